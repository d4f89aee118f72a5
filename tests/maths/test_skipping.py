"""Pauses and probes by hand; the fast form equals the plain one; committed rounds alone decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import ScheduleError
from dspark.maths.skipping import SkipPolicy, after_round, after_step, break_even, open_batch, open_request

POLICY = SkipPolicy(break_even=0.5, start=1.0, inertia=0.5, first_pause=2, longest_pause=5)


def played(policy: SkipPolicy, outcomes: list[int], rounds: int) -> list[bool]:
    """Which of ``rounds`` rounds are drafted, if the drafted ones accept ``outcomes`` in turn."""
    state, drafted, left = open_request(policy), [], iter(outcomes)
    for _ in range(rounds):
        drafted.append(state.drafts)
        state = after_round(state, policy, accepted=next(left) if state.drafts else None)
    return drafted


def test_pauses_double_and_end_in_probes() -> None:
    """Means 0.5 (pays), 0.25, 0.125, ...: pauses of 2, 4, 5 and 5 rounds, one probing round after each."""
    drafted = played(POLICY, [0] * 20, 22)
    assert drafted == [True, True, *[False] * 2, True, *[False] * 4, True, *[False] * 5, True, *[False] * 5, True]


def test_a_good_probe_ends_the_pauses() -> None:
    drafted = played(POLICY, [0, 0, 4, 0, 0, 0, 0], 14)
    # the probe lifts the mean to 2.125, and it takes three dead rounds to fall below 0.5; then a short pause again
    assert drafted == [True, True, False, False, True, True, True, True, False, False, True, *[False] * 3]


def test_a_request_that_goes_well_is_always_drafted_for() -> None:
    assert all(played(SkipPolicy(), [2] * 50, 50))


@settings(deadline=None, max_examples=50)
@given(
    st.floats(0, 2), st.floats(0, 3), st.floats(0, 0.95), st.integers(1, 4), st.integers(0, 20), st.integers(0, 2**16)
)
def test_fast_equals_plain(floor: float, start: float, inertia: float, first: int, more: int, seed: int) -> None:
    policy = SkipPolicy(break_even=floor, start=start, inertia=inertia, first_pause=first, longest_pause=first + more)
    random, requests = np.random.default_rng(seed), 6
    batch, plain = open_batch(policy, requests), [open_request(policy)] * requests
    for _ in range(25):
        assert batch.drafts.tolist() == [state.drafts for state in plain]
        accepted = random.poisson(0.4, requests)
        drafted = batch.drafts & (random.uniform(size=requests) < 0.9)  # an engine may leave one out for other reasons
        batch = after_step(batch, policy, drafted=drafted, accepted=accepted)
        plain = [
            after_round(state, policy, accepted=int(a) if d else None)
            for state, d, a in zip(plain, drafted, accepted, strict=True)
        ]
        assert batch.mean.tolist() == [state.mean for state in plain]
        assert batch.pause.tolist() == [state.pause for state in plain]


def test_break_even() -> None:
    assert break_even(draft_seconds=2.0, verify_seconds=6.0, plain_seconds=5.0) == pytest.approx(0.6)
    assert break_even(draft_seconds=0.0, verify_seconds=4.0, plain_seconds=5.0) == 0.0
    with pytest.raises(ScheduleError, match="plain_seconds is 0"):
        break_even(draft_seconds=1.0, verify_seconds=1.0, plain_seconds=0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("break_even", -1.0), ("start", float("nan")), ("inertia", 1.0), ("first_pause", 0), ("longest_pause", 1)],
)
def test_refusals(field: str, value: float) -> None:
    with pytest.raises(ScheduleError, match=f"{field} is"):
        SkipPolicy(**{"first_pause": 2, **{field: value}})  # type: ignore[arg-type]
