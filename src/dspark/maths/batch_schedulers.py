"""The schedulers of a batch: a rule of :mod:`dspark.maths.global_scheduling` with its settings, and with its memory.

They stand beside :class:`dspark.maths.scheduling.Scheduler`, which chooses for one request; for one request these
choose the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ScheduleError
from dspark.maths import global_scheduling as rules
from dspark.maths.global_scheduling import FEW, NUMPY, Arithmetic, Ranked


@dataclass(frozen=True, kw_only=True, eq=False)
class StepDrafts:
    """What a step's requests proposed. A request that sat the round out has ``proposed`` 0 and a row of zeros."""

    request_ids: Int[np.ndarray, "requests"]  # each once; a request keeps its number for life
    proposed: Int[np.ndarray, "requests"]  # drafts of each request, 0..block
    confidence: Float[np.ndarray, "requests block"]  # c_k, calibrated; 0 behind a request's last draft
    sps: Float[np.ndarray, "max_tokens_plus_1"] | None = None  # of this step alone, where it is not the scheduler's:
    # steps per second by the anchors and drafts in it, on top of its other tokens and of the drafting


@runtime_checkable
class BatchScheduler(Protocol):
    """Chooses the verify lengths of a step. ``needs_confidence`` as in the protocol for one request."""

    needs_confidence: ClassVar[bool]

    def choose(self, drafts: StepDrafts) -> Int[np.ndarray, "requests"]:
        """``verify_len`` of each request, 0 to what it proposed."""
        ...


@dataclass(frozen=True)
class FixedBatch:
    """The first ``length`` drafts of each request; None takes all."""

    needs_confidence: ClassVar[bool] = False
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ScheduleError(f"length is {self.length}; it must be 0 or more, or None for the whole block")

    def choose(self, drafts: StepDrafts) -> Int[np.ndarray, "requests"]:
        return rules.fixed_lens(drafts.proposed, self.length)


@dataclass(frozen=True)
class ThresholdBatch:
    """Each request's drafts before its first with a confidence under ``threshold``, in [0, 1]."""

    needs_confidence: ClassVar[bool] = True
    threshold: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ScheduleError(f"threshold is {self.threshold}; it must be in [0, 1]")

    def choose(self, drafts: StepDrafts) -> Int[np.ndarray, "requests"]:
        return rules.threshold_lens(drafts.confidence, drafts.proposed, self.threshold)


@dataclass(frozen=True, eq=False)
class GreedyBatch:
    """Algorithm 1 against ``sps`` [max_tokens + 1], steps per second when a step carries B tokens.

    ``arithmetic`` is numpy's, or a faster one (:func:`dspark.models.native_schedule.fast_arithmetic`).
    """

    needs_confidence: ClassVar[bool] = True
    sps: Float[np.ndarray, "max_tokens_plus_1"]
    arithmetic: Arithmetic = NUMPY

    def choose(self, drafts: StepDrafts) -> Int[np.ndarray, "requests"]:
        sps = self.sps if drafts.sps is None else drafts.sps
        if drafts.confidence.size <= FEW and (lens := rules.greedy_lens_of_few(drafts.confidence, sps)) is not None:
            return lens
        ranked = self.arithmetic.ranked(drafts.confidence)
        return self.arithmetic.admit(ranked, self.arithmetic.greedy(ranked, sps))


def recall(
    past_ids: Int[np.ndarray, "past_requests"],
    past: Ranked,
    request_ids: Int[np.ndarray, "requests"],
    guess: Float[np.ndarray, "block"],
    *,
    arithmetic: Arithmetic = NUMPY,
) -> Float[np.ndarray, "candidates"]:
    """Survivals above 0 of a step's requests, largest first: those of a past step, with requests ``past_ids``, where
    they were in it, and ``guess`` where not. Ids occur once each, in any order."""
    rows = np.tile(guess, (len(request_ids), 1))
    if len(past_ids):
        order = np.argsort(past_ids)
        places = np.searchsorted(past_ids, request_ids, sorter=order).clip(max=len(order) - 1)
        there = past_ids[order[places]] == request_ids
        rows[there] = past.survival[order[places[there]]]
    return arithmetic.descending(rows)


