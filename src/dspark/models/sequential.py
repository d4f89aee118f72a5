"""The sequential stage of a draft: tokens drawn left to right from base logits that a head corrects (paper equation 4).

Blocks of many requests are drawn together; within each, left to right. Three equal forms. Over the full vocabulary, the
paper's loop. Over candidates: only the M largest base logits of each position are corrected and all other tokens have
probability exactly zero, which is as exact, because what is reported is what was drawn from. And the latter as one call
of compiled C (``sequential.c``), where there is a compiler and the head is the vanilla one or none; elsewhere the plain
form serves, which is its reference. The confidences come with the drafts, for they look at the same tokens before.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import draw_at, target_probs, uniforms
from dspark.models.heads import SequentialHead, VanillaMarkovHead
from dspark.models.native import compiled, native_wanted

SOURCE = Path(__file__).with_name("sequential.c")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, kw_only=True)
class BlockAsk:
    """One block to draw."""

    base: Float[Tensor, "block draft_vocab"]  # base logits of its positions; bfloat16 or float32
    anchor: int
    sampling: SamplingParams
    generator: torch.Generator  # advanced by one uniform per draft; not at all by a greedy request


@dataclass(frozen=True, kw_only=True)
class ConfidenceWeights:
    """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b): the chance that draft k survives if those before it do."""

    weight: Float[Tensor, "inputs"]  # float32: those of the state, then of the head's row of the token before
    bias: float
    looks_back: bool  # whether the second part is there


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What the stage drew, a row per request, as wide as the longest block asked for. All ids are the target's.

    ``ids`` behind a request's own block are 0, and so are all of a request that ``failed``, because a position's
    logits left no token; other entries there say nothing. ``probs`` are those of sampled requests; of greedy ones they
    say nothing.
    """

    ids: Int[Tensor, "requests block_plus_1"]  # the anchor, then the drafts
    probs: Float[Tensor, "requests block support"] | None  # None: all are greedy
    support_ids: Int[Tensor, "requests block support"] | None  # None: the target's vocabulary in order
    failed: frozenset[int]  # requests
    confidence: Float[np.ndarray, "requests block"] | None = None  # 0 behind a request's own block

    @property
    def token_ids(self) -> Int[Tensor, "requests block"]:
        """The drafts."""
        return self.ids.narrow(1, 1, self.ids.shape[1] - 1)

    @property
    def prev_ids(self) -> Int[Tensor, "requests block"]:
        """The token before each."""
        return self.ids.narrow(1, 0, self.ids.shape[1] - 1)


