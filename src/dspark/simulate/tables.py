"""A simulation in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from dspark.numbers import number_text
from dspark.simulate.fleet import Plan
from dspark.simulate.log import Point

LOADS = {"closed": "users", "open": "per s", "trace": "requests"}


def points_table(points: Sequence[Point]) -> Table:
    """A row per way and load; the file of results has more columns."""
    loop = points[0].loop
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("scheduler", no_wrap=True)
    headings = [LOADS[loop], "tok/s\nall", "tok/s\nuser p5", "\np50", "1st tok\np95, s"]
    headings += ["check-\ned", "commit-\nted", "step\nms", "draft-\ning"]
    for heading in [*headings, *(["wait-\ning"] if loop != "closed" else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for i, point in enumerate(points):
        speed = point.user_speed
        row = [
            point.scheduler,
            f"{point.load:g}",
            _number(point.throughput),
            *(_number(value) for value in (speed.p5, speed.p50, point.first_token.p95)),
            f"{point.verify_tokens:.2f}",
            f"{point.acceptance_length:.2f}",
            f"{1e3 * point.step_seconds:.1f}",
            f"{point.draft_share:.0%}",
        ]
        last = i + 1 < len(points) and points[i + 1].scheduler != point.scheduler
        table.add_row(*row, *([f"{point.waiting_at_end}"] if loop != "closed" else []), end_section=last)
    return table


def plans_table(plans: Sequence[Plan]) -> Table:
    """What each way needs for a speed per user."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("a user's tokens/s,\nat the least", justify="right")
    table.add_column("scheduler")
    counted = any(each.engines is not None for each in plans)
    for heading in ("users\nan engine", "tokens/s\nan engine", *(["engines"] if counted else [])):
        table.add_column(heading, justify="right")
    for each in plans:
        if each.users_per_engine is None or each.throughput is None:
            table.add_row(f"{each.user_speed:g}", each.scheduler, "not reached")
            continue
        cells = [f"{math.floor(each.users_per_engine):,}", _number(each.throughput)]
        if each.engines is not None:
            cells.append(f"{each.engines:,}")
        table.add_row(f"{each.user_speed:g}", each.scheduler, *cells)
    return table


def _number(value: float) -> str:
    return number_text(value, ",.0f" if abs(value) >= 100 else ".3g")
