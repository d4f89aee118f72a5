"""Wrapped schedulers: true confidences reach the inner one, the output stays the target's, online follows a drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from fakes import ExactRounds, ExactVerification, TableDrafter, TableTarget, target_chain

from dspark.core import DraftDistribution, Proposal, RoundRecord, SamplingParams
from dspark.decode import generate
from dspark.errors import ScheduleError
from dspark.maths.calibrated_scheduling import (
    CalibratedScheduler,
    EstimatingScheduler,
    OnlineScheduler,
    ProfiledGreedyScheduler,
)
from dspark.maths.calibration import judge, scaled, summarise
from dspark.maths.estimator import Estimator
from dspark.maths.scheduling import FixedScheduler, GreedyScheduler, Scheduler, ThresholdScheduler
from dspark.models.drafter import NoDrafter

SPS = torch.tensor([0.0, 1.0, 0.62, 0.6])
ESTIMATOR = Estimator(np.array([[-1.2, 0.9, 1.0, 0.0], [-1.0, 1.5, 0.4, 0.0]]))


@dataclass
class Listener:
    """A scheduler that keeps what it was given."""

    needs_confidence: ClassVar[bool] = True
    seen: list[Proposal] = field(default_factory=list)

    def choose(self, proposal: Proposal, context_len: int) -> int:
        self.seen.append(proposal)
        return proposal.block


def proposal(
    confidence: list[float] | None, probs: torch.Tensor | None = None, tokens: tuple[int, ...] = ()
) -> Proposal:
    block = len(confidence or tokens)
    return Proposal(
        torch.tensor(tokens or (0,) * block, dtype=torch.long),
        None if probs is None else DraftDistribution(probs),
        None if confidence is None else torch.tensor(confidence),
    )


def test_the_inner_scheduler_sees_calibrated_confidences() -> None:
    listener = Listener()
    scheduler = CalibratedScheduler(listener, np.array([2.0, 1.0, 0.5]))
    assert scheduler.choose(proposal([0.9, 0.9]), 5) == 2
    assert listener.seen[0].confidence is not None
    assert listener.seen[0].confidence.tolist() == pytest.approx([0.75, 0.9])
    assert scheduler.choose(proposal([]), 5) == 0
    assert ThresholdScheduler(0.8).choose(proposal([0.9, 0.9]), 5) == 2
    assert CalibratedScheduler(ThresholdScheduler(0.8), np.array([2.0, 1.0])).choose(proposal([0.9, 0.9]), 5) == 0


def test_estimates_come_from_the_distribution_and_never_from_the_draft() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3]])
    listener = Listener()
    scheduler = EstimatingScheduler(listener, ESTIMATOR, np.ones(2))
    assert not scheduler.needs_confidence  # the loop lets a drafter without a head pass
    for tokens in ((0, 1), (2, 2)):
        scheduler.choose(proposal(None, probs, tokens), 5)
    one, two = (p.confidence for p in listener.seen)
    assert one is not None and two is not None and one.tolist() == two.tolist()
    changed = probs.clone()
    changed[1] = torch.tensor([0.1, 0.1, 0.8])  # x_0 shows in q_1, and q_1 in c_1 alone
    scheduler.choose(proposal(None, changed, (1, 1)), 5)
    three = listener.seen[2].confidence
    assert three is not None and three[0] == one[0] and three[1] != one[1]


@pytest.mark.parametrize("kind", ["dense", "candidates", "sequential"])
@pytest.mark.parametrize("inner", [ThresholdScheduler(0.55), GreedyScheduler(SPS)], ids=["threshold", "greedy"])
@pytest.mark.parametrize("way", ["calibrated", "estimated"])
def test_output_is_exactly_the_targets(way: str, inner: Scheduler, kind: str) -> None:
    """Every draft, length and closing token of two rounds enumerated."""
    target = TableTarget(vocab_size=3)
    drafter = TableDrafter(vocab_size=3, block=2, kind=kind, seed=5, sharpness=1.5)
    scheduler: Scheduler = CalibratedScheduler(inner, np.array([1.7, 0.6]))
    if way == "estimated":
        scheduler = EstimatingScheduler(inner, ESTIMATOR, np.array([1.7, 0.6]))
    exact = ExactRounds(
        ExactVerification(lambda p: target.next_probs(p, SamplingParams(temperature=1.0)), drafter), scheduler
    )
    lens = {scheduler.choose(drafter.proposal_of((0, x), (y, 0)), 2) for x in range(3) for y in range(3)}
    assert len(lens) > 1  # it does choose
    drafted = exact.output((0, 1), rounds=2, horizon=3)
    assert float(np.abs(drafted - target_chain((0, 1), exact.next_probs, 3)).max()) < 1e-6


class Loose:
    """A drafter without confidences in the loop; proposes the same certain tokens always."""

    name, block_size, has_confidence = "loose", 2, False
    taps: tuple[int, ...] = ()

    def open(self, *, max_len: int) -> None:
        return None

    def extend(self, state: None, token_ids: torch.Tensor, features: torch.Tensor | None) -> None:
        return None

    def propose(
        self, state: None, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        return Proposal(torch.tensor([1, 2][: max(0, limit)], dtype=torch.long))


def test_the_loop_takes_an_estimator_for_a_drafter_without_a_head() -> None:
    target = TableTarget(max_len=40)
    certain = Estimator(np.array([[0.2, 1.0, 1.0, 1.0], [0.1, 1.0, 1.0, 1.0]]))
    scheduler = EstimatingScheduler(ThresholdScheduler(0.54), certain, np.ones(2))
    ours, plain = (
        generate(target, d, [0, 1], sampling=SamplingParams(), max_new_tokens=20, scheduler=s)
        for d, s in ((Loose(), scheduler), (NoDrafter(), FixedScheduler()))
    )
    assert ours.token_ids == plain.token_ids
    assert {r.verify_len for r in ours.rounds[:-2]} == {1}  # sigmoid(0.2) = 0.55 passes, sigmoid(0.1) = 0.52 does not


def test_profiled_greedy_takes_the_curve_of_the_context() -> None:
    curves = torch.tensor([[0.0, 1.0, 0.9, 0.8], [0.0, 1.0, 0.1, 0.05]])
    scheduler = ProfiledGreedyScheduler((100, 1000), curves)
    drafts = proposal([0.9, 0.9])
    assert [scheduler.choose(drafts, n) for n in (1, 100, 101, 5000)] == [2, 2, 0, 0]
    assert scheduler.choose(proposal([]), 5) == 0
    for curve, context in ((0, 50), (1, 500)):
        assert scheduler.choose(drafts, context) == GreedyScheduler(curves[curve]).choose(drafts, context)
    with pytest.raises(ScheduleError, match=r"contexts is \[100, 100\]"):
        ProfiledGreedyScheduler((100, 100), curves)
    with pytest.raises(ScheduleError, match="drafter gives none"):
        scheduler.choose(proposal(None, tokens=(0, 0)), 5)


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match=r"sts_temperatures\[0\] is 0.0"):
        CalibratedScheduler(FixedScheduler(), np.zeros(2))
    with pytest.raises(ScheduleError, match="3 drafts were proposed and sts_temperatures has 2"):
        CalibratedScheduler(FixedScheduler(), np.ones(2)).choose(proposal([0.5] * 3), 1)
    with pytest.raises(ScheduleError, match="no confidences to calibrate"):
        CalibratedScheduler(FixedScheduler(), np.ones(2)).choose(proposal(None, tokens=(1,)), 1)
    with pytest.raises(ScheduleError, match="window is 0"):
        OnlineScheduler(FixedScheduler(), sts_temperatures=np.ones(2), window=0)


# --- online ----------------------------------------------------------------------------------------------------------


def serve(scheduler: OnlineScheduler, rounds: int, *, sharpness: float, seed: int) -> list[int]:
    """Rounds of a made-up drafter of block 3 through ``scheduler``; returns the verify lengths."""
    random, lens = np.random.default_rng(seed), []
    for _ in range(rounds):
        logits = random.normal(1.0, 1.2) + random.normal(0.0, 0.7, 3)
        drafts = proposal((1 / (1 + np.exp(-sharpness * logits))).tolist())
        alive = random.uniform(size=3) < 1 / (1 + np.exp(-logits))
        verify_len = scheduler.choose(drafts, 10)
        accepted = int(np.cumprod(alive)[:verify_len].sum())
        assert drafts.confidence is not None
        lens.append(verify_len)
        scheduler.observe(
            RoundRecord(
                draft_tokens=(0, 0, 0),
                confidence=tuple(drafts.confidence.tolist()),
                verify_len=verify_len,
                accepted=accepted,
                committed=(0,) * accepted + (1,),
                draft_seconds=0.0,
                sequential_seconds=0.0,
                verify_seconds=0.0,
                host_seconds=0.0,
            )
        )
    return lens


def test_online_temperatures_follow_what_is_served() -> None:
    """From 1 towards the 2 that the drafter needs, from explored rounds alone; the statistic can be read off."""
    scheduler = OnlineScheduler(
        ThresholdScheduler(0.9), sts_temperatures=np.ones(3), explore_every=2, window=800, refit_every=800
    )
    lens = serve(scheduler, 1600, sharpness=2.0, seed=0)
    assert set(lens[::2]) == {3} and len(set(lens[1::2])) > 1  # every second round is checked whole
    assert len(scheduler.outcomes) == 800
    raw = scheduler.outcomes
    mended = raw.replaced(scaled(raw.confidence, scheduler.sts_temperatures))
    assert summarise(judge(mended)).ece < 0.5 * summarise(judge(raw)).ece
    assert np.abs(np.log(scheduler.sts_temperatures / 2.0)).max() < 0.5


def test_exploration_is_settled_by_the_round_count_alone() -> None:
    """Whether a round is explored must not depend on its drafts."""
    lens = {
        sharpness: serve(
            OnlineScheduler(FixedScheduler(0), sts_temperatures=np.ones(3), explore_every=5),
            20,
            sharpness=sharpness,
            seed=1,
        )
        for sharpness in (0.5, 3.0)
    }
    assert lens[0.5] == lens[3.0] == [3, 0, 0, 0, 0] * 4
