"""Confidences from draft distributions: features by hand, a fit that finds what was put in, and the prefix alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dspark.core import DraftDistribution
from dspark.errors import DataError, ScheduleError
from dspark.maths.calibration import RoundOutcomes, judge, summarise
from dspark.maths.estimator import FEATURES, Estimator, draft_features, fit_estimator, logistic_fit


def test_features_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    features = draft_features(DraftDistribution(probs), 2)
    assert features.shape == (2, len(FEATURES))
    assert features[0].tolist() == pytest.approx([1.0, 0.0, 1.5 * math.log(2), math.log(3)], rel=1e-5)
    bound = math.log((1 - 1e-6) / 1e-6)
    assert features[1].tolist() == pytest.approx([1.0, bound, 0.0, bound], rel=1e-3)


def test_features_do_not_depend_on_the_order_of_the_support() -> None:
    probs = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ids = torch.arange(4, -1, -1).expand(3, 5)
    dense = draft_features(DraftDistribution(probs), 3)
    named = draft_features(DraftDistribution(probs.flip(1), ids), 3)
    assert np.allclose(dense, named, atol=1e-6)


def test_certain_drafts_and_supports_of_one_token() -> None:
    assert draft_features(None, 2).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert draft_features(None, 0).shape == (0, 4)
    assert np.isfinite(draft_features(DraftDistribution(torch.ones(2, 1)), 2)).all()


def played(rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of made-up drafts that survive by a known law of them, and how many of four did."""
    random = np.random.default_rng(seed)
    features = np.concatenate([np.ones((rounds, 4, 1)), random.normal(0.5, 1.0, (rounds, 4, 3))], axis=2)
    logits = features @ np.array([0.3, 1.0, -0.5, 0.0]) + np.array([0.5, 0.0, -0.2, -0.4])
    alive = random.uniform(size=(rounds, 4)) < 1 / (1 + np.exp(-logits))
    return features, np.full(rounds, 4), np.cumprod(alive, axis=1).sum(axis=1)


def test_the_fit_is_true_on_other_rounds() -> None:
    estimator = fit_estimator(*played(6000, 0))
    features, lengths, accepted = played(6000, 1)
    quality = judge(RoundOutcomes(confidence=estimator.confidence(features), lengths=lengths, accepted=accepted))
    assert summarise(quality).ece < 0.02 and quality[0].conditional_auc > 0.7
    assert estimator.weights[0].tolist() == pytest.approx([0.8, 1.0, -0.5, 0.0], abs=0.15)


def test_positions_hardly_reached_lean_on_the_others() -> None:
    features, lengths, accepted = played(2000, 0)
    lengths, accepted = lengths.copy(), accepted.copy()
    lengths[:], accepted[:] = 3, np.minimum(accepted, 3)  # nothing at all is known of the last position
    estimator = fit_estimator(features, lengths, accepted)
    assert estimator.weights[3][1] == pytest.approx(1.0, abs=0.15)


def test_certain_drafts_get_their_positions_rate() -> None:
    random, rounds = np.random.default_rng(0), 5000
    alive = random.uniform(size=(rounds, 3)) < np.array([0.9, 0.6, 0.3])
    features = np.tile(draft_features(None, 3), (rounds, 1, 1))
    estimator = fit_estimator(features, np.full(rounds, 3), np.cumprod(alive, axis=1).sum(axis=1))
    assert estimator.confidence(draft_features(None, 2)).tolist() == pytest.approx([0.9, 0.6], abs=0.03)


def test_separable_data_stay_finite() -> None:
    """All drafts of high logit accepted and no other: without a prior the weights would run away."""
    features = np.stack([np.ones(40), np.linspace(-2, 2, 40)], axis=1)
    weights = logistic_fit(features, features[:, 1] > 0, prior=np.zeros(2), ridge=1.0)
    assert np.isfinite(weights).all() and 1 < weights[1] < 20
    nothing = logistic_fit(features[:0], features[:0, 1] > 0, prior=np.array([0.5, 2.0]), ridge=1.0)
    assert nothing.tolist() == [0.5, 2.0]


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="3 drafts were proposed and the estimator knows 2 positions"):
        Estimator(np.zeros((2, 4))).confidence(np.zeros((3, 4)))
    with pytest.raises(DataError, match="no round has a draft"):
        fit_estimator(np.zeros((2, 3, 4)), np.zeros(2, dtype=int), np.zeros(2, dtype=int))
