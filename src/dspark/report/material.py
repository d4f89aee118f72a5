"""What a figure is drawn from: rows of numbers, the commands that made the files they come from, or what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import DataError
from dspark.evaluate.records import Cell

Row = tuple[Any, ...]  # texts and numbers; None where there is none
SIMULATION, SIMULATION_VERSION = "simulation", 1  # the file of `dspark simulate`


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Rows under names, the same numbers that the figure shows."""

    names: tuple[str, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.names) for row in self.rows), f"rows of another length than {self.names}"

    def where(self, **values: Any) -> list[Row]:
        """Rows whose columns have these values."""
        places = {self.names.index(name): value for name, value in values.items()}
        return [row for row in self.rows if all(row[place] == value for place, value in places.items())]

    def distinct(self, name: str) -> list[Any]:
        """Values of a column, each once, in order."""
        place = self.names.index(name)
        return list(dict.fromkeys(row[place] for row in self.rows))

    def values(self, rows: Sequence[Row], name: str) -> list[Any]:
        place = self.names.index(name)
        return [row[place] for row in rows]

    def objects(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the report. ``missing`` says why there is nothing to draw and how to make it; empty if there is."""

    key: str  # of its files, as "position"
    number: str  # in the paper
    title: str
    caption: str
    data: Columns
    more: Mapping[str, Columns] = field(default_factory=dict)  # further tables, by title
    commands: tuple[str, ...] = ()  # that made the files behind it
    missing: str = ""

    @property
    def name(self) -> str:
        return f"figure-{self.number}-{self.key}"


NOTHING = Columns(names=(), rows=())


def absent(key: str, number: str, title: str, *, why: str, command: str) -> Figure:
    """A figure without data: why, and the command that makes it."""
    return Figure(key=key, number=number, title=title, caption="", data=NOTHING, missing=f"{why} Make it: {command}")


def commands_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The commands that began these records, each once for a commit, with the date of its first record."""
    found: dict[tuple[Any, Any], str] = {}
    for cell in cells:
        key = cell.provenance.get("command"), cell.provenance.get("git_commit")
        found.setdefault(key, command_line(cell.provenance))
    return tuple(found.values())


def command_line(provenance: Mapping[str, Any]) -> str:
    """A command, and behind it in a shell's comment where and when it ran."""
    commit = str(provenance.get("git_commit") or "unknown")[:12]
    command, date, cpu = (provenance.get(name, "?") for name in ("command", "date", "cpu"))
    return f"{command}    # commit {commit}, {date}, {cpu}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """A file of `dspark simulate`."""

    path: Path
    points: tuple[Mapping[str, Any], ...]
    provenance: Mapping[str, Any]


def read_load(path: Path) -> Load:
    """Raises :class:`DataError` for anything but a simulation of the version that we draw."""
    remedy = f"make it with dspark simulate --out {path}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = (content["kind"], content["version"])
        points = content["fields"]["points"] if found == (SIMULATION, SIMULATION_VERSION) else ()
        needed = ("scheduler", "loop", "load", "throughput", "user_speed", "verify_tokens")
        if found != (SIMULATION, SIMULATION_VERSION) or not all(name in point for point in points for name in needed):
            raise DataError(f"{path} is no simulation of version {SIMULATION_VERSION}; {remedy}")
        return Load(path=path, points=tuple(points), provenance=content["provenance"])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a simulation ({error}); {remedy}") from None
