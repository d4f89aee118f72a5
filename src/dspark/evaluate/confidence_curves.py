"""What recorded confidences are good for: acceptance against a threshold, and calibration before and after STS.

Both read rounds of full length. For the sweep each round is cut where a threshold would have cut it and its known fate
is counted up to there. The rounds stay those that full-length decoding went through: a threshold run commits the same
text at temperature 0 but opens its blocks at other places of it, so the sweep is what the threshold does to these
blocks and not a forecast of that run's speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import DataError
from dspark.evaluate.records import AnswerRecord, Cell
from dspark.evaluate.suite import KNOWN_SETS
from dspark.maths.calibration import (
    ReliabilityBin,
    RoundOutcomes,
    SlotQuality,
    fit_temperatures,
    judge,
    reliability,
    scaled,
    slot_samples,
)
from dspark.maths.outcomes import outcomes_of

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))  # 0..0.95
LEAST_ROUNDS = 100  # in either share of a calibration
LEAST_CHECKED = 30  # drafts behind a threshold's rate, for the rate to count as one


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One threshold over the rounds of one domain."""

    threshold: float
    checked: int  # drafts
    acceptance_rate: float  # accepted drafts / checked drafts; nan where none is checked
    acceptance_length: float  # committed tokens per round, bonus included
    verify_len: float  # mean drafts checked


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rounds of one domain under every threshold, ascending."""

    rounds: int
    points: tuple[SweepPoint, ...]

    @property
    def monotone(self) -> bool:
        """Whether the acceptance rate never falls from one threshold to the next, as far as 30 drafts or more are
        checked: where only the last few are let through, one of them decides."""
        rates = [point.acceptance_rate for point in self.points if point.checked >= LEAST_CHECKED]
        return all(one <= other for one, other in pairwise(rates))


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Sequential Temperature Scaling on half of the prompts, judged on the other half."""

    sts_temperatures: tuple[float, ...]
    fitted_rounds: int
    held_out_rounds: int
    before: tuple[SlotQuality, ...]  # per position, on the held-out rounds
    after: tuple[SlotQuality, ...]
    bins_before: tuple[tuple[ReliabilityBin, ...], ...]  # per position
    bins_after: tuple[tuple[ReliabilityBin, ...], ...]


def outcomes_by_prompt(cell: Cell) -> tuple[RoundOutcomes, Int[np.ndarray, "rounds"], list[str]]:
    """Full-length rounds of a cell, the number of each one's prompt (in the order of set and id), and each round's
    domain.

    Raises :class:`DataError` if the drafter has no confidences or its rounds were cut.
    """
    if not cell.about["facts"]["has_confidence"]:
        raise DataError(f"{cell.label} has no confidence head; nothing can be cut by confidence")
    answers = sorted(cell.answers, key=lambda answer: answer.key)
    prompts = {key: i for i, key in enumerate(dict.fromkeys((a.set, a.prompt) for a in answers))}
    rounds = [(a, r) for a in answers for r in a.rounds if r.draft_tokens]
    outcomes = outcomes_of((r for _, r in rounds), block=int(cell.about["facts"]["block_size"]))
    return outcomes, np.array([prompts[a.set, a.prompt] for a, _ in rounds]), [a.domain for a, _ in rounds]


def cut_at(
    confidence: Float[np.ndarray, "rounds block"], lengths: Int[np.ndarray, "rounds"], threshold: float
) -> Int[np.ndarray, "rounds"]:
    """Drafts before the first whose conditional confidence is under ``threshold``, at most ``lengths``."""
    lets = (confidence >= threshold) & (np.arange(confidence.shape[1]) < lengths[:, None])
    return np.cumprod(lets, axis=1).sum(1)


def sweep(outcomes: RoundOutcomes, thresholds: Sequence[float] = THRESHOLDS) -> Sweep:
    """Every threshold over ``outcomes``."""
    points = []
    for threshold in thresholds:
        cut = cut_at(outcomes.confidence, outcomes.lengths, threshold)
        accepted = np.minimum(outcomes.accepted, cut)
        checked = int(cut.sum())
        points.append(
            SweepPoint(
                threshold=threshold,
                checked=checked,
                acceptance_rate=float(accepted.sum() / checked) if checked else float("nan"),
                acceptance_length=float(1.0 + accepted.mean()) if len(outcomes) else float("nan"),
                verify_len=float(cut.mean()) if len(outcomes) else float("nan"),
            )
        )
    return Sweep(rounds=len(outcomes), points=tuple(points))


def sweep_by_domain(cell: Cell, thresholds: Sequence[float] = THRESHOLDS) -> Mapping[str, Sweep]:
    """A sweep for every domain of a cell. Raises as :func:`outcomes_by_prompt` does."""
    outcomes, _, domains = outcomes_by_prompt(cell)
    names = np.array(domains)
    paper = list(dict.fromkeys(known.domain for known in KNOWN_SETS.values()))
    order = sorted(dict.fromkeys(domains), key=lambda name: paper.index(name) if name in paper else len(paper))
    return {name: sweep(outcomes.take(names == name), thresholds) for name in order}


def calibrate_records(cell: Cell) -> Calibrated:
    """Fit temperatures on every second prompt and judge them on the others.

    Raises :class:`DataError` if a half has fewer than 100 rounds, and as :func:`outcomes_by_prompt` does.
    """
    outcomes, prompt, _ = outcomes_by_prompt(cell)
    learning, held_out = outcomes.take(prompt % 2 == 0), outcomes.take(prompt % 2 == 1)
    if (least := min(len(learning), len(held_out))) < LEAST_ROUNDS:
        raise DataError(
            f"half of the prompts of {cell.label} have {least} rounds; {LEAST_ROUNDS} are needed to calibrate: "
            "evaluate more prompts or tokens"
        )
    temperatures = fit_temperatures(learning)
    mended = held_out.replaced(scaled(held_out.confidence, temperatures))
    block = range(held_out.confidence.shape[1])
    return Calibrated(
        sts_temperatures=tuple(temperatures.tolist()),
        fitted_rounds=len(learning),
        held_out_rounds=len(held_out),
        before=tuple(judge(held_out)),
        after=tuple(judge(mended)),
        bins_before=tuple(tuple(reliability(*slot_samples(held_out, k))) for k in block),
        bins_after=tuple(tuple(reliability(*slot_samples(mended, k))) for k in block),
    )


def confident_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose drafters have confidences and whose rounds were checked whole."""
    return [cell for cell in cells if cell.about["facts"]["has_confidence"] and full_length(cell.answers)]


def full_length(answers: Sequence[AnswerRecord]) -> bool:
    return all(r.verify_len == len(r.draft_tokens) for answer in answers for r in answer.rounds)
