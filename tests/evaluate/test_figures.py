"""Figures of a run, each by hand on a few rounds."""

from __future__ import annotations

import json
import math

import pytest

from dspark.core import Completion, RoundRecord
from dspark.evaluate.figures import (
    Divergence,
    Pair,
    acceptance_length,
    agreement,
    conditional_acceptance,
    domain_figures,
    mean_figures,
    plain_data,
    prefix_acceptance,
    stage_times,
)


def a_round(accepted: int, *, verify_len: int = 3, bonus: bool = True, ms: float = 10.0) -> RoundRecord:
    return RoundRecord(
        draft_tokens=tuple(range(verify_len)),
        confidence=(),
        verify_len=verify_len,
        accepted=accepted,
        committed=tuple(range(accepted + bonus)),
        draft_seconds=0.2 * ms / 1e3,
        sequential_seconds=0.05 * ms / 1e3,
        verify_seconds=0.7 * ms / 1e3,
        host_seconds=0.1 * ms / 1e3,
    )


def a_completion(rounds: tuple[RoundRecord, ...], *, seconds: float = 1.0) -> Completion:
    tokens = 1 + sum(len(r.committed) for r in rounds)
    return Completion(
        token_ids=tuple(range(tokens)),
        finish_reason="length",
        rounds=rounds,
        prefill_seconds=0.1,
        decode_seconds=seconds,
    )


# accepted 3 of 3, 1 of 3, 0 of 2, and a stop token as the second draft: no bonus, the third draft's fate unknown
ROUNDS = (a_round(3), a_round(1), a_round(0, verify_len=2), a_round(2, bonus=False))


def test_acceptance_length_counts_the_bonus_but_not_in_a_round_that_stops() -> None:
    assert acceptance_length(ROUNDS) == (4 + 2 + 1 + 2) / 4


def test_prefix_acceptance_by_hand() -> None:
    # position 0: 3 of 4 survive; position 1: 2 of 4; position 2: proposed in the first two rounds only
    assert prefix_acceptance(ROUNDS) == (3 / 4, 2 / 4, 1 / 2)


def test_conditional_acceptance_by_hand() -> None:
    # position 1 is reached by rounds 0, 1 and 3; position 2 by round 0 alone (round 3 ended before it)
    assert conditional_acceptance(ROUNDS) == (3 / 4, 2 / 3, 1.0)


def test_conditional_products_are_prefix_when_every_round_proposes_all() -> None:
    rounds = [a_round(n) for n in (0, 1, 1, 2, 3, 3, 3, 0)]
    product = 1.0
    for prefix, conditional in zip(prefix_acceptance(rounds), conditional_acceptance(rounds), strict=True):
        product *= conditional
        assert math.isclose(product, prefix)


def test_a_position_that_no_round_reaches_is_nan_not_zero() -> None:
    rounds = [a_round(0), a_round(0)]
    assert prefix_acceptance(rounds) == (0.0, 0.0, 0.0)
    first, second, third = conditional_acceptance(rounds)
    assert first == 0.0 and math.isnan(second) and math.isnan(third)


def test_no_rounds_have_no_figures() -> None:
    assert math.isnan(acceptance_length(())) and prefix_acceptance(()) == () and conditional_acceptance(()) == ()
    assert math.isnan(stage_times(()).round)


def test_stage_times_are_medians_in_milliseconds_and_take_the_sequential_part_out_of_the_draft() -> None:
    times = stage_times([a_round(1, ms=ms) for ms in (10.0, 10.0, 500.0)])
    assert times.draft == pytest.approx(1.5) and times.sequential == pytest.approx(0.5)
    assert times.verify == pytest.approx(7.0) and times.host == pytest.approx(1.0)
    assert times.round == pytest.approx(10.0)


def test_agreement_separates_near_ties_from_faults() -> None:
    found = [
        None,
        Divergence(position=3, gap=0.1),
        Divergence(position=3, gap=0.5),  # the tolerance itself is in
        Divergence(position=3, gap=2.0),  # no rounding explains this one
    ]
    result = agreement(found, tolerance=0.5)
    assert (result.count, result.total, result.near_ties, result.largest_gap) == (1, 4, 2, 2.0)


def pair(domain: str, *, drafted: float, plain: float, peer: float | None = None, **kwargs: Divergence) -> Pair:
    """A pair whose ways take ``drafted`` and ``plain`` seconds for the same nine tokens after the first."""
    return Pair(
        domain=domain,
        drafted=a_completion(ROUNDS, seconds=drafted),
        plain=a_completion(tuple(a_round(0, verify_len=0) for _ in range(9)), seconds=plain),
        divergence=kwargs.get("divergence"),
        peer_tokens_per_second=peer,
    )


def test_speedup_is_the_ratio_of_median_speeds() -> None:
    pairs = [pair("math", drafted=1.0, plain=2.0), pair("math", drafted=1.0, plain=2.0, peer=3.0)]
    pairs.append(pair("math", drafted=50.0, plain=2.0))  # one hiccup moves no median
    figures = domain_figures(pairs, greedy=True, tolerance=0.5)
    assert figures.tokens_per_second == pytest.approx(9.0)
    assert figures.plain_tokens_per_second == pytest.approx(4.5)
    assert figures.speedup == pytest.approx(2.0)
    assert figures.peer_speedup == pytest.approx(3.0)
    assert figures.identical is not None and (figures.identical.count, figures.identical.total) == (3, 3)


def test_sampled_output_is_not_said_to_be_identical() -> None:
    figures = domain_figures([pair("chat", drafted=1.0, plain=2.0)], greedy=False, tolerance=0.5)
    assert figures.identical is None and mean_figures([figures]).identical is None


def test_mean_weighs_domains_alike_and_sums_counts() -> None:
    fast = domain_figures([pair("math", drafted=1.0, plain=3.0)] * 3, greedy=True, tolerance=0.5)
    parted = Divergence(position=1, gap=0.25)
    slow = domain_figures([pair("code", drafted=1.0, plain=1.0, divergence=parted)], greedy=True, tolerance=0.5)
    mean = mean_figures([fast, slow])
    assert mean.speedup == pytest.approx(2.0) and mean.prompts == 4
    assert mean.peer_speedup is None
    assert mean.identical is not None
    assert (mean.identical.count, mean.identical.total, mean.identical.near_ties) == (3, 4, 1)
    assert mean.prefix_acceptance == pytest.approx(prefix_acceptance(ROUNDS))


def test_plain_data_is_strict_json() -> None:
    figures = domain_figures([pair("math", drafted=1.0, plain=2.0)], greedy=True, tolerance=0.5)
    text = json.dumps(plain_data({"a": figures, "b": (math.nan, math.inf, 1.23456)}), allow_nan=False)
    assert json.loads(text)["b"] == [None, None, 1.2346]
    assert json.loads(text)["a"]["round_ms"]["verify"] == pytest.approx(7.0)
