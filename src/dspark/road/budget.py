"""A budget of time that survives kills, and the pace that makes a training run end when its time does.

What counts is the time in which a call works, summed over all calls; between them the clock stands still. A kill loses
at most what passed since the last beat (:meth:`dspark.road.ledger.Ledger.beat`).
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dspark.errors import ConfigError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LEAST_STEPS = 20  # of a training run, however little time is left
SKIPPED = 2  # first steps of a call, which are slower than the others: not measured
WINDOW = 200  # steps that the pace is the mean of


def read_budget(text: str) -> float:
    """Seconds of "60m", "90s" or "1.5h"; a bare number counts minutes. Raises :class:`ConfigError` for other texts."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh]?)\s*", text)
    seconds = float(found[1]) * UNITS[found[2] or "m"] if found else 0.0
    if seconds <= 0:
        raise ConfigError(f"budget is {text!r}; write a time as 60m, 90s or 1.5h")
    return seconds


@dataclass
class Budget:
    """Time to be spent. ``clock`` gives seconds since any fixed moment."""

    seconds: float
    spent_before: float = 0.0  # by earlier calls
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def spent(self) -> float:
        return self.spent_before + self.clock() - self._begin

    @property
    def left(self) -> float:
        return self.seconds - self.spent


class TimeUp(Exception):
    """A stage's time is over; raised between two target passes, and caught by the stage."""


@dataclass
class Deadline:
    """A callback for target passes: raises :class:`TimeUp` once ``budget.spent`` has reached ``at`` and ``enough`` is
    true; calls ``beat`` every time."""

    budget: Budget
    at: float  # of budget.spent
    enough: Callable[[], bool] = lambda: True
    beat: Callable[[], object] = lambda: None

    def __call__(self, *_: object) -> None:
        self.beat()
        if self.budget.spent >= self.at and self.enough():
            raise TimeUp


class Pace:
    """Steps that fit into what is left, from the seconds that steps and evaluations take here and now.

    Ask :meth:`steps` between the steps of a run, and tell :meth:`evaluated` when one of them was followed by an
    evaluation. The mean over the last steps is taken, saves included, so that a machine which slows down or speeds up
    moves the end of the run and not the end of its time.
    """

    def __init__(self, seconds_left: Callable[[], float], *, steps: int, evaluate_every: int) -> None:
        """``seconds_left`` of the run itself; ``steps`` is the first plan, which holds until steps were measured."""
        self.planned, self._left, self._every = steps, seconds_left, evaluate_every
        self._before: float | None = None  # seconds left at the last call
        self._calls = 0
        self._step_seconds: deque[float] = deque(maxlen=WINDOW)
        self._evaluations: list[float] = []
        self._evaluated = False

    def evaluated(self) -> None:
        """The step under way was followed by an evaluation."""
        self._evaluated = True

    @property
    def step_seconds(self) -> float | None:
        """Mean of the last steps; None before any was measured."""
        return sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None

    def steps(self, step: int) -> int:
        """Steps that the run shall have in all, ``step`` of them done; always at least one more."""
        left = self._left()
        if self._before is not None:
            self._take(self._before - left)
        self._before, self._calls = left, self._calls + 1
        if (pace := self.step_seconds) is not None:
            self._replan(step, left, max(pace, 1e-9))
        self.planned = max(self.planned, step + 1, LEAST_STEPS)
        return self.planned

    def _take(self, seconds: float) -> None:
        if self._evaluated:
            self._evaluations.append(max(0.0, seconds - (self.step_seconds or 0.0)))
            self._evaluated = False
        elif self._calls > SKIPPED:
            self._step_seconds.append(seconds)

    def _replan(self, step: int, left: float, pace: float) -> None:
        """Evaluations come every so many steps and at the end; what they take is no time for steps."""
        each = sum(self._evaluations[-3:]) / len(self._evaluations[-3:]) if self._evaluations else 0.0
        ahead = max(0.0, left - each) / (pace + each / self._every)
        fitting = step + math.floor(ahead)
        if abs(fitting - self.planned) > 0.02 * max(1, self.planned - step):
            self.planned = fitting
