"""The draft and schedule parts of a step: whom to draft for, what they propose, and how much of it is verified.

look up    who repeats his own text, and what comes next in it (:mod:`dspark.maths.lookup`); these cost no drafting
gate       before drafting, from committed rounds: for whom else and how deep (:mod:`dspark.maths.draft_gate`)
propose    the drafter, for all of them at once
schedule   before the target runs, from today's confidences: drafts of each (:mod:`dspark.maths.batch_schedulers`)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from dspark.errors import ScheduleError
from dspark.maths.batch_schedulers import (
    BatchScheduler,
    FixedBatch,
    GreedyBatch,
    LaggedBatch,
    StepDrafts,
    ThresholdBatch,
)
from dspark.maths.draft_gate import Consents, ProbeClock, Refusals, choose_depths, could_pay, first_few, probe_cost
from dspark.maths.step_costs import StepCosts
from dspark.maths.survival_history import SurvivalHistory, round_survivals
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.native_schedule import fast_arithmetic
from dspark.serve.confidences import Confidences
from dspark.serve.copies import Copies, CopyFinder
from dspark.serve.curves import Curves
from dspark.serve.flight import Flight
from dspark.serve.settings import EngineConfig

Lens = Int[np.ndarray, "requests"]


@runtime_checkable
class JudgesDrafts(Protocol):
    """A shaper that knows which drafts cannot stand (a grammar)."""

    def useful(self, draft_tokens: Sequence[int]) -> int:
        """Drafts worth verifying: those that may stand, and the first that may not."""
        ...


@dataclass(kw_only=True, eq=False)
class Drafting:
    """A step's drafts, as they go to the target."""

    flights: list[Flight]  # all that decode, oldest first
    proposal: BatchProposal | None = None
    drafts: dict[int, tuple[int, list[int], int]] = field(default_factory=dict)
    # by request number: row of the proposal, all drafts, how many are verified
    looked_up: frozenset[int] = frozenset()  # numbers of the requests whose drafts are from their own text
    asked: Lens  # most drafts asked of the drafter; 0: not drafted for
    proposed: Lens
    verify_lens: Lens
    confidence: Float[np.ndarray, "requests block"] | None = None  # calibrated; None: not drafted, or no such thing
    failed: list[tuple[Flight, Exception]] = field(default_factory=list)
    draft_seconds: float = 0.0
    schedule_seconds: float = 0.0