@runtime_checkable
class Recalls(Protocol):
    """An arithmetic that has a faster :func:`recall`."""

    def recall(
        self,
        past_ids: Int[np.ndarray, "past_requests"],
        past: Ranked,
        request_ids: Int[np.ndarray, "requests"],
        guess: Float[np.ndarray, "block"],
    ) -> Float[np.ndarray, "candidates"]:
        """:func:`recall`."""
        ...


@dataclass(frozen=True, eq=False)
class _Past:
    """A step as the lagged scheduler remembers it."""

    request_ids: Int[np.ndarray, "requests"]
    ranked: Ranked


class LaggedBatch:
    """A step's size from the survivals of two steps ago, filled with the drafts likeliest today.

    :meth:`capacity` may be asked before the step's drafts exist, and before the step before it has ended. A request
    that was not there two steps ago counts with the survivals of confidence ``guess`` at every position. The size is
    what pays by the old survivals; where today's are worse, a step can be slower than plain decoding would have been:
    shrinking it in hindsight would make a draft's admission depend on what follows it.
    """

    needs_confidence: ClassVar[bool] = True
    LAG = 2  # steps

    def __init__(
        self,
        sps: Float[np.ndarray, "max_tokens_plus_1"],
        *,
        block_size: int,
        guess: float = 0.7,
        arithmetic: Arithmetic = NUMPY,
    ) -> None:
        """``guess`` in [0, 1], for a block of ``block_size`` drafts; ``arithmetic`` as in :class:`GreedyBatch`."""
        if not 0.0 <= guess <= 1.0:
            raise ScheduleError(f"guess is {guess}; it must be a confidence in [0, 1]")
        if block_size < 0:
            raise ScheduleError(f"block_size is {block_size}; it must be 0 or more")
        self.sps, self._arithmetic = sps, arithmetic
        self._guess = np.full(block_size, guess).cumprod()
        self._past: deque[_Past] = deque(maxlen=self.LAG)
        self._foreseen: tuple[Int[np.ndarray, "requests"], int] | None = None

    def capacity(
        self, request_ids: Int[np.ndarray, "requests"], sps: Float[np.ndarray, "max_tokens_plus_1"] | None = None
    ) -> int:
        """Drafts that the next step will carry, all requests together, if it has these requests; ``sps`` as in
        :class:`StepDrafts`."""
        sps = self.sps if sps is None else sps
        requests, past = len(request_ids), self._past[0] if len(self._past) == self.LAG else None
        if past is not None and np.array_equal(past.request_ids, request_ids):
            return self._arithmetic.capacity(past.ranked.ordered, sps, requests)
        if past is None:
            known = self._arithmetic.descending(np.tile(self._guess, (requests, 1)))
        elif isinstance(self._arithmetic, Recalls):
            known = self._arithmetic.recall(past.request_ids, past.ranked, request_ids, self._guess)
        else:
            known = recall(past.request_ids, past.ranked, request_ids, self._guess, arithmetic=self._arithmetic)
        return self._arithmetic.capacity(known, sps, requests)

    def foresee(
        self, request_ids: Int[np.ndarray, "requests"], sps: Float[np.ndarray, "max_tokens_plus_1"] | None = None
    ) -> None:
        """Settle the next step's size now, before its drafts exist; it holds if the step has these very requests."""
        self._foreseen = (request_ids, self.capacity(request_ids, sps))

    def choose(self, drafts: StepDrafts) -> Int[np.ndarray, "requests"]:
        if drafts.confidence.shape[1] != len(self._guess):
            raise ScheduleError(
                f"confidence has {drafts.confidence.shape[1]} positions; this scheduler was made for block_size "
                f"{len(self._guess)}"
            )
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and np.array_equal(foreseen[0], drafts.request_ids):
            capacity = foreseen[1]
        else:
            capacity = self.capacity(drafts.request_ids, drafts.sps)
        ranked = self._arithmetic.ranked(drafts.confidence)
        self._past.append(_Past(drafts.request_ids, ranked))
        return self._arithmetic.admit(ranked, capacity)
