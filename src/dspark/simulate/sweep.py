"""Every way to decode under every load, and what a fleet makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.errors import ConfigError
from dspark.simulate.acceptance import (
    AcceptanceModel,
    ModelledRounds,
    RecordedRounds,
    ReplayedRounds,
    RoundSource,
)
from dspark.simulate.arrivals import Arrivals, ClosedLoop, OpenLoop
from dspark.simulate.costs import Costs
from dspark.simulate.log import Point
from dspark.simulate.loop import Engine, EngineShape
from dspark.simulate.ways import Way
from dspark.simulate.workload import Lengths, Requests, poisson

Acceptance = AcceptanceModel | RecordedRounds


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that a simulation needs beside a way and a load. One seed gives one result."""

    costs: Costs
    acceptance: Acceptance
    mtp_acceptance: Acceptance | None = None  # of MTP-1; None: as good as the drafter's first position
    lengths: Lengths = field(default_factory=Lengths)
    shape: EngineShape = field(default_factory=EngineShape)
    steps: int = 2000  # of a closed loop
    requests: int = 500  # of an open loop
    warm_up: float = 0.1  # share of the steps that is not measured
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0.0 <= self.warm_up < 1.0:
            raise ConfigError(f"warm_up is {self.warm_up}; it must be in [0, 1)")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")

    def source(self, way: Way) -> RoundSource:
        """The rounds that a way decodes with."""
        acceptance = self.acceptance
        if way.drafts == "mtp":
            acceptance = self.mtp_acceptance or self.acceptance
            acceptance = acceptance.first_only()
        return ModelledRounds(acceptance) if isinstance(acceptance, AcceptanceModel) else ReplayedRounds(acceptance)


def closed_loop(scene: Scene, way: Way, users: int) -> Point:
    """``users`` who each ask again as soon as they are answered. Raises :class:`ConfigError` for less than one."""
    if users < 1:
        raise ConfigError(f"concurrency is {users}; it must be 1 or more")
    shape = replace(scene.shape, seats=users)
    engine = _engine(scene, way, ClosedLoop(scene.lengths, _stream(scene, 0)), shape)
    for _ in range(scene.steps):
        engine.step()
    engine.close()
    return engine.log.point(scheduler=way.name, loop="closed", load=float(users), seats=users, warm_up=scene.warm_up)


def open_loop(scene: Scene, way: Way, rate: float) -> Point:
    """Requests at random times, ``rate`` a second: as many as the scene has, and no longer than they keep coming."""
    requests = poisson(scene.requests, rate, scene.lengths, _stream(scene, 0))
    return _served(scene, way, requests, loop="open", load=rate)


def trace(scene: Scene, way: Way, requests: Requests) -> Point:
    """The requests of a trace."""
    return _served(scene, way, requests, loop="trace", load=float(len(requests)))


def _served(scene: Scene, way: Way, requests: Requests, *, loop: str, load: float) -> Point:
    engine = _engine(scene, way, OpenLoop(requests), scene.shape)
    last = float(requests.arrival[-1])
    while engine.now <= last and engine.step():
        pass
    if not len(engine.log):  # all came at once, or one alone
        while engine.step():
            pass
    engine.close()
    return engine.log.point(scheduler=way.name, loop=loop, load=load, seats=scene.shape.seats, warm_up=scene.warm_up)


def _engine(scene: Scene, way: Way, arrivals: Arrivals, shape: EngineShape) -> Engine:
    source = scene.source(way)
    return Engine(way, source=source, costs=scene.costs, arrivals=arrivals, shape=shape, rng=_stream(scene, 1))


def _stream(scene: Scene, number: int) -> np.random.Generator:
    """The requests have a stream of their own, so that all ways meet the same ones."""
    return np.random.default_rng([scene.seed, number])


def sweep(
    ways: Sequence[Way],
    loads: Sequence[float],
    play: Callable[[Way, float], Point],
    *,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[Point, ...]:
    """``play`` of every way at every load; ``on_point`` hears of each."""
    points = []
    for way in ways:
        for load in loads:
            points.append(play(way, load))
            on_point(points[-1])
    return tuple(points)