class DraftPlanner:
    """Gate, drafter and scheduler of an engine, with what they remember of its seats."""

    def __init__(
        self,
        drafter: BatchDrafter,
        scheduler: BatchScheduler | None,
        *,
        seats: int,
        costs: StepCosts | None = None,
        confidences: Confidences | None = None,
        gated: bool = False,
        lookup: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """``scheduler`` None never drafts. ``costs`` are what the gate and load-aware schedulers weigh; ``confidences``
        makes the drafter's true (None takes them as they are). ``lookup``: whether requests draft from their own text
        where they can; ``device`` is where the drafter's proposals lie."""
        block = drafter.block_size
        if gated and costs is None:
            raise ScheduleError("a draft gate weighs measured costs and has none; profile the target first")
        self.drafter, self.scheduler, self.costs = drafter, scheduler, costs
        self._confidences = confidences or Confidences()
        self._gated, self._block = gated, block
        convex = isinstance(scheduler, GreedyBatch)
        self._curves = None if costs is None else Curves(costs, block=block, convex=convex)
        self._finder = CopyFinder(block=block, curves=self._curves if gated else None) if lookup else None
        self._nobody = BatchProposal(
            draft_tokens=torch.zeros(0, block, dtype=torch.long, device=device),
            proposed=np.zeros(0, dtype=np.int64),
            certain=np.zeros(0, dtype=np.bool_),
        )
        self._arithmetic = fast_arithmetic()
        self.history = SurvivalHistory(seats, block_size=block)
        self._clock, self._refusals, self._consents = ProbeClock(seats), Refusals(), Consents()

    @property
    def drafts(self) -> bool:
        """Whether this planner ever drafts."""
        return self.scheduler is not None and self._block > 0

    def open(self, seat: int) -> None:
        """A request takes ``seat``."""
        self.history.open(seat)
        self._clock.open(seat)
        self._refusals.come()

    def plan(self, flights: list[Flight], *, other_tokens: int) -> Drafting:
        """Draft for some of the decoding ``flights`` and choose what to verify; ``other_tokens`` share the pass."""
        count = len(flights)
        nothing = np.zeros(count, dtype=np.int64)
        plan = Drafting(flights=flights, asked=nothing, proposed=nothing, verify_lens=nothing)
        if not self.drafts or not count:
            return plan
        started = time.perf_counter()
        context = sum(len(flight.ids) for flight in flights) / count
        looked_up: Copies = {}
        if self._finder is not None:
            looked_up = self._finder.find(flights, other_tokens=other_tokens, context=context)
        refused = self._gated and self._refusals.holds(count) and not self._clock.tick(self._probe_cost(count))
        if refused and not looked_up:
            plan.schedule_seconds = time.perf_counter() - started
            return plan
        if not refused:
            plan.asked = self._asked(flights, looked_up, other_tokens, context)
        places = np.flatnonzero(plan.asked)
        if not len(places) and not looked_up:
            plan.schedule_seconds = time.perf_counter() - started
            return plan
        asking = time.perf_counter()
        if len(places):
            plan.proposal = self.drafter.propose([_ask(flights[i], int(plan.asked[i])) for i in places])
        scheduling = time.perf_counter()
        plan.draft_seconds = scheduling - asking
        self._schedule(plan, places, looked_up, other_tokens, context)
        plan.schedule_seconds = time.perf_counter() - scheduling + asking - started
        return plan

    def _asked(self, flights: Sequence[Flight], looked_up: Collection[int], other_tokens: int, context: float) -> Lens:
        """Drafts to ask the drafter for."""
        limits = np.array([flight.most_drafts for flight in flights], dtype=np.int64).clip(0, self._block)
        limits[list(looked_up)] = 0
        if not self._gated or not limits.any():
            return limits
        held = None if other_tokens else self._consents.held([flight.number for flight in flights])
        return self._gate(flights, limits, other_tokens, context) if held is None else np.minimum(held, limits)

    def _gate(self, flights: Sequence[Flight], limits: Lens, other_tokens: int, context: float) -> Lens:
        """Drafts to ask for: what the gate lets through, and a probe where one is due."""
        assert self.costs is not None and self._curves is not None
        rows = _seats(flights)
        survival = self.history.estimate(rows)
        depth = np.zeros(len(flights), dtype=np.int64)
        if self._could_pay(survival, limits, other_tokens, context):
            depth = choose_depths(
                survival,
                limits,
                self.costs,
                other_tokens=other_tokens,
                context=context,
                judged=self._curves.judged(len(flights), other_tokens, context),
                arithmetic=self._arithmetic,
            ).depth
        self._consents.keep([flight.number for flight in flights], depth)  # without the probe
        if not depth.any() and not (other_tokens and self._could_pay(survival, limits, 0, context)):
            self._refusals.refuse(len(flights))  # also for the steps behind a prompt
        probed = self._clock.due(rows, depth, limits, cost=self._probe_cost(len(flights)))
        depth = depth.copy()
        depth[probed] = limits[probed]
        return first_few(depth, known_rounds=self.history.rounds)

    def _could_pay(
        self, survival: Float[np.ndarray, "requests block"], limits: Lens, other_tokens: int, context: float
    ) -> bool:
        assert self.costs is not None
        return could_pay(
            survival, limits, self.costs, other_tokens=other_tokens, context=context, arithmetic=self._arithmetic
        )

    def _probe_cost(self, requests: int) -> float:
        assert self.costs is not None
        return probe_cost(self.costs, self._clock, requests=requests, known_rounds=self.history.rounds)

    def _schedule(
        self,
        plan: Drafting,
        asked: Int[np.ndarray, "asks"],
        looked_up: Copies,
        other_tokens: int,
        context: float,
    ) -> None:
        """Fill ``proposed``, ``confidence``, ``verify_lens`` and ``drafts`` in; drafts that were looked up follow those
        of the ``asked``."""
        assert self.scheduler is not None
        flights, of_drafter = plan.flights, plan.proposal
        proposal = of_drafter or self._nobody
        if looked_up:
            proposal = proposal.with_certain([drafts for drafts, _ in looked_up.values()])
            plan.looked_up = frozenset(flights[i].number for i in looked_up)
        plan.proposal, places = proposal, [*asked.tolist(), *looked_up]
        drafts = proposal.draft_tokens.tolist()
        useful = proposal.proposed.copy()
        for row, i in enumerate(places):
            shaper = flights[i].shaper
            if shaper is not None and useful[row] and isinstance(shaper, JudgesDrafts):
                try:
                    useful[row] = min(useful[row], shaper.useful(drafts[row][: useful[row]]))
                except Exception as error:
                    plan.failed.append((flights[i], error))
        plan.proposed = np.zeros_like(plan.asked)
        plan.proposed[places] = useful
        known = None if of_drafter is None else self._known([flights[i] for i in asked], of_drafter)
        confidence = np.zeros((len(flights), self._block))
        if known is not None:
            confidence[asked] = known
            plan.confidence = confidence
        for i, (_, chances) in looked_up.items():
            confidence[i, : len(chances)] = chances
        confidence[np.arange(self._block) >= plan.proposed[:, None]] = 0.0
        sps = None
        if self._curves is not None:
            sps = self._curves.sps(len(flights), len(asked), int(plan.asked.max()), other_tokens, context)
        numbers = np.array([flight.number for flight in flights], dtype=np.int64)
        step = StepDrafts(request_ids=numbers, proposed=plan.proposed, confidence=confidence, sps=sps)
        plan.verify_lens = self.scheduler.choose(step)
        for row, i in enumerate(places):
            count = int(proposal.proposed[row])
            if count:
                plan.drafts[flights[i].number] = (row, drafts[row][:count], int(plan.verify_lens[i]))

    def _known(self, flights: Sequence[Flight], proposal: BatchProposal) -> Float[np.ndarray, "asks block"] | None:
        """What is known of the chances of the drafter's proposals, or has to be; None for a rule that does without."""
        assert self.scheduler is not None
        known = self._confidences.of(proposal, [flight.request.sampling.greedy for flight in flights])
        if known is None and self.scheduler.needs_confidence:
            return self.history.confidence(_seats(flights))
        return known

    def foresee(self, flights: Sequence[Flight]) -> None:
        """During a pass: let a scheduler that can settle the next step's size, should it be of these requests."""
        if not flights or self._curves is None or not isinstance(self.scheduler, LaggedBatch):
            return
        context = sum(len(flight.ids) for flight in flights) / len(flights)
        sps = self._curves.sps(len(flights), len(flights), self._block, 0, context)
        self.scheduler.foresee(np.array([flight.number for flight in flights], dtype=np.int64), sps)

    def observe(self, plan: Drafting, accepted: dict[int, int]) -> None:
        """Take in a committed step: accepted drafts by request number, of those whose round was committed."""
        if not self.drafts:
            return
        if plan.proposal is None:
            if plan.flights:
                self.history.rest_all()
            return
        there = [
            i
            for i, flight in enumerate(plan.flights)
            if flight.number in accepted and flight.number not in plan.looked_up and flight.seat >= 0
        ]
        drafted = np.array([i for i in there if plan.asked[i] > 0], dtype=np.int64)
        rested = np.array([i for i in there if plan.asked[i] == 0], dtype=np.int64)
        if len(rested):
            self.history.rest(_seats([plan.flights[i] for i in rested]))
        if not len(drafted):
            return
        told = round_survivals(
            asked=plan.asked[drafted],
            proposed=plan.proposed[drafted],
            verified=plan.verify_lens[drafted],
            accepted=np.array([accepted[plan.flights[i].number] for i in drafted], dtype=np.int64),
            confidence=None if plan.confidence is None else plan.confidence[drafted],
            usual=self.history.usual,
        )
        self.history.observe(_seats([plan.flights[i] for i in drafted]), told)
        self._refusals.end()


def make_planner(
    drafter: BatchDrafter,
    config: EngineConfig,
    *,
    costs: StepCosts | None,
    confidences: Confidences | None,
    lookup: bool = False,
    device: torch.device | str = "cpu",
) -> DraftPlanner:
    """The planner that ``config`` names, the rest as :class:`DraftPlanner` has it. ``costs`` are needed by greedy,
    lagged and the gate."""
    scheduler: BatchScheduler | None = None
    if config.scheduler == "fixed":
        scheduler = FixedBatch(config.verify_len)
    elif config.threshold is not None:
        scheduler = ThresholdBatch(config.threshold)
    elif config.scheduler in ("greedy", "lagged"):
        if costs is None:
            raise ScheduleError(f"the {config.scheduler} scheduler weighs measured costs and has none; profile first")
        sps = 1.0 / np.concatenate(([np.inf], costs.passes[0, 1:]))
        greedy = config.scheduler == "greedy"
        if greedy:
            scheduler = GreedyBatch(sps, fast_arithmetic())
        else:
            scheduler = LaggedBatch(sps, block_size=drafter.block_size, arithmetic=fast_arithmetic())
    return DraftPlanner(
        drafter,
        scheduler,
        seats=config.seats,
        costs=costs,
        confidences=confidences,
        gated=config.gated,
        lookup=lookup,
        device=device,
    )


def _ask(flight: Flight, limit: int) -> DraftAsk:
    return DraftAsk(
        seat=flight.seat,
        anchor=flight.ids[-1],
        sampling=flight.request.sampling,
        generator=flight.streams.propose,
        limit=limit,
    )


def _seats(flights: Sequence[Flight]) -> Int[np.ndarray, "requests"]:
    return np.array([flight.seat for flight in flights], dtype=np.int64)
