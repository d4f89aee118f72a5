"""Gate, proposal and schedule of a step: what each may look at, and what stands in for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import tiny_drafter, tiny_target
from history_rig import HistoryTarget

from dspark.core import DraftDistribution, SamplingParams
from dspark.errors import ConfigError, ScheduleError
from dspark.maths.batch_schedulers import FixedBatch, GreedyBatch, LaggedBatch, ThresholdBatch
from dspark.maths.calibration import scaled
from dspark.maths.estimator import Estimator, draft_features
from dspark.maths.step_costs import StepCosts
from dspark.models.batch_drafter import BatchProposal, DraftAsk
from dspark.schedule_files import Calibration
from dspark.serve import costs as costs_module
from dspark.serve.confidences import Confidences
from dspark.serve.costs import measure_costs
from dspark.serve.drafting import DraftPlanner, make_planner
from dspark.serve.engine import Engine
from dspark.serve.flight import Flight, open_flight
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

BLOCK, SEATS = 3, 4
TARGET = HistoryTarget(vocab_size=9)


class Scripted:
    """Proposes tokens and confidences as told."""

    name, block_size, taps = "scripted", BLOCK, ()

    def __init__(self, confidence: float | None, *, token: int = 0) -> None:
        self.confidence, self.token, self.has_confidence = confidence, token, confidence is not None

    def attach(self, tables: Any, *, pages: int, max_len: int) -> None: ...
    def open(self, seat: int, *, shaper: Any) -> None: ...
    def resume(self, seat: int, token_ids: Sequence[int]) -> None: ...
    def extend(self, seats: Any, counts: Any, token_ids: torch.Tensor, features: torch.Tensor | None) -> None: ...
    def close(self, seat: int) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        known = None if self.confidence is None else np.full((len(asks), BLOCK), self.confidence)
        return BatchProposal(
            draft_tokens=torch.full((len(asks), BLOCK), self.token),
            proposed=np.array([ask.limit for ask in asks]),
            certain=np.ones(len(asks), dtype=np.bool_),
            confidence=known,
        )


def costs(draft: float = 0.1) -> StepCosts:
    passes = (1.0 + 0.05 * np.arange(SEATS * (1 + BLOCK) + 1))[None]
    return StepCosts(contexts=(100,), passes=passes, drafts=np.full((SEATS + 1, BLOCK + 1), draft))


def flights(count: int = SEATS, **fields: Any) -> list[Flight]:
    made = []
    for i in range(count):
        request = GenerationRequest(request_id=f"{i}", prompt_ids=(1, 2), max_new_tokens=9, **fields)
        flight = open_flight(request, info=TARGET.info, max_len=50, page_size=4, chat=None)
        flight.number, flight.seat = i, i
        flight.ids.append(3)
        flight.computed = 2
        made.append(flight)
    return made


def planner(drafter: Any, scheduler: Any, **fields: Any) -> DraftPlanner:
    return DraftPlanner(drafter, scheduler, seats=SEATS, **fields)


def test_the_gate_looks_at_committed_rounds_and_at_nothing_of_its_step() -> None:
    """The same history and other drafts, other confidences: the same choice; another history: another choice."""
    asked: dict[tuple[float, float], set[tuple[int, ...]]] = {}
    for past in (1.0, 0.0):
        for confidence in (0.05, 0.5, 0.99):
            for token in (0, 8):
                one = planner(Scripted(confidence, token=token), GreedyBatch(np.ones(99)), costs=costs(), gated=True)
                rows = np.arange(SEATS)
                for _ in range(30):
                    one.history.observe(rows, np.full((SEATS, BLOCK), past))
                plan = one.plan(flights(), other_tokens=0)
                asked.setdefault((past, 0.0), set()).add(tuple(plan.asked.tolist()))
    assert all(len(choices) == 1 for choices in asked.values())
    assert asked[(1.0, 0.0)] == {(BLOCK,) * SEATS} and asked[(0.0, 0.0)] == {(0,) * SEATS}


def test_rounds_teach_the_gate_and_probes_bring_it_back() -> None:
    one = planner(Scripted(0.9), GreedyBatch(np.ones(99)), costs=costs(), gated=True)
    fleet, drafted = flights(), []
    for step in range(900):
        plan = one.plan(fleet, other_tokens=0)
        drafted.append(int((plan.asked > 0).sum()))
        lives = step >= 300
        one.observe(plan, {i: int(plan.verify_lens[i]) if lives else 0 for i in range(SEATS)})
    assert drafted[0] == SEATS and 0 < sum(drafted[30:300]) < 0.03 * SEATS * 270  # dead drafts: probes alone
    assert drafted[-1] == SEATS  # they live again: it came back


def test_what_is_only_guessed_is_tried_on_a_few() -> None:
    passes = np.ones((1, 12 * (1 + BLOCK) + 1))
    flat = StepCosts(contexts=(100,), passes=passes, drafts=np.zeros((13, BLOCK + 1)))
    one = DraftPlanner(Scripted(0.9), GreedyBatch(np.ones(99)), seats=12, costs=flat, gated=True)
    drafted = []
    for _ in range(6):
        plan = one.plan(flights(12), other_tokens=0)
        drafted.append(int((plan.asked > 0).sum()))
        one.observe(plan, {i: int(plan.verify_lens[i]) for i in range(12)})
    assert drafted == [4, 4, 4, 4, 12, 12]


class Watched:
    """An engine's answers, passes, tokens that its drafter took in, and looks of its gate; all that it was asked."""

    def __init__(self, scheduler: str, costs: StepCosts, *, seats: int) -> None:
        config = EngineConfig(seats=seats, scheduler=scheduler, memory_mib=1, max_len=64, prefill_tokens=32)
        self.engine = Engine(tiny_target("llama"), tiny_drafter("llama", "dspark"), config=config, costs=costs)
        self.fed = self.looks = 0
        self._extend, self._gate = self.engine.drafter.inner.extend, self.engine.planner._gate
        self.engine.drafter.inner.extend = self.extend  # type: ignore[method-assign]
        self.engine.planner._gate = self.gate  # type: ignore[method-assign]

    def extend(self, seats: Any, counts: Any, token_ids: torch.Tensor, features: Any) -> None:
        self.fed += len(token_ids)
        self._extend(seats, counts, token_ids, features)

    def gate(self, *asked: Any) -> Any:
        self.looks += 1
        return self._gate(*asked)

    def run(self) -> dict[str, list[int]]:
        for i in range(12):
            self.engine.add(GenerationRequest(request_id=f"{i}", prompt_ids=(1 + i, 2), max_new_tokens=40))
        found: dict[str, list[int]] = {}
        while self.engine.has_work:
            for event in self.engine.step():
                found.setdefault(event.request_id, []).extend(event.token_ids)
        return found


