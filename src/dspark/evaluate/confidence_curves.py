"""What recorded confidences are good for: acceptance against a threshold, and calibration before and after scaling.

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
from dspark.evaluate.calibrate import LEAST_ROUNDS, fit_scaling
from dspark.evaluate.intervals import Estimate, estimate, resamples, weights_of
from dspark.evaluate.records import AnswerRecord, Cell
from dspark.evaluate.suite import KNOWN_SETS
from dspark.maths.calibration import (
    ReliabilityBin,
    RoundOutcomes,
    SlotQuality,
    judge,
    reliability,
    slot_samples,
)
from dspark.maths.outcomes import outcomes_of

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))  # 0..0.95
LEAST_CHECKED = 200  # drafts behind a threshold's rate, for the rate to count as one


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One threshold over the rounds of one domain."""

    threshold: float
    checked: int  # drafts
    acceptance_rate: float  # accepted drafts / checked drafts; nan where none is checked
    low: float | None  # of its 95 % interval over prompts; None with one prompt, or where none is checked
    high: float | None
    acceptance_length: float  # committed tokens per round, bonus included
    verify_len: float  # mean drafts checked


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The rounds of one domain under every threshold, ascending."""

    rounds: int
    points: tuple[SweepPoint, ...]

    @property
    def monotone(self) -> bool:
        """Whether the acceptance rate never falls from one threshold to the next, as far as 200 drafts or more are
        checked: where only the last few are let through, a few of them decide."""
        rates = [point.acceptance_rate for point in self.points if point.checked >= LEAST_CHECKED]
        return all(one <= other for one, other in pairwise(rates))


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What one method of calibration does to the held-out half."""

    sts_temperatures: tuple[float, ...]  # per position
    biases: tuple[float, ...]  # likewise; 0 throughout with temperatures alone
    after: tuple[SlotQuality, ...]
    bins: tuple[tuple[ReliabilityBin, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Sequential Temperature Scaling and Platt's scaling on half of the prompts, judged on the other half."""

    fitted_rounds: int
    held_out_rounds: int
    before: tuple[SlotQuality, ...]  # per position, on the held-out rounds
    bins: tuple[tuple[ReliabilityBin, ...], ...]  # per position
    sts: Mended
    platt: Mended


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


def sweep(
    outcomes: RoundOutcomes,
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    prompt: Int[np.ndarray, "rounds"] | None = None,
    name: str = "",
) -> Sweep:
    """Every threshold over ``outcomes``; ``prompt`` numbers each round's, for intervals (None: no intervals).

    ``name`` tells the draws of one domain's prompts from another's.
    """
    places = np.zeros(len(outcomes), dtype=np.int64) if prompt is None else np.unique(prompt, return_inverse=True)[1]
    prompts = int(places.max()) + 1 if len(places) else 0
    weights = weights_of(resamples(prompts, name)) if prompts > 1 else None
    points = []
    for threshold in thresholds:
        cut = cut_at(outcomes.confidence, outcomes.lengths, threshold)
        accepted = np.minimum(outcomes.accepted, cut)
        checked = int(cut.sum())
        rate = Estimate(value=float(accepted.sum() / checked) if checked else float("nan"))
        if weights is not None and checked:
            some, of = (weights @ np.bincount(places, count, prompts) for count in (accepted, cut))
            drawn = np.divide(some, of, out=np.full(len(of), np.nan), where=of > 0)
            rate = estimate(rate.value, drawn, prompts=prompts)
        points.append(
            SweepPoint(
                threshold=threshold,
                checked=checked,
                acceptance_rate=rate.value,
                low=rate.low,
                high=rate.high,
                acceptance_length=float(1.0 + accepted.mean()) if len(outcomes) else float("nan"),
                verify_len=float(cut.mean()) if len(outcomes) else float("nan"),
            )
        )
    return Sweep(rounds=len(outcomes), points=tuple(points))


def sweep_by_domain(cell: Cell, thresholds: Sequence[float] = THRESHOLDS) -> Mapping[str, Sweep]:
    """A sweep for every domain of a cell. Raises as :func:`outcomes_by_prompt` does."""
    outcomes, prompt, domains = outcomes_by_prompt(cell)
    names = np.array(domains)
    paper = list(dict.fromkeys(known.domain for known in KNOWN_SETS.values()))
    order = sorted(dict.fromkeys(domains), key=lambda name: paper.index(name) if name in paper else len(paper))
    return {
        name: sweep(outcomes.take(names == name), thresholds, prompt=prompt[names == name], name=name) for name in order
    }


def calibrate_records(cell: Cell) -> Calibrated:
    """Fit both methods on every second prompt and judge them on the others.

    Raises :class:`DataError` if a half has fewer than 100 rounds, and as :func:`outcomes_by_prompt` does.
    """
    outcomes, prompt, _ = outcomes_by_prompt(cell)
    learning, held_out = outcomes.take(prompt % 2 == 0), outcomes.take(prompt % 2 == 1)
    if (least := min(len(learning), len(held_out))) < LEAST_ROUNDS:
        raise DataError(
            f"half of the prompts of {cell.label} have {least} rounds; {LEAST_ROUNDS} are needed to calibrate: "
            "evaluate more prompts or tokens"
        )
    return Calibrated(
        fitted_rounds=len(learning),
        held_out_rounds=len(held_out),
        before=tuple(judge(held_out)),
        bins=_bins(held_out),
        sts=_mended(learning, held_out, "sts"),
        platt=_mended(learning, held_out, "platt"),
    )


def _mended(learning: RoundOutcomes, held_out: RoundOutcomes, method: str) -> Mended:
    scaling = fit_scaling(learning, method)
    mended = held_out.replaced(scaling(held_out.confidence))
    return Mended(
        sts_temperatures=tuple(scaling.sts_temperatures.tolist()),
        biases=tuple(scaling.biases.tolist()),
        after=tuple(judge(mended)),
        bins=_bins(mended),
    )


def _bins(outcomes: RoundOutcomes) -> tuple[tuple[ReliabilityBin, ...], ...]:
    return tuple(tuple(reliability(*slot_samples(outcomes, k))) for k in range(outcomes.confidence.shape[1]))


def confident_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose drafters have confidences and whose rounds were checked whole."""
    return [cell for cell in cells if cell.about["facts"]["has_confidence"] and full_length(cell.answers)]


def full_length(answers: Sequence[AnswerRecord]) -> bool:
    return all(r.verify_len == len(r.draft_tokens) for answer in answers for r in answer.rounds)
