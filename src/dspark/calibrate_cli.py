"""The verb ``calibrate``: play prompts at full length, fit on some, judge on the others, write the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.evaluate.bench import prompts_of, read_prompts
from dspark.evaluate.calibrate import Fitted, fit, quality_fields
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.evaluate.recorder import play
from dspark.export.schedule import check_exportable, sglang_temperatures, write_table
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
    place: dict[str, Any],
) -> None:
    """Calibrate ``drafter`` for ``model`` and write ``out``; print the judgement on the held-out rounds."""
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
        on_prompt=lambda done: typer.echo(f"\r{done}/{len(chosen)} prompts", err=True, nl=done == len(chosen)),
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


def fit_bundle(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    files: tuple[str, ...] = (),
    on_prompt: Callable[[int], None] = lambda done: None,
) -> tuple[Fitted, Calibration]:
    """Play the ids of ``prompts`` and fit: the judgement, and the calibration that says what it is of.

    ``files`` are where the prompts came from. Raises :class:`DataError` if they lead to too few rounds.
    """
    played = play(
        bundle.target,
        bundle.drafter,
        prompts,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=bundle.chat.stop_token_ids,
        on_prompt=on_prompt,
    )
    fitted = fit(played, has_confidence=bundle.drafter.has_confidence)
    settings = asdict(sampling)
    calibration = Calibration(
        model=bundle.model,
        model_fingerprint=folder_fingerprint(bundle.folder),
        drafter=bundle.drafter.name,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        block_size=bundle.drafter.block_size,
        sampling={name: settings[name] for name in RECORDED},
        prompts=files,
        sts_temperatures=tuple(fitted.sts_temperatures.tolist()),
        estimator=None if fitted.estimator is None else tuple(map(tuple, fitted.estimator.weights.tolist())),
        fitted_rounds=fitted.fitted_rounds,
        held_out_rounds=fitted.held_out_rounds,
        before=quality_fields(fitted.before),
        after=quality_fields(fitted.after),
    )
    return fitted, calibration
