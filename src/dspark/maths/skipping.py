"""Whom not to draft for: a request whose drafts keep dying pays for proposals that add nothing.

The block is drafted whole before anything is known of it, so its cost is lost when the first draft falls. The paper
leaves this open (an early exit by difficulty is its future work). The rule here looks at what a request's past rounds
committed: a running mean of accepted drafts per drafted round, and, where that is below the break-even point, a pause
that doubles as long as the single round that probes at its end does not lift the mean again.

Only committed rounds count, so whether a round is drafted is settled before any of its drafts is drawn, and the
output's distribution stays the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class SkipPolicy:
    """When drafting pauses and for how long. All lengths in rounds of the request."""

    break_even: float = 0.5  # accepted drafts per drafted round at which drafting just pays; >= 0
    start: float = 2.0  # the running mean before the first round; >= 0
    inertia: float = 0.8  # weight of the past in the running mean; [0, 1)
    first_pause: int = 4  # >= 1
    longest_pause: int = 64  # >= first_pause

    def __post_init__(self) -> None:
        for name in ("break_even", "start"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ScheduleError(f"{name} is {getattr(self, name)}; it must be a finite number, 0 or more")
        if not 0.0 <= self.inertia < 1.0:
            raise ScheduleError(f"inertia is {self.inertia}; it must be in [0, 1)")
        if not 1 <= self.first_pause <= self.longest_pause:
            raise ScheduleError(
                f"first_pause is {self.first_pause} and longest_pause is {self.longest_pause}; they must be ordered "
                "and at least 1"
            )


def break_even(*, draft_seconds: float, verify_seconds: float, plain_seconds: float) -> float:
    """Accepted drafts per round at which a drafted round is as fast per token as a plain step.

    A drafted round takes ``draft_seconds`` + ``verify_seconds`` for 1 + accepted tokens, a plain step ``plain_seconds``
    for one. Never below 0. Raises :class:`ScheduleError` if the plain step takes no time.
    """
    if not plain_seconds > 0.0:
        raise ScheduleError(f"plain_seconds is {plain_seconds}; a step takes time, so it must be positive")
    return max(0.0, (draft_seconds + verify_seconds) / plain_seconds - 1.0)


@dataclass(frozen=True)
class RequestSkip:
    """One request's state: the plain form."""

    mean: float  # accepted drafts per drafted round
    pause: int  # rounds that the next pause will last
    waiting: int  # rounds still to be left undrafted; 0: draft

    @property
    def drafts(self) -> bool:
        return self.waiting == 0


def open_request(policy: SkipPolicy) -> RequestSkip:
    """State before a request's first round."""
    return RequestSkip(policy.start, policy.first_pause, 0)


def after_round(state: RequestSkip, policy: SkipPolicy, *, accepted: int | None) -> RequestSkip:
    """State after a committed round: ``accepted`` drafts of a drafted one, or None if the request was not drafted
    for."""
    if accepted is None:
        return RequestSkip(state.mean, state.pause, max(0, state.waiting - 1))
    mean = policy.inertia * state.mean + (1.0 - policy.inertia) * accepted
    if mean >= policy.break_even:
        return RequestSkip(mean, policy.first_pause, 0)
    return RequestSkip(mean, min(2 * state.pause, policy.longest_pause), state.pause)


@dataclass(frozen=True, eq=False)
class BatchSkip:
    """The state of many requests, an entry each: the fast form."""

    mean: Float[np.ndarray, "requests"]
    pause: Int[np.ndarray, "requests"]
    waiting: Int[np.ndarray, "requests"]

    @property
    def drafts(self) -> Bool[np.ndarray, "requests"]:
        return self.waiting == 0


def open_batch(policy: SkipPolicy, requests: int) -> BatchSkip:
    """State of ``requests`` requests before their first rounds."""
    return BatchSkip(
        np.full(requests, policy.start),
        np.full(requests, policy.first_pause, dtype=np.int64),
        np.zeros(requests, dtype=np.int64),
    )


def after_step(
    state: BatchSkip,
    policy: SkipPolicy,
    *,
    drafted: Bool[np.ndarray, "requests"],
    accepted: Int[np.ndarray, "requests"],
) -> BatchSkip:
    """:func:`after_round` for all requests of a step; ``accepted`` counts where ``drafted`` is true."""
    mean = np.where(drafted, policy.inertia * state.mean + (1.0 - policy.inertia) * accepted, state.mean)
    pays = drafted & (mean >= policy.break_even)
    fails = drafted & ~pays
    waiting = np.where(fails, state.pause, np.where(pays, 0, np.maximum(0, state.waiting - 1)))
    longer = np.minimum(2 * state.pause, policy.longest_pause)
    pause = np.where(fails, longer, np.where(pays, policy.first_pause, state.pause))
    return BatchSkip(mean, pause, waiting)
