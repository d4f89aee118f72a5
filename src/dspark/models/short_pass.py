"""All layers of a pass in one compiled call: decode steps, and blocks of drafts to be verified, of many requests.

Over a few tokens a pass takes as long as reading the weights does, and what the caller of the products does in between:
starting each of 120 products costs the library ten microseconds and more, Python and small allocations another few
milliseconds a pass. ``short_pass.c`` runs the same layers between the barriers of one team of threads. It reads the
library's own packed weights, in a layout and with an order of sums that are not documented; so both are found out by
trial, and the call is used only if its products equal the library's bit for bit. Elsewhere (other CPUs, float32, other
layouts) the layers run one by one.

Of SmolLM2 in bfloat16 on one thread of a Zen 4, a pass over 1, 8, 16, 64 and 256 tokens took 0.49, 0.60, 0.72, 0.83 and
0.93 of the time that it took layer by layer; its cost rises in steps of four tokens, the library's in steps of eight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.models.decoder_config import DecoderConfig
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Layer
from dspark.models.linear import Linear
from dspark.models.native import Attention, NativeOps
from dspark.models.norm import RMSNorm
from dspark.models.target import FINAL

SHORT_TOKENS = 128  # more are prompts; the library blocks large products of wide models better
BLOCK = 64  # output columns that lie together in packed weights
PIECES = (1024, 512, 256, 128, 64, 32)  # pairs of inputs that the library may add up at a time, if not all
TRIAL_ROWS, TRIALS = 24, 400_000  # rows of a trial product, and results compared for each shape

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = (("weight", _pointer), ("bias", _pointer), ("inputs", _int64), ("outputs", _int64), ("piece", _int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
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
        *((name, _int64) for name in ("count", "tokens", "hidden")),
    )


class ShortPass:
    """The layers of one model, ready to be run in one call."""

    def __init__(
        self, ops: NativeOps, layers: Sequence[Layer], final_norm: RMSNorm, products: Sequence[_Product]
    ) -> None:
        """``products``: qkv, o, gate_up and down of every layer."""
        self._ops, self._run = ops, ops.library.short_pass
        self._run.argtypes = [ctypes.POINTER(_Pass)]
        self._model, self._norm = layers, final_norm  # they own what the structures point to
        config: DecoderConfig = ops.config
        self._layers = (_Layer * len(layers))()
        for i, (layer, into) in enumerate(zip(layers, self._layers, strict=True)):
            into.qkv, into.o, into.gate_up, into.down = products[4 * i : 4 * i + 4]
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
        final, tokens = torch.empty_like(x), x.shape[0]
        a, kept = self._ops.places(memory, rows, counts, causal=causal)
        p = _Pass(layers=ctypes.addressof(self._layers), count=len(self._layers), tokens=tokens, hidden=x.shape[1])
        scratch = torch.empty(tokens * sum(width for _, width in self._widths), dtype=x.dtype)
        address = scratch.data_ptr()
        for name, width in self._widths:
            setattr(p, name, address)
            address += tokens * width * x.element_size()
        wanted = (_pointer * len(self._layers))()
        for tap, into in tapped.items():
            if tap >= 0:
                wanted[tap] = into.data_ptr()
        for i, (cos, sin) in enumerate(tables):
            p.cos[i], p.sin[i] = cos.data_ptr(), sin.data_ptr()
        a.qkv, a.out = p.qkv, p.attended
        p.attention, p.taps, p.first_norm = a, ctypes.addressof(wanted), _weight(self._model[0].input_norm)
        p.x, p.h, p.keys = x.data_ptr(), final.data_ptr(), memory.both.data_ptr()
        p.layer_stride, p.values_offset = memory.both[0].numel(), memory.both[0, 0].numel()
        if self._run(ctypes.byref(p)):
            raise MemoryError("no memory for attention scores; shorten the context")
        del kept
        if FINAL in taps:
            tapped[FINAL] = final
        return final, [tapped[tap] for tap in taps]


def short_pass(ops: NativeOps, layers: Sequence[Layer], final_norm: RMSNorm) -> ShortPass | None:
    """The layers as one call; None where the compiled products do not give the library's bits."""
    if not layers or not hasattr(ops.library, "short_pass"):
        return None
    linears = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    pieces: dict[tuple[int, int], int | None] = {}
    for shape in {(linear.out_features, linear.in_features) for linear in linears}:
        alike = [linear for linear in linears if (linear.out_features, linear.in_features) == shape]
        candidates = {size: None for size in (shape[1] // 2, *PIECES) if size <= shape[1] // 2}
        pieces[shape] = next((size for size in candidates if _agree(alike, size, ops.library)), None)
        if pieces[shape] is None:
            return None
    products = [_product(linear, pieces[linear.out_features, linear.in_features] or 0) for linear in linears]
    return ShortPass(ops, layers, final_norm, products)


def _product(linear: Linear, piece: int) -> _Product:
    bias = None if linear.exact_bias is None else linear.exact_bias.data_ptr()
    return _Product(
        weight=linear.place()[0], bias=bias, inputs=linear.in_features, outputs=linear.out_features, piece=piece
    )


def _agree(linears: Sequence[Linear], piece: int, library: ctypes.CDLL) -> bool:
    """Whether compiled products of one shape equal the library's on random rows, as many as make a chance hit unlikely.

    Sums in another order differ in their last bit, and rounding to bfloat16 lets one in some 30,000 show.
    """
    outputs, inputs = linears[0].out_features, linears[0].in_features
    generator = torch.Generator().manual_seed(inputs)
    for linear in linears[: -(-TRIALS // (TRIAL_ROWS * outputs))]:
        if not linear.packed or outputs % BLOCK or inputs % 2 or linear.place()[1] != 2 * inputs * outputs:
            return False
        x = torch.randn(TRIAL_ROWS, inputs, generator=generator).bfloat16()
        y = torch.empty(TRIAL_ROWS, outputs, dtype=torch.bfloat16)
        library.short_product.argtypes = [ctypes.POINTER(_Product), _pointer, _pointer, _int64]
        library.short_product(ctypes.byref(_product(linear, piece)), x.data_ptr(), y.data_ptr(), TRIAL_ROWS)
        if not torch.equal(y, linear(x)):
            return False
    return True


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.exact.data_ptr()
