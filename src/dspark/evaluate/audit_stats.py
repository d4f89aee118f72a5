"""The statistics of an audit: goodness of fit, how many trials it takes to see a shift, and many tests at once.

Pearson's statistic over c cells, X = sum of (observed - n p)^2 / (n p), follows chi-square with c - 1 degrees of
freedom when the counts come from p, and the noncentral one with noncentrality n * sum of d^2 / p when they come from
p + d. Of all d with a given total variation delta (half of sum |d|) the hardest to see has the smallest sum of d^2 / p:
by Cauchy and Schwarz it is at least delta^2 / m + delta^2 / (1 - m), where m is the mass of the cells that d raises,
and so never below 4 delta^2. Hence

    n >= noncentrality(df, alpha, power) / (4 delta^2)

trials see *every* shift by delta over the cells with at least the stated power; most shifts are seen far sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch

MIN_EXPECTED = 10.0  # trials that a cell must expect; rarer cells share one
SIMULATE_BELOW = 1e-2  # p-values under this are not left to the chi-square approximation ...
HOPELESS = 1e-9  # ... unless they are so small that no approximation error matters
SIMULATION_CHUNK = 20_000

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Outcome of one goodness-of-fit test."""

    trials: int
    cells: int  # after pooling; degrees of freedom + 1
    statistic: float  # Pearson's; inf when something impossible was seen
    p_value: float
    simulated: bool  # whether p_value was counted in simulated samples instead of read off chi-square
    impossible: int  # trials whose outcome has probability 0


def goodness_of_fit(
    counts: Mapping[Outcome, int],
    chances: Mapping[Outcome, float],
    *,
    impossible: int = 0,
    simulations: int = 0,
    seed: int = 0,
) -> Fit:
    """Test that ``counts`` were drawn from ``chances``, outcomes missing from ``chances`` being its remaining mass.

    Outcomes that expect fewer than ``MIN_EXPECTED`` trials are one cell. ``impossible`` is how many of the counted
    trials had an outcome of probability 0: any at all gives a p-value of 0. With ``simulations`` > 0 a small p-value
    is counted in that many samples from ``chances`` (generator seeded by ``seed``) rather than taken from the
    approximation, and is then at least 1 / (simulations + 1).
    """
    trials = sum(counts.values())
    observed, expected = pool(counts, chances, trials)
    if impossible:
        statistic = math.inf
    else:
        statistic = float(((observed - expected) ** 2 / expected).sum()) if len(expected) > 1 else 0.0
    p_value = chi_square_tail(statistic, len(expected) - 1)
    simulated = bool(simulations) and HOPELESS < p_value < SIMULATE_BELOW
    if simulated:
        p_value = _simulated_tail(statistic, expected, trials, simulations, seed)
    return Fit(
        trials=trials,
        cells=len(expected),
        statistic=statistic,
        p_value=p_value,
        simulated=simulated,
        impossible=impossible,
    )


def pool(counts: Mapping[Outcome, int], chances: Mapping[Outcome, float], trials: int) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected trials of every cell. Rare outcomes share the last one, which takes in the rarest of the
    others if it would be too small itself."""
    kept = sorted((c for c, p in chances.items() if p * trials >= MIN_EXPECTED), key=lambda c: -chances[c])
    observed, expected = [float(counts.get(c, 0)) for c in kept], [chances[c] * trials for c in kept]
    observed.append(trials - sum(observed))
    expected.append(max(0.0, trials - sum(expected)))
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:
        last = observed.pop(), expected.pop()
        observed[-1], expected[-1] = observed[-1] + last[0], expected[-1] + last[1]
    return np.array(observed), np.array(expected)


def count_cells(chances: Mapping[Outcome, float], trials: int) -> int:
    """Cells that :func:`pool` makes of ``trials`` trials."""
    return len(pool({}, chances, trials)[1])


def _simulated_tail(statistic: float, expected: np.ndarray, trials: int, simulations: int, seed: int) -> float:
    """Share of samples from the expected cells whose statistic is at least ``statistic``, the observed one included."""
    random, reached, left = np.random.default_rng(seed), 0, simulations
    shares = expected / expected.sum()
    while left > 0:
        samples = random.multinomial(trials, shares, size=min(left, SIMULATION_CHUNK))
        reached += int((((samples - expected) ** 2 / expected).sum(1) >= statistic).sum())
        left -= len(samples)
    return (1 + reached) / (1 + simulations)


# --- chi-square, central and not -------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, df: int) -> float:
    """P(X >= ``statistic``) for chi-square with ``df`` degrees of freedom; 1 with none, unless the statistic is inf."""
    if math.isinf(statistic):
        return 0.0
    if df < 1:
        return 1.0
    return float(torch.special.gammaincc(_f64(df / 2), _f64(statistic / 2)))


@cache
def critical_value(df: int, alpha: float) -> float:
    """The statistic that chance exceeds with probability ``alpha``."""
    return _root(lambda x: chi_square_tail(x, df) <= alpha, start=float(df))


def rejection_chance(df: int, noncentrality: float, alpha: float) -> float:
    """Chance that the test at level ``alpha`` rejects when the counts have this noncentrality.

    Noncentral chi-square is a Poisson mixture of central ones with df + 2j degrees of freedom, j of mean
    noncentrality / 2; terms beyond 12 standard deviations are left out.
    """
    if df < 1:
        return 0.0
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 30
    j = torch.arange(max(0, math.floor(mean - spread)), math.ceil(mean + spread) + 1, dtype=torch.float64)
    log_mean = math.log(mean) if mean > 0 else -math.inf
    log_weights = torch.where(j > 0, j * log_mean, 0.0) - mean - torch.lgamma(j + 1)
    tails = torch.special.gammaincc(df / 2 + j, _f64(critical_value(df, alpha) / 2).expand(len(j)))
    return float((log_weights.exp() * tails).sum())


@cache
def noncentrality_for(df: int, alpha: float, power: float) -> float:
    """The noncentrality that the test at level ``alpha`` sees with chance ``power``."""
    return _root(lambda x: rejection_chance(df, x, alpha) >= power, start=8.0)


def detectable_shift(cells: int, trials: int, *, alpha: float, power: float) -> float:
    """Total variation over ``cells`` cells that ``trials`` trials see with chance ``power``, whatever its shape; at
    most 1, and 1 where there is only one cell."""
    if cells < 2 or trials < 1:
        return 1.0
    return min(1.0, math.sqrt(noncentrality_for(cells - 1, alpha, power) / (4 * trials)))


def trials_needed(chances: Mapping[Outcome, float], *, shift: float, alpha: float, power: float) -> int:
    """Trials after which any ``shift`` in total variation over the cells is seen with chance ``power``.

    More trials leave fewer outcomes to pool, and more cells take more trials: the number is raised until it fits.
    """
    trials = 1
    while True:
        cells = max(2, count_cells(chances, trials))
        wanted = math.ceil(noncentrality_for(cells - 1, alpha, power) / (4 * shift**2))
        if wanted <= trials:
            return trials
        trials = wanted


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those under alpha keeps the chance of any false rejection under alpha, whatever the
    dependence between the tests. Source: Holm 1979."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = floor
    return adjusted


def _root(reached: Callable[[float], bool], *, start: float) -> float:
    """Smallest x, to 1e-9 of itself, at which the monotone condition ``reached`` holds."""
    high = max(start, 1.0)
    while not reached(high):
        high *= 2
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _f64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
