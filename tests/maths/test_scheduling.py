"""Algorithm 1 by hand, against exhaustive search and against its fast form; Appendix A; who may know what."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from fakes import ExactRounds, ExactVerification, TableDrafter, TableTarget, target_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import ScheduleError
from dspark.maths.rejection import verify
from dspark.maths.sampling import RequestStreams
from dspark.maths.scheduling import (
    FixedScheduler,
    GreedyScheduler,
    Scheduler,
    ThresholdScheduler,
    choose_verify_lens,
    choose_verify_lens_vectorised,
    survival,
    threshold_verify_len,
)

APPENDIX_A_SPS = torch.tensor([0.0, 1.0, 0.5, 0.45])
# Eighths make ties common and products exact; free floats cover the rest.
CHANCE = st.one_of(st.integers(0, 8).map(lambda n: n / 8), st.floats(0.0, 1.0, width=32))


@st.composite
def confidences(draw: st.DrawFn, max_requests: int = 4, max_block: int = 4) -> Tensor:
    requests, block = draw(st.integers(1, max_requests)), draw(st.integers(1, max_block))
    row = st.lists(CHANCE, min_size=block, max_size=block)
    return torch.tensor(draw(st.lists(row, min_size=requests, max_size=requests)), dtype=torch.float32)


def jagged_sps(max_tokens: int, seed: int) -> Tensor:
    """Any positive curve at all, rises included."""
    return torch.rand(max_tokens + 1, generator=torch.Generator().manual_seed(seed)).double() + 0.3


# --- Appendix A: why the scheduler stops -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RetrospectiveScheduler:
    """The counterexample: evaluates every length, then takes the best, so c_2, computed from x_1, decides about x_1."""

    needs_confidence: ClassVar[bool] = True
    sps: Tensor

    def choose(self, proposal: Proposal, context_len: int) -> int:
        assert proposal.confidence is not None
        gains = survival(proposal.confidence[None])[0].double().cumsum(0)
        throughput = torch.cat([torch.ones(1), 1 + gains]) * self.sps[1 : proposal.block + 2]
        return int(throughput.argmax())


class AppendixADrafter(TableDrafter):
    """Vocabulary {A, B}, draft (1/2, 1/2), c_1 = 0.8 = 1 - |p - q|/2; c_2 is high after A and low after B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logits = torch.zeros_like(self.logits)
        after = {"start": self._row(()), "A": self._row((0,)), "B": self._row((1,))}
        self.confidences = torch.zeros_like(self.confidences)
        self.confidences[after["start"]] = 0.8
        self.confidences[after["A"]] = 1.0
        self.confidences[after["B"]] = 0.1


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [(RetrospectiveScheduler(APPENDIX_A_SPS), (0.85, 0.15)), (GreedyScheduler(APPENDIX_A_SPS), (0.7, 0.3))],
    ids=["retrospective", "algorithm 1"],
)
def test_appendix_a(scheduler: Scheduler, expected: tuple[float, float]) -> None:
    """The token-wise rule, enumerated: (0.85, 0.15) where the target says (0.7, 0.3), and exactly that."""
    drafter = AppendixADrafter(vocab_size=2, block=2, order=1)
    target = torch.tensor([0.7, 0.3])
    verification = ExactVerification(lambda prefix: target, drafter)
    first = ExactRounds(verification, scheduler, order=1).output((), rounds=1, horizon=1)
    assert first.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [(RetrospectiveScheduler(APPENDIX_A_SPS), 0.85), (GreedyScheduler(APPENDIX_A_SPS), 0.7)],
    ids=["retrospective", "algorithm 1"],
)
def test_appendix_a_by_simulation(scheduler: Scheduler, expected: float) -> None:
    """The same with coins: first tokens of 600 drafted rounds, within four standard errors."""
    drafter, rounds = AppendixADrafter(vocab_size=2, block=2, order=1), 600
    rows = torch.tensor([[0.7, 0.3]] * 3)
    streams, firsts = RequestStreams.from_seed(1), 0
    for _ in range(rounds):
        proposal = drafter.propose((), streams.propose)
        verify_len = scheduler.choose(proposal, 0)
        drafts = proposal.draft_tokens[:verify_len]
        verdict = verify(drafts, proposal.distribution, rows[: verify_len + 1], streams)
        firsts += [*drafts[: verdict.accepted].tolist(), verdict.next_token][0] == 0
    assert abs(firsts / rounds - expected) < 4 * (expected * (1 - expected) / rounds) ** 0.5