@pytest.mark.parametrize("scheduler", ["greedy", "lagged"])
def test_a_busy_engine_that_refuses_gives_its_drafter_nothing_to_do(scheduler: str) -> None:
    """Rows and drafting are dear: no draft, nothing taken in, a look every few steps; what is written is what an
    engine that knows of no drafts writes, in as many passes."""
    seats = 6
    passes = (0.001 + 1.0 * np.arange(seats * (1 + BLOCK) + 33))[None]
    dear = StepCosts(contexts=(100,), passes=passes, drafts=np.full((seats + 1, BLOCK + 1), 50.0))
    plain, refusing = (Watched(name, dear, seats=seats) for name in ("none", scheduler))
    for _ in range(3):  # rounds enough: what nobody knows yet is probed at any price
        refusing.engine.planner.history.observe(np.arange(seats), np.zeros((seats, BLOCK)))
    assert plain.run() == refusing.run()
    stats = refusing.engine.stats()
    assert stats.steps == plain.engine.stats().steps and stats.drafted_steps == refusing.fed == 0
    assert stats.rounds == plain.engine.stats().rounds == 12 * 39
    assert 0 < refusing.looks <= 2 + stats.steps // 8 and plain.looks == 0


@pytest.mark.parametrize("scheduler", [GreedyBatch(np.ones(99)), LaggedBatch(np.ones(99), block_size=BLOCK)])
def test_survivals_so_far_stand_in_for_missing_confidences(scheduler: Any) -> None:
    one = planner(Scripted(None), scheduler, costs=costs(0.0))
    for _ in range(30):
        one.history.observe(np.arange(2), np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    plan = one.plan(flights(2), other_tokens=0)
    assert plan.verify_lens[0] > 0 and plan.verify_lens.tolist()[1] <= plan.verify_lens[0]
    assert plan.confidence is not None and plan.confidence[0, 0] > 0.8 > 0.3 > plan.confidence[1, 0]


def test_drafts_stop_where_there_is_no_room() -> None:
    fleet = flights()
    fleet[0].room, fleet[1].room = len(fleet[0].ids) + 1, len(fleet[1].ids) + 2
    plan = planner(Scripted(0.9), FixedBatch()).plan(fleet, other_tokens=0)
    assert plan.asked.tolist() == plan.verify_lens.tolist() == [0, 1, 3, 3]
    assert set(plan.drafts) == {1, 2, 3} and plan.drafts[2] == (1, [0, 0, 0], 3)


def test_what_a_grammar_forbids_is_not_verified_beyond_its_first() -> None:
    class Strict:
        def useful(self, draft_tokens: Sequence[int]) -> int:
            return min(2, len(draft_tokens))

    fleet = flights(2)
    fleet[0].shaper = Strict()  # type: ignore[assignment]
    plan = planner(Scripted(0.9), FixedBatch()).plan(fleet, other_tokens=0)
    assert plan.verify_lens.tolist() == [2, 3]

    class Broken:
        def useful(self, draft_tokens: Sequence[int]) -> int:
            raise RuntimeError("no such state")

    fleet[0].shaper = Broken()  # type: ignore[assignment]
    plan = planner(Scripted(0.9), FixedBatch()).plan(fleet, other_tokens=0)
    assert [flight.number for flight, _ in plan.failed] == [0] and plan.verify_lens[1] == 3


def test_schedulers_by_name() -> None:
    for settings, kind in (
        ({"scheduler": "fixed", "verify_len": 2}, FixedBatch),
        ({"scheduler": "threshold", "threshold": 0.5}, ThresholdBatch),
        ({"scheduler": "greedy"}, GreedyBatch),
        ({"scheduler": "lagged"}, LaggedBatch),
    ):
        config = EngineConfig(seats=SEATS, **settings)  # type: ignore[arg-type]
        made = make_planner(Scripted(0.9), config, costs=costs(), confidences=None)  # type: ignore[arg-type]
        assert isinstance(made.scheduler, kind) and made.drafts
    with pytest.raises(ScheduleError, match="profile"):
        config = EngineConfig(scheduler="greedy", draft_gate=False)
        make_planner(Scripted(0.9), config, costs=None, confidences=None)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="gate"):
        planner(Scripted(0.9), FixedBatch(), gated=True)
    for settings, why in (
        ({"scheduler": "best"}, "scheduler is"),
        ({"threshold": 0.5}, "threshold"),
        ({"scheduler": "threshold"}, "missing"),
        ({"scheduler": "greedy", "verify_len": 1}, "verify_len"),
        ({"seats": 0}, "seats is 0"),
        ({"pages": 1, "memory_mib": 1}, "both"),
    ):
        with pytest.raises(ConfigError, match=why):
            EngineConfig(**settings)  # type: ignore[arg-type]


