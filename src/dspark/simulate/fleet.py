"""How many engines serve so many users at a speed: read off the points of a closed loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dspark.errors import ConfigError
from dspark.simulate.log import Point


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What users are to have."""

    user_speed: float  # tokens per second that the median user sees while the answer decodes; > 0
    first_token: float | None = None  # most seconds to the first token for 95 % of the answers; None: any
    users: int | None = None  # of the whole fleet, each of whom asks again at once; None: not said

    def __post_init__(self) -> None:
        if not 0.0 < self.user_speed < math.inf:
            raise ConfigError(f"user_speed is {self.user_speed}; it must be positive, in tokens per second")
        if self.first_token is not None and not 0.0 < self.first_token < math.inf:
            raise ConfigError(f"first_token is {self.first_token}; it must be positive, in seconds")
        if self.users is not None and self.users < 1:
            raise ConfigError(f"users is {self.users}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one way needs for a goal. The last three are None if even the smallest load that was tried is too much."""

    scheduler: str
    user_speed: float  # the goal's
    first_token: float | None
    users_per_engine: float | None  # the most at which the goal is met
    throughput: float | None  # of an engine with so many, tokens per second
    engines: int | None  # for all users; None as well if the goal does not say how many


def plan(points: Sequence[Point], goal: Goal) -> Plan:
    """How far one way's closed-loop ``points`` reach, on straight lines between the loads tried.

    Loads count up to the first that misses the goal. Beyond the largest load nothing is promised: a way that meets the
    goal there is taken at that load. Raises :class:`ConfigError` for points of several ways or of another loop.
    """
    names = {point.scheduler for point in points}
    if len(names) != 1 or {point.loop for point in points} != {"closed"}:
        raise ConfigError(f"a plan is made from the closed-loop points of one scheduler, not of {sorted(names)}")
    ordered = sorted(points, key=lambda point: point.load)
    load = throughput = None
    if _meets(ordered[0], goal):
        load, throughput = ordered[0].load, ordered[0].throughput
        for here, there in pairwise(ordered):
            share = 1.0 if _meets(there, goal) else _share(here, there, goal)
            load = here.load + share * (there.load - here.load)
            throughput = here.throughput + share * (there.throughput - here.throughput)
            if share < 1.0:
                break
    engines = None if goal.users is None or load is None else math.ceil(goal.users / math.floor(load))
    return Plan(
        scheduler=names.pop(),
        user_speed=goal.user_speed,
        first_token=goal.first_token,
        users_per_engine=load,
        throughput=throughput,
        engines=engines,
    )


def _meets(point: Point, goal: Goal) -> bool:
    """Whether a point does; a quantity that nobody had, as no prompt was worked off, is no obstacle."""
    fast = point.user_speed.p50 >= goal.user_speed
    late = goal.first_token is not None and point.first_token.p95 > goal.first_token
    return fast and not late


def _share(here: Point, there: Point, goal: Goal) -> float:
    """How much of the way from a point that meets the goal to one that does not, in [0, 1)."""
    shares = [1.0 - 1e-9]
    if there.user_speed.p50 < goal.user_speed:
        shares.append((here.user_speed.p50 - goal.user_speed) / (here.user_speed.p50 - there.user_speed.p50))
    if goal.first_token is not None and there.first_token.p95 > goal.first_token:
        begun = here.first_token.p95 if math.isfinite(here.first_token.p95) else 0.0
        shares.append((goal.first_token - begun) / (there.first_token.p95 - begun))
    return min(shares)