def test_appendix_a_decisions() -> None:
    """The two branches: the search lets both drafts through after A and none after B; Algorithm 1 none in either."""
    drafter = AppendixADrafter(vocab_size=2, block=2, order=1)
    after_a, after_b = (drafter.proposal_of((), (x, 0)) for x in (0, 1))
    retrospective, greedy = RetrospectiveScheduler(APPENDIX_A_SPS), GreedyScheduler(APPENDIX_A_SPS)
    assert (retrospective.choose(after_a, 0), retrospective.choose(after_b, 0)) == (2, 0)
    assert (greedy.choose(after_a, 0), greedy.choose(after_b, 0)) == (0, 0)


def test_the_bias_is_no_accident_of_the_example() -> None:
    """A random target and drafter, a cliff at two tokens with a plateau after it: three rounds, four tokens jointly."""
    target, drafter = TableTarget(vocab_size=4), TableDrafter(vocab_size=4, block=2, seed=5)
    sps = torch.tensor([0.0, 1.0, 0.62, 0.6])
    gaps = {}
    for scheduler in (RetrospectiveScheduler(sps), GreedyScheduler(sps)):
        verification = ExactVerification(lambda p: target.next_probs(p, SamplingParams(temperature=1.0)), drafter)
        exact = ExactRounds(verification, scheduler)
        drafted = exact.output((0, 1), rounds=3, horizon=4)
        gaps[type(scheduler)] = float(np.abs(drafted - target_chain((0, 1), exact.next_probs, 4)).max())
    assert gaps[GreedyScheduler] < 1e-6
    assert gaps[RetrospectiveScheduler] > 1e-3


# --- Survival --------------------------------------------------------------------------------------------------------


def test_survival_by_hand() -> None:
    assert survival(torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 0.5]])).tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert survival(torch.empty(2, 0)).shape == (2, 0)


@settings(deadline=None)
@given(confidences(max_block=9))
def test_survival_never_rises_and_is_a_product(confidence: Tensor) -> None:
    chances = survival(confidence)
    assert bool((chances[:, 1:] <= chances[:, :-1]).all())
    for row, expected in zip(chances.tolist(), confidence.double().cumprod(1).tolist(), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-37)


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.5])
def test_a_confidence_that_is_no_probability_is_refused(bad: float) -> None:
    with pytest.raises(ScheduleError, match=r"confidence\[1, 2\] is .*\[0, 1\]"):
        survival(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, bad]]))
    with pytest.raises(ScheduleError, match=r"confidence\[0, 1\]"):
        threshold_verify_len(torch.tensor([0.5, bad]), 0.2)


# --- Algorithm 1 -----------------------------------------------------------------------------------------------------


def test_algorithm_1_by_hand() -> None:
    """Two requests; candidates .9 .8 .72 .1: throughput 2.0, 2.61, 3.33, 3.536, then 3.29 at the fourth: stop."""
    chances = torch.tensor([[0.9, 0.72], [0.8, 0.1]])
    sps = torch.tensor([0.0, 1.1, 1.0, 0.9, 0.9, 0.8, 0.728])
    assert choose_verify_lens(chances, sps).tolist() == [2, 1]
    assert choose_verify_lens(chances, torch.tensor([0.0, 1.1, 1.0, 0.6, 0.9, 0.9, 0.9])).tolist() == [0, 0]


