"""Calibrations and profiles in the form that SGLang's DSpark scheduler reads.

    --speculative-dspark-confidence-sts-path
        JSON with `temperatures`, one per draft position and positive; the head's logit is divided by them. `dataset`,
        `num_samples`, `ece_before` and `ece_after` are for the reader. Source: sglang ``dspark_sts.py``.
    --speculative-dspark-sps-table-path
        JSON with `sample_batch_tokens`, strictly ascending, `sample_steps_per_sec` for each, and `max_batch_tokens`.
        Source: sglang ``dspark_sps.py``.

A profile of this machine says nothing of the engine that will read it: export one that was measured where it will serve
and only where no better one is to be had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.artifacts import write_json
from dspark.errors import ConfigError
from dspark.schedule_files import Calibration, Profile


def check_exportable(drafter: str, *, has_head: bool, method: str = "sts") -> None:
    """Raise :class:`ConfigError` for a drafter without a confidence head, and for a method with biases: SGLang has
    nothing in their place."""
    if method != "sts":
        raise ConfigError(f"method is {method!r}; SGLang's table holds temperatures alone: calibrate with --method sts")
    if not has_head:
        raise ConfigError(
            f"{drafter} has no confidence head and SGLang schedules by one; "
            "only calibrations of a head can be exported: leave --sglang out"
        )


def sglang_temperatures(calibration: Calibration) -> dict[str, Any]:
    """The calibration as SGLang's STS table. Raises :class:`ConfigError` if it is not of a confidence head, or if it
    is more than temperatures."""
    check_exportable(calibration.drafter, has_head=calibration.estimator is None, method=calibration.method)
    return {
        "temperatures": list(calibration.sts_temperatures),
        "dataset": ", ".join(Path(name).name for name in calibration.prompts),
        "num_samples": calibration.fitted_rounds,
        "ece_before": [slot["ece"] or 0.0 for slot in calibration.before],
        "ece_after": [slot["ece"] or 0.0 for slot in calibration.after],
    }


def sglang_table(profile: Profile, *, context: int | None = None) -> dict[str, Any]:
    """The profile's curve for ``context`` committed tokens (the shortest measured if None) as SGLang's SPS table."""
    if context is not None and context not in profile.contexts:
        raise ConfigError(f"context is {context}; the profile has {', '.join(map(str, profile.contexts))}")
    curve = profile.sps[0 if context is None else profile.contexts.index(context)]
    return {
        "sample_batch_tokens": list(range(1, len(curve))),
        "sample_steps_per_sec": list(curve[1:]),
        "max_batch_tokens": profile.max_tokens,
    }


def write_table(path: Path | str, table: dict[str, Any]) -> None:
    """Write either table."""
    write_json(path, table)
