"""Statistics by hand and by brute force; STS on made-up drafters whose true chances are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import RoundRecord
from dspark.errors import DataError, ScheduleError
from dspark.maths.calibration import (
    RoundOutcomes,
    auc,
    brier,
    check_temperatures,
    conditional_auc,
    expected_calibration_error,
    fit_temperatures,
    judge,
    predictions,
    reliability,
    scaled,
    slot_samples,
    summarise,
)
from dspark.maths.outcomes import outcomes_of


def made_up(rounds: int, *, block: int, seed: int, sharpness: np.ndarray) -> RoundOutcomes:
    """Rounds whose drafts survive with chances sigmoid(z_k), reported as sigmoid(sharpness_k z_k): over-confident."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.2, 1.0, (rounds, 1)) + random.normal(0.0, 0.8, (rounds, block)) - 0.05 * np.arange(block)
    alive = random.uniform(size=(rounds, block)) < 1.0 / (1.0 + np.exp(-logits))
    said = (1.0 / (1.0 + np.exp(-logits * sharpness))).astype(np.float32)
    return RoundOutcomes(
        confidence=said, lengths=np.full(rounds, block), accepted=np.cumprod(alive, axis=1).sum(axis=1)
    )


def record(draft: int = 3, *, accepted: int = 1, verify_len: int | None = None, stopped: bool = False) -> RoundRecord:
    return RoundRecord(
        draft_tokens=(5,) * draft,
        confidence=(0.5,) * draft,
        verify_len=draft if verify_len is None else verify_len,
        accepted=accepted,
        committed=(5,) * accepted + (() if stopped else (6,)),
        draft_seconds=0.0,
        sequential_seconds=0.0,
        verify_seconds=0.0,
        host_seconds=0.0,
    )


# --- statistics ------------------------------------------------------------------------------------------------------


def test_predictions_are_clamped_products() -> None:
    confidence = np.array([[0.5, 0.5, 0.0], [1.0, 1.0, 0.25]], dtype=np.float32)
    assert predictions(confidence).tolist() == [[0.5, 0.25, 1e-8], [1 - 1e-8, 1 - 1e-8, 0.25]]
    assert predictions(confidence).dtype == np.float64


def test_ece_by_hand() -> None:
    """Two bins: |0.925 - 0.5| with two samples and |0.11 - 0| with one; 1 falls into the last bin."""
    prediction, label = np.array([0.91, 0.94, 0.11]), np.array([True, False, False])
    assert expected_calibration_error(prediction, label) == pytest.approx((2 * 0.425 + 0.11) / 3)
    assert expected_calibration_error(np.array([1.0]), np.array([True])) == 0.0
    assert np.isnan(expected_calibration_error(np.array([]), np.array([], dtype=bool)))


def test_brier_and_reliability_by_hand() -> None:
    prediction, label = np.array([0.91, 0.94, 0.11]), np.array([True, False, False])
    assert brier(prediction, label) == pytest.approx((0.09**2 + 0.94**2 + 0.11**2) / 3)
    bins = [(b.count, b.prediction, b.label) for b in reliability(prediction, label)]
    assert bins == [(1, 0.11, 0.0), (2, pytest.approx(0.925), 0.5)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 999), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs_and_half_the_ties(samples: list[tuple[int, bool]]) -> None:
    prediction = np.array([(place + 0.5) / 1000 for place, _ in samples])
    label = np.array([good for _, good in samples])
    good, bad = prediction[label], prediction[~label]
    if not len(good) or not len(bad):
        assert np.isnan(auc(prediction, label))
        return
    pairs = (good[:, None] > bad).mean() + 0.5 * (good[:, None] == bad).mean()
    assert auc(prediction, label) == pytest.approx(pairs)


def test_slots_behind_a_rounds_end_do_not_count() -> None:
    outcomes = RoundOutcomes(
        confidence=np.array([[0.9, 0.8, 0.5], [0.6, 0.5, 0.0]]), lengths=np.array([3, 1]), accepted=np.array([2, 0])
    )
    slots = judge(outcomes)
    assert [slot.count for slot in slots] == [2, 1, 1]
    assert [slot.label for slot in slots] == [0.5, 1.0, 0.0]
    assert slots[1].prediction == pytest.approx(0.72)
    assert slots[0].auc == 1.0 and np.isnan(slots[1].auc)
    prediction, label = slot_samples(outcomes, 2)
    assert prediction.tolist() == pytest.approx([0.36]) and label.tolist() == [False]


def test_the_summary_weighs_by_count() -> None:
    outcomes = RoundOutcomes(
        confidence=np.array([[0.9, 0.8], [0.6, 0.5], [0.3, 0.0]]),
        lengths=np.array([2, 2, 1]),
        accepted=np.array([2, 0, 0]),
    )
    slots = judge(outcomes)
    total = summarise(slots)
    assert total.count == 5
    assert total.ece == pytest.approx((3 * slots[0].ece + 2 * slots[1].ece) / 5)
    empty = judge(outcomes.take(np.array([], dtype=int)))
    assert summarise(empty).count == 0 and np.isnan(summarise(empty).ece)


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_records_become_outcomes() -> None:
    """A stop token among the accepted drafts ends the round's slots; a prefill's record says nothing."""
    rounds = [
        record(0, accepted=0),
        record(accepted=3),
        record(accepted=0),
        record(accepted=2, stopped=True),
        record(2),
    ]
    outcomes = outcomes_of(rounds, block=4)
    assert outcomes.lengths.tolist() == [3, 3, 2, 2] and outcomes.accepted.tolist() == [3, 0, 2, 1]
    assert outcomes.confidence.tolist()[-1] == [0.5, 0.5, 0.0, 0.0]


