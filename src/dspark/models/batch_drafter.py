"""Drafters for many requests at once: the protocol that an engine knows, and the form that any drafter has in it.

A request in flight sits on a seat, and its tokens lie in the pages that :class:`PageTables` names for the seat; one
page number means the same tokens in the target's memory and in whatever the drafter keeps by position. So a request
that starts on pages which another one filled brings the drafter's context along (:meth:`BatchDrafter.resume`).

Per request a batched form proposes what the single form would: the same draws of the request's own generator in the
same order. Trained drafters have forms of their own (:mod:`dspark.models.dspark_batch`,
:mod:`dspark.models.chain_batch`); every other is asked request by request (:class:`LoopingDrafter`), and the features
it was fed are kept by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.maths.shaping import Shaper
from dspark.models.drafter import EMPTY, Drafter, MirrorsShaping
from dspark.models.paged_memory import PageTables
from dspark.models.target import Target


@dataclass(frozen=True, kw_only=True)
class DraftAsk:
    """What one request wants of a batched proposal."""

    seat: int
    anchor: int  # the request's last committed token, which the target has not run yet
    sampling: SamplingParams
    generator: torch.Generator  # the request's own stream of draft draws; advanced by one uniform per sampled draft
    limit: int  # most drafts, >= 1


@dataclass(frozen=True, kw_only=True)
class BatchProposal:
    """Proposals of several requests, in the order of the asks; ``block`` is the drafter's ``block_size``.

    Entries behind a request's ``proposed`` drafts say nothing: token 0, confidence 0, any distribution; nor do the
    ``probs`` of requests that are ``certain``, those whose every token was chosen with certainty given its prefix
    (greedy, n-gram lookup) or that have no draft. A row's ``support_ids`` are distinct; None means that the support is
    the target's vocabulary in order. ``confidence`` is c_k as :class:`dspark.core.Proposal` has it.
    """

    draft_tokens: Int[Tensor, "requests block"]
    proposed: Int[np.ndarray, "requests"]  # 0..block
    certain: Bool[np.ndarray, "requests"]
    probs: Float[Tensor, "requests block support"] | None = None  # None: all are certain
    support_ids: Int[Tensor, "requests block support"] | None = None
    confidence: Float[np.ndarray, "requests block"] | None = None  # None: the drafter has none
    sequential_seconds: float = 0.0  # part of the proposal's time spent left to right

    def of(self, i: int) -> Proposal:
        """The proposal of request ``i`` alone; it shares memory with the batch."""
        count = int(self.proposed[i])
        if count == 0:
            return EMPTY
        distribution = None
        if not self.certain[i]:
            assert self.probs is not None
            ids = None if self.support_ids is None else self.support_ids[i, :count]
            distribution = DraftDistribution(self.probs[i, :count], ids)
        confidence = None if self.confidence is None else torch.from_numpy(self.confidence[i, :count])
        return Proposal(self.draft_tokens[i, :count], distribution, confidence)

    def with_certain(self, drafts: Sequence[Sequence[int]]) -> BatchProposal:
        """The same proposals, and behind them rows of ``drafts`` that are certain, at most ``block`` each; without
        confidences."""
        more, device = len(drafts), self.draft_tokens.device
        rows = torch.zeros(more, self.draft_tokens.shape[1], dtype=torch.long)
        for row, tokens in zip(rows, drafts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)

        def longer(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.cat((part, part.new_zeros(more, *part.shape[1:])))

        return BatchProposal(
            draft_tokens=torch.cat((self.draft_tokens, rows.to(device))),
            proposed=np.concatenate((self.proposed, [len(tokens) for tokens in drafts])),
            certain=np.concatenate((self.certain, np.ones(more, dtype=np.bool_))),
            probs=longer(self.probs),
            support_ids=longer(self.support_ids),
            sequential_seconds=self.sequential_seconds,
        )

    def spread(self, places: Sequence[int], requests: int) -> BatchProposal:
        """The same proposals as those number ``places`` (ascending) of ``requests``; the others propose nothing."""
        if len(places) == requests:
            return self
        held = list(places)
        proposed, certain = np.zeros(requests, dtype=np.int64), np.ones(requests, dtype=np.bool_)
        proposed[held], certain[held] = self.proposed, self.certain
        confidence = None
        if self.confidence is not None:
            confidence = np.zeros((requests, self.confidence.shape[1]), dtype=self.confidence.dtype)
            confidence[held] = self.confidence
        index = torch.tensor(held, dtype=torch.long, device=self.draft_tokens.device)

        def laid_out(part: Tensor) -> Tensor:
            return part.new_zeros(requests, *part.shape[1:]).index_copy_(0, index, part)

        return BatchProposal(
            draft_tokens=laid_out(self.draft_tokens),
            proposed=proposed,
            certain=certain,
            probs=None if self.probs is None else laid_out(self.probs),
            support_ids=None if self.support_ids is None else laid_out(self.support_ids),
            confidence=confidence,
            sequential_seconds=self.sequential_seconds,
        )


@runtime_checkable
class BatchDrafter(Protocol):
    """What an engine knows of a drafter. Order of calls: ``attach`` once; per request ``open``, then ``resume`` at most
    once, then ``extend`` and ``propose`` as the request goes on, then ``close``."""

    name: str
    block_size: int  # most drafts of one proposal; 0 never proposes
    taps: tuple[int, ...]  # target layers whose states `extend` wants; empty for none
    has_confidence: bool

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """Make room for all seats of ``tables``, in ``pages`` pages, for requests of up to ``max_len`` tokens.

        The engine writes ``tables`` as it goes; a seat has pages for its tokens and ``block_size`` + 1 more whenever
        it is extended or asked.
        """
        ...

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """A request takes ``seat``. ``shaper`` is its own (None without rules) and knows the committed text, anchor
        included, whenever a proposal is asked for."""
        ...

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """The request's first tokens lie in its pages already, run for another request: as if extended with them."""
        ...

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """Take in the next committed tokens that the target has run, ``counts[i]`` of seat ``seats[i]``, all seats one
        after the other; each seat at most once."""
        ...

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """A block for each ask, each seat at most once; none for a request past the drafter's own context limit."""
        ...

    def close(self, seat: int) -> None:
        """The request is gone; the seat is free."""
        ...


