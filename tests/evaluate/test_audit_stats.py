"""The audit's statistics against closed forms, tabulated values and simulation."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dspark.evaluate.audit_stats import (
    MIN_EXPECTED,
    chi_square_tail,
    count_cells,
    critical_value,
    detectable_shift,
    goodness_of_fit,
    holm,
    noncentrality_for,
    pool,
    rejection_chance,
    trials_needed,
)


@pytest.mark.parametrize(("df", "alpha", "value"), [(1, 0.05, 3.841459), (10, 0.001, 29.588298), (50, 0.01, 76.153891)])
def test_critical_values_are_the_tabulated_ones(df: int, alpha: float, value: float) -> None:
    assert critical_value(df, alpha) == pytest.approx(value, abs=1e-5)


def test_tail_of_two_degrees_is_an_exponential() -> None:
    assert chi_square_tail(7.0, 2) == pytest.approx(math.exp(-3.5), rel=1e-12)
    assert chi_square_tail(0.0, 5) == 1.0 and chi_square_tail(3.0, 0) == 1.0
    assert chi_square_tail(math.inf, 0) == chi_square_tail(math.inf, 9) == 0.0


def test_power_of_one_degree_is_that_of_a_shifted_normal() -> None:
    edge, shift = math.sqrt(critical_value(1, 0.01)), 2.5

    def normal_tail(x: float) -> float:
        return 0.5 * math.erfc(x / math.sqrt(2))

    assert rejection_chance(1, shift**2, 0.01) == pytest.approx(normal_tail(edge - shift) + normal_tail(edge + shift))


@pytest.mark.parametrize(("df", "alpha", "power"), [(1, 0.05, 0.8), (30, 1e-4, 0.9), (400, 1e-5, 0.95)])
def test_noncentrality_gives_the_power_it_was_asked_for(df: int, alpha: float, power: float) -> None:
    assert rejection_chance(df, noncentrality_for(df, alpha, power), alpha) == pytest.approx(power, abs=1e-6)
    assert rejection_chance(df, 0.0, alpha) == pytest.approx(alpha, rel=1e-6)


def test_the_hardest_shift_is_seen_with_the_power_promised() -> None:
    """Half of the mass moves by delta in the direction that chi-square sees worst; 400 audits see it as promised."""
    chances = {i: 1 / 8 for i in range(8)}
    alpha, power, delta = 1e-2, 0.9, 0.08
    trials = trials_needed(chances, shift=delta, alpha=alpha, power=power)
    shifted = np.array([1 / 8 + delta / 4 * (1 if i < 4 else -1) for i in range(8)])
    random = np.random.default_rng(0)
    caught = sum(
        goodness_of_fit(dict(enumerate(sample.tolist())), chances).p_value < alpha
        for sample in random.multinomial(trials, shifted, size=400)
    )
    assert abs(caught / 400 - power) < 4 * math.sqrt(power * (1 - power) / 400)
    assert detectable_shift(8, trials, alpha=alpha, power=power) == pytest.approx(delta, rel=2e-3)


def test_honest_counts_are_rejected_as_often_as_alpha_says() -> None:
    chances = {i: p for i, p in enumerate([0.4, 0.3, 0.2, 0.06, 0.03, 0.005, 0.005])}
    random = np.random.default_rng(1)
    samples = random.multinomial(1000, list(chances.values()), size=1000)
    small = sum(goodness_of_fit(dict(enumerate(s.tolist())), chances).p_value < 0.05 for s in samples)
    assert 25 < small < 80


def test_rare_outcomes_share_a_cell_and_totals_agree() -> None:
    chances = {"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.06, "e": 0.04}
    counts = Counter(a=52, b=30, c=9, d=5, e=3, f=1)  # f is not among the outcomes listed: it is rare
    observed, expected = pool(counts, chances, 100)
    assert expected.tolist() == pytest.approx([50, 30, 10, 10]) and observed.tolist() == [52, 30, 9, 9]
    observed, expected = pool(counts - Counter(a=10), chances, 90)
    assert expected.tolist() == pytest.approx([45, 27, 18]) and observed.tolist() == [42, 30, 18]
    for trials in (1, 15, 90, 100, 1000):
        observed, expected = pool({"a": trials}, chances, trials)
        assert observed.sum() == trials == pytest.approx(expected.sum())
        assert len(expected) == count_cells(chances, trials)
        assert len(expected) == 1 or expected.min() >= MIN_EXPECTED


def test_a_single_outcome_fits_and_an_impossible_one_does_not() -> None:
    assert goodness_of_fit({"a": 50}, {"a": 1.0}).p_value == 1.0
    seen = goodness_of_fit({"a": 49, "b": 1}, {"a": 1.0}, impossible=1)
    assert seen.p_value == 0.0 and seen.impossible == 1 and seen.statistic == math.inf


def test_small_p_values_are_counted_in_simulated_samples() -> None:
    chances = {i: 0.1 for i in range(10)}
    counts = {i: 100 + (36 if i == 0 else -36 if i == 1 else 0) for i in range(10)}
    approximate, simulated = (goodness_of_fit(counts, chances, simulations=n) for n in (0, 100_000))
    assert not approximate.simulated and simulated.simulated
    assert simulated.p_value == pytest.approx(approximate.p_value, rel=0.15)
    hopeless = {i: 1000 if i == 0 else 0 for i in range(10)}
    assert not goodness_of_fit(hopeless, chances, simulations=100).simulated


def test_more_is_needed_for_less() -> None:
    chances = {i: 2.0 ** -(i + 1) for i in range(20)}
    needed = [trials_needed(chances, shift=s, alpha=1e-4, power=0.9) for s in (0.1, 0.05, 0.02)]
    assert needed[0] < needed[1] < needed[2]
    for shift, trials in zip((0.1, 0.05, 0.02), needed, strict=True):
        cells = count_cells(chances, trials)
        assert detectable_shift(cells, trials, alpha=1e-4, power=0.9) <= shift
    assert detectable_shift(1, 10**6, alpha=1e-4, power=0.9) == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == [] and holm([0.0, 0.2])[0] == 0.0
