"""How true recorded confidences are, as tables and as data: by position, after calibration, and under thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.errors import DataError
from dspark.evaluate.confidence_curves import (
    LEAST_CHECKED,
    Calibrated,
    Sweep,
    calibrate_records,
    confident_cells,
    outcomes_by_prompt,
    sweep_by_domain,
)
from dspark.evaluate.figures import plain_data
from dspark.evaluate.records import Cell
from dspark.evaluate.tables import TextTable, temperature_name
from dspark.maths.calibration import SlotQuality, judge, summarise
from dspark.numbers import number_text

SHOWN_THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)


@dataclass(frozen=True, kw_only=True)
class ConfidenceFigures:
    """What the confidences of one drafter at one temperature are worth."""

    label: str
    temperature: float
    quality: tuple[SlotQuality, ...]  # per position, raw, on all rounds
    sweeps: dict[str, Sweep]  # by domain
    calibrated: Calibrated | None  # None: too few rounds to fit and judge
    note: str  # why not; empty otherwise


def confidence_figures(cells: Sequence[Cell]) -> list[ConfidenceFigures]:
    """Figures of every cell whose drafter has confidences and whose rounds were checked whole."""
    found = []
    for cell in confident_cells(cells):
        outcomes, _, _ = outcomes_by_prompt(cell)
        calibrated, note = None, ""
        try:
            calibrated = calibrate_records(cell)
        except DataError as error:
            note = str(error)
        found.append(
            ConfidenceFigures(
                label=cell.label,
                temperature=cell.temperature,
                quality=tuple(judge(outcomes)),
                sweeps=dict(sweep_by_domain(cell)),
                calibrated=calibrated,
                note=note,
            )
        )
    return found


def confidence_tables(found: Sequence[ConfidenceFigures]) -> list[TextTable]:
    """Two tables a drafter: quality by position, and acceptance under thresholds."""
    return [table for each in found for table in (_quality(each), _thresholds(each))]


def confidence_data(found: Sequence[ConfidenceFigures]) -> list[Any]:
    """For JSON; null where there is no number."""
    return list(plain_data(list(found)))


def _quality(each: ConfidenceFigures) -> TextTable:
    """Expected calibration error, AUC and Brier score of the survivals, by position and together."""
    fitted = each.calibrated
    places = [*enumerate(each.quality), ("all", summarise(each.quality))]
    rows = []
    for place, raw in places:
        row = [
            str(place + 1) if isinstance(place, int) else f"= {place}",
            str(raw.count),
            number_text(raw.label, ".3f"),
            number_text(raw.ece, ".2%"),
            number_text(raw.floor, ".2%"),
            number_text(raw.auc, ".3f"),
            number_text(raw.brier, ".3f"),
        ]
        if fitted is not None:
            row += _held_out(fitted, place)
        rows.append(tuple(row))
    head = ["position", "rounds", "survival", "ECE", "floor", "AUC", "Brier"]
    head += ["ECE held out", "floor", "T", "after STS", "T, b", "after Platt"] if fitted else []
    note = each.note
    if fitted:
        note = f"Fitted on {fitted.fitted_rounds} rounds of every second prompt, held out are the others'. STS: a "
        note += "temperature per position; Platt: a temperature and a bias."
    note += " Floor: the ECE that true chances show with as many rounds."
    title = f"{temperature_name(each.temperature)}: confidences of {each.label}"
    return TextTable(title=title, head=tuple(head), rows=tuple(rows), note=note)


def _held_out(fitted: Calibrated, place: object) -> list[str]:
    """A row's cells on the held-out half: of the position ``place``, or of all if it is no number."""
    sides = fitted.before, fitted.sts.after, fitted.platt.after
    before, sts, platt = (side[place] if isinstance(place, int) else summarise(side) for side in sides)
    one = two = ""
    if isinstance(place, int):
        one = f"{fitted.sts.sts_temperatures[place]:.2f}"
        two = f"{fitted.platt.sts_temperatures[place]:.2f}, {fitted.platt.biases[place]:+.2f}"
    shown = [number_text(number, ".2%") for number in (before.ece, platt.floor, sts.ece, platt.ece)]
    return [*shown[:2], one, shown[2], two, shown[3]]


def _thresholds(each: ConfidenceFigures) -> TextTable:
    """Acceptance rate and tokens per round where blocks are cut at the first confidence under a threshold."""
    rows = []
    for domain, sweep in each.sweeps.items():
        points = [point for point in sweep.points if point.threshold in SHOWN_THRESHOLDS]
        rows.append((domain, str(sweep.rounds), "accepted", *(number_text(p.acceptance_rate, ".1%") for p in points)))
        bands = (f"{p.low:.1%}-{p.high:.1%}" if p.low is not None else "-" for p in points)
        rows.append(("", "", "95 %", *bands))
        rows.append(("", "", "per round", *(f"{p.acceptance_length:.2f}" for p in points)))
    head = ("domain", "rounds", "tokens", *(f"{threshold:g}" for threshold in SHOWN_THRESHOLDS))
    falls = [domain for domain, sweep in each.sweeps.items() if not sweep.monotone]
    note = "Accepted: share of checked drafts. Each recorded round is cut where the threshold would have cut it."
    note += f" It rises as far as {LEAST_CHECKED} drafts are checked." if not falls else ""
    note += f" The share falls somewhere in {', '.join(falls)}." if falls else ""
    title = f"{temperature_name(each.temperature)}: {each.label} under confidence thresholds"
    return TextTable(title=title, head=head, rows=tuple(rows), note=note)