def test_truncated_rounds_are_refused() -> None:
    with pytest.raises(DataError, match="checked 2 of 3 drafts; calibration needs rounds of full length"):
        outcomes_of([record(verify_len=2)], block=3)
    with pytest.raises(DataError, match="has 3 drafts; the drafter's block_size is 2"):
        outcomes_of([record()], block=2)
    bare = RoundRecord(**{**record().__dict__, "confidence": ()})
    with pytest.raises(DataError, match="needs an estimator"):
        outcomes_of([bare], block=3)


def test_impossible_outcomes_are_refused() -> None:
    with pytest.raises(DataError, match="0 <= accepted <= lengths <= block"):
        RoundOutcomes(confidence=np.ones((1, 2)), lengths=np.array([2]), accepted=np.array([3]))
    with pytest.raises(DataError, match=r"confidence must be in \[0, 1\]"):
        RoundOutcomes(confidence=np.array([[0.5, np.nan]]), lengths=np.array([2]), accepted=np.array([0]))
    kept = RoundOutcomes(confidence=np.array([[0.5, np.nan]]), lengths=np.array([1]), accepted=np.array([0]))
    assert len(kept) == 1  # what stands behind the length is ignored


# --- Sequential Temperature Scaling ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=30), st.floats(0.125, 8.0))
def test_scaling_keeps_the_order_of_each_slot(chances: list[float], temperature: float) -> None:
    confidence = np.sort(np.array(chances))[:, None]
    after = scaled(confidence, np.array([temperature]))[:, 0]
    assert (np.diff(after) >= 0).all() and ((after >= 0) & (after <= 1)).all()
    apart = (np.diff(confidence[:, 0]) > 1e-6) & (confidence[:-1, 0] > 1e-6) & (confidence[1:, 0] < 1 - 1e-6)
    apart &= after[1:] < 1 - 1e-9  # a steep temperature rounds the surest to 1
    assert (np.diff(after)[apart] > 0).all()


def test_scaling_by_hand() -> None:
    assert scaled(np.array([0.9, 0.5]), np.array([2.0, 3.0])).tolist() == pytest.approx([0.75, 0.5])
    unchanged = scaled(np.array([0.3, 0.9]), np.ones(2))
    assert unchanged.tolist() == pytest.approx([0.3, 0.9])


@pytest.mark.parametrize("sharpness", [1.5, np.linspace(1.3, 2.2, 7)], ids=["even", "rising"])
def test_sts_makes_overconfident_products_true_on_other_rounds(sharpness: float | np.ndarray) -> None:
    """ECE of the products from 9-10 % to under 1.5 % in all slots together, on rounds that were not fitted on. What a
    temperature cannot move does not move: each c_k keeps its AUC to 0.001; the products' may only rise."""
    steepness = np.broadcast_to(np.asarray(sharpness, dtype=float), (7,))
    fitted, held_out = (made_up(12000, block=7, seed=seed, sharpness=steepness) for seed in (0, 1))
    temperatures = fit_temperatures(fitted)
    before, after = judge(held_out), judge(held_out.replaced(scaled(held_out.confidence, temperatures)))
    assert summarise(before).ece > 0.08
    assert summarise(after).ece < 0.015
    for raw, calibrated in zip(before, after, strict=True):
        assert calibrated.ece < raw.ece / 2
        assert abs(calibrated.conditional_auc - raw.conditional_auc) < 0.001
        assert calibrated.auc > raw.auc - 0.001
    assert summarise(after).brier < summarise(before).brier


def test_sts_finds_the_temperatures_that_were_put_in() -> None:
    sharpness = np.array([1.0, 2.0, 1.5])
    temperatures = fit_temperatures(made_up(30000, block=3, seed=3, sharpness=sharpness))
    assert np.abs(np.log(temperatures / sharpness)).max() < 0.2


def test_sts_goes_by_the_product_not_by_the_slot() -> None:
    """Slot 0 cannot be mended by a temperature (it says 1/2 where 0.8 is true); slot 1 then makes the product true,
    though its own conditional confidences were true before."""
    random, rounds = np.random.default_rng(0), 20000
    alive = random.uniform(size=(rounds, 2)) < np.array([0.8, 0.6])
    outcomes = RoundOutcomes(
        confidence=np.tile([0.5, 0.6], (rounds, 1)),
        lengths=np.full(rounds, 2),
        accepted=np.cumprod(alive, axis=1).sum(axis=1),
    )
    temperatures = fit_temperatures(outcomes)
    assert temperatures[0] == 1.0  # nothing helps: the nearest to 1 is kept
    product = 0.5 * scaled(np.array([0.6]), temperatures[1:])[0]
    assert product == pytest.approx(0.48, abs=0.02)


def test_sts_leaves_a_slot_of_few_rounds_alone() -> None:
    outcomes = made_up(60, block=2, seed=0, sharpness=np.full(2, 2.0))
    assert fit_temperatures(outcomes, least_rounds=61).tolist() == [1.0, 1.0]
    short = RoundOutcomes(
        confidence=outcomes.confidence, lengths=np.ones(60, dtype=int), accepted=np.minimum(outcomes.accepted, 1)
    )
    assert fit_temperatures(short)[1] == 1.0 != fit_temperatures(short)[0]


def test_conditional_auc_looks_at_reached_slots_alone() -> None:
    outcomes = RoundOutcomes(
        confidence=np.array([[0.5, 0.9], [0.5, 0.2], [0.5, 0.99]]), lengths=np.full(3, 2), accepted=np.array([2, 1, 0])
    )
    assert conditional_auc(outcomes, 1) == 1.0  # the third round never got there


def test_temperatures_are_checked() -> None:
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ScheduleError, match=r"sts_temperatures\[1\] is"):
            check_temperatures(np.array([1.0, bad]))
