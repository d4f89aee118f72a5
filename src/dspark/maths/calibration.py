"""How true confidences are, and Sequential Temperature Scaling, which makes them so (paper section 3.2.1).

The scheduler needs absolute chances: expected tokens are sums of survivals, a_k = c_0 x ... x c_k. What is judged here
is therefore the product, slot by slot, against whether the drafts 0..k of a round were all accepted. Only rounds whose
whole proposal was checked can tell; where a scheduler had cut it, the fate of the rest is unknown.

    prediction of slot k   product of c_0..c_k in float64, clamped to [1e-8, 1 - 1e-8]
    label of slot k        drafts 0..k all accepted
    slots of a round       all that it proposed; behind an accepted stop token, none

Definitions as in DeepSpec ``deepspec/eval`` (its confidence recorder): ECE over 20 equal-width bins weighted by count,
AUC from a histogram of 1000 bins with ties counted half, Brier score as the mean square; a summary over slots weighs
them by their counts. The paper's calibration itself is not in DeepSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark.errors import DataError, ScheduleError

EPSILON = 1e-8
ECE_BINS, AUC_BINS = 20, 1000
FLOOR_DRAWS = 16  # simulations behind a noise floor; its own error is then a few percent of it
GRID = np.exp(np.linspace(np.log(0.125), np.log(8.0), 193))  # of temperatures; 1 is the middle one

Samples = Float[np.ndarray, "samples"]
Labels = Bool[np.ndarray, "samples"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundOutcomes:
    """Full-length rounds of one drafter, as calibration sees them."""

    confidence: Float[np.ndarray, "rounds block"]  # raw c_k; what stands behind `lengths` is ignored
    lengths: Int[np.ndarray, "rounds"]  # slots that count, 0..block
    accepted: Int[np.ndarray, "rounds"]  # drafts accepted, 0..lengths

    def __post_init__(self) -> None:
        block = self.confidence.shape[1]
        if not ((self.accepted >= 0) & (self.accepted <= self.lengths) & (self.lengths <= block)).all():
            raise DataError("accepted and lengths must satisfy 0 <= accepted <= lengths <= block in every round")
        used = self.confidence[np.arange(block) < self.lengths[:, None]]
        if not ((used >= 0) & (used <= 1)).all():
            raise DataError("confidence must be in [0, 1] in every slot that counts (apply the sigmoid)")

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rounds: Int[np.ndarray, "some"] | Bool[np.ndarray, "rounds"]) -> RoundOutcomes:
        """Some of the rounds, by index or mask."""
        return RoundOutcomes(
            confidence=self.confidence[rounds], lengths=self.lengths[rounds], accepted=self.accepted[rounds]
        )

    def replaced(self, confidence: Float[np.ndarray, "rounds block"]) -> RoundOutcomes:
        """The same rounds with other confidences."""
        return RoundOutcomes(confidence=confidence, lengths=self.lengths, accepted=self.accepted)

    def slot(self, k: int) -> tuple[Bool[np.ndarray, "rounds"], Bool[np.ndarray, "rounds"]]:
        """Which rounds have slot ``k``, and in which of all rounds the drafts 0..k were accepted."""
        return self.lengths > k, self.accepted > k


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """A non-empty bin of a reliability diagram."""

    count: int
    prediction: float  # mean
    label: float  # mean


@dataclass(frozen=True, kw_only=True)
class SlotQuality:
    """How good the predictions of one slot are, or of all slots together."""

    count: int
    ece: float
    floor: float  # the ECE that true predictions show with as many rounds: what chance alone makes of it
    auc: float  # of the products; nan where all labels are alike
    conditional_auc: float  # of c_k itself, among rounds whose earlier drafts were accepted
    brier: float
    prediction: float  # mean
    label: float  # mean: the measured survival


def predictions(confidence: Float[np.ndarray, "rounds block"]) -> Float[np.ndarray, "rounds block"]:
    """Survivals as calibration judges them: float64 products, clamped."""
    return np.cumprod(confidence.astype(np.float64), axis=1).clip(EPSILON, 1.0 - EPSILON)


def expected_calibration_error(prediction: Samples, label: Labels) -> float:
    """Mean distance of mean prediction and mean label over 20 equal-width bins, weighted by count; nan of nothing."""
    if not len(prediction):
        return float("nan")
    place = np.minimum((prediction * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    gaps = np.bincount(place, weights=prediction - label, minlength=ECE_BINS)
    return float(np.abs(gaps).sum() / len(prediction))


def noise_floor(prediction: Samples, *, draws: int = FLOOR_DRAWS, seed: int = 0) -> float:
    """Mean ECE of ``draws`` simulations in which these predictions are true; nan of nothing.

    It takes samples as independent; rounds of one answer resemble each other, so the true floor is somewhat higher.
    """
    random = np.random.default_rng(seed)
    found = [expected_calibration_error(prediction, random.random(len(prediction)) < prediction) for _ in range(draws)]
    return float(np.mean(found))


def auc(prediction: Samples, label: Labels) -> float:
    """Chance that an accepted prefix was predicted likelier than a refused one; nan if all were one or the other."""
    place = np.minimum((prediction * AUC_BINS).astype(np.int64), AUC_BINS - 1)
    good = np.bincount(place[label], minlength=AUC_BINS).astype(np.float64)
    bad = np.bincount(place[~label], minlength=AUC_BINS).astype(np.float64)
    if not good.sum() or not bad.sum():
        return float("nan")
    below = np.cumsum(bad) - bad
    return float((good * (below + 0.5 * bad)).sum() / (good.sum() * bad.sum()))


def brier(prediction: Samples, label: Labels) -> float:
    """Mean square of prediction minus label; nan of nothing."""
    return float(np.square(prediction - label).mean()) if len(prediction) else float("nan")


def reliability(prediction: Samples, label: Labels) -> list[ReliabilityBin]:
    """The non-empty ones of the 20 bins, from low to high."""
    place = np.minimum((prediction * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    return [
        ReliabilityBin(
            count=int(inside.sum()), prediction=float(prediction[inside].mean()), label=float(label[inside].mean())
        )
        for inside in (place == i for i in range(ECE_BINS))
        if inside.any()
    ]


def slot_samples(outcomes: RoundOutcomes, k: int) -> tuple[Samples, Labels]:
    """Predictions and labels of slot ``k``."""
    there, label = outcomes.slot(k)
    return predictions(outcomes.confidence[there])[:, k], label[there]


def conditional_auc(outcomes: RoundOutcomes, k: int) -> float:
    """:func:`auc` of c_k against "draft k was accepted", where drafts before it were: what temperatures cannot move."""
    reached = (outcomes.lengths > k) & (outcomes.accepted >= k)
    return auc(outcomes.confidence[reached, k].astype(np.float64), outcomes.accepted[reached] > k)


def judge(outcomes: RoundOutcomes) -> list[SlotQuality]:
    """The quality of every slot; slots without rounds are nan with count 0."""
    slots = []
    for k in range(outcomes.confidence.shape[1]):
        prediction, label = slot_samples(outcomes, k)
        slots.append(
            SlotQuality(
                count=len(label),
                ece=expected_calibration_error(prediction, label),
                floor=noise_floor(prediction),
                auc=auc(prediction, label),
                conditional_auc=conditional_auc(outcomes, k),
                brier=brier(prediction, label),
                prediction=float(prediction.mean()) if len(label) else float("nan"),
                label=float(label.mean()) if len(label) else float("nan"),
            )
        )
    return slots


def summarise(slots: Sequence[SlotQuality]) -> SlotQuality:
    """Slots together, each by its count; the AUC over the slots that have one."""

    def mean(name: str) -> float:
        values = np.array([getattr(slot, name) for slot in slots])
        counts = np.array([slot.count for slot in slots], dtype=np.float64)
        known = ~np.isnan(values) & (counts > 0)
        return float(np.average(values[known], weights=counts[known])) if known.any() else float("nan")

    return SlotQuality(
        count=sum(slot.count for slot in slots),
        **{name: mean(name) for name in ("ece", "floor", "auc", "conditional_auc", "brier", "prediction", "label")},
    )


# --- Sequential Temperature Scaling ----------------------------------------------------------------------------------


def scaled(
    confidence: Float[np.ndarray, "*rows block"],
    temperatures: Float[np.ndarray, "block"],
    biases: Float[np.ndarray, "block"] | None = None,
) -> Float[np.ndarray, "*rows block"]:
    """sigmoid(logit(c_k) / T_k + b_k), in float64: every slot keeps its order. ``biases`` None are 0, as in STS; with
    them it is Platt's scaling (:mod:`dspark.maths.platt`).

    A confidence beyond [1e-8, 1 - 1e-8], which only rounding makes of a finite logit, counts as that bound.
    """
    logits = logits_of(confidence) / temperatures
    return sigmoid(logits if biases is None else logits + biases)


def logits_of(confidence: Float[np.ndarray, "*rows block"]) -> Float[np.ndarray, "*rows block"]:
    """Logits in float64, of confidences kept within [1e-8, 1 - 1e-8]."""
    c = np.minimum(np.maximum(confidence.astype(np.float64), EPSILON), 1.0 - EPSILON)
    return np.log(c) - np.log1p(-c)


def sigmoid(logits: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    return 1.0 / (1.0 + np.exp(-logits))


def check_temperatures(temperatures: Float[np.ndarray, "block"]) -> None:
    """Raise :class:`ScheduleError` unless all are positive and finite."""
    for k, value in enumerate(temperatures.tolist()):
        if not 0.0 < value < float("inf"):
            raise ScheduleError(f"sts_temperatures[{k}] is {value}; it must be positive and finite, 1 for no change")


def fit_temperatures(
    outcomes: RoundOutcomes, *, grid: Float[np.ndarray, "grid"] = GRID, least_rounds: int = 50
) -> Float[np.ndarray, "block"]:
    """One temperature per slot, left to right: the one of ``grid`` with the least ECE of the cumulative product, the
    slots before it fixed at their calibrated values.

    Of equal ECEs the smaller Brier score wins, then the temperature nearest to 1. Slots with fewer than
    ``least_rounds`` rounds keep temperature 1. Source: paper section 3.2.1; not a fit of each slot by itself.
    """
    check_temperatures(grid)
    block = outcomes.confidence.shape[1]
    temperatures = np.ones(block)
    before = np.ones(len(outcomes))
    candidates = sorted(grid.tolist(), key=lambda value: abs(np.log(value)))
    logits = logits_of(outcomes.confidence)
    for k in range(block):
        there, label = outcomes.slot(k)
        if there.sum() >= least_rounds:
            best, known = (np.inf, np.inf), label[there]
            for value in candidates:
                product = before[there] * sigmoid(logits[there, k] / value)
                prediction = product.clip(EPSILON, 1.0 - EPSILON)
                found = (expected_calibration_error(prediction, known), brier(prediction, known))
                if found < best:
                    best, temperatures[k] = found, value
        before = before * sigmoid(logits[:, k] / temperatures[k])
    return temperatures
