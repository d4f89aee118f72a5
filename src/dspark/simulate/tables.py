"""A simulation in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from dspark.simulate.log import Point
from dspark.simulate.sweep import Plan

LOADS = {"closed": "users", "open": "requests/s", "trace": "requests"}


def points_table(points: Sequence[Point]) -> Table:
    """A row per way and load."""
    loop = points[0].loop
    table = Table(title=f"{points[0].steps:,} steps a row" if loop == "closed" else None, title_justify="left")
    table.add_column("scheduler")
    headings = (LOADS[loop], "tokens/s", "a user's tokens/s\np5 / p50 / p95", "first token s\np50 / p95")
    more = ("tokens checked", "committed\na round", "of those\nchecked", "step ms", "drafting", "seats", "waiting")
    for heading in (*headings, *more):
        table.add_column(heading, justify="right")
    for i, point in enumerate(points):
        speed, first = point.user_speed, point.first_token
        table.add_row(
            point.scheduler,
            f"{point.load:g}",
            f"{point.throughput:,.0f}" if point.throughput >= 100 else f"{point.throughput:.1f}",
            " / ".join(_number(value) for value in (speed.p5, speed.p50, speed.p95)),
            " / ".join(_number(value) for value in (first.p50, first.p95)),
            f"{point.verify_tokens:.2f}",
            f"{point.acceptance_length:.2f}",
            f"{point.committed_per_verified:.0%}",
            f"{1e3 * point.step_seconds:.2f}",
            f"{point.draft_share:.0%}",
            f"{point.seats_used:.0%}",
            f"{point.waiting:.1f}",
            end_section=i + 1 < len(points) and points[i + 1].scheduler != point.scheduler,
        )
    return table


def plans_table(plans: Sequence[Plan]) -> Table:
    """What each way needs for a speed per user."""
    table = Table(title="reach", title_justify="left")
    table.add_column("a user's tokens/s", justify="right")
    table.add_column("scheduler")
    for heading in ("users an engine", "tokens/s an engine", "engines"):
        table.add_column(heading, justify="right")
    for each in plans:
        if each.users_per_engine is None or each.throughput is None:
            table.add_row(f"{each.user_speed:g}", each.scheduler, "not reached", "", "")
            continue
        engines = "" if each.engines is None else f"{each.engines:,}"
        reach = f"{math.floor(each.users_per_engine):,}"
        table.add_row(f"{each.user_speed:g}", each.scheduler, reach, f"{each.throughput:,.0f}", engines)
    return table


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
