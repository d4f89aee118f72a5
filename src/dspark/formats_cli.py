"""The verbs ``inspect`` and ``convert``: what a drafter's folder holds, and the same drafter in another format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from dspark.export.conversion import convert_folder
from dspark.export.inspection import Inspection, inspect_folder
from dspark.export.target_facts import TargetFacts

MISFIT = 1  # exit code of an inspection whose target the drafter does not fit


def run_inspect(folder: Path, *, target: str | None, as_json: bool, trust_remote_code: bool) -> int:
    """Print what ``folder`` holds and whether it fits ``target``; returns the exit code."""
    facts = None if target is None else TargetFacts.of(target, trust_remote_code=trust_remote_code)
    found = inspect_folder(folder, facts)
    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        for line in lines(found):
            typer.echo(line)
    return 0 if found.fits else MISFIT


def run_convert(
    folder: Path, out: Path, *, to: str, target: str | None, with_embeddings: bool, trust_remote_code: bool
) -> None:
    """Write the drafter of ``folder`` to ``out`` in another format, and say what was done."""
    facts = None if target is None else TargetFacts.of(target, trust_remote_code=trust_remote_code)
    done = convert_folder(folder, out, to=to, target=facts, with_embeddings=with_embeddings)
    typer.echo(f"{done.result.kind} drafter, {done.source.format.name} to {to}: {out}")
    if done.dropped:
        typer.echo(f"left out, as copies of the target: {', '.join(done.dropped)} (--with-embeddings stores them)")


def lines(found: Inspection) -> list[str]:
    """An inspection as text, one fact a line."""
    told = {**found.facts}
    title, name = told.pop("format_title"), told.pop("format")
    table: dict[str, Any] = {"folder": told.pop("folder"), "format": f"{title} ({name})", **told}
    width = max(len(key) for key in table)
    shown = [f"{key.replace('_', ' '):<{width}}  {_shown(key, value)}" for key, value in table.items()]
    if not found.target:
        return [*shown, "", "name a target with --target to see whether it fits"]
    if found.fits:
        return [*shown, "", f"fits {found.target}"]
    return [*shown, "", f"does not fit {found.target}:", *(f"  {problem}" for problem in found.problems)]


def _shown(key: str, value: Any) -> str:
    if key == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    if key == "parameters":
        return f"{value:,}"
    if key == "draft_vocab_size" and value is None:
        return "the whole vocabulary"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    return "not said" if value is None else str(value)