class SequentialStage:
    """Draws blocks. ``candidates`` 0 is the full vocabulary; ``native`` False keeps to the plain form."""

    def __init__(
        self,
        head: SequentialHead | None,
        token_ids: Int[Tensor, "draft_vocab"] | None,
        *,
        width: int,
        candidates: int,
        device: torch.device,
        native: bool = True,
        confidence: ConfidenceWeights | None = None,
    ) -> None:
        """``token_ids`` names the target id of every draft id, None where they are the same; ``width`` counts them.

        Raises :class:`ConfigError` if ``candidates`` is negative.
        """
        if candidates < 0:
            raise ConfigError(f"candidates is {candidates}; it must be 0 (full vocabulary) or more")
        self.head = None if head is None else copy.deepcopy(head).requires_grad_(False).to(device, torch.float32)
        self.candidates = 0 if candidates >= width else candidates  # as many as tokens: nothing is left out
        self.device = device
        self._width, self._confidence = width, confidence
        self._token_ids = None if token_ids is None else token_ids.to(device).contiguous()
        fused = (
            native and self.candidates and device.type == "cpu" and type(self.head) in (VanillaMarkovHead, type(None))
        )
        self._library = _library() if fused and native_wanted() else None
        self._w2: Tensor | None = None  # as compiled code reads it: bfloat16 where that loses nothing
        if self._library is not None and self.head is not None:
            w2, half = self.head.markov_w2.weight, self.head.markov_w2.weight.bfloat16()
            self._w2 = half if torch.equal(half.float(), w2) else w2
        self._alike = self._what_calls_share()

    @property
    def native(self) -> bool:
        """Whether blocks are drafted by compiled code."""
        return self._library is not None

    def draft(
        self, asks: Sequence[BlockAsk], hidden: Float[Tensor, "rows hidden"], *, block: int | None = None
    ) -> Drafted:
        """Draw a block of one position or more for each ask; ``hidden`` holds their states one after the other.

        ``block``: width of the result, the longest block by default. Draws one uniform per draft of a sampled request
        from its own generator, whatever the others ask.
        """
        block = max((len(ask.base) for ask in asks), default=0) if block is None else block
        shares = None  # of the uniforms; no greedy request has any
        if not all(ask.sampling.greedy for ask in asks):
            shares = torch.zeros(len(asks), block, dtype=torch.float64)
            for i, ask in enumerate(asks):
                if not ask.sampling.greedy:
                    shares[i, : len(ask.base)] = uniforms(len(ask.base), ask.generator)
        if self._library is not None:
            return self._fused(self._library, asks, hidden, shares, block)
        drafted = self._plain(asks, hidden, None if shares is None else shares.to(self.device), block)
        if self._confidence is None:
            return drafted
        sizes = [len(ask.base) for ask in asks]
        return replace(drafted, confidence=self._confidences(self._confidence, hidden, drafted.prev_ids, sizes))

    def _plain(
        self, asks: Sequence[BlockAsk], hidden: Tensor, shares: Float[Tensor, "requests block"] | None, block: int
    ) -> Drafted:
        """The loop of the paper, over the full vocabulary or over candidates, a position of all blocks at a time.

        Behind its own end a block goes on with its last position, for nothing.
        """
        if not asks:
            nobody = torch.zeros(0, block + 1, dtype=torch.long)
            return Drafted(ids=nobody, probs=None, support_ids=None, failed=frozenset())
        counts = torch.tensor([len(ask.base) for ask in asks], device=self.device)
        base = torch.cat([ask.base.float() for ask in asks])
        columns = support = None
        if self.candidates:
            base, columns = base.topk(self.candidates, -1)
            support = columns if self._token_ids is None else self._token_ids[columns]
        elif self._token_ids is not None:
            support = self._token_ids.expand(base.shape)
        ids, probs, supports = [torch.tensor([ask.anchor for ask in asks], device=self.device)], [], []
        failed, state = set[int](), None
        for k in range(int(counts.max())):
            rows = counts.cumsum(0) - counts + (counts - 1).clamp(max=k)
            logits = base[rows]
            if self.head is not None:
                latents, state = self.head.step(ids[-1], hidden[rows].float(), state)
                logits = logits + self._bias(latents, None if columns is None else columns[rows])
            if shares is None:
                places = logits.argmax(1)
            else:
                weights, empty = draft_weights(logits, [ask.sampling for ask in asks])
                probs.append(weights)
                failed.update(empty)
                places = draw_at(weights, shares[:, k])
            supports.append(places if support is None else support[rows])
            ids.append(places if support is None else supports[-1].gather(1, places[:, None])[:, 0])
        missing = block + 1 - len(ids)
        found = torch.stack([*ids, *[torch.zeros_like(ids[0])] * missing], 1)
        counts[sorted(failed)] = 0
        found *= torch.arange(found.shape[1], device=self.device) <= counts[:, None]
        if shares is None:
            return Drafted(ids=found, probs=None, support_ids=None, failed=frozenset(failed))
        padding = (0, 0, 0, missing)
        held = None if support is None else F.pad(torch.stack(supports, 1), padding)
        drawn_from = F.pad(torch.stack(probs, 1), padding)
        return Drafted(ids=found, probs=drawn_from, support_ids=held, failed=frozenset(failed))

    def _bias(
        self, latents: Float[Tensor, "requests rank"], columns: Int[Tensor, "requests candidates"] | None
    ) -> Float[Tensor, "requests support"]:
        """W2 @ latent over the draft vocabulary, or over ``columns`` of it."""
        assert self.head is not None
        if columns is None:
            return self.head.bias(latents)
        return (self.head.markov_w2.weight[columns] @ latents[:, :, None]).squeeze(-1)

    def _confidences(
        self, of: ConfidenceWeights, hidden: Tensor, prev_ids: Int[Tensor, "requests block"], sizes: Sequence[int]
    ) -> Float[np.ndarray, "requests block"]:
        inside = np.arange(prev_ids.shape[1]) < np.array(sizes, dtype=np.int64)[:, None]
        inputs = hidden.float()
        if of.looks_back:
            assert self.head is not None
            inputs = torch.cat((inputs, self.head.embed(prev_ids[torch.from_numpy(inside).to(self.device)])), 1)
        found = np.zeros(inside.shape, dtype=np.float32)
        found[inside] = torch.sigmoid(inputs @ of.weight + of.bias).cpu().numpy()
        return found

    def _what_calls_share(self) -> _Sequential:
        """The structure of a compiled call, as far as it is the same in all; it points into what this stage owns."""
        call, of = _Sequential(width=self._width, candidates=self.candidates), self._confidence
        call.names = None if self._token_ids is None else self._token_ids.data_ptr()
        if self.head is not None and self._w2 is not None:
            w1 = self.head.markov_w1.weight
            call.w1, call.w2, call.rank = w1.data_ptr(), self._w2.data_ptr(), w1.shape[1]
            call.half = self._w2.dtype == torch.bfloat16
        if of is not None:
            call.weight, call.bias, call.looks_back = of.weight.data_ptr(), of.bias, of.looks_back
        return call

    def _fused(
        self,
        library: ctypes.CDLL,
        asks: Sequence[BlockAsk],
        hidden: Tensor,
        shares: Float[Tensor, "requests block"] | None,
        block: int,
    ) -> Drafted:
        """The same over candidates, in one call."""
        count, certain = len(asks), shares is None
        bases = [ask.base.contiguous() for ask in asks]
        firsts = [0, *accumulate(base.shape[0] for base in bases)]
        entries = [_entry(ask, base, first) for ask, base, first in zip(asks, bases, firsts, strict=False)]
        table = (_Request * count)(*entries)
        shape, room = (count, block, self.candidates), torch.empty if certain else torch.zeros  # if so, nobody reads it
        support, probs = room(shape, dtype=torch.long), room(shape)
        ids = torch.zeros(count, block + 1, dtype=torch.long)
        call = _Sequential.from_buffer_copy(self._alike)
        call.count, call.block, call.requests = count, block, ctypes.addressof(table)
        call.support, call.probs, call.tokens = support.data_ptr(), probs.data_ptr(), ids.data_ptr()
        call.uniforms, confidence = None if shares is None else shares.data_ptr(), None
        if self._confidence is not None:
            hidden, confidence = hidden.contiguous(), torch.zeros(count, block)
            call.hidden, call.states = hidden.data_ptr(), hidden.shape[1]
            call.half_states, call.confidence = hidden.dtype == torch.bfloat16, confidence.data_ptr()
        if library.draft(ctypes.byref(call)):
            raise MemoryError("no memory to choose candidates; lower candidates or block_size")
        return Drafted(
            ids=ids,
            probs=None if certain else probs,
            support_ids=None if certain else support,
            failed=frozenset(i for i, failed in enumerate(request.failed for request in table) if failed),
            confidence=None if confidence is None else confidence.numpy(),
        )


