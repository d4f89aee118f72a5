"""Platt scaling from left to right: a slope and a shift per position, for what temperatures alone cannot mend.

A temperature turns a slot's logits about 0: it draws confidences towards 1/2 or drives them apart, and leaves one of
1/2 where it is. A head that promises too much by a base rate keeps promising it, and there are reasons for such a
shift: it was fitted to answers that its drafter was fitted to as well, and a decoder's rounds begin where drafts have
just failed, at places harder than those that training draws at random. So

    c_k becomes sigmoid(logit(c_k) / T_k + b_k),  T_k > 0

which keeps every slot's order as a temperature does. As in STS slots are fitted one after the other on the cumulative
product, the slots before at their calibrated values; but by the log loss, which is smooth, where the ECE of two free
numbers would follow the noise of single bins. b_k = 0 throughout is a temperature scaling. Source: Platt 1999, with the
product as what is judged; not in the paper, which has temperatures alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from dspark.errors import ScheduleError
from dspark.maths.calibration import EPSILON, GRID, RoundOutcomes, check_temperatures, logits_of, scaled, sigmoid

RIDGE = 10.0  # strength of the pull towards "no change", in rounds
STEPS = 50  # of Fisher scoring, at most; it takes under ten

Weights = Float[np.ndarray, "2"]  # b, 1/T


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaling:
    """What a calibration does to the logits of every position: divide by a temperature, then add a bias."""

    sts_temperatures: Float[np.ndarray, "block"]
    biases: Float[np.ndarray, "block"]  # 0 throughout: temperatures alone

    def __post_init__(self) -> None:
        check_temperatures(self.sts_temperatures)
        if len(self.biases) != len(self.sts_temperatures) or not np.isfinite(self.biases).all():
            raise ScheduleError(
                f"biases is {self.biases.tolist()}; {len(self.sts_temperatures)} finite numbers are needed"
            )

    @property
    def temperatures_only(self) -> bool:
        return not self.biases.any()

    def __call__(self, confidence: Float[np.ndarray, "*rows proposed"]) -> Float[np.ndarray, "*rows proposed"]:
        """Calibrated confidences of the first positions of blocks, in float64.

        Raises :class:`ScheduleError` for more positions than were calibrated.
        """
        proposed = confidence.shape[-1]
        if proposed > len(self.biases):
            raise ScheduleError(
                f"{proposed} drafts were proposed and the calibration knows {len(self.biases)} positions; "
                "calibrate this drafter anew"
            )
        return scaled(confidence, self.sts_temperatures[:proposed], self.biases[:proposed])


def fit_platt(outcomes: RoundOutcomes, *, least_rounds: int = 50) -> Scaling:
    """Slope and shift per slot, left to right, by the log loss of the cumulative product plus a weak pull towards no
    change.

    Slots with fewer than ``least_rounds`` rounds stay as they are. Temperatures stay within the grid of STS.
    """
    block = outcomes.confidence.shape[1]
    temperatures, biases = np.ones(block), np.zeros(block)
    before = np.ones(len(outcomes))
    logits = logits_of(outcomes.confidence)
    for k in range(block):
        there, label = outcomes.slot(k)
        if there.sum() >= least_rounds:
            bias, slope = _fit(logits[there, k], before[there], label[there])
            temperatures[k], biases[k] = 1.0 / slope, bias
        before = before * sigmoid(logits[:, k] / temperatures[k] + biases[k])
    return Scaling(sts_temperatures=temperatures, biases=biases)


def _fit(
    logits: Float[np.ndarray, "rounds"], before: Float[np.ndarray, "rounds"], label: Bool[np.ndarray, "rounds"]
) -> Weights:
    """Bias and slope of the least loss, by damped Fisher scoring; the slope is held within 1/T of the grid."""
    inputs = np.stack((np.ones_like(logits), logits), axis=1)
    same = np.array([0.0, 1.0])

    def product(w: Weights) -> Float[np.ndarray, "rounds"]:
        return (before * sigmoid(inputs @ w)).clip(EPSILON, 1.0 - EPSILON)

    def loss(w: Weights) -> float:
        p = product(w)
        return float(-np.log(np.where(label, p, 1.0 - p)).sum() + 0.5 * RIDGE * np.square(w - same).sum())

    weights, current = same, loss(same)
    for _ in range(STEPS):
        p = product(weights)
        slope = p * (1.0 - sigmoid(inputs @ weights))  # of the product, by the logit
        spread = p * (1.0 - p)
        gradient = inputs.T @ ((p - label) * slope / spread) + RIDGE * (weights - same)
        curvature = (inputs * (slope * slope / spread)[:, None]).T @ inputs + RIDGE * np.eye(2)
        move, share = np.linalg.solve(curvature, gradient), 1.0
        while (found := loss(_held(weights - share * move))) > current and share > 1e-3:
            share /= 2.0
        if current - found <= 1e-9 * current:
            break
        weights, current = _held(weights - share * move), found
    return weights


def _held(weights: Weights) -> Weights:
    return np.array([weights[0], weights[1].clip(1.0 / GRID[-1], 1.0 / GRID[0])])
