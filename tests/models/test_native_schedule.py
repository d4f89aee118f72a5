"""The compiled arithmetic of schedulers is numpy's, ties, rounding and refusals included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark
from dspark.errors import ScheduleError
from dspark.maths.batch_schedulers import GreedyBatch, LaggedBatch, StepDrafts, recall
from dspark.maths.global_scheduling import NUMPY, Arithmetic, Ranked
from dspark.models.native_schedule import NativeArithmetic, fast_arithmetic

CHANCE = st.one_of(st.integers(0, 8).map(lambda n: n / 8), st.floats(0.0, 1.0, width=32), st.floats(1e-300, 1e-290))


@pytest.fixture(scope="module")
def native() -> Arithmetic:
    arithmetic = fast_arithmetic()
    if not isinstance(arithmetic, NativeArithmetic):
        pytest.skip("no C compiler")
    return arithmetic


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Confidences, a seed for a curve, and a capacity."""
    requests, block = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rows = st.lists(st.lists(CHANCE, min_size=block, max_size=block), min_size=requests, max_size=requests)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return np.array(draw(rows), dtype=dtype), draw(st.integers(0, 2**16)), draw(st.integers(0, 40))


def same(one: Ranked, other: Ranked) -> bool:
    return one.survival.tolist() == other.survival.tolist() and one.ordered.tolist() == other.ordered.tolist()


def check(native: Arithmetic, confidence: np.ndarray, sps: np.ndarray, capacity: int) -> None:
    fast, plain = native.ranked(confidence), NUMPY.ranked(confidence)
    assert same(fast, plain) and fast.survival.dtype == plain.survival.dtype
    assert native.descending(plain.survival).tolist() == NUMPY.descending(plain.survival).tolist()
    requests = len(confidence)
    assert native.greedy(fast, sps) == NUMPY.greedy(plain, sps)
    assert native.capacity(fast.ordered, sps, requests) == NUMPY.capacity(plain.ordered, sps, requests)
    assert native.admit(fast, capacity).tolist() == NUMPY.admit(plain, capacity).tolist()


@settings(deadline=None, max_examples=150)
@given(steps())
def test_native_equals_numpy(native: Arithmetic, step: tuple[np.ndarray, int, int]) -> None:
    confidence, seed, capacity = step
    sps = np.random.default_rng(seed).uniform(0.3, 1.3, confidence.size + len(confidence) + 1)
    check(native, confidence, sps, capacity)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_native_equals_numpy_on_large_batches(native: Arithmetic, dtype: type) -> None:
    rng = np.random.default_rng(0)
    for low, slope in ((0.0, 1e-3), (0.5, 1e-9), (0.999999, 3e-4), (1 - 1e-12, 1e-2)):
        confidence = rng.uniform(low, 1.0, (256, 16)).astype(dtype)
        sps = 1.0 / (1.0 + slope * np.arange(256 * 17 + 1))
        check(native, confidence, sps, 1000)
        coarse = (np.round(confidence * 8) / 8).astype(dtype)  # hundreds of ties
        check(native, coarse, sps, 700)


def test_doubles_closer_than_floats_can_tell(native: Arithmetic) -> None:
    """Thousands of survivals with one float and many doubles, in the worst order there is."""
    confidence = (0.5 + 1e-12 * np.arange(4096))[:, None]
    assert native.ranked(confidence).ordered.tolist() == confidence[::-1, 0].tolist()


def test_other_layouts_and_types_are_taken_too(native: Arithmetic) -> None:
    confidence = np.random.default_rng(1).uniform(0, 1, (6, 8))
    sps = 1.0 / (1.0 + np.arange(100))
    for other in (confidence[:, ::2], np.asfortranarray(confidence), confidence.astype(np.float16)):
        assert same(native.ranked(other), NUMPY.ranked(other))
        assert native.greedy(native.ranked(other), sps.astype(np.float32)) == NUMPY.greedy(NUMPY.ranked(other), sps)
    for shape in ((0, 4), (3, 0)):
        check(native, np.zeros(shape), np.ones(9), 2)