def draft_weights(
    logits: Float[Tensor, "requests support"], samplings: Sequence[SamplingParams]
) -> tuple[Float[Tensor, "requests support"], list[int]]:
    """Each request's distribution of its next draft, and which requests have none: a sampled one whose logits are
    broken (nan) or leave no token; its row says nothing."""
    sampled = torch.tensor([not sampling.greedy for sampling in samplings], device=logits.device)
    empty = sampled & ~logits.amax(1).isfinite()  # nan is the largest of all
    failed = empty.nonzero()[:, 0].tolist()
    if failed:
        logits = logits.masked_fill(empty[:, None], 0.0)
    weights = torch.empty_like(logits)
    order = sorted(range(len(samplings)), key=lambda i: _filters(samplings[i]))
    for _, group in groupby(order, key=lambda i: _filters(samplings[i])):
        members = list(group)
        weights[members] = target_probs(logits[members], samplings[members[0]])
    return weights, failed


def _filters(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """All that a draft's distribution depends on beside its logits."""
    return (0.0 if sampling.greedy else sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _entry(ask: BlockAsk, base: Tensor, first: int) -> _Request:
    """``ask`` as compiled code reads it; its base logits are those of ``base``."""
    sampling = ask.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    half, filters = base.dtype == torch.bfloat16, (sampling.top_p, temperature, sampling.min_p, sampling.top_k)
    return _Request(base.data_ptr(), half, base.shape[0], ask.anchor, *filters, 0, first)


class _Request(ctypes.Structure):
    """``struct request`` of sequential.c, field by field."""

    _fields_ = (
        ("base", _pointer),
        *((name, _int64) for name in ("half", "count", "anchor")),
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("temperature", "min_p")),
        *((name, _int64) for name in ("top_k", "failed", "first")),
    )


class _Sequential(ctypes.Structure):
    """``struct sequential`` of sequential.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("requests", "w1", "w2", "names", "uniforms", "support", "probs", "tokens")),
        *((name, _pointer) for name in ("hidden", "weight", "confidence")),
        *((name, _int64) for name in ("count", "block", "width", "rank", "candidates", "states")),
        *((name, _int64) for name in ("half", "half_states", "looks_back")),
        ("bias", ctypes.c_float),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compiled(SOURCE, ())
    if library is not None:
        library.draft.argtypes = [ctypes.POINTER(_Sequential)]
    return library
