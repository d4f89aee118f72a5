"""Fitting and judging on different prompts."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import ConfigError, DataError
from dspark.evaluate.calibrate import METHODS, fit, quality_fields
from dspark.evaluate.recorder import PlayedRounds
from dspark.maths.calibration import RoundOutcomes


def made_up(rounds: int, *, sharpness: float, prompts: int = 60, seed: int = 0) -> PlayedRounds:
    """Drafts of a block of 3 whose features decide their fate; the head's confidences are too sure of it."""
    random = np.random.default_rng(seed)
    features = np.concatenate([np.ones((rounds, 3, 1)), random.normal(0.5, 1.0, (rounds, 3, 3))], axis=2)
    logits = features @ np.array([0.4, 1.2, -0.6, 0.0])
    alive = random.uniform(size=(rounds, 3)) < 1 / (1 + np.exp(-logits))
    return PlayedRounds(
        outcomes=RoundOutcomes(
            confidence=1 / (1 + np.exp(-sharpness * logits)),
            lengths=np.full(rounds, 3),
            accepted=np.cumprod(alive, axis=1).sum(axis=1),
        ),
        features=features,
        prompt=np.arange(rounds) % prompts,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_heads_confidences_become_true_on_held_out_prompts(method: str) -> None:
    fitted = fit(made_up(12000, sharpness=2.0), has_confidence=True, method=method)
    before, after = fitted.totals
    assert before.ece > 0.1 and after.ece < 1.5 * after.floor
    assert fitted.scaling.temperatures_only == (method == "sts")
    assert fitted.estimator is None and fitted.fitted_rounds == fitted.held_out_rounds == 6000
    assert np.abs(fitted.sts_temperatures - 2.0).max() < 0.6


def test_without_a_head_an_estimator_is_fitted() -> None:
    played = made_up(12000, sharpness=1.0)
    bare = PlayedRounds(
        outcomes=played.outcomes.replaced(np.zeros((12000, 3))), features=played.features, prompt=played.prompt
    )
    fitted = fit(bare, has_confidence=False)
    assert fitted.estimator is not None and fitted.totals[1].ece < 0.025
    assert fitted.totals[1].conditional_auc > 0.7
    assert (fitted.fitted_rounds, fitted.held_out_rounds) == (8000, 4000)


def test_a_shift_is_beyond_temperatures_and_said_to_be() -> None:
    """Confidences that are too high by one logit throughout: a bias mends them, and no temperature."""
    played = made_up(12000, sharpness=1.0)
    high = 1.0 / (1.0 + np.exp(-1.0) * (1.0 / played.outcomes.confidence - 1.0))
    played = PlayedRounds(outcomes=played.outcomes.replaced(high), features=played.features, prompt=played.prompt)
    sts, platt = (fit(played, has_confidence=True, method=method) for method in ("sts", "platt"))
    assert sts.totals[1].ece > 3 * platt.totals[1].ece and platt.totals[1].ece < 1.5 * platt.totals[1].floor
    assert any("--method platt" in doubt for doubt in sts.doubts()) and platt.doubts() == []
    assert np.abs(platt.scaling.biases + 1.0).max() < 0.15
    for one, other in zip(platt.before, platt.after, strict=True):
        assert one.conditional_auc == pytest.approx(other.conditional_auc, abs=1e-3)  # by the 1000 bins it is taken in
    with pytest.raises(ConfigError, match="method is 'isotonic'"):
        fit(played, has_confidence=True, method="isotonic")


def test_held_out_prompts_are_not_fitted_on() -> None:
    """Changing what happened in held-out prompts changes the judgement alone."""
    played = made_up(4000, sharpness=2.0)
    held_out = played.prompt % 2 == 1
    accepted = np.where(held_out, 0, played.outcomes.accepted)
    changed = PlayedRounds(
        outcomes=RoundOutcomes(
            confidence=played.outcomes.confidence, lengths=played.outcomes.lengths, accepted=accepted
        ),
        features=played.features,
        prompt=played.prompt,
    )
    one, two = fit(played, has_confidence=True), fit(changed, has_confidence=True)
    assert one.sts_temperatures.tolist() == two.sts_temperatures.tolist()
    assert one.totals[1].ece != two.totals[1].ece and two.totals[0].label == 0.0


def test_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="a share of the prompts has 90 rounds; 100 are needed in each of 2"):
        fit(made_up(180, sharpness=1.0), has_confidence=True)
    with pytest.raises(DataError, match="has 0 rounds"):
        fit(made_up(500, sharpness=1.0, prompts=1), has_confidence=True)


def test_doubts_are_voiced() -> None:
    """True confidences and enough rounds: none. Confidences that know nothing: the temperatures run to the edge."""
    assert all(fit(made_up(6000, sharpness=2.0), has_confidence=True, method=each).doubts() == [] for each in METHODS)
    played = made_up(2000, sharpness=1.0)
    noise = np.random.default_rng(1).uniform(0.05, 0.95, (2000, 3))
    blind = PlayedRounds(outcomes=played.outcomes.replaced(noise), features=played.features, prompt=played.prompt)
    doubts = fit(blind, has_confidence=True, method="sts").doubts()
    assert any("is the last one tried" in doubt for doubt in doubts)


def test_the_judgement_prints_and_serialises() -> None:
    fitted = fit(made_up(1200, sharpness=2.0), has_confidence=True)
    lines = fitted.lines()
    assert len(lines) == 5 and lines[0].split()[:4] == ["position", "rounds", "T", "bias"] and "all" in lines[-1]
    fields = quality_fields(fitted.before)
    assert len(fields) == 3 and fields[0]["count"] == 600
    nothing = made_up(1200, sharpness=2.0)
    nothing.outcomes.accepted[:] = 0
    assert quality_fields(fit(nothing, has_confidence=True).before)[0]["auc"] is None
