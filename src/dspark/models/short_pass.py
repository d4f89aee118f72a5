"""All layers of a pass in one compiled call: decode steps, and blocks of drafts to be verified, of many requests.

Over a few tokens a pass takes as long as reading the weights does, and what the caller of the products does in between:
starting each of 121 products costs the library ten microseconds and more, Python and small allocations another few
milliseconds a pass. ``short_pass.c`` runs the same layers between the barriers of one team of threads. It reads the
library's own packed weights, in a layout and with an order of sums that are not documented; so both are found out by
trial, and the call is used only if its products equal the library's bit for bit. Elsewhere (other CPUs, float32, other
layouts) the layers run one by one. Weights of eight bits (:mod:`dspark.models.eight_bit`) are of our own making and
need no trial.

The call goes from token ids to logits, for Python that stands between two passes is cold: it took half a millisecond.

Of SmolLM2 in bfloat16 on one thread of a Zen 4, a pass with logits over 1, 8, 16, 64 and 128 tokens took 0.34, 0.55,
0.70, 0.86 and 0.93 of the time that it took layer by layer; up to eight tokens every weight is read once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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

NO_SUCH_ID = 2  # what short_pass returns for a token that the embedding does not have

Tables = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # cosines and sines of full layers and of sliding ones
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ProductForm) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _pointer) for name in ("attention_out_norm", "feedforward_norm", "feedforward_out_norm")),
        *((name, _pointer) for name in ("following_norm", "qk_norm")),
        *((name, _int64) for name in ("window", "slides")),
    )


class _Pass(ctypes.Structure):
    """``struct pass`` of short_pass.c, field by field."""

    _fields_ = (
        ("attention", Attention),
        *((name, _pointer) for name in ("layers", "first_norm")),
        ("cos", _pointer * 2),
        ("sin", _pointer * 2),
        ("keys", _pointer),
        *((name, _int64) for name in ("layer_stride", "values_offset")),
        *((name, _pointer) for name in ("rows", "pasts", "counts", "table", "ids", "embedding")),
        *((name, _pointer) for name in ("x", "h", "features", "taps")),
        ("head", ProductForm),
        ("logits", _pointer),
        *((name, _int64) for name in ("requests", "table_stride", "causal", "vocab", "tapped", "count", "tokens")),
        *((name, _int64) for name in ("hidden", "widest")),
        ("embedding_scale", ctypes.c_float),
        *((name, _pointer) for name in ("qkv", "attended", "gate_up", "gated", "added")),
    )


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """What a pass over token ids leaves."""

    final: Float[Tensor, "tokens hidden"]  # states after the last norm
    features: Float[Tensor, "tokens features"] | None  # the tapped layers side by side; None: no taps
    logits: Float[Tensor, "tokens vocab"] | None  # the head's product; None: not asked for, or no head


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
        embedding: Float[Tensor, "vocab hidden"] | None = None,
        embedding_scale: float | None = None,
    ) -> None:
        """``forms``: qkv, o, gate_up and down of every layer, then the head's if there is one. ``embedding``: of token
        ids, in bfloat16; without it a pass begins with embeddings."""
        self._run = ops.library.short_pass
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
        self._alike = _Pass(layers=ctypes.addressof(self._layers), count=len(layers), hidden=config.hidden_size)
        self._alike.attention = ops.alike()
        self._alike.first_norm = _weight(first.input_norm)
        self._alike.widest = max((form.inputs for form in forms if form.scale), default=0)
        if head is not None:
            self._alike.head = forms[-1]
        self._embedding = None if embedding is None else embedding.contiguous()
        if self._embedding is not None:
            self._alike.embedding, self._alike.vocab = self._embedding.data_ptr(), len(self._embedding)
            self._alike.embedding_scale = embedding_scale or 0.0
        # in bfloat16 the library serves more tokens, with the same bits; weights of eight bits have no other form
        self.most_tokens = SHORT_TOKENS if any(not form.scale for form in forms) else 1 << 30

    def __call__(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: Tables,
        *,
        taps: tuple[int, ...] = (),
        want_logits: bool = False,
    ) -> PassOutput:
        """From token ids to final-norm states, tapped ones and logits. Writes keys and values; advances no lengths.

        ``tables``: cosines and sines of full layers and of sliding ones. Raises IndexError for an id that the embedding
        does not have.
        """
        assert self._embedding is not None, "this pass was made without an embedding"
        p, tokens, hidden = _Pass.from_buffer_copy(self._alike), token_ids.shape[0], self._embedding.shape[1]
        ids, final = token_ids.to(torch.int64).contiguous(), self._embedding.new_empty(tokens, hidden)
        features = logits = None
        wanted = (_int64 * len(taps))(*(-2 if tap == FINAL else tap for tap in taps))
        if taps:
            features = final.new_empty(tokens, len(taps) * hidden)
            p.features, p.taps, p.tapped = features.data_ptr(), ctypes.addressof(wanted), len(taps)
        if want_logits and self._head is not None:
            logits = final.new_empty(tokens, self._head.out_features)
            p.logits = logits.data_ptr()
        p.ids, p.h = ids.data_ptr(), final.data_ptr()
        self._pass(p, memory, rows, counts, tables, causal=True)
        return PassOutput(final=final, features=features, logits=logits)

    def with_logits(
        self,
        x: Float[Tensor, "tokens hidden"],
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: Tables,
        *,
        causal: bool = True,
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens head_outputs"] | None]:
        """From embeddings, which are overwritten, to final-norm states and the head's product of them; None without a
        head."""
        p, final = _Pass.from_buffer_copy(self._alike), torch.empty_like(x)
        logits = None if self._head is None else x.new_empty(x.shape[0], self._head.out_features)
        p.x, p.h, p.logits = x.data_ptr(), final.data_ptr(), None if logits is None else logits.data_ptr()
        self._pass(p, memory, rows, counts, tables, causal=causal)
        return final, logits

    def _pass(
        self,
        p: _Pass,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        tables: Tables,
        *,
        causal: bool,
    ) -> None:
        """Fill in what every pass needs, and run it."""
        requests, table, (full, local) = len(rows), memory.table, tables
        numbers = (_int64 * (3 * requests))(*rows, *(memory.lengths[row] for row in rows), *counts)
        p.rows = ctypes.addressof(numbers)
        p.pasts, p.counts = p.rows + 8 * requests, p.rows + 16 * requests
        p.requests, p.tokens, p.causal = requests, sum(counts), causal
        p.table, p.table_stride, p.attention.page_size = table.data_ptr(), table.stride(0), memory.page_size
        p.cos[0], p.sin[0] = full[0].data_ptr(), full[1].data_ptr()
        p.cos[1], p.sin[1] = local[0].data_ptr(), local[1].data_ptr()
        p.keys, (p.layer_stride, p.values_offset) = memory.both.data_ptr(), memory.both.stride()[:2]
        failed = self._run(ctypes.byref(p))
        if failed == NO_SUCH_ID:
            raise IndexError(f"a token id is not in 0..{p.vocab - 1}; the embedding has no row for it")
        if failed:
            raise MemoryError("no memory for a pass's states and attention scores; shorten the context")


def short_pass(
    ops: NativeOps,
    layers: Sequence[Layer],
    final_norm: RMSNorm,
    *,
    head: Product | None = None,
    embedding: Float[Tensor, "vocab hidden"] | None = None,
    embedding_scale: float | None = None,
) -> ShortPass | None:
    """The layers as one call, with ``head`` behind them if it can be had; None where the compiled products do not give
    the library's bits."""
    if not layers:
        return None
    linears = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    for last in (head, None):
        forms = compiled_forms([*linears, *([] if last is None else [last])], ops.library)
        if forms is not None:
            return ShortPass(
                ops, layers, final_norm, forms, head=last, embedding=embedding, embedding_scale=embedding_scale
            )
    return None


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.exact.data_ptr()
