"""From folders of records and files of simulations to a folder of figures and its page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.artifacts import MANIFEST_NAME, atomic_write_bytes, atomic_write_text, provenance
from dspark.errors import ConfigError
from dspark.evaluate.comparison import compare
from dspark.evaluate.confidence_tables import confidence_figures, confidence_tables
from dspark.evaluate.records import Cell, find_cells
from dspark.evaluate.tables import tables
from dspark.report.draw import DARK, LIGHT, png, svg
from dspark.report.load_figures import budget_figure, throughput_figure
from dspark.report.material import Figure, Load, command_line, read_load
from dspark.report.page import page
from dspark.report.records_figures import (
    block_figure,
    chosen_temperature,
    depth_figure,
    position_figure,
    reliability_figure,
    threshold_figure,
)

PAGE_NAME = "index.html"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a report is made of."""

    cells: tuple[Cell, ...]
    loads: tuple[Load, ...]


def read_sources(paths: Sequence[Path]) -> Sources:
    """Folders of `dspark eval` and files of `dspark simulate`, in any order; none is allowed.

    Raises :class:`ConfigError` for a path that is neither, :class:`DataError` for a file of another kind.
    """
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if path.is_file()]
    if missing := [path for path in paths if path not in (*folders, *files)]:
        raise ConfigError(f"{missing[0]} does not exist; name folders of `dspark eval` or files of `dspark simulate`")
    cells = find_cells(folders) if folders else []
    return Sources(cells=tuple(cells), loads=tuple(read_load(path) for path in files))


def figures_of(sources: Sources, *, temperature: float | None = None) -> list[Figure]:
    """All figures, in the paper's order; those without data say so.

    Raises :class:`DataError` if nothing was recorded at ``temperature``; None takes 1 where it is there.
    """
    cells = sources.cells
    chosen = chosen_temperature(cells, temperature)
    makers = (position_figure, depth_figure, block_figure, threshold_figure, reliability_figure)
    return [
        *(make(cells, chosen) for make in makers),
        throughput_figure(sources.loads),
        budget_figure(sources.loads),
    ]


def write_report(out: Path, sources: Sources, *, temperature: float | None = None) -> list[Figure]:
    """Write PNG, SVG and JSON of every figure and ``index.html`` into ``out``, and return the figures.

    Files of an earlier report there are replaced; one of a figure that has no data any more is removed. Nothing is
    written before all is computed. Raises :class:`ConfigError` for two records of one drafter and temperature.
    """
    found = tables(compare(sources.cells)) if sources.cells else []
    found += confidence_tables(confidence_figures(sources.cells))
    figures = figures_of(sources, temperature=temperature)
    images: dict[str, tuple[str, str]] = {}
    for figure in figures:
        if figure.missing:
            for ending in ("png", "svg", "json"):
                (out / f"{figure.name}.{ending}").unlink(missing_ok=True)
            continue
        images[figure.key] = (svg(figure, LIGHT), svg(figure, DARK))
        atomic_write_text(out / f"{figure.name}.svg", images[figure.key][0])
        atomic_write_bytes(out / f"{figure.name}.png", png(figure, LIGHT))
        atomic_write_text(out / f"{figure.name}.json", _data(figure))
    atomic_write_text(out / PAGE_NAME, page(figures, images, found, facts=_facts(sources)))
    return figures


def _data(figure: Figure) -> str:
    """The figure's numbers and where they come from."""
    content = {
        "kind": "figure",
        "version": 1,
        "fields": {
            "title": figure.title,
            "caption": figure.caption,
            "data": figure.data.objects(),
            **{name: columns.objects() for name, columns in figure.more.items()},
            "commands": list(figure.commands),
        },
        "provenance": provenance(),
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _facts(sources: Sources) -> list[str]:
    """Records and simulations by name, and how this page was made."""
    facts = [
        f"{cell.folder.name}: {len(cell.answers)} answers of {cell.about['model']}, {cell.made_for['dtype']} on "
        f"{cell.made_for['device']}, {cell.made_for['threads']} threads ({cell.folder / MANIFEST_NAME})"
        for cell in sources.cells
    ]
    facts += [f"{load.path.name}: simulation with {len(load.points)} points" for load in sources.loads]
    return [*facts, f"this page: {command_line(provenance())}"]