def test_a_draft_that_gains_nothing_is_not_admitted() -> None:
    """Throughput stays exactly at 1: the first non-gain, not the first loss, ends the search."""
    for choose in (choose_verify_lens, choose_verify_lens_vectorised):
        assert choose(torch.tensor([[1.0, 1.0]]), torch.tensor([0.0, 1.0, 0.5, 1.0])).tolist() == [0]


def test_equal_survivals_go_in_draft_order() -> None:
    """All six are equal; four are worth it: position 0 of every request before position 1 of any."""
    chances = torch.full((3, 2), 0.5)
    sps = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1, 0.1, 0.1])
    assert choose_verify_lens(chances, sps).tolist() == [2, 1, 1]


@settings(deadline=None, max_examples=200)
@given(confidences(max_requests=6), st.integers(0, 2**31))
def test_fast_form_equals_the_plain_one(confidence: Tensor, seed: int) -> None:
    chances = survival(confidence)
    sps = jagged_sps(confidence.numel() + len(confidence), seed)
    if seed % 2:
        sps = sps.sort(descending=True).values  # falling curves admit more before they stop
    assert torch.equal(choose_verify_lens_vectorised(chances, sps), choose_verify_lens(chances, sps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fast_form_keeps_ties_of_every_dtype(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for curve in range(20):
        chances = survival(torch.rand(5, 7, generator=random).sqrt().to(dtype))
        sps = 1.0 / (1.0 + 0.002 * curve * torch.arange(41, dtype=torch.float64))
        assert torch.equal(choose_verify_lens_vectorised(chances, sps), choose_verify_lens(chances, sps))


@settings(deadline=None)
@given(
    confidences(max_requests=3, max_block=3),
    st.floats(0.05, 2.0),
    st.lists(st.floats(0.0, 0.5), min_size=12, max_size=12),
)
def test_greedy_equals_exhaustive_search_on_unimodal_curves(
    confidence: Tensor, start: float, growth: list[float]
) -> None:
    """A step time convex in B makes throughput unimodal along the greedy order: stopping early loses nothing."""
    requests, block = confidence.shape
    step_time = start + np.cumsum(np.cumsum(sorted(growth)))  # increments never fall
    sps = torch.tensor(np.concatenate(([0.0], 1.0 / step_time)))
    chances = survival(confidence)

    def throughput(lengths: tuple[int, ...]) -> float:
        expected = requests + sum(float(chances[r, :length].double().sum()) for r, length in enumerate(lengths))
        return expected * float(sps[requests + sum(lengths)])

    best = max(throughput(lengths) for lengths in product(range(block + 1), repeat=requests))
    chosen = choose_verify_lens(chances, sps)
    assert throughput(tuple(chosen.tolist())) == pytest.approx(best, rel=1e-9)


@settings(deadline=None)
@given(confidences(max_requests=1, max_block=6), st.integers(0, 2**31))
def test_one_request_is_the_single_request_rule(confidence: Tensor, seed: int) -> None:
    """throughput(l) = (1 + a_1 + ... + a_l) SPS(1 + l): the last l before the first that gains nothing."""
    chances, sps = survival(confidence), jagged_sps(confidence.numel() + 1, seed)
    length, expected = 0, 1.0
    for chance in chances[0].tolist():
        if chance == 0 or (expected + chance) * float(sps[length + 2]) <= expected * float(sps[length + 1]):
            break
        length, expected = length + 1, expected + chance
    assert choose_verify_lens(chances, sps).tolist() == [length]
    assert (
        GreedyScheduler(sps).choose(Proposal(torch.zeros(len(chances[0]), dtype=torch.int64), None, confidence[0]), 0)
        == length
    )


@settings(deadline=None, max_examples=200)
@given(confidences(), st.integers(0, 2**31), st.data())
def test_admission_of_a_draft_ignores_everything_computed_from_it(
    confidence: Tensor, seed: int, data: st.DataObject
) -> None:
    """Confidences after k are computed from x_k; whatever they are, draft k is admitted or refused as before."""
    requests, block = confidence.shape
    sps = jagged_sps(confidence.numel() + requests, seed)
    r, k = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, block - 1))
    other = confidence.clone()
    other[r, k + 1 :] = torch.tensor(data.draw(st.lists(CHANCE, min_size=block - k - 1, max_size=block - k - 1)))
    threshold = data.draw(CHANCE)
    for admitted in (
        lambda c: int(choose_verify_lens(survival(c), sps)[r]) > k,
        lambda c: threshold_verify_len(c[r], threshold) > k,
    ):
        assert admitted(confidence) == admitted(other)


def test_rising_survivals_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"survival\[1\] rises from 0\.25 at position 1 to 0\.5"):
        choose_verify_lens(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.25, 0.5]]), torch.ones(9))


