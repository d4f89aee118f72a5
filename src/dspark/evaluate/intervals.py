"""Bootstrap confidence intervals over prompts: how far a figure would move with other prompts of the same kind.

Rounds of one answer resemble each other, so they are not the sample: conversations are. They are drawn again with
replacement, each with all its rounds; figures of a domain draw inside each of its sets, as the mean over sets does.
Two drafters that are compared answered the same prompts, so both are given the same draws and the interval is that of
their difference: what prompts have in common cancels.

Percentile intervals. With few prompts they come out too narrow: of 2,000 simulated samples 88 % held the truth at 8
prompts and 93 % at 40, instead of 95; with one prompt there is no interval.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ConfigError

DRAWS, LEVEL = 2000, 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its interval; ``low`` and ``high`` are None where a set has one prompt, which shows no spread."""

    value: float  # nan where there was nothing to count
    low: float | None = None
    high: float | None = None

    def map(self, number: float) -> Estimate:
        """All three times ``number``, which is positive."""
        return Estimate(
            value=self.value * number,
            low=None if self.low is None else self.low * number,
            high=None if self.high is None else self.high * number,
        )


def resamples(count: int, name: str, *, draws: int = DRAWS, seed: int = 0) -> Int[np.ndarray, "draws count"]:
    """Prompts of each draw, with replacement: the same for equal ``count``, ``name`` and ``seed``, for any drafter."""
    if count < 1 or draws < 1:
        raise ConfigError(f"count is {count} and draws is {draws}; both must be 1 or more")
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
    return np.random.default_rng(key).integers(count, size=(draws, count))


def weights_of(chosen: Int[np.ndarray, "draws count"]) -> Float[np.ndarray, "draws count"]:
    """How often each prompt is in each draw; sums over drawn prompts are products with it."""
    draws, count = chosen.shape
    places = chosen + count * np.arange(draws)[:, None]
    return np.bincount(places.ravel(), minlength=draws * count).reshape(draws, count).astype(np.float64)


def estimate(value: float, drawn: Float[np.ndarray, "draws"], *, prompts: int, level: float = LEVEL) -> Estimate:
    """``value`` with the middle ``level`` of ``drawn``; no interval if the smallest set has one prompt, or if no draw
    gave a number."""
    known = drawn[~np.isnan(drawn)]
    if prompts < 2 or not len(known):
        return Estimate(value=float(value))
    low, high = np.quantile(known, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Estimate(value=float(value), low=float(low), high=float(high))


def mean_over(rows: Float[np.ndarray, "sets *rest"]) -> Float[np.ndarray, "*rest"]:
    """Mean over sets at every place, leaving out sets that have no number there; nan where none has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a mean of nothing, which is the nan that we want
        return np.nanmean(rows, axis=0)
