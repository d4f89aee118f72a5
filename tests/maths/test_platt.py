"""Platt's scaling on made-up drafters whose true chances are known."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import ScheduleError
from dspark.maths.calibration import RoundOutcomes, fit_temperatures, judge, scaled, summarise
from dspark.maths.platt import Scaling, fit_platt


def made_up(rounds: int, *, block: int = 3, seed: int, slope: float, shift: float) -> RoundOutcomes:
    """Rounds whose drafts survive with chances sigmoid(z_k), reported as sigmoid(slope z_k + shift)."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.4, 1.2, (rounds, block))
    alive = random.uniform(size=(rounds, block)) < 1.0 / (1.0 + np.exp(-logits))
    return RoundOutcomes(
        confidence=1.0 / (1.0 + np.exp(-slope * logits - shift)),
        lengths=np.full(rounds, block),
        accepted=np.cumprod(alive, axis=1).sum(axis=1),
    )


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (1.0, 0.7), (2.0, -0.5), (0.6, 1.0)])
def test_slope_and_shift_are_found(slope: float, shift: float) -> None:
    """sigmoid((slope z + shift) / T + b) is sigmoid(z) where T is the slope and b minus the shift by T."""
    found = fit_platt(made_up(20000, seed=1, slope=slope, shift=shift))
    assert np.abs(np.log(found.sts_temperatures / slope)).max() < 0.1
    assert np.abs(found.biases + shift / slope).max() < 0.2


def test_a_shift_is_mended_on_other_rounds_where_temperatures_leave_it() -> None:
    known, other = (made_up(20000, seed=seed, slope=1.2, shift=0.9) for seed in (2, 3))
    platt = summarise(judge(other.replaced(fit_platt(known)(other.confidence))))
    sts = summarise(judge(other.replaced(scaled(other.confidence, fit_temperatures(known)))))
    assert platt.ece < 1.5 * platt.floor < 0.015 < 0.03 < sts.ece and platt.brier < sts.brier


def test_order_is_kept_in_every_slot() -> None:
    """Also of a head that points the wrong way, whose slope would turn round."""
    outcomes = made_up(3000, seed=4, slope=-1.0, shift=0.0)
    found = fit_platt(outcomes)
    assert (found.sts_temperatures > 0).all()
    order = np.argsort(outcomes.confidence[:, 1], kind="stable")
    assert (np.diff(found(outcomes.confidence)[order, 1]) >= 0).all()


def test_slots_with_few_rounds_stay_and_few_rounds_move_little() -> None:
    outcomes = made_up(60, seed=5, slope=1.0, shift=3.0)
    unmoved = fit_platt(outcomes, least_rounds=61)
    assert unmoved.sts_temperatures.tolist() == [1.0] * 3 and unmoved.temperatures_only
    hopeless = RoundOutcomes(
        confidence=outcomes.confidence, lengths=outcomes.lengths, accepted=np.zeros(60, dtype=np.int64)
    )
    assert np.isfinite(fit_platt(hopeless).biases).all()  # all alike: only the pull keeps it from running off


def test_a_scaling_is_temperatures_then_biases() -> None:
    scaling = Scaling(sts_temperatures=np.array([2.0, 1.0]), biases=np.array([0.0, 1.0]))
    found = scaling(np.array([[0.8, 0.5], [0.5, 0.2]]))
    assert found[0].tolist() == pytest.approx([2.0 / 3.0, 1.0 / (1.0 + np.exp(-1.0))])  # odds 4 become 2
    assert found[1, 0] == pytest.approx(0.5) and not scaling.temperatures_only
    assert scaling(np.array([0.8])).tolist() == pytest.approx([2.0 / 3.0])  # the first of a shorter proposal
    with pytest.raises(ScheduleError, match="3 drafts were proposed and the calibration knows 2"):
        scaling(np.zeros((1, 3)))
    with pytest.raises(ScheduleError, match="2 finite numbers are needed"):
        Scaling(sts_temperatures=np.ones(2), biases=np.array([0.0, np.nan]))
    with pytest.raises(ScheduleError, match="must be positive"):
        Scaling(sts_temperatures=np.zeros(2), biases=np.zeros(2))
