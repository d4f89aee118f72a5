"""A way at work in a simulated engine: whom to draft for, what to check, and what it remembers of either.

The rules, the gate and the pauses are the ones that engines run: :mod:`dspark.maths.batch_schedulers`,
:mod:`dspark.maths.draft_gate` and :mod:`dspark.maths.skipping`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dspark.maths import skipping
from dspark.maths.batch_schedulers import StepDrafts
from dspark.maths.draft_gate import ProbeClock, choose_depths, first_few, probe_cost
from dspark.maths.step_costs import StepCosts
from dspark.maths.survival_history import SurvivalHistory, round_survivals
from dspark.models.native_schedule import fast_arithmetic
from dspark.simulate.ways import Way

Seats = Int[np.ndarray, "requests"]
Lens = Int[np.ndarray, "requests"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A committed step, of all its decoding requests."""

    seats: Seats
    asked: Lens  # most drafts that were asked for; 0: not drafted for
    drafts: StepDrafts
    verify_lens: Lens
    accepted: Lens
    break_even: float  # accepted drafts per drafted request at which this step's drafting paid


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """What a step costs, as guards and rules see it: its decoding tokens' own share beside prompts, and host time."""

    costs: StepCosts
    judged: Float[np.ndarray, "tokens_plus_1"] | None  # seconds that the rule goes by instead, by decoding tokens

    def sps(self, drafting: float) -> Float[np.ndarray, "tokens_plus_1"]:
        """Steps per second by decoding tokens, with so many seconds of drafting."""
        seconds = self.costs.passes[0] if self.judged is None else self.judged
        return 1.0 / (seconds + drafting)


@runtime_checkable
class Guard(Protocol):
    """Decides before drafting for whom to draft, from committed rounds alone."""

    def open(self, seats: Seats) -> None:
        """New requests on ``seats``."""
        ...

    def ask(self, seats: Seats, limits: Lens, weights: Weights | None) -> Lens:
        """Drafts to ask for, 0 to ``limits``."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Take in a committed step."""
        ...


class Pauses:
    """Requests whose drafts keep dying sit rounds out (maths.skipping); the break-even point is the step's own."""

    def __init__(self, seats: int) -> None:
        self._policy = skipping.SkipPolicy()
        self._state = skipping.open_batch(self._policy, seats)

    def open(self, seats: Seats) -> None:
        self._set(seats, skipping.open_batch(self._policy, len(seats)))

    def ask(self, seats: Seats, limits: Lens, weights: Weights | None) -> Lens:
        return np.where(self._state.drafts[seats], limits, 0)

    def observe(self, outcome: Outcome) -> None:
        seats, state = outcome.seats, self._state
        here = skipping.BatchSkip(state.mean[seats], state.pause[seats], state.waiting[seats])
        policy = replace(self._policy, break_even=outcome.break_even)
        drafted = outcome.drafts.proposed > 0
        self._set(seats, skipping.after_step(here, policy, drafted=drafted, accepted=outcome.accepted))

    def _set(self, seats: Seats, there: skipping.BatchSkip) -> None:
        state = self._state
        state.mean[seats], state.pause[seats], state.waiting[seats] = there.mean, there.pause, there.waiting


class Gate:
    """Drafting is left out where expected tokens per second say so (maths.draft_gate), as the engine does it."""

    def __init__(self, seats: int, *, block_size: int) -> None:
        self._history = SurvivalHistory(seats, block_size=block_size)
        self._clock = ProbeClock(seats)

    def open(self, seats: Seats) -> None:
        for seat in seats.tolist():
            self._history.open(seat)
            self._clock.open(seat)

    def ask(self, seats: Seats, limits: Lens, weights: Weights | None) -> Lens:
        assert weights is not None, "the gate weighs costs"
        choice = choose_depths(
            self._history.estimate(seats),
            limits,
            weights.costs,
            other_tokens=0,
            context=0.0,
            judged=weights.judged,
            arithmetic=fast_arithmetic(),
        )
        depth = choice.depth.copy()
        cost = probe_cost(weights.costs, self._clock, requests=len(seats), known_rounds=self._history.rounds)
        probed = self._clock.due(seats, depth, limits, cost=cost)
        depth[probed] = limits[probed]
        return first_few(depth, known_rounds=self._history.rounds)

    def observe(self, outcome: Outcome) -> None:
        drafted, rested = np.flatnonzero(outcome.asked), np.flatnonzero(outcome.asked == 0)
        if len(rested):
            self._history.rest(outcome.seats[rested])
        if not len(drafted):
            return
        told = round_survivals(
            asked=outcome.asked[drafted],
            proposed=outcome.drafts.proposed[drafted],
            verified=outcome.verify_lens[drafted],
            accepted=outcome.accepted[drafted],
            confidence=outcome.drafts.confidence[drafted],
            usual=self._history.usual,
        )
        self._history.observe(outcome.seats[drafted], told)


class Decider:
    """One way, for an engine with so many ``seats``."""

    def __init__(self, way: Way, *, seats: int, block_size: int) -> None:
        self.way = way
        self._rule = way.scheduler(block_size=block_size, arithmetic=fast_arithmetic())
        self._guard: Guard | None = None
        if way.guard is not None:
            self._guard = Pauses(seats) if way.guard == "skip" else Gate(seats, block_size=block_size)

    @property
    def weighs(self) -> bool:
        """Whether costs are weighed, before drafting or after."""
        return self.way.weighs_costs or isinstance(self._guard, Gate)

    def open(self, seats: Seats) -> None:
        if self._guard is not None:
            self._guard.open(seats)

    def ask(self, seats: Seats, limits: Lens, weights: Weights | None) -> Lens:
        """Drafts to ask for, 0 to ``limits``; ``weights`` must be there if the way :attr:`weighs`."""
        if self.way.drafts == "none" or not len(seats):
            return np.zeros_like(limits)
        return limits if self._guard is None else self._guard.ask(seats, limits, weights)

    def choose(self, drafts: StepDrafts) -> Lens:
        """``verify_len`` of each request; ``drafts.sps`` must be there if the way weighs costs."""
        return self._rule.choose(drafts) if len(drafts.proposed) else drafts.proposed

    def observe(self, outcome: Outcome) -> None:
        if self._guard is not None and len(outcome.seats):
            self._guard.observe(outcome)
