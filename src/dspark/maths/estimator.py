"""Confidences for drafters that have no confidence head, from the distribution each draft was drawn from.

A position's features are functions of q_k, the draft's distribution there, which depends on the prefix x_<k alone;
the drawn x_k is never looked at, so a scheduler that follows these confidences keeps the output exact. A draft that
was certain (greedy decoding, n-gram lookup) has no distribution to look at: there the estimate is its position's
measured acceptance. The estimate is a logistic regression per position, with the pooled one of all positions as its
prior, fitted on rounds that reached the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from dspark.core import DraftDistribution
from dspark.errors import DataError, ScheduleError

FEATURES = ("one", "logit of the top probability", "entropy", "logit of the top two")
LEAST_LOGIT = 1e-6  # probabilities are kept so far from 0 and 1 before their logit is taken
RIDGE = 10.0  # strength of the prior, in rounds


def draft_features(distribution: DraftDistribution | None, block: int) -> Float[np.ndarray, "block features"]:
    """Features of each of ``block`` positions: 1, the logit of the largest probability, the entropy in nats, and the
    logit of the two largest together. Without a distribution, 1 and zeros.
    """
    features = np.zeros((block, len(FEATURES)))
    features[:, 0] = 1.0
    if distribution is not None and block:
        probs = distribution.probs[:block].float()
        top = probs.topk(min(2, probs.shape[1]), -1).values.double()
        logits = torch.logit(top.cumsum(-1), eps=LEAST_LOGIT)
        features[:, 1] = logits[:, 0].cpu().numpy()
        features[:, 2] = torch.special.entr(probs).sum(-1).double().cpu().numpy()
        features[:, 3] = logits[:, -1].cpu().numpy()
    return features


@dataclass(frozen=True, eq=False)
class Estimator:
    """c_k = sigmoid(weights_k . features_k)."""

    weights: Float[np.ndarray, "block features"]

    def confidence(self, features: Float[np.ndarray, "*rows proposed features"]) -> Float[np.ndarray, "*rows proposed"]:
        """Estimates for the first positions of blocks; in (0, 1)."""
        proposed = features.shape[-2]
        if proposed > len(self.weights):
            raise ScheduleError(
                f"{proposed} drafts were proposed and the estimator knows {len(self.weights)} positions; "
                "calibrate this drafter anew"
            )
        return _sigmoid((features * self.weights[:proposed]).sum(-1))


def fit_estimator(
    features: Float[np.ndarray, "rounds block features"],
    lengths: Int[np.ndarray, "rounds"],
    accepted: Int[np.ndarray, "rounds"],
) -> Estimator:
    """Fit on full-length rounds: label of position k is "draft k accepted", over rounds that accepted all before it.

    Raises :class:`DataError` if no round has a draft.
    """
    block = features.shape[1]
    reached = (np.arange(block) < lengths[:, None]) & (np.arange(block) <= accepted[:, None])
    label = np.arange(block) < accepted[:, None]
    if not reached.any():
        raise DataError("no round has a draft to learn from; play more or longer answers")
    weak = np.zeros(features.shape[2])
    pooled = logistic_fit(features[reached], label[reached], prior=weak, ridge=1.0)
    weights = [
        logistic_fit(features[reached[:, k], k], label[reached[:, k], k], prior=pooled, ridge=RIDGE)
        for k in range(block)
    ]
    return Estimator(np.stack(weights))


def logistic_fit(
    features: Float[np.ndarray, "samples features"],
    label: Bool[np.ndarray, "samples"],
    *,
    prior: Float[np.ndarray, "features"],
    ridge: float,
    steps: int = 50,
) -> Float[np.ndarray, "features"]:
    """Weights of the least log loss plus ``ridge``/2 times the squared distance from ``prior``, by damped Newton
    steps. Without samples, the prior.
    """
    weights = prior.astype(np.float64)

    def loss(w: Float[np.ndarray, "features"]) -> float:
        logits = features @ w
        return float((np.logaddexp(0.0, logits) - label * logits).sum() + 0.5 * ridge * np.square(w - prior).sum())

    current = loss(weights)
    for _ in range(steps):
        chance = _sigmoid(features @ weights)
        gradient = features.T @ (chance - label) + ridge * (weights - prior)
        curvature = (features * (chance * (1.0 - chance))[:, None]).T @ features + ridge * np.eye(len(prior))
        move, share = np.linalg.solve(curvature, gradient), 1.0
        while (found := loss(weights - share * move)) > current and share > 1e-6:
            share *= 0.5
        if current - found < 1e-10 * max(1.0, current):
            break
        weights, current = weights - share * move, found
    return weights


def _sigmoid(logits: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    return 1.0 / (1.0 + np.exp(-logits.clip(-60.0, 60.0)))
