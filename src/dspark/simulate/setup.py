"""A scene from the names and numbers of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.assignments import read_fields
from dspark.errors import ConfigError
from dspark.schedule_files import Calibration, Profile
from dspark.simulate.acceptance import AcceptanceModel
from dspark.simulate.costs import Costs, ProfileCosts, SyntheticCosts
from dspark.simulate.loop import EngineShape
from dspark.simulate.recorded import read_records
from dspark.simulate.sweep import Acceptance, Scene
from dspark.simulate.workload import Lengths

PROFILED = ("host_ms", "mtp_share")  # named costs that a profile does not say
OURS = ("steps", "requests", "warm_up", "seed")  # of the scene itself


def named_numbers() -> dict[str, Any]:
    """Every number that ``--set`` may change, with its default."""
    defaults: dict[str, Any] = {}
    for part in (SyntheticCosts, AcceptanceModel, Lengths, EngineShape, Scene):
        for field in dataclasses.fields(part):
            if part is not Scene or field.name in OURS:
                defaults[field.name] = field.default
    return defaults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Files that take the place of named numbers."""

    profile: Path | None = None
    mtp_profile: Path | None = None
    extrapolate: bool = False
    records: Path | None = None
    mtp_records: Path | None = None
    sets: tuple[str, ...] = ()
    calibration: Path | None = None

    def __post_init__(self) -> None:
        if self.profile is None and (self.mtp_profile is not None or self.extrapolate):
            raise ConfigError("--mtp-profile and --extrapolate go with --profile; give it, or leave them out")
        if self.records is None and (self.sets or self.calibration is not None or self.mtp_records is not None):
            raise ConfigError("--of, --calibration and --mtp-records go with --records; give it, or leave them out")


def scene_of(sources: Sources, assignments: Sequence[str], given: dict[str, Any]) -> Scene:
    """Read everything. ``given`` are numbers with a flag of their own.

    Raises :class:`ConfigError` for an unknown number, or one that a file says already; :class:`DataError` for a file.
    """
    numbers = read_fields({k: v for k, v in given.items() if v is not None}, assignments, named_numbers())
    acceptance = _acceptance(sources, numbers)
    mtp = None if sources.mtp_records is None else read_records(sources.mtp_records, sets=sources.sets)
    return Scene(
        costs=_costs(sources, numbers),
        acceptance=acceptance,
        mtp_acceptance=mtp,
        lengths=Lengths(**_of(Lengths, numbers)),
        shape=EngineShape(**_of(EngineShape, numbers)),
        **{name: numbers[name] for name in OURS if name in numbers},
    )


def _costs(sources: Sources, numbers: dict[str, Any]) -> Costs:
    named = _of(SyntheticCosts, numbers)
    if sources.profile is None:
        return SyntheticCosts(**named)
    if unread := sorted(set(named) - {*PROFILED}):
        raise ConfigError(f"--set {unread[0]}: the profile says what a step costs; leave out one of the two")
    return ProfileCosts(
        profile=Profile.read(sources.profile),
        path=str(sources.profile),
        extrapolate=sources.extrapolate,
        host_seconds=1e-3 * named.get("host_ms", 0.0),
        mtp_profile=None if sources.mtp_profile is None else Profile.read(sources.mtp_profile),
        mtp_share=named.get("mtp_share", SyntheticCosts.mtp_share),
    )


def _acceptance(sources: Sources, numbers: dict[str, Any]) -> Acceptance:
    named = _of(AcceptanceModel, numbers)
    if sources.records is None:
        return AcceptanceModel(**named)
    if named:
        raise ConfigError(f"--set {sorted(named)[0]}: the records say what is accepted; leave out one of the two")
    scaling = None
    if sources.calibration is not None:
        calibration = Calibration.read(sources.calibration)
        if calibration.estimator is not None:
            raise ConfigError(
                f"{sources.calibration} estimates confidences from distributions, which records do not hold; "
                "use the records of a drafter with a confidence head"
            )
        scaling = calibration.scaling
    return read_records(sources.records, sets=sources.sets, scaling=scaling)


def _of(part: type, numbers: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(part)}
    return {name: value for name, value in numbers.items() if name in names}
