"""Many requests at once: fast equals plain, one request as by the single rule, no future known, never a loss."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark
from dspark.core import Proposal
from dspark.errors import ScheduleError
from dspark.maths import scheduling as single
from dspark.maths.batch_schedulers import (
    BatchScheduler,
    FixedBatch,
    GreedyBatch,
    LaggedBatch,
    StepDrafts,
    ThresholdBatch,
)
from dspark.maths.global_scheduling import (
    admit_likeliest,
    admit_likeliest_plain,
    choose_capacity,
    choose_capacity_plain,
    fixed_lens,
    greedy_lens,
    greedy_lens_of_few,
    survivals,
    threshold_lens,
    threshold_lens_plain,
)

# eighths make ties common and products exact; 0 and 1 are among them
CHANCE = st.one_of(st.integers(0, 8).map(lambda n: n / 8), st.floats(0.0, 1.0, width=32))


@st.composite
def confidences(draw: st.DrawFn, max_requests: int = 5, max_block: int = 5) -> np.ndarray:
    requests, block = draw(st.integers(1, max_requests)), draw(st.integers(1, max_block))
    row = st.lists(CHANCE, min_size=block, max_size=block)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return np.array(draw(st.lists(row, min_size=requests, max_size=requests)), dtype=dtype)


def jagged_sps(max_tokens: int, seed: int) -> np.ndarray:
    """Any positive curve at all, rises included."""
    return np.random.default_rng(seed).uniform(0.3, 1.3, max_tokens + 1)


def smooth_sps(max_tokens: int, slope: float) -> np.ndarray:
    """A step costs 1 plus ``slope`` per token: throughput over the greedy order has one peak."""
    return 1.0 / (1.0 + slope * np.arange(max_tokens + 1))


def step(confidence: np.ndarray, proposed: np.ndarray | None = None) -> StepDrafts:
    requests, block = confidence.shape
    drafted = np.full(requests, block) if proposed is None else proposed
    return StepDrafts(request_ids=np.arange(requests), proposed=drafted, confidence=confidence)


def expected_throughput(survival: np.ndarray, sps: np.ndarray, lens: np.ndarray) -> float:
    gain = sum(float(row[:length].sum(dtype=np.float64)) for row, length in zip(survival, lens, strict=True))
    return (len(survival) + gain) * float(sps[len(survival) + int(lens.sum())])


# --- fast equals plain -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 2**16))
def test_greedy_equals_the_plain_rule(confidence: np.ndarray, seed: int) -> None:
    survival, sps = survivals(confidence), jagged_sps(confidence.size + len(confidence), seed)
    plain = single.choose_verify_lens(torch.from_numpy(survival), torch.from_numpy(sps))
    assert greedy_lens(survival, sps).tolist() == plain.tolist()


@settings(max_examples=100, deadline=None)
@given(confidences(), st.integers(0, 99))
def test_few_drafts_are_scheduled_alike_on_pythons_numbers(confidence: np.ndarray, seed: int) -> None:
    requests, block = confidence.shape
    sps = jagged_sps(requests * (1 + block), seed)
    sps[0] = np.inf  # which nobody reads
    few = greedy_lens_of_few(confidence, sps)
    assert (few is None) == (confidence.dtype == np.float32)
    assert few is None or few.tolist() == greedy_lens(survivals(confidence), sps).tolist()


@pytest.mark.parametrize("bad", [-1.0, np.inf, np.nan, 0.0])
def test_what_is_no_chance_or_no_speed_is_left_to_the_rule_that_says_so(bad: float) -> None:
    confidence, sps = np.full((2, 3), 0.5), np.ones(9)
    assert greedy_lens_of_few(confidence, sps) is not None
    slow, odd = sps.copy(), confidence.copy()
    slow[8], odd[1, 2] = bad, bad or 2.0
    for chances, speeds in ((odd, sps), (confidence, slow), (confidence, sps[:-1])):
        assert greedy_lens_of_few(chances, speeds) is None
        with pytest.raises(ScheduleError):
            GreedyBatch(speeds).choose(step(chances))


def test_greedy_equals_the_plain_rule_on_a_large_batch() -> None:
    confidence = np.random.default_rng(0).uniform(0.8, 1.0, (256, 16)).astype(np.float32)
    survival = survivals(confidence)
    for slope in (1e-9, 3e-4, 1e-3, 1e-2):
        sps = smooth_sps(256 * 17, slope)
        plain = single.choose_verify_lens(torch.from_numpy(survival), torch.from_numpy(sps))
        assert greedy_lens(survival, sps).tolist() == plain.tolist()


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 2**16), st.integers(1, 9))
def test_capacity_equals_the_plain_search(confidence: np.ndarray, seed: int, requests: int) -> None:
    survival, sps = survivals(confidence), jagged_sps(confidence.size + requests, seed)
    assert choose_capacity(survival, sps, requests) == choose_capacity_plain(survival, sps, requests)


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 30))
def test_admission_equals_the_plain_order(confidence: np.ndarray, capacity: int) -> None:
    survival = survivals(confidence)
    fast, plain = admit_likeliest(survival, capacity), admit_likeliest_plain(survival, capacity)
    assert fast.tolist() == plain.tolist()
    assert int(fast.sum()) == min(capacity, int((survival > 0).sum()))


@settings(deadline=None, max_examples=50)
@given(confidences(), CHANCE, st.integers(0, 2**16))
def test_threshold_equals_the_plain_rule(confidence: np.ndarray, threshold: float, seed: int) -> None:
    proposed = np.random.default_rng(seed).integers(0, confidence.shape[1] + 1, len(confidence))
    fast = threshold_lens(confidence, proposed, threshold)
    assert fast.tolist() == threshold_lens_plain(confidence, proposed, threshold).tolist()


# --- one request -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(confidences(max_requests=1), CHANCE, st.integers(0, 5), st.integers(0, 2**16))
def test_one_request_is_scheduled_as_by_the_single_rules(
    confidence: np.ndarray, threshold: float, length: int, seed: int
) -> None:
    block = confidence.shape[1]
    proposal = Proposal(torch.zeros(block, dtype=torch.long), None, torch.from_numpy(confidence[0]))
    sps = jagged_sps(block + 1, seed)
    pairs: list[tuple[BatchScheduler, single.Scheduler]] = [
        (FixedBatch(), single.FixedScheduler()),
        (FixedBatch(length), single.FixedScheduler(length)),
        (ThresholdBatch(threshold), single.ThresholdScheduler(threshold)),
        (GreedyBatch(sps), single.GreedyScheduler(torch.from_numpy(sps))),
    ]
    for batch, one in pairs:
        assert batch.choose(step(confidence)).tolist() == [one.choose(proposal, 10)], batch
        assert batch.needs_confidence == one.needs_confidence


def test_threshold_compares_in_the_dtype_given() -> None:
    confidence = np.array([[0.7, 0.1]], dtype=np.float32)
    one = single.threshold_verify_len(torch.from_numpy(confidence[0]), 0.7)
    assert threshold_lens(confidence, np.array([2]), 0.7).tolist() == [one]


# --- laws ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 2**16))
def test_admitted_drafts_are_the_likeliest_and_ties_go_in_draft_order(confidence: np.ndarray, seed: int) -> None:
    """Prefixes by construction; and whoever is left out was no likelier than whoever is in, or came later in line."""
    survival, sps = survivals(confidence), jagged_sps(confidence.size + len(confidence), seed)
    for lens in (greedy_lens(survival, sps), admit_likeliest(survival, confidence.size // 2)):
        rank = {(r, k): (-float(survival[r, k]), k, r) for r, k in np.ndindex(*survival.shape)}
        inside = [place for (r, k), place in rank.items() if k < lens[r]]
        outside = [place for (r, k), place in rank.items() if k >= lens[r] and survival[r, k] > 0]
        assert max(inside, default=(-2.0, 0, 0)) < min(outside, default=(0.0, 0, 0))
        assert all(survival[r, k] > 0 for (r, k) in rank if k < lens[r])


@settings(deadline=None, max_examples=30)
@given(confidences(max_requests=3, max_block=3), st.sampled_from([0.02, 0.1, 0.3, 1.0]))
def test_greedy_equals_exhaustive_search_where_the_curve_has_one_peak(confidence: np.ndarray, slope: float) -> None:
    survival, sps = survivals(confidence), smooth_sps(confidence.size + len(confidence), slope)
    best = max(
        expected_throughput(survival, sps, np.array(lens))
        for lens in product(range(confidence.shape[1] + 1), repeat=len(confidence))
    )
    assert expected_throughput(survival, sps, greedy_lens(survival, sps)) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(confidences(max_requests=3, max_block=3), st.integers(0, 2**16))
def test_the_lagged_search_is_global_on_any_curve(confidence: np.ndarray, seed: int) -> None:
    """With the survivals it planned for, no choice of lengths is better (but for checking drafts without a chance)."""
    survival, sps = survivals(confidence), jagged_sps(confidence.size + len(confidence), seed)
    lens = admit_likeliest(survival, choose_capacity(survival, sps, len(survival)))
    best = max(
        expected_throughput(survival, sps, np.array(other))
        for other in product(*(range(count + 1) for count in (survival > 0).sum(1).tolist()))
    )
    assert expected_throughput(survival, sps, lens) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 2**16))
def test_never_below_plain_decoding_in_expectation(confidence: np.ndarray, seed: int) -> None:
    survival, sps = survivals(confidence), jagged_sps(confidence.size + len(confidence), seed)
    nothing = expected_throughput(survival, sps, np.zeros(len(survival), dtype=int))
    planned = admit_likeliest(survival, choose_capacity(survival, sps, len(survival)))
    for lens in (greedy_lens(survival, sps), planned):
        assert expected_throughput(survival, sps, lens) >= nothing * (1 - 1e-12)


def schedulers(requests: int, block: int, seed: int) -> list[BatchScheduler]:
    """All of them, the lagged one with two steps behind it."""
    sps = jagged_sps(requests * (block + 1), seed)
    lagged = LaggedBatch(sps, block_size=block)
    random = np.random.default_rng(seed)
    for _ in range(2):
        lagged.choose(step(random.uniform(0, 1, (requests, block))))
    return [FixedBatch(1), ThresholdBatch(0.5), GreedyBatch(sps), lagged]


@settings(deadline=None, max_examples=50)
@given(confidences(), st.integers(0, 2**16), st.data())
def test_what_is_drawn_at_or_after_a_position_never_changes_its_admission(
    confidence: np.ndarray, seed: int, data: st.DataObject
) -> None:
    """x_k of a request shows in its confidences behind k, and nowhere else before the step is committed."""
    requests, block = confidence.shape
    r, k = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(0, block - 1))
    other = confidence.copy()
    other[r, k + 1 :] = data.draw(st.lists(CHANCE, min_size=block - k - 1, max_size=block - k - 1))
    for one, two in zip(schedulers(requests, block, seed), schedulers(requests, block, seed), strict=True):
        admitted = [int(s.choose(step(c))[r]) > k for s, c in ((one, confidence), (two, other))]
        assert admitted[0] == admitted[1], type(one).__name__


def test_a_scheduler_that_looks_ahead_fails_that_test() -> None:
    """The same change of a later confidence moves the admission of x_0 when the best of all lengths is taken."""
    sps = np.array([0.0, 1.0, 0.5, 0.45])

    def best_length(confidence: list[float]) -> int:
        survival = survivals(np.array([confidence]))
        return max(range(3), key=lambda length: expected_throughput(survival, sps, np.array([length])))

    assert (best_length([0.8, 1.0]), best_length([0.8, 0.1])) == (2, 0)


# --- the lagged scheduler's memory -----------------------------------------------------------------------------------


def test_lagged_capacity_is_two_steps_old() -> None:
    """The confidences of this step and of the one before it do not move its size; those before them do."""
    sps = smooth_sps(30, 0.1)
    low, high = np.full((3, 4), 0.05), np.full((3, 4), 0.99)
    sizes = {}
    for name, steps in {"low": (low, high), "high": (high, low), "high again": (high, high)}.items():
        lagged = LaggedBatch(sps, block_size=4)
        for confidence in steps:
            lagged.choose(step(confidence))
        sizes[name] = lagged.capacity(np.arange(3))
        assert int(lagged.choose(step(np.full((3, 4), 0.5))).sum()) == sizes[name]
    assert sizes["low"] == 0 and sizes["high"] == sizes["high again"] > 6


def test_lagged_matches_requests_by_their_number_and_guesses_for_new_ones() -> None:
    sps = smooth_sps(40, 0.05)
    lagged = LaggedBatch(sps, block_size=2, guess=0.5)
    old = np.array([[0.9, 0.8], [0.2, 0.1], [0.6, 0.5]])
    lagged.choose(StepDrafts(request_ids=np.array([7, 3, 5]), proposed=np.full(3, 2), confidence=old))
    lagged.choose(step(np.zeros((2, 2))))
    known = np.array([[0.5, 0.25], [0.6, 0.3], [0.9, 0.72]])  # 9 is new, then 5, then 7
    assert lagged.capacity(np.array([9, 5, 7])) == choose_capacity(known, sps, 3)


def test_lagged_starts_from_the_guess() -> None:
    sps = smooth_sps(40, 0.05)
    lagged, guess = LaggedBatch(sps, block_size=3, guess=0.9), np.full((2, 3), 0.9).cumprod(1)
    for _ in range(2):
        assert lagged.capacity(np.arange(2)) == choose_capacity(guess, sps, 2) > 0
        lagged.choose(step(np.zeros((2, 3))))
    assert lagged.capacity(np.arange(2)) == 0


# --- edges and refusals ----------------------------------------------------------------------------------------------


def test_certainties() -> None:
    sps = smooth_sps(20, 0.01)
    confidence = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    assert greedy_lens(survivals(confidence), sps).tolist() == [3, 0, 1]
    assert admit_likeliest(survivals(confidence), 99).tolist() == [3, 0, 1]
    assert admit_likeliest(survivals(confidence), 2).tolist() == [1, 0, 1]  # equal chances: position before request
    assert threshold_lens(confidence, np.array([2, 3, 3]), 0.0).tolist() == [2, 3, 3]
    assert fixed_lens(np.array([0, 1, 3]), 2).tolist() == [0, 1, 2]


def test_nothing_to_schedule() -> None:
    sps = smooth_sps(5, 0.1)
    for shape in ((0, 4), (3, 0), (0, 0)):
        confidence = np.zeros(shape)
        proposed = np.zeros(shape[0], dtype=int)
        assert greedy_lens(survivals(confidence), sps).tolist() == [0] * shape[0]
        assert admit_likeliest(survivals(confidence), 3).tolist() == [0] * shape[0]
        assert threshold_lens(confidence, proposed, 0.5).tolist() == [0] * shape[0]
        assert threshold_lens_plain(confidence, proposed, 0.5).tolist() == [0] * shape[0]


def test_refusals() -> None:
    rising, good = np.array([[0.5, 0.6]]), np.array([[0.5, 0.4]])
    sps = smooth_sps(9, 0.1)
    with pytest.raises(ScheduleError, match=r"survival\[0\] rises from 0.5 at position 0 to 0.6"):
        greedy_lens(rising, sps)
    with pytest.raises(ScheduleError, match=r"survival\[0, 0\] is 1.5"):
        admit_likeliest(np.array([[1.5, 0.4]]), 1)
    with pytest.raises(ScheduleError, match=r"survival\[0, 1\] is nan"):
        choose_capacity(np.array([[0.5, np.nan]]), sps, 1)
    with pytest.raises(ScheduleError, match=r"survival\[0, 0\] is nan"):
        greedy_lens(np.array([[np.nan]]), sps)
    with pytest.raises(ScheduleError, match=r"confidence\[0, 1\] is 1.2"):
        survivals(np.array([[0.5, 1.2]]))
    with pytest.raises(ScheduleError, match=r"confidence\[0, 0\] is nan"):
        threshold_lens(np.array([[np.nan]]), np.array([1]), 0.5)
    with pytest.raises(ScheduleError, match="covers up to 2 tokens and the step could carry 3"):
        greedy_lens(good, sps[:3])
    with pytest.raises(ScheduleError, match=r"sps\[2\] is nan"):
        choose_capacity(good, np.array([0.0, 1.0, np.nan, 0.5]), 1)
    with pytest.raises(ScheduleError, match=r"sps\[3\] is 0.0"):
        greedy_lens(good, np.array([0.0, 1.0, 1.0, 0.0]))
    with pytest.raises(ScheduleError, match="capacity is -1"):
        admit_likeliest(good, -1)
    with pytest.raises(ScheduleError, match="length is -1"):
        FixedBatch(-1)
    with pytest.raises(ScheduleError, match=r"threshold is 1\.1"):
        ThresholdBatch(1.1)
    with pytest.raises(ScheduleError, match=r"guess is 2\.0"):
        LaggedBatch(sps, block_size=2, guess=2.0)
    with pytest.raises(ScheduleError, match="confidence has 2 positions; this scheduler was made for block_size 3"):
        LaggedBatch(sps, block_size=3).choose(step(good))


# --- speed -----------------------------------------------------------------------------------------------------------

TIMING = """
import timeit
import numpy as np
from dspark.maths.batch_schedulers import FixedBatch, GreedyBatch, LaggedBatch, StepDrafts, ThresholdBatch
confidence = np.random.default_rng(0).uniform(0.5, 1.0, (256, 16)).astype(np.float32)
drafts = StepDrafts(request_ids=np.arange(256), proposed=np.full(256, 16), confidence=confidence)
sps = 1 / (1 + np.arange(256 * 17 + 1) / 2000)
for scheduler in (FixedBatch(4), ThresholdBatch(0.7), GreedyBatch(sps), LaggedBatch(sps, block_size=16)):
    for _ in range(3):
        scheduler.choose(drafts)
    print(min(timeit.repeat(lambda: scheduler.choose(drafts), number=20, repeat=60)) / 20)
"""


def test_a_decision_takes_microseconds() -> None:
    """256 requests by 16 positions, in a process without shape checks. The figure on a quiet core is under 100
    microseconds; the bound leaves room for a busy or slow machine and still catches a loop over drafts (1 ms up)."""
    source = Path(dspark.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", TIMING], capture_output=True, text=True, timeout=120, check=True, cwd=source
    )
    assert max(map(float, done.stdout.split())) < 400e-6