# --- confidences -----------------------------------------------------------------------------------------------------


def calibration(temperature: float, estimator: tuple[tuple[float, ...], ...] | None = None) -> Calibration:
    return Calibration(
        model="m",
        model_fingerprint="1",
        drafter="d",
        drafter_fingerprint="2",
        block_size=BLOCK,
        sampling={"temperature": 0.0},
        prompts=(),
        sts_temperatures=(temperature,) * BLOCK,
        estimator=estimator,
        fitted_rounds=1,
        held_out_rounds=1,
        before=(),
        after=(),
    )


def test_greedy_and_sampled_requests_have_calibrations_of_their_own() -> None:
    proposal = Scripted(0.8).propose([_ask(), _ask()])
    both = Confidences(greedy=calibration(2.0), sampled=calibration(0.5))
    found = both.of(proposal, [True, False])
    raw = np.full(BLOCK, 0.8)
    assert found is not None
    assert found[0] == pytest.approx(scaled(raw, np.full(BLOCK, 2.0)))
    assert found[1] == pytest.approx(scaled(raw, np.full(BLOCK, 0.5)))
    for kind in (True, False):  # where all are of one kind, no rows are picked
        alone = both.of(proposal, [kind, kind])
        assert alone is not None and alone.tolist() == [found[int(not kind)].tolist()] * 2
    assert Confidences().of(proposal, [True, False]) == pytest.approx(np.full((2, BLOCK), 0.8))
    assert Confidences().of(Scripted(None).propose([_ask()]), [True]) is None
    with pytest.raises(ScheduleError, match="block_size"):
        short = BatchProposal(
            draft_tokens=torch.zeros(1, 2, dtype=torch.long),
            proposed=np.ones(1, dtype=np.int64),
            certain=np.ones(1, dtype=np.bool_),
            confidence=np.full((1, 2), 0.5),
        )
        both.of(short, [True])


