"""The verb ``calibrate``: play prompts at full length, fit on some, judge on the others, write the file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import typer

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.evaluate.bench import prompts_of, read_prompts
from dspark.evaluate.calibrate import Fitted, fit, quality_fields
from dspark.evaluate.confidence_curves import confident_cells, outcomes_by_prompt
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.evaluate.recorder import ROWS, PlayedRounds, play
from dspark.evaluate.records import find_cells
from dspark.export.schedule import check_exportable, sglang_temperatures, write_table
from dspark.maths.estimator import FEATURES
from dspark.models.weights import resolve_model
from dspark.pace import Pace
from dspark.schedule_files import Calibration, check_drafts, drafter_fingerprint, folder_fingerprint

RECORDED = ("temperature", "top_k", "top_p", "min_p", "rule")  # of the sampling parameters


def run(
    out: Path,
    *,
    model: str,
    drafter: str,
    prompts: Sequence[Path],
    limit: int | None,
    sampling: SamplingParams,
    max_new_tokens: int,
    candidates: int,
    sglang: Path | None,
    method: str,
    rows: int,
    records: Path | None,
    place: dict[str, Any],
) -> None:
    """Calibrate ``drafter`` for ``model`` and write ``out``; print the judgement on the held-out rounds.

    With ``records``, a folder that `dspark eval` wrote for this pair, nothing is played: its rounds at
    ``sampling.temperature`` are fitted to.
    """
    if sglang is not None:
        check_exportable(drafter, has_head=True, method=method)  # the rest once the drafter is known
    if records is not None:
        if prompts:
            raise ConfigError("prompts is given beside records, which hold the rounds already; leave one of them out")
        fitted, calibration = fit_records(records, temperature=sampling.temperature, method=method)
        here = folder_fingerprint(resolve_model(model, trust_remote_code=place["trust_remote_code"]))
        calibration.check(model=here, drafter=drafter_fingerprint(drafter), sampling=sampling)
        if sglang is not None:
            check_exportable(calibration.drafter, has_head=calibration.estimator is None)
    else:
        chosen = read_prompts(prompts, limit=limit) if prompts else prompts_of(PROMPTS, limit=limit)
        bundle = Bundle.load(model, drafter, candidates=candidates, **place)
        check_drafts(bundle.drafter)
        if sglang is not None:
            check_exportable(bundle.drafter.name, has_head=bundle.drafter.has_confidence)
        fitted, calibration = fit_bundle(
            bundle,
            [bundle.prompt_ids(prompt.text) for prompt in chosen],
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            files=tuple(map(str, prompts)),
            method=method,
            rows=rows,
            on_prompt=_progress(len(chosen)),
        )
    calibration.write(out)
    for line in fitted.lines():
        typer.echo(line)
    for doubt in fitted.doubts():
        typer.echo(f"doubtful: {doubt}", err=True)
    typer.echo(str(out))
    if sglang is not None:
        write_table(sglang, sglang_temperatures(calibration))
        typer.echo(str(sglang))


def _progress(prompts: int) -> Callable[[int], None]:
    """Tells how many are done on stderr: in place at a terminal, else a line every half minute and at the end."""
    place, pace = sys.stderr.isatty(), Pace()

    def on_prompt(done: int) -> None:
        if place:
            typer.echo(f"\r{done}/{prompts} prompts", err=True, nl=done == prompts)
        elif pace.due(finished=done == prompts):
            typer.echo(f"{done}/{prompts} prompts", err=True)

    return on_prompt


def fit_bundle(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    files: tuple[str, ...] = (),
    method: str = "platt",
    rows: int = ROWS,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> tuple[Fitted, Calibration]:
    """Play the ids of ``prompts`` and fit: the judgement, and the calibration that says what it is of.

    ``files`` are where the prompts came from; ``rows`` prompts share target passes. Raises
    :class:`DataError` if they lead to too few rounds.
    """
    played = play(
        bundle.target,
        bundle.drafter,
        prompts,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=bundle.chat.stop_token_ids,
        rows=rows,
        on_prompt=on_prompt,
    )
    fitted = fit(played, has_confidence=bundle.drafter.has_confidence, method=method)
    calibration = _calibration(
        fitted,
        asdict(sampling),
        model=bundle.model,
        model_fingerprint=folder_fingerprint(bundle.folder),
        drafter=bundle.drafter.name,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        block_size=bundle.drafter.block_size,
        prompts=files,
    )
    return fitted, calibration


def fit_records(folder: Path, *, temperature: float, method: str = "platt") -> tuple[Fitted, Calibration]:
    """Fit to the full-length rounds that `dspark eval` recorded in ``folder`` at ``temperature``.

    Raises :class:`ConfigError` unless there is exactly one such drafter with a confidence head in there, and
    :class:`DataError` if it has too few rounds.
    """
    cells = [cell for cell in confident_cells(find_cells([folder])) if cell.temperature == temperature]
    if len(cells) != 1:
        raise ConfigError(
            f"records is {folder}, which holds {len(cells)} drafters with a confidence head and full-length rounds at "
            f"temperature {temperature:g}; name the folder of the one to calibrate, as dspark eval wrote it"
        )
    (cell,) = cells
    outcomes, prompt, _ = outcomes_by_prompt(cell)
    bare = np.zeros((*outcomes.confidence.shape, len(FEATURES)))
    fitted = fit(PlayedRounds(outcomes=outcomes, features=bare, prompt=prompt), has_confidence=True, method=method)
    calibration = _calibration(
        fitted,
        cell.made_for["sampling"],
        model=cell.about["model"],
        model_fingerprint=cell.made_for["model_fingerprint"],
        drafter=cell.about["drafter_spec"],
        drafter_fingerprint=cell.made_for["drafter_fingerprint"],
        block_size=cell.about["facts"]["block_size"],
        prompts=tuple(cell.about["prompts"]),
    )
    return fitted, calibration


def _calibration(fitted: Fitted, sampling: Mapping[str, Any], **about: Any) -> Calibration:
    """The file's content; ``about`` are the fields that say what it is of."""
    return Calibration(
        **about,
        sampling={name: sampling[name] for name in RECORDED},
        sts_temperatures=tuple(fitted.scaling.sts_temperatures.tolist()),
        biases=() if fitted.scaling.temperatures_only else tuple(fitted.scaling.biases.tolist()),
        estimator=None if fitted.estimator is None else tuple(map(tuple, fitted.estimator.weights.tolist())),
        fitted_rounds=fitted.fitted_rounds,
        held_out_rounds=fitted.held_out_rounds,
        before=quality_fields(fitted.before),
        after=quality_fields(fitted.after),
    )
