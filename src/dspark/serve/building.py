"""From a loaded bundle to an engine, with the calibration and the profile that belong to it."""

from __future__ import annotations

from pathlib import Path

from dspark.bundle import Bundle
from dspark.errors import ConfigError
from dspark.maths.step_costs import StepCosts
from dspark.schedule_files import Calibration
from dspark.serve.confidences import Confidences
from dspark.serve.costs import costs_of
from dspark.serve.engine import Engine
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.settings import EngineConfig


def build_engine(
    bundle: Bundle,
    config: EngineConfig,
    *,
    calibrations: tuple[Path, ...] = (),
    profile: Path | None = None,
) -> Engine:
    """An engine for ``bundle``: overlapped if ``config`` says so, else the plain loop.

    ``calibrations``: files of `dspark calibrate`, at most one of a greedy and one of a sampled run; ``profile``: a
    file of `dspark profile`. Without them those in the drafter's own folder are taken where they fit (one that does
    not is left aside with a warning), and without a profile the engine measures its costs, a matter of seconds. Raises
    :class:`ConfigError` for a given file that was made for something else.
    """
    kind = OverlappedEngine if config.overlap else Engine
    return kind(
        bundle.target,
        bundle.drafter,
        config=config,
        chat=bundle.chat,
        costs=_costs(bundle, config, profile),
        confidences=_confidences(bundle, config, calibrations),
    )


def _costs(bundle: Bundle, config: EngineConfig, path: Path | None) -> StepCosts | None:
    if not config.weighs_costs:
        if path is not None:
            raise ConfigError(f"profile is given, which the {config.scheduler} scheduler does not read; leave it out")
        return None

    measured = bundle.measured(path, tokens=1)
    if measured is None:
        return None
    block = bundle.drafter.block_size
    return costs_of(measured, seats=config.seats, block_size=block, prefill_tokens=config.prefill_tokens)


def _confidences(bundle: Bundle, config: EngineConfig, paths: tuple[Path, ...]) -> Confidences:
    if config.scheduler in ("none", "fixed"):
        if paths:
            raise ConfigError(
                f"a calibration is given, which the {config.scheduler} scheduler does not read; leave it out"
            )
        return Confidences()

    by_kind: dict[bool, Calibration] = {} if paths else bundle.own_calibrations()
    for fitted in (bundle.read_calibration(path) for path in paths):
        if fitted.greedy in by_kind:
            raise ConfigError("two calibrations are given of greedy runs, or two of sampled ones; give one of each")
        by_kind[fitted.greedy] = fitted
    return Confidences(greedy=by_kind.get(True), sampled=by_kind.get(False))
