"""The simulator against an engine that runs: the same closed loop on both, and how far apart they come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspark.errors import DataError
from dspark.simulate.log import Point


@runtime_checkable
class Event(Protocol):
    """What an engine tells of a request: :class:`dspark.serve.events.StepEvent`."""

    finish_reason: str | None


@runtime_checkable
class Stats(Protocol):
    """An engine's totals: :class:`dspark.serve.events.EngineStats`."""

    steps: int
    completion_tokens: int
    rounds: int
    verified_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    stage_seconds: dict[str, float]


@runtime_checkable
class RunningEngine(Protocol):
    """An engine that can be driven: :class:`dspark.serve.engine.Engine`. Requests are its own type."""

    def add(self, request: object) -> None: ...
    def step(self) -> Sequence[Event]: ...
    def stats(self) -> Stats: ...


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A closed loop that was run. Per-step figures in seconds."""

    throughput: float  # tokens per second of all users
    verify_tokens: float  # checked per request and step, the anchor included
    acceptance_length: float
    step_seconds: float
    stage_seconds: Mapping[str, float]  # per step

    @property
    def host_seconds(self) -> float:
        """Of a step, all that is neither drafting nor the target."""
        return self.step_seconds - sum(self.stage_seconds.get(name, 0.0) for name in ("draft", "target"))


def measure(
    engine: RunningEngine,
    make_request: Callable[[int], object],
    *,
    users: int,
    steps: int,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Run ``engine`` with ``users`` who each ask again at once, and measure ``steps`` steps behind ``warm_up`` others.

    ``make_request(i)`` is the i-th request; give the first ``users`` answers of different lengths, or they end in step.
    Raises :class:`DataError` if a request ends for another reason than its length.
    """
    asked = 0
    for _ in range(users):
        engine.add(make_request(asked))
        asked += 1
    before, start = engine.stats(), clock()
    for number in range(warm_up + steps):
        if number == warm_up:
            before, start = engine.stats(), clock()
        for event in engine.step():
            if event.finish_reason is None:
                continue
            if event.finish_reason != "length":
                raise DataError(f"an answer ended by {event.finish_reason!r}; measure with answers of a fixed length")
            engine.add(make_request(asked))
            asked += 1
    return _between(before, engine.stats(), clock() - start)


def _between(before: Stats, after: Stats, seconds: float) -> Measured:
    rounds, steps = after.rounds - before.rounds, after.steps - before.steps
    if rounds < 1:
        raise DataError("no round was committed in the measured steps; measure more of them")
    verified = sum(after.verified_at) - sum(before.verified_at)
    accepted = sum(after.accepted_at) - sum(before.accepted_at)
    stages = {name: total - before.stage_seconds.get(name, 0.0) for name, total in after.stage_seconds.items()}
    return Measured(
        throughput=(after.completion_tokens - before.completion_tokens) / seconds,
        verify_tokens=1.0 + verified / rounds,
        acceptance_length=1.0 + accepted / rounds,
        step_seconds=seconds / steps,
        stage_seconds={name: total / steps for name, total in stages.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One way at one load, simulated over measured: 1 is a perfect prediction."""

    scheduler: str
    users: int
    throughput: float
    verify_tokens: float
    acceptance_length: float
    step_seconds: float


def compare(point: Point, measured: Measured) -> Comparison:
    """Ratios of what was simulated to what was measured."""
    names = ("throughput", "verify_tokens", "acceptance_length", "step_seconds")
    ratios = {name: getattr(point, name) / getattr(measured, name) for name in names}
    return Comparison(scheduler=point.scheduler, users=int(point.load), **ratios)
