"""Fits a calibration on recorded rounds and judges it on others.

Rounds of one prompt resemble each other, so prompts are dealt out, not rounds: every second one is held out for the
judgement. A drafter without a confidence head takes a third share, for its estimator, so that temperatures are not
fitted on the rounds that the estimator knows.

    sts     a temperature per position: the paper's, and what SGLang reads (:mod:`dspark.maths.calibration`)
    platt   a temperature and a bias per position: mends a base rate too (:mod:`dspark.maths.platt`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark.errors import ConfigError, DataError
from dspark.evaluate.recorder import PlayedRounds
from dspark.maths.calibration import GRID, RoundOutcomes, SlotQuality, fit_temperatures, judge, summarise
from dspark.maths.estimator import Estimator, fit_estimator
from dspark.maths.platt import Scaling, fit_platt
from dspark.numbers import json_data

METHODS = ("platt", "sts")
LEAST_ROUNDS = 100  # in each share
SHIFTED = 3.0  # times its noise floor, an ECE that temperatures leave is no noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A calibration and what it does to rounds that it was not fitted on."""

    scaling: Scaling
    estimator: Estimator | None  # None: the drafter has a confidence head
    fitted_rounds: int
    held_out_rounds: int
    before: list[SlotQuality]  # per position; of the estimator's raw output if there is one
    after: list[SlotQuality]

    @property
    def sts_temperatures(self) -> Float[np.ndarray, "block"]:
        return self.scaling.sts_temperatures

    def lines(self) -> list[str]:
        """The judgement as text: a line per position and one for all."""
        rows = [*enumerate(zip(self.before, self.after, strict=True)), ("all", self.totals)]
        head = f"{'position':>8} {'rounds':>7} {'T':>6} {'bias':>6} {'ECE':>7} {'after':>7} {'floor':>7} "
        shown = [f"{head}{'AUC':>6} {'after':>6} {'survival':>8}"]
        for name, (raw, mended) in rows:
            numbers = ""
            if isinstance(name, int):
                numbers = f"{self.scaling.sts_temperatures[name]:>6.2f} {self.scaling.biases[name]:>6.2f}"
            shown.append(
                f"{name!s:>8} {raw.count:>7} {numbers:>13} {raw.ece:>7.2%} {mended.ece:>7.2%} {mended.floor:>7.2%} "
                f"{raw.auc:>6.3f} {mended.auc:>6.3f} {raw.label:>8.3f}"
            )
        return shown

    def doubts(self) -> list[str]:
        """Reasons not to trust the calibration, in words; none if all is well."""
        found = []
        before, after = self.totals
        edges = [k for k, value in enumerate(self.scaling.sts_temperatures) if not GRID[0] < value < GRID[-1]]
        if edges:
            found.append(
                f"the best temperature of position {', '.join(map(str, edges))} is the last one tried; record more "
                "rounds, or the confidences there are no better than a constant"
            )
        if self.scaling.temperatures_only and after.ece > SHIFTED * after.floor:
            found.append(
                f"temperatures leave an ECE of {after.ece:.2%}, {after.ece / after.floor:.1f} times what true chances "
                "would show: confidences are too high or too low by a shift, which --method platt mends"
            )
        if not after.ece < before.ece:
            found.append(
                f"on held-out rounds the ECE went from {before.ece:.2%} to {after.ece:.2%}; record more rounds"
            )
        return found

    @property
    def totals(self) -> tuple[SlotQuality, SlotQuality]:
        """All positions together, before and after."""
        return summarise(self.before), summarise(self.after)


def fit_scaling(outcomes: RoundOutcomes, method: str) -> Scaling:
    """The scaling that ``method`` fits to these rounds. Raises :class:`ConfigError` for another than ``METHODS``."""
    if method == "platt":
        return fit_platt(outcomes)
    if method != "sts":
        raise ConfigError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    temperatures = fit_temperatures(outcomes)
    return Scaling(sts_temperatures=temperatures, biases=np.zeros(len(temperatures)))


def fit(played: PlayedRounds, *, has_confidence: bool, method: str = "platt") -> Fitted:
    """Estimator where needed, temperatures (and biases), and the judgement, each on its own prompts.

    Raises :class:`DataError` if a share has fewer than 100 rounds.
    """
    shares = 2 if has_confidence else 3
    of_share = [played.take(played.prompt % shares == share) for share in range(shares)]
    if (least := min(len(share.outcomes) for share in of_share)) < LEAST_ROUNDS:
        raise DataError(
            f"a share of the prompts has {least} rounds; {LEAST_ROUNDS} are needed in each of {shares}: "
            "give more prompts or raise --max-new-tokens"
        )
    *learning, held_out = of_share
    estimator = None
    if not has_confidence:
        first = learning[0]
        estimator = fit_estimator(first.features, first.outcomes.lengths, first.outcomes.accepted)
    known, judged = (_with_confidence(share, estimator) for share in (learning[-1], held_out))
    scaling = fit_scaling(known, method)
    return Fitted(
        scaling=scaling,
        estimator=estimator,
        fitted_rounds=sum(len(share.outcomes) for share in learning),
        held_out_rounds=len(judged),
        before=judge(judged),
        after=judge(judged.replaced(scaling(judged.confidence))),
    )


def _with_confidence(played: PlayedRounds, estimator: Estimator | None) -> RoundOutcomes:
    if estimator is None:
        return played.outcomes
    return played.outcomes.replaced(estimator.confidence(played.features))


def quality_fields(slots: list[SlotQuality]) -> tuple[dict[str, Any], ...]:
    """Judgements for JSON."""
    return tuple(json_data(slot) for slot in slots)
