"""The verb ``report``: the paper's figures of your own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.verbs.options import SAMPLING


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of `eval` and files of `simulate`, in any order."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures and index.html.")] = Path("report"),
    temperature: Annotated[
        float | None,
        typer.Option(help="Of the records that are drawn; default: 1 where there are any.", rich_help_panel=SAMPLING),
    ] = None,
) -> None:
    """Draw the paper's figures from records and simulations: PNG, SVG, and one HTML page with the data behind them."""
    from dspark.report.write import PAGE_NAME, read_sources, write_report

    figures = write_report(out, read_sources(sources or ()), temperature=temperature)
    for figure in figures:
        typer.echo(f"figure {figure.number}, {figure.title}: {figure.missing or f'{figure.name}.png, .svg, .json'}")
    typer.echo(str(out / PAGE_NAME))