def test_refusals_are_numpy_s_own(native: Arithmetic) -> None:
    good, sps = native.ranked(np.array([[0.5, 0.4]])), np.array([0.0, 1.0, np.nan, 0.5])
    with pytest.raises(ScheduleError, match=r"confidence\[0, 1\] is 1.2"):
        native.ranked(np.array([[0.5, 1.2]]))
    with pytest.raises(ScheduleError, match=r"confidence\[0, 0\] is nan"):
        native.ranked(np.array([[np.nan]]))
    with pytest.raises(ScheduleError, match=r"sps\[2\] is nan"):
        native.greedy(good, sps)
    with pytest.raises(ScheduleError, match=r"sps\[2\] is nan"):
        native.capacity(good.ordered, sps, 1)
    with pytest.raises(ScheduleError, match="covers up to 2 tokens and the step could carry 3"):
        native.greedy(good, np.ones(3))
    with pytest.raises(ScheduleError, match=r"survival\[0, 0\] is 1.5"):
        native.descending(np.array([[1.5, 0.4]]))


def test_schedulers_choose_the_same_with_either(native: Arithmetic) -> None:
    rng, sps = np.random.default_rng(2), 1.0 / (1.0 + 0.02 * np.arange(200))
    pairs = [(GreedyBatch(sps), GreedyBatch(sps, native))]
    pairs += [(LaggedBatch(sps, block_size=5), LaggedBatch(sps, block_size=5, arithmetic=native))]  # type: ignore[list-item]
    for number in range(12):
        ids = np.arange(number // 4, 8 + number // 4)  # now and then others
        drafts = StepDrafts(request_ids=ids, proposed=np.full(8, 5), confidence=rng.uniform(0.2, 1, (8, 5)))
        for plain, fast in pairs:
            assert plain.choose(drafts).tolist() == fast.choose(drafts).tolist()


TIMING = """
import timeit
import numpy as np
from dspark.maths.batch_schedulers import GreedyBatch, LaggedBatch, StepDrafts, recall
from dspark.models.native_schedule import fast_arithmetic
sps, arithmetic = 1 / (1 + np.arange(256 * 17 + 1) / 2000), fast_arithmetic()
for dtype in (np.float32, np.float64):
    confidence = np.random.default_rng(0).uniform(0.5, 1.0, (256, 16)).astype(dtype)
    drafts = StepDrafts(request_ids=np.arange(256), proposed=np.full(256, 16), confidence=confidence)
    for scheduler in (GreedyBatch(sps, arithmetic), LaggedBatch(sps, block_size=16, arithmetic=arithmetic)):
        for _ in range(3):
            scheduler.choose(drafts)
        print(min(timeit.repeat(lambda: scheduler.choose(drafts), number=5, repeat=60)) / 5)
"""


def test_a_decision_takes_half_of_what_it_may(native: Arithmetic) -> None:
    """256 requests by 16 positions in 100 microseconds is the promise; the bound leaves room for a slow machine."""
    source = Path(dspark.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", TIMING], capture_output=True, text=True, timeout=120, check=True, cwd=source
    )
    assert max(map(float, done.stdout.split())) < 150e-6


@settings(deadline=None, max_examples=100)
@given(steps(), st.sets(st.integers(0, 9), max_size=6), st.booleans())
def test_what_is_recalled_of_requests_that_come_and_go(
    native: NativeArithmetic, step: tuple[np.ndarray, int, int], here: set[int], shuffled: bool
) -> None:
    confidence, seed, _ = step
    rng = np.random.default_rng(seed)
    past_ids = np.sort(rng.choice(10, len(confidence), replace=False))
    ids = np.array(sorted(here), dtype=np.int64)
    if shuffled:  # merged by nobody: sorted again
        rng.shuffle(past_ids)
        rng.shuffle(ids)
    guess = np.full(confidence.shape[1], rng.choice([0.0, 0.5, 0.7, 1.0])).cumprod()
    past = native.ranked(confidence)
    found = native.recall(past_ids, past, ids, guess)
    assert found.tolist() == recall(past_ids, past, ids, guess).tolist()
    by_id = dict(zip(past_ids.tolist(), past.survival.astype(np.float64).tolist(), strict=True))
    plain = [value for i in ids.tolist() for value in by_id.get(i, guess.tolist()) if value > 0]
    assert found.tolist() == sorted(plain, reverse=True)