@pytest.mark.parametrize(
    ("chances", "sps", "message"),
    [
        ([[0.5, 0.5]], [0.0, 1.0, 1.0], r"sps covers up to 2 tokens; 1 requests with 2 drafts each need 3"),
        ([[0.5, 0.5]], [0.0, 1.0, 0.0, 1.0], r"sps\[2\] is 0\.0"),
        ([[0.5, 0.5]], [0.0, 1.0, 1.0, float("nan")], r"sps\[3\] is nan"),
        ([[0.5, float("nan")]], [0.0, 1.0, 1.0, 1.0], r"survival\[0, 1\] is nan"),
        ([[1.5, 0.5]], [0.0, 1.0, 1.0, 1.0], r"survival\[0, 0\] is 1\.5"),
    ],
)
def test_unusable_inputs_are_named(chances: list[list[float]], sps: list[float], message: str) -> None:
    for choose in (choose_verify_lens, choose_verify_lens_vectorised):
        with pytest.raises(ScheduleError, match=message):
            choose(torch.tensor(chances), torch.tensor(sps))


def test_an_empty_batch_and_an_empty_block() -> None:
    for choose in (choose_verify_lens, choose_verify_lens_vectorised):
        assert choose(torch.empty(0, 3), torch.tensor([0.0])).tolist() == []
        assert choose(torch.empty(2, 0), torch.ones(3)).tolist() == [0, 0]


# --- Schedulers of the batch-1 loop ----------------------------------------------------------------------------------


def test_threshold_compares_the_conditional_chance() -> None:
    """Survival falls to 0.36 at the fourth draft, but each step stands at 0.7 or more until the last."""
    confidence = torch.tensor([0.8, 0.8, 0.8, 0.7, 0.5])
    assert [threshold_verify_len(confidence, t) for t in (0.0, 0.5, 0.6, 0.75, 0.9)] == [5, 5, 4, 3, 0]


def proposal_with(confidence: list[float] | None, block: int = 3) -> Proposal:
    tokens = torch.zeros(block if confidence is None else len(confidence), dtype=torch.int64)
    return Proposal(tokens, None, None if confidence is None else torch.tensor(confidence))


def test_fixed_scheduler() -> None:
    assert [FixedScheduler(n).choose(proposal_with(None), 9) for n in (None, 0, 2, 7)] == [3, 0, 2, 3]
    assert not FixedScheduler().needs_confidence


def test_schedulers_that_need_confidence_say_so() -> None:
    for scheduler in (ThresholdScheduler(0.5), GreedyScheduler(torch.ones(5))):
        assert scheduler.needs_confidence
        assert scheduler.choose(proposal_with(None, block=0), 9) == 0
        with pytest.raises(ScheduleError, match=f"{type(scheduler).__name__} needs a confidence"):
            scheduler.choose(proposal_with(None), 9)


def test_scheduler_fields_are_checked() -> None:
    with pytest.raises(ScheduleError, match="length is -1"):
        FixedScheduler(-1)
    with pytest.raises(ScheduleError, match=r"threshold is 1\.5"):
        ThresholdScheduler(1.5)
    assert ThresholdScheduler(0.6).choose(proposal_with([0.9, 0.5, 0.9]), 9) == 1
