"""What the verb ``simulate`` does with its options."""

from __future__ import annotations

import math
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dspark.errors import ConfigError
from dspark.schedule_files import Profile
from dspark.simulate import sweep as sweeps
from dspark.simulate.files import as_json, write_simulation
from dspark.simulate.fleet import Goal, Plan, plan
from dspark.simulate.log import Point
from dspark.simulate.page import PAGE, page_with, write_page
from dspark.simulate.sweep import Scene
from dspark.simulate.tables import plans_table, points_table
from dspark.simulate.ways import ALL, Way, read_way
from dspark.simulate.workload import Requests, read_trace

MOST_USERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """The loads to simulate: one kind of loop, and its numbers."""

    loop: str  # "closed", "open" or "trace"
    numbers: tuple[float, ...]
    requests: Requests | None = None  # of a trace

    @classmethod
    def read(cls, *, concurrency: str, rate: str | None, trace: Path | None) -> Load:
        """Raises :class:`ConfigError` for numbers that cannot be loads, or a rate beside a trace."""
        if rate is not None and trace is not None:
            raise ConfigError("--rate and --trace both say when requests come; give one of them")
        if trace is not None:
            requests = read_trace(trace)
            return cls(loop="trace", numbers=(float(len(requests)),), requests=requests)
        if rate is not None:
            return cls(loop="open", numbers=read_rates(rate, name="--rate"))
        numbers = read_rates(concurrency, name="--concurrency")
        if any(number != int(number) or number > MOST_USERS for number in numbers):
            raise ConfigError(f"--concurrency is {concurrency!r}; users are whole numbers up to {MOST_USERS}")
        return cls(loop="closed", numbers=numbers)

    def player(self, scene: Scene) -> Callable[[Way, float], Point]:
        """What plays one way at one load."""
        if self.requests is not None:
            requests = self.requests
            return lambda way, load: sweeps.trace(scene, way, requests)
        if self.loop == "open":
            return lambda way, load: sweeps.open_loop(scene, way, load)
        return lambda way, load: sweeps.closed_loop(scene, way, int(load))


def read_rates(text: str, *, name: str) -> tuple[float, ...]:
    """Ascending positive numbers of "0.5,1,2". Raises :class:`ConfigError` naming the option."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers) or list(numbers) != sorted(set(numbers)):
        raise ConfigError(f"{name} is {text!r}; give ascending positive numbers with commas between them, as 1,8,64")
    return numbers


def run(scene: Scene, names: Sequence[str], load: Load, *, goals: Sequence[Goal], quiet: bool) -> dict[str, Any]:
    """Simulate, print tables unless ``quiet``, and return the content of a results file.

    ``names`` empty: every way that the records' confidences allow. ``goals`` plan a fleet.
    """
    if goals and load.loop != "closed":
        raise ConfigError("--user-speed plans from users who ask again at once; leave --rate and --trace out")
    ways = _ways(scene, names)
    errors = Console(stderr=True)
    with errors.status("simulating") as status:

        def told(point: Point) -> None:
            status.update(f"simulating {point.scheduler}, {point.load:g}: {point.throughput:,.0f} tokens/s")

        points = sweeps.sweep(ways, load.numbers, load.player(scene), on_point=told)
    plans = [plan([point for point in points if point.scheduler == way.name], goal) for goal in goals for way in ways]
    if not quiet:
        _print(points, plans)
    return as_json(scene, points, plans)


def _ways(scene: Scene, names: Sequence[str]) -> list[Way]:
    if names:
        if len(set(names)) < len(names):
            raise ConfigError(f"scheduler {max(names, key=list(names).count)} is given twice; leave one out")
        return [read_way(name) for name in names]
    ways = [read_way(name) for name in ALL]
    if scene.source(read_way("fixed")).has_confidence:
        return ways
    typer.echo("the records hold no confidences: only schedulers that need none are simulated", err=True)
    return [way for way in ways if not way.needs_confidence]


def _print(points: Sequence[Point], plans: Sequence[Plan]) -> None:
    console = Console()
    console.print(points_table(points))
    if plans:
        console.print(plans_table(plans))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a results file and say where."""
    write_simulation(path, content)
    typer.echo(str(path), err=True)


def show_page(out: Path | None, *, profile: Path | None, browser: bool) -> None:
    """Open the interactive page: the one of the package, or a copy at ``out`` that knows the curve of ``profile``.

    Raises :class:`ConfigError` for a profile without a place to write to.
    """
    path = PAGE
    if out is None and profile is not None:
        raise ConfigError("a page with a measured curve is a file of its own; say where with --out page.html")
    if out is not None:
        write_page(out, page_with(None if profile is None else Profile.read(profile)))
        path = out
    typer.echo(str(path))
    if browser and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no browser was found; open the file yourself", err=True)
