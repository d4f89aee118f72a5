"""The file of a simulation: every point, with all that went into it, as ``dspark report`` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import provenance, read_json, write_json
from dspark.errors import DataError
from dspark.simulate.acceptance import AcceptanceModel, RecordedRounds
from dspark.simulate.fleet import Plan
from dspark.simulate.log import Point, Spread, plain
from dspark.simulate.sweep import Scene
from dspark.simulate.ways import read_way

KIND, VERSION = "simulation", 1


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a file holds."""

    scene: Mapping[str, Any]
    points: tuple[Point, ...]
    plans: tuple[Plan, ...]
    provenance: Mapping[str, Any]


def describe(scene: Scene) -> dict[str, Any]:
    """All settings of a scene, for JSON."""
    return {
        "seed": scene.seed,
        "block_size": scene.source(read_way("fixed")).block_size,
        "steps": scene.steps,
        "requests": scene.requests,
        "warm_up": scene.warm_up,
        "costs": scene.costs.describe(),
        "acceptance": _acceptance(scene.acceptance),
        "mtp_acceptance": None if scene.mtp_acceptance is None else _acceptance(scene.mtp_acceptance),
        "workload": scene.lengths.describe(),
        "engine": asdict(scene.shape),
    }


def as_json(scene: Scene, points: Sequence[Point], plans: Sequence[Plan]) -> dict[str, Any]:
    """The content of a file."""
    fields = {
        **describe(scene),
        "points": [plain(point) for point in points],
        "plans": [asdict(each) for each in plans],
    }
    return {"kind": KIND, "version": VERSION, "fields": fields, "provenance": provenance()}


def write_simulation(path: Path | str, content: Mapping[str, Any]) -> None:
    """Write what :func:`as_json` made."""
    write_json(path, content)


def read_simulation(path: Path | str) -> Simulation:
    """Raises :class:`DataError` for anything but a simulation of this version."""
    remedy = f"make it with dspark simulate --out {path}"
    content = read_json(path, remedy=remedy)
    found = (content.get("kind"), content.get("version"))
    if found != (KIND, VERSION):
        raise DataError(
            f"{path} is kind {found[0]!r}, version {found[1]!r}; a {KIND} of version {VERSION} is needed: {remedy}"
        )
    try:
        fields = dict(content["fields"])
        points = tuple(_point(each) for each in fields.pop("points"))
        plans = tuple(Plan(**each) for each in fields.pop("plans"))
        return Simulation(scene=fields, points=points, plans=plans, provenance=content["provenance"])
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no simulation of this dspark ({error}); {remedy}") from None


def _point(content: Mapping[str, Any]) -> Point:
    spreads = {name: Spread(**_numbers(content[name])) for name in ("user_speed", "first_token")}
    return Point(**{**_numbers(content), **spreads})


def _numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's null as nan."""
    return {name: float("nan") if value is None else value for name, value in content.items()}


def _acceptance(acceptance: AcceptanceModel | RecordedRounds) -> dict[str, Any]:
    if isinstance(acceptance, AcceptanceModel):
        return {"source": "model", **asdict(acceptance), "conditional": list(acceptance.conditional)}
    counts = {"rounds": len(acceptance.proposed), "conversations": len(acceptance.starts)}
    return {"source": "records", **counts, "block_size": acceptance.block_size, **(acceptance.description or {})}
