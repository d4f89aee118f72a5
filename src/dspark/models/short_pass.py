"""All layers of a pass in one compiled call: decode steps, and blocks of drafts to be verified, of many requests.

Over a few tokens a pass takes as long as reading the weights does, and what the caller of the products does in between:
starting each of 120 products costs the library ten microseconds and more, Python and small allocations another few
milliseconds a pass. ``short_pass.c`` runs the same layers between the barriers of one team of threads. It reads the
library's own packed weights, in a layout and with an order of sums that are not documented; so both are found out by
trial, and the call is used only if its products equal the library's bit for bit. Elsewhere (other CPUs, float32, other
layouts) the layers run one by one. Weights of eight bits (:mod:`dspark.models.eight_bit`) are of our own making and
need no trial.

Of SmolLM2 in bfloat16 on one thread of a Zen 4, a pass over 1, 8, 16, 64 and 256 tokens took 0.49, 0.60, 0.72, 0.83 and
0.93 of the time that it took layer by layer; its cost rises in steps of four tokens, the library's in steps of eight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.models.compiled_products import compiled_forms
from dspark.models.decoder_config import DecoderConfig
from dspark.models.eight_bit import ProductForm
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Layer
from dspark.models.linear import Product
from dspark.models.native import Attention, NativeOps
from dspark.models.norm import RMSNorm
from dspark.models.target import FINAL

SHORT_TOKENS = 128  # more are prompts; the library blocks large products of wide models better

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ProductForm) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _pointer) for name in ("attention_out_norm", "feedforward_norm", "feedforward_out_norm")),
        *((name, _pointer) for name in ("following_norm", "qk_norm")),
        *((name, _int64) for name in ("window", "slides")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("attention", Attention),
        ("layers", _pointer),
        ("first_norm", _pointer),
        ("cos", _pointer * 2),
        ("sin", _pointer * 2),
        ("keys", _pointer),
        *((name, _int64) for name in ("layer_stride", "values_offset")),
        *((name, _pointer) for name in ("x", "h", "qkv", "attended", "gate_up", "gated", "added", "taps")),
        ("head", ProductForm),
        ("logits", _pointer),
        *((name, _int64) for name in ("count", "tokens", "hidden", "widest")),
    )


class ShortPass:
    """The layers of one model, ready to be run in one call."""

    def __init__(
        self,
        ops: NativeOps,
        layers: Sequence[Layer],
        final_norm: RMSNorm,
        forms: Sequence[ProductForm],
        *,
        head: Product | None = None,
    ) -> None:
        """``forms``: qkv, o, gate_up and down of every layer, then the head's if there is one."""
        self._ops, self._run = ops, ops.library.short_pass
        self._run.argtypes = [ctypes.POINTER(_Pass)]
        self._model, self._norm, self._head = layers, final_norm, head  # they own what the structures point to
        config: DecoderConfig = ops.config
        self._layers = (_Layer * len(layers))()
        for i, (layer, into) in enumerate(zip(layers, self._layers, strict=True)):
            into.qkv, into.o, into.gate_up, into.down = forms[4 * i : 4 * i + 4]
            following = layers[i + 1].input_norm if i + 1 < len(layers) else final_norm
            into.attention_out_norm, into.feedforward_norm = (
                _weight(layer.attention_out_norm),
                _weight(layer.feedforward_norm),
            )
            into.feedforward_out_norm, into.following_norm = _weight(layer.feedforward_out_norm), _weight(following)
            into.qk_norm, into.slides = _weight(layer.qk_norm), layer.slides
            into.window = config.sliding_window or 0 if layer.slides else 0
        first = layers[0]
        heads = config.num_heads * config.head_dim
        self._widths = (
            ("qkv", first.qkv.out_features),
            ("attended", heads),
            ("gate_up", first.gate_up.out_features),
            ("gated", first.down.in_features),
            ("added", config.hidden_size),
        )
        self._alike = _Pass(layers=ctypes.addressof(self._layers), count=len(layers), hidden=config.hidden_size)
        self._alike.first_norm = _weight(first.input_norm)
        self._alike.widest = max((form.inputs for form in forms if form.scale), default=0)
        if head is not None:
            self._alike.head = forms[-1]
        # in bfloat16 the library serves more tokens, with the same bits; weights of eight bits have no other form
        self.most_tokens = SHORT_TOKENS if any(not form.scale for form in forms) else 1 << 30

    def __call__(
        self,
        x: Float[Tensor, "tokens hidden"],
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        taps: tuple[int, ...],
        *,
        causal: bool = True,
    ) -> tuple[Float[Tensor, "tokens hidden"], list[Float[Tensor, "tokens hidden"]]]:
        """From embeddings to final-norm states, and the tapped ones. Writes keys and values; advances no lengths.

        ``x`` is overwritten. ``tables``: cosines and sines of full layers and of sliding ones.
        """
        tapped = {tap: torch.empty_like(x) for tap in taps if 0 <= tap < len(self._layers)}
        if -1 in taps:
            tapped[-1] = x.clone()
        wanted = (_pointer * len(self._layers))()
        for tap, into in tapped.items():
            if tap >= 0:
                wanted[tap] = into.data_ptr()
        final = self._pass(x, memory, rows, counts, tables, wanted, None, causal)
        if FINAL in taps:
            tapped[FINAL] = final
        return final, [tapped[tap] for tap in taps]

    def with_logits(
        self,
        x: Float[Tensor, "tokens hidden"],
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        *,
        causal: bool = True,
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens head_outputs"] | None]:
        """The same with the head's product of the final-norm states in the same call; None without a head."""
        logits = None if self._head is None else x.new_empty(x.shape[0], self._head.out_features)
        none = (_pointer * len(self._layers))()
        return self._pass(x, memory, rows, counts, tables, none, logits, causal), logits

    def _pass(
        self,
        x: Tensor,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        taps: ctypes.Array[ctypes.c_void_p],
        logits: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Final-norm states; ``taps``: an address per layer, or null."""
        final, tokens = torch.empty_like(x), x.shape[0]
        a, kept = self._ops.places(memory, rows, counts, causal=causal)
        p = _Pass.from_buffer_copy(self._alike)
        scratch = torch.empty(tokens * sum(width for _, width in self._widths), dtype=x.dtype)
        address = scratch.data_ptr()
        for name, width in self._widths:
            setattr(p, name, address)
            address += tokens * width * x.element_size()
        for i, (cos, sin) in enumerate(tables):
            p.cos[i], p.sin[i] = cos.data_ptr(), sin.data_ptr()
        a.qkv, a.out = p.qkv, p.attended
        p.attention, p.taps, p.tokens = a, ctypes.addressof(taps), tokens
        p.x, p.h, p.keys = x.data_ptr(), final.data_ptr(), memory.both.data_ptr()
        p.logits = None if logits is None else logits.data_ptr()
        p.layer_stride, p.values_offset = memory.both.stride()[:2]
        if self._run(ctypes.byref(p)):
            raise MemoryError("no memory for attention scores; shorten the context")
        del kept
        return final


def short_pass(
    ops: NativeOps, layers: Sequence[Layer], final_norm: RMSNorm, *, head: Product | None = None
) -> ShortPass | None:
    """The layers as one call, with ``head`` behind them if it can be had; None where the compiled products do not give
    the library's bits."""
    if not layers:
        return None
    linears = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    for last in (head, None):
        forms = compiled_forms([*linears, *([] if last is None else [last])], ops.library)
        if forms is not None:
            return ShortPass(ops, layers, final_norm, forms, head=last)
    return None


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.exact.data_ptr()