def test_estimates_come_from_the_distribution_and_never_from_the_draft() -> None:
    weights = ((0.1, 0.2, -0.3, 0.4),) * BLOCK
    probs = torch.rand(2, BLOCK, 5).softmax(-1)
    proposal = BatchProposal(
        draft_tokens=torch.zeros(2, BLOCK, dtype=torch.long),
        proposed=np.full(2, BLOCK),
        certain=np.array([False, True]),
        probs=probs,
    )
    found = Confidences(greedy=calibration(1.0, weights), sampled=calibration(1.0, weights)).of(proposal, [False, True])
    assert found is not None
    estimator = Estimator(np.array(weights))
    sampled = estimator.confidence(draft_features(DraftDistribution(probs[0]), BLOCK))
    assert found[0] == pytest.approx(sampled) and found[1] == pytest.approx(
        estimator.confidence(draft_features(None, BLOCK))
    )


def _ask() -> DraftAsk:
    return DraftAsk(seat=0, anchor=0, sampling=SamplingParams(), generator=torch.Generator(), limit=BLOCK)


# --- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [None, 9])
def test_costs_are_measured_on_the_engines_own_seats_and_everything_is_given_back(pages: int | None) -> None:
    config = EngineConfig(seats=3, page_size=8, pages=pages, prefill_tokens=8, max_len=100)
    target = tiny_target("llama")
    engine = Engine(target, tiny_drafter("llama", "dspark"), config=config)
    found = measure_costs(target, engine.drafter, engine.roster, prefill_tokens=8)
    assert found.max_tokens == 3 * 4 + 8 and found.drafts.shape == (4, 4)
    assert (found.passes[:, 1:] > 0).all() and (np.diff(found.passes[0, 1:]) >= 0).all()
    assert (found.drafts[0] == 0).all() and (found.drafts[1:, 1:] > 0).all()
    engine.roster.check()
    assert engine.stats().pages_used == 0 and engine.stats().pages_cached == 0
    engine.add(GenerationRequest(request_id="a", prompt_ids=(1,), max_new_tokens=3))
    engine.step()
    with pytest.raises(ConfigError, match="in flight"):
        measure_costs(target, engine.drafter, engine.roster, prefill_tokens=8)


def test_a_busy_moment_of_the_machine_meets_no_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of runs in a row would have called the middle size as dear as the large one, and flat what rises."""
    clock, ran = [0.0], list[int]()
    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: clock[0])

    def run(size: int) -> None:
        ran.append(size)
        clock[0] += 0.01 * size * (5 if 3 <= len(ran) <= 6 else 1)

    found = costs_module.least_seconds({size: partial(run, size) for size in (1, 2, 4)})
    assert found == pytest.approx({1: 0.01, 2: 0.02, 4: 0.04}) and ran[:6] == [1, 2, 4] * 2
    ran.clear()
    costs_module.least_seconds({100: partial(run, 100)})
    assert ran == [100, 100], "what takes a second is not run four times"


@pytest.mark.parametrize("scheduler", ["greedy", "lagged"])
def test_an_engine_without_costs_measures_them(scheduler: str) -> None:
    config = EngineConfig(seats=2, scheduler=scheduler, memory_mib=1, max_len=64, prefill_tokens=8)
    engine = Engine(tiny_target("llama"), tiny_drafter("llama", "dspark"), config=config)
    assert engine.planner.costs is not None and engine.config.gated
    engine.add(GenerationRequest(request_id="a", prompt_ids=(1,), max_new_tokens=20))
    while engine.has_work:
        engine.step()
    assert engine.stats().completion_tokens == 20
