"""Time: budgets are read and kept on a fake clock, whatever the speed does meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from dspark.errors import ConfigError
from dspark.road.budget import Budget, Deadline, Pace, TimeUp, read_budget
from dspark.train.optim import learning_rate


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("text, seconds", [("60m", 3600), ("90s", 90), ("1.5h", 5400), ("5", 300), (" 2 m ", 120)])
def test_budgets_are_read(text: str, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0m", "-3m", "an hour", "5d", "1:30"])
def test_other_texts_are_no_budget(text: str) -> None:
    with pytest.raises(ConfigError, match="budget is"):
        read_budget(text)


def test_a_budget_counts_the_work_of_all_calls() -> None:
    clock = FakeClock()
    budget = Budget(100.0, spent_before=30.0, clock=clock)
    clock.now += 20
    assert (budget.spent, budget.left) == (50.0, 50.0)


def test_a_deadline_waits_until_there_is_enough() -> None:
    clock, enough, beats = FakeClock(), [False], []
    deadline = Deadline(Budget(100.0, clock=clock), at=10.0, enough=lambda: enough[0], beat=lambda: beats.append(1))
    deadline(3)
    clock.now += 10
    deadline()
    enough[0] = True
    with pytest.raises(TimeUp):
        deadline()
    assert len(beats) == 3


def simulated(seconds: float, cost: Callable[[int], float], *, plan: int, every: int, evaluation: float):
    """A run on a fake clock: (seconds that it took, steps, the rate of every step)."""
    clock = FakeClock()
    budget = Budget(seconds, clock=clock)
    pace = Pace(lambda: budget.left, steps=plan, evaluate_every=every)
    rates: list[float] = []
    for step in itertools.count():
        total = pace.steps(step)
        rates.append(learning_rate(step, total, 1.0, warmup=0.02, schedule="trapezoid", decay=0.5))
        clock.now += cost(step) * (5.0 if step == 0 else 1.0)  # the first step compiles and loads
        if (step + 1) % every == 0 or step + 1 == total:
            clock.now += evaluation
            pace.evaluated()
        if step + 1 >= total:
            return budget.spent, step + 1, rates


SPEEDS: dict[str, Callable[[int], float]] = {
    "as planned": lambda step: 1.0,
    "three times slower": lambda step: 3.0,
    "ten times faster": lambda step: 0.1,
    "slows down on the way": lambda step: 1.0 if step < 200 else 2.0,
    "speeds up on the way": lambda step: 2.0 if step < 200 else 0.7,
    "blocks grow": lambda step: 0.6 if step < 300 else 1.1,
    "jittery": lambda step: 0.4 + 1.2 * ((step * 7919) % 10) / 10,
}


@pytest.mark.parametrize("name", SPEEDS)
def test_a_run_ends_in_its_decay_when_its_time_does(name: str) -> None:
    spent, steps, rates = simulated(1000.0, SPEEDS[name], plan=1000, every=100, evaluation=8.0)
    assert 950 <= spent <= 1030, (spent, steps)
    assert max(rates) == 1.0
    assert rates[-1] < 0.02 and rates[-max(2, steps // 10)] < 0.3  # it has come down, to the end


def test_evaluations_that_take_most_of_the_time_are_reckoned_with() -> None:
    spent, steps, _ = simulated(1000.0, lambda step: 1.0, plan=1000, every=50, evaluation=60.0)
    assert 900 <= spent <= 1060 and 350 <= steps <= 550


def test_without_time_a_run_still_has_a_few_steps() -> None:
    _, steps, _ = simulated(0.5, lambda step: 1.0, plan=5, every=100, evaluation=0.0)
    assert steps == 20
