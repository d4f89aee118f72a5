"""Figures 2 to 6 of the paper from record files: position, depth, block length, threshold, calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dspark.errors import DataError
from dspark.evaluate.comparison import OVERALL, AtTemperature, DrafterFigures, compare
from dspark.evaluate.confidence_curves import LEAST_CHECKED, calibrate_records, confident_cells, sweep_by_domain
from dspark.evaluate.intervals import Estimate
from dspark.evaluate.records import Cell
from dspark.numbers import json_data
from dspark.report.draw import LEAST_IN_BIN
from dspark.report.material import Columns, Figure, Row, absent, commands_of

EVAL = "dspark eval --prompts SETS --out records --temperature {temperature:g} --drafter DRAFTER"
RECIPE = "python recipes/compare_drafters.py --answers ANSWERS --prompts PROMPTS --sets SETS --out runs/compare"
KINDS = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3", "mtp": "MTP-1", "ngram": "n-gram"}
INTERVAL = ("value", "low", "high")


def method(cell: Cell) -> str:
    """What a drafter is, in the words of a legend: ``DSpark (gated)``, ``DFlash``."""
    facts = cell.about["facts"]
    name = KINDS.get(facts["kind"], facts["kind"])
    head = facts.get("head")
    return f"{name} ({head})" if head and head != "vanilla" else name


def at(cells: Sequence[Cell], temperature: float) -> list[Cell]:
    """Drafting cells of one temperature."""
    return [cell for cell in cells if cell.temperature == temperature and cell.drafts]


def chosen_temperature(cells: Sequence[Cell], wanted: float | None) -> float:
    """``wanted``, or 1 if there are drafts at it (the paper's), or else the lowest that there is.

    Raises :class:`DataError` if nothing was recorded at ``wanted``.
    """
    known = sorted({cell.temperature for cell in cells if cell.drafts})
    if wanted is not None and wanted not in known:
        raise DataError(
            f"temperature is {wanted:g}; there are records of {', '.join(f'{t:g}' for t in known) or 'none'}"
        )
    if wanted is not None:
        return wanted
    return 1.0 if 1.0 in known or not known else known[0]


def scopes(figures: DrafterFigures) -> dict[str, Any]:
    """Figures by domain and, where there are several, their mean."""
    several = len(figures.domains) > 1
    return {**figures.domains, **({OVERALL: figures.mean} if several else {})}


def interval(estimate: Estimate) -> tuple[float | None, float | None, float | None]:
    return (json_data(estimate.value), estimate.low, estimate.high)


def compared(cells: Sequence[Cell]) -> AtTemperature:
    return compare(cells).temperatures[0]


def position_figure(cells: Sequence[Cell], temperature: float) -> Figure:
    """Figure 2: conditional acceptance by position, a panel per domain, a line per method.

    Of several drafters of one method the first that has the commonest block size is taken.
    """
    title = "Acceptance by position"
    group = at(cells, temperature)
    if not group:
        command = EVAL.format(temperature=temperature)
        return absent("position", "2", title, why=f"No drafts at temperature {temperature:g}.", command=command)
    common = Counter(cell.about["facts"]["block_size"] for cell in group).most_common(1)[0][0]
    first: dict[str, Cell] = {}
    for cell in group:
        if cell.about["facts"]["block_size"] == common:
            first.setdefault(method(cell), cell)
    names = {cell.label: name for name, cell in first.items()}
    rows: list[Row] = []
    for figures in compared(list(first.values())).drafters:
        for scope, found in scopes(figures).items():
            for kind in ("conditional", "prefix"):
                estimates = getattr(found, f"{kind}_acceptance")
                rows += [
                    (scope, names[figures.label], figures.label, kind, k + 1, *interval(each))
                    for k, each in enumerate(estimates)
                ]
    return Figure(
        key="position",
        number="2",
        title=title,
        caption=f"Share of drafts accepted at each position, given that all before were (conditional), at temperature "
        f"{temperature:g} and block {common}. Bands: 95 % over prompts. The data has prefix acceptance too.",
        data=Columns(names=("domain", "method", "drafter", "kind", "position", *INTERVAL), rows=tuple(rows)),
        commands=commands_of(list(first.values())),
    )


def _series(cells: Sequence[Cell], value: str) -> list[Cell]:
    """Cells of the methods that are there with two or more of ``value`` ("layers" or "block_size")."""
    by_method: dict[str, set[int]] = {}
    for cell in cells:
        by_method.setdefault(method(cell), set()).add(cell.about["facts"][value])
    return [cell for cell in cells if len(by_method[method(cell)]) > 1]


def _shape_rows(cells: Sequence[Cell], value: str) -> list[Row]:
    """Acceptance length by domain of every cell, and its share of sequential time."""
    about = {cell.label: cell for cell in cells}
    rows: list[Row] = []
    for figures in compared(cells).drafters:
        cell = about[figures.label]
        for scope, found in scopes(figures).items():
            share = json_data(found.sequential_share)
            place = (scope, method(cell), figures.label, cell.about["facts"][value])
            rows.append((*place, *interval(found.acceptance_length), share))
    return rows


SWEEP = ("domain", "threshold", "checked", "acceptance_rate", "low", "high", "acceptance_length", "verify_len")
SHAPE = ("domain", "method", "drafter", "x", *INTERVAL, "sequential_share")


def depth_figure(cells: Sequence[Cell], temperature: float) -> Figure:
    """Figure 3: acceptance length against the draft's layers. Methods of one depth stand as single points."""
    title = "Depth of the drafter"
    group = at(cells, temperature)
    common = Counter(cell.about["facts"]["block_size"] for cell in _series(group, "layers")).most_common(1)
    same = [cell for cell in group if common and cell.about["facts"]["block_size"] == common[0][0]]
    if not _series(same, "layers"):
        return absent("depth", "3", title, why="No method with drafters of two depths.", command=RECIPE)
    block = common[0][0]
    kept = [cell for cell in same if cell.about["facts"]["layers"] > 0]
    return Figure(
        key="depth",
        number="3",
        title=title,
        caption=f"Tokens committed per round (bonus included) by layers of the drafter, at temperature {temperature:g} "
        f"and block {block}. Bars: 95 % over prompts.",
        data=Columns(names=SHAPE, rows=tuple(_shape_rows(kept, "layers"))),
        commands=commands_of(kept),
    )


def block_figure(cells: Sequence[Cell], temperature: float) -> Figure:
    """Figure 4: acceptance length and the sequential stage's share of a round against the block length."""
    title = "Block length and sequential overhead"
    group = at(cells, temperature)
    # of one method, compare blocks at the depth that most of its drafters have
    found: list[Cell] = []
    for name in dict.fromkeys(method(cell) for cell in group):
        mine = [cell for cell in group if method(cell) == name]
        depth = Counter(cell.about["facts"]["layers"] for cell in mine).most_common(1)[0][0]
        found += [cell for cell in mine if cell.about["facts"]["layers"] == depth]
    kept = _series(found, "block_size")
    if not kept:
        return absent("block", "4", title, why="No method with drafters of two block sizes.", command=RECIPE)
    rows = max(cell.made_for["rows"] for cell in kept)
    shared = f" (with {rows} conversations a pass, a round checked up to its first rejection)" if rows > 1 else ""
    return Figure(
        key="block",
        number="4",
        title=title,
        caption=f"Tokens committed per round by block length, at temperature {temperature:g}, and the share of a "
        f"round's time that goes into drawing the block left to right{shared}. Bars: 95 % over prompts.",
        data=Columns(names=SHAPE, rows=tuple(_shape_rows(kept, "block_size"))),
        commands=commands_of(kept),
    )


def _confident(cells: Sequence[Cell], temperature: float, key: str, number: str, title: str) -> Cell | Figure:
    """The first cell with confidences and whole rounds, or the figure that says there is none."""
    found = confident_cells(at(cells, temperature))
    if found:
        return found[0]
    why = f"No full-length rounds with confidences at temperature {temperature:g}."
    return absent(key, number, title, why=why, command=EVAL.format(temperature=temperature))


def threshold_figure(cells: Sequence[Cell], temperature: float) -> Figure:
    """Figure 5: acceptance rate against the confidence threshold, by domain."""
    title = "Confidence threshold"
    cell = _confident(cells, temperature, "threshold", "5", title)
    if isinstance(cell, Figure):
        return cell
    sweeps = sweep_by_domain(cell)
    rows = [
        (
            domain,
            point.threshold,
            point.checked,
            json_data(point.acceptance_rate),
            point.low,
            point.high,
            point.acceptance_length,
            point.verify_len,
        )
        for domain, found in sweeps.items()
        for point in found.points
    ]
    falls = [domain for domain, found in sweeps.items() if not found.monotone]
    rounds = ", ".join(f"{domain} {found.rounds}" for domain, found in sweeps.items())
    behind = f"as far as {LEAST_CHECKED} drafts are checked"
    note = f"It never falls, {behind}." if not falls else f"It falls somewhere in {', '.join(falls)}, {behind}."
    return Figure(
        key="threshold",
        number="5",
        title=title,
        caption=f"Share of checked drafts that are accepted when {cell.label}'s blocks are cut at the first confidence "
        f"under a threshold, and what is left of tokens per round. Full-length rounds at temperature {temperature:g} "
        f"({rounds}), each cut where the threshold would have cut it. {note} Bands: 95 % over prompts.",
        data=Columns(names=SWEEP, rows=tuple(rows)),
        commands=commands_of([cell]),
    )


def reliability_figure(cells: Sequence[Cell], temperature: float) -> Figure:
    """Figure 6: predicted against measured survival, position by position, before and after calibration: Sequential
    Temperature Scaling, the paper's, and Platt's scaling, with a bias per position."""
    title = "Reliability before and after calibration"
    cell = _confident(cells, temperature, "reliability", "6", title)
    if isinstance(cell, Figure):
        return cell
    try:
        found = calibrate_records(cell)
    except DataError as error:
        return absent("reliability", "6", title, why=f"{error}.", command=EVAL.format(temperature=temperature))
    rows: list[Row] = []
    for when, slots in (("before", found.bins), ("STS", found.sts.bins), ("Platt", found.platt.bins)):
        for k, bins in enumerate(slots):
            rows += [(k + 1, when, each.prediction, each.label, each.count) for each in bins]
    quality = tuple(
        (
            k + 1,
            one.count,
            found.sts.sts_temperatures[k],
            found.platt.sts_temperatures[k],
            found.platt.biases[k],
            json_data(slots[-1].floor),
            *(json_data(getattr(each, name)) for name in ("ece", "auc", "conditional_auc", "brier") for each in slots),
        )
        for k, (one, *slots) in enumerate(
            zip(found.before, found.before, found.sts.after, found.platt.after, strict=True)
        )
    )
    names: tuple[str, ...] = ("position", "rounds", "temperature", "Platt temperature", "Platt bias", "floor")
    names += tuple(
        f"{name}{of}" for name in ("ece", "auc", "conditional auc", "brier") for of in ("", " STS", " Platt")
    )
    return Figure(
        key="reliability",
        number="6",
        title=title,
        caption=f"Predicted and measured chance that drafts 1 to k of {cell.label} are all accepted, at temperature "
        f"{temperature:g}: fitted on every second prompt ({found.fitted_rounds} rounds), shown on the others "
        f"({found.held_out_rounds}). STS: a temperature per position; Platt: a temperature and a bias. Titles: ECE "
        f"before, after STS and after Platt, and in brackets what true chances would show. Bars: how many of Platt's "
        f"predictions lie there; bins of fewer than {LEAST_IN_BIN} are in the data alone.",
        data=Columns(names=("position", "when", "prediction", "label", "count"), rows=tuple(rows)),
        more={"Quality by position": Columns(names=names, rows=quality)},
        commands=commands_of([cell]),
    )
