"""Figures 7 and 8 of the paper from files of `dspark simulate`: the fleet's trade-off, and the budget under load."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.report.material import Columns, Figure, Load, Row, absent, command_line

SIMULATE = "dspark simulate --out load.json"


def _closed(loads: Sequence[Load]) -> list[tuple[Load, Row]]:
    """Points of closed loops: (scheduler, load, median user speed, throughput, tokens checked); by load."""
    found = []
    for load in loads:
        for point in load.points:
            if point["loop"] == "closed":
                speed = point["user_speed"]["p50"]
                row = (point["scheduler"], point["load"], speed, point["throughput"], point["verify_tokens"])
                found.append((load, row))
    return sorted(found, key=lambda each: float(each[1][1]))


def _named(loads: Sequence[Load], load: Load, scheduler: str) -> str:
    """With several files a line is called by its file as well."""
    return scheduler if len(loads) == 1 else f"{load.path.stem}: {scheduler}"


def throughput_figure(loads: Sequence[Load]) -> Figure:
    """Figure 7: throughput of all users against the speed that one of them sees."""
    title = "Throughput against speed per user"
    points = _closed(loads)
    if not points:
        return absent("throughput", "7", title, why="No simulation with a closed loop.", command=SIMULATE)
    rows = tuple((_named(loads, load, row[0]), row[1], row[2], row[3]) for load, row in points)
    return Figure(
        key="throughput",
        number="7",
        title=title,
        caption="Simulated: tokens per second of all users against the median speed of one, a point per number of "
        "users. Further up and to the right is better.",
        data=Columns(names=("scheduler", "users", "user_speed", "throughput"), rows=rows),
        commands=tuple(dict.fromkeys(command_line(load.provenance) for load, _ in points)),
    )


def budget_figure(loads: Sequence[Load]) -> Figure:
    """Figure 8: tokens checked per request and step against the load."""
    title = "Verification budget under load"
    points = _closed(loads)
    if not points:
        return absent("budget", "8", title, why="No simulation with a closed loop.", command=SIMULATE)
    rows = tuple((_named(loads, load, row[0]), row[1], row[4]) for load, row in points)
    return Figure(
        key="budget",
        number="8",
        title=title,
        caption="Simulated: tokens that the target checks per request and step, the anchor included, by the number of "
        "users. Schedulers that know the load check less as it grows.",
        data=Columns(names=("scheduler", "users", "verify_tokens"), rows=rows),
        commands=tuple(dict.fromkeys(command_line(load.provenance) for load, _ in points)),
    )
