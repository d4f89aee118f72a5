"""Other projects' formats: ``inspect``, ``convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.verbs.options import Json, Trust


def inspect(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder, in any of the formats that `convert` names.")],
    target: Annotated[str | None, typer.Option(help="Model to judge it by; exit code 1 if it does not fit.")] = None,
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Say what a drafter is, by which conventions, and whether it fits a model."""
    from dspark import formats_cli

    if code := formats_cli.run_inspect(folder, target=target, as_json=as_json, trust_remote_code=trust_remote_code):
        raise typer.Exit(code)


def convert(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    to: Annotated[str, typer.Option(help="deepspec, speculators, specforge, zlab or sglang-eagle3.")],
    target: Annotated[str | None, typer.Option(help="The model it was trained for: checked, and named inside.")] = None,
    with_embeddings: Annotated[
        bool, typer.Option("--with-embeddings", help="Store copies of the target's embedding and head.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a drafter in another project's format."""
    from dspark import formats_cli

    formats_cli.run_convert(
        folder, out, to=to, target=target, with_embeddings=with_embeddings, trust_remote_code=trust_remote_code
    )