@runtime_checkable
class FormsBatches(Protocol):
    """A drafter with a batched form of its own."""

    def batch_form(self, target: Target) -> BatchDrafter:
        """The form for many requests, over the same weights."""
        ...


@dataclass
class Seated:
    """What a batched form over shared pages knows of the request on a seat."""

    shaper: Shaper | None
    length: int = 0  # committed tokens that the target has run, beyond the drafter's room too


def batched(drafter: Drafter, target: Target) -> BatchDrafter:
    """The form of ``drafter`` that an engine runs beside ``target``."""
    return drafter.batch_form(target) if isinstance(drafter, FormsBatches) else LoopingDrafter(drafter, target)


def flat_places(
    seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
    """Seat and position of each token of a flat batch, ``counts[i]`` of them from position ``starts[i]`` on."""
    where = np.empty((2, sum(counts)), dtype=np.int64)
    where[0] = [seat for seat, count in zip(seats, counts, strict=True) for _ in range(count)]
    where[1] = [at for start, count in zip(starts, counts, strict=True) for at in range(start, start + count)]
    return torch.from_numpy(where[0]), torch.from_numpy(where[1])


def stacked(
    proposals: Sequence[Proposal], *, block: int, vocab_size: int, has_confidence: bool, device: torch.device
) -> BatchProposal:
    """Separate proposals as one batch. Distributions on supports of unlike sizes are spread over the vocabulary."""
    size = (len(proposals), block)
    tokens = torch.zeros(size, dtype=torch.long, device=device)
    confidence = np.zeros(size, dtype=np.float32) if has_confidence else None
    for i, one in enumerate(proposals):
        tokens[i, : one.block] = one.draft_tokens
        if confidence is not None and one.confidence is not None:
            confidence[i, : one.block] = one.confidence.cpu()
    distributions = [one.distribution if one.block else None for one in proposals]
    probs, support_ids = _stacked_distributions(distributions, block=block, vocab_size=vocab_size, device=device)
    return BatchProposal(
        draft_tokens=tokens,
        proposed=np.array([one.block for one in proposals], dtype=np.int64),
        certain=np.array([one is None for one in distributions], dtype=np.bool_),
        probs=probs,
        support_ids=support_ids,
        confidence=confidence,
        sequential_seconds=sum((one.sequential_seconds for one in proposals), 0.0),
    )


def _stacked_distributions(
    distributions: Sequence[DraftDistribution | None], *, block: int, vocab_size: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    kinds = {(one.probs.shape[1], one.token_ids is None) for one in distributions if one is not None}
    if not kinds:
        return None, None
    unlike = len(kinds) > 1
    support, dense = (vocab_size, True) if unlike else next(iter(kinds))
    probs = torch.zeros(len(distributions), block, support, device=device)
    ids = None if dense else torch.zeros(probs.shape, dtype=torch.long, device=device)
    for i, one in enumerate(distributions):
        if one is None:
            continue
        for k in range(len(one.probs)):
            probs[i, k] = one.dense(k, vocab_size) if unlike else one.probs[k]
        if ids is not None and one.token_ids is not None:
            ids[i, : len(one.probs)] = one.token_ids
    return probs, ids


@dataclass
class _Seat:
    state: Any  # the drafter's own type
    length: int = 0  # committed tokens that the target has run


class LoopingDrafter:
    """Any drafter over seats, asked request by request.

    | range of a page's slots   | owner                                                                     |
    |---------------------------|---------------------------------------------------------------------------|
    | positions < seat's length | features of committed tokens, for requests that start on the same pages   |
    | others                    | nobody; what a former request left                                        |
    """

    def __init__(self, inner: Drafter, target: Target) -> None:
        self.inner, self._info = inner, target.info
        self.name, self.block_size = inner.name, inner.block_size
        self.taps, self.has_confidence = inner.taps, inner.has_confidence
        self._seats: dict[int, _Seat] = {}
        self._features: Tensor | None = None  # [pages * page_size, features]

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :meth:`BatchDrafter.attach`. Features are kept in the target's dtype."""
        self._tables, self._max_len = tables, max_len
        if self.taps:  # not filled: room that nobody writes to costs nothing
            width = len(self.taps) * self._info.hidden_size
            shape = (pages * tables.page_size, width)
            self._features = torch.empty(shape, dtype=self._info.dtype, device=self._info.device)

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """See :meth:`BatchDrafter.open`."""
        assert seat not in self._seats, f"seat {seat} is taken"
        state = self.inner.open(max_len=self._max_len)
        if shaper is not None and isinstance(self.inner, MirrorsShaping):
            self.inner.mirror(state, shaper)
        self._seats[seat] = _Seat(state)

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :meth:`BatchDrafter.resume`."""
        one, count = self._seats[seat], len(token_ids)
        assert one.length == 0, f"seat {seat} has {one.length} tokens; only a fresh request resumes"
        if count == 0:
            return
        features = None
        if self._features is not None:
            features = self._features[self._slots([seat], [0], [count])]
        ids = torch.tensor(token_ids, dtype=torch.long, device=self._info.device)
        one.length = count
        self.inner.extend(one.state, ids, features)

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """See :meth:`BatchDrafter.extend`."""
        if self._features is not None:
            assert features is not None
            lengths = [self._seats[seat].length for seat in seats]
            self._features[self._slots(seats, lengths, counts)] = features.to(self._features.dtype)
        begin = 0
        for seat, count in zip(seats, counts, strict=True):
            one, part = self._seats[seat], slice(begin, begin + count)
            one.length, begin = one.length + count, begin + count
            self.inner.extend(one.state, token_ids[part], None if features is None else features[part])

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :meth:`BatchDrafter.propose`."""
        proposals = [
            self.inner.propose(
                self._seats[ask.seat].state,
                ask.anchor,
                sampling=ask.sampling,
                generator=ask.generator,
                limit=min(ask.limit, self.block_size),
            )
            for ask in asks
        ]
        return stacked(
            proposals,
            block=self.block_size,
            vocab_size=self._info.vocab_size,
            has_confidence=self.has_confidence,
            device=self._info.device,
        )

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`."""
        del self._seats[seat]

    def _slots(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Int[Tensor, "tokens"]:
        """Where those tokens' features lie, all pages one after the other."""
        rows, positions = flat_places(seats, starts, counts)
        size = self._tables.page_size
        return (self._tables.ids[rows, positions // size] * size + positions % size).to(self._info.device)
