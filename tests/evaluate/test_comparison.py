"""Figures and intervals by hand, pairing, and the share of intervals that hold the truth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_records import answer_of, drawn_rounds, facts, round_of, save_cell

from dspark.errors import ConfigError, DataError
from dspark.evaluate.comparison import compare
from dspark.evaluate.figures import acceptance_length, conditional_acceptance, prefix_acceptance
from dspark.evaluate.intervals import estimate, resamples, weights_of
from dspark.evaluate.records import AnswerRecord, Cell
from dspark.evaluate.tables import comparison_data, markdown, tables
from dspark.evaluate.tally import sum_ratio, tally


def answers(lengths: dict[str, list[list[int]]], block: int, slow: float = 1.0) -> list[AnswerRecord]:
    """Accepted lengths of every round, by set and prompt."""
    domain = {"gsm8k": "math", "math500": "math", "alpaca": "chat"}
    return [
        answer_of([round_of(k, block, slow=slow) for k in rounds], name=name, domain=domain[name], prompt=f"p{i}")
        for name, prompts in lengths.items()
        for i, rounds in enumerate(prompts)
    ]


GOOD = {"gsm8k": [[3, 1, 0], [2, 3]], "math500": [[0, 1], [3, 3]], "alpaca": [[1, 0], [0, 0], [2, 1]]}
POOR = {name: [[max(0, k - 1) for k in rounds] for rounds in prompts] for name, prompts in GOOD.items()}


def cells(folder: Path) -> list[Cell]:
    plain = {name: [[0] * 3 for _ in prompts] for name, prompts in GOOD.items()}
    return [
        save_cell(folder, "none", 0.0, answers(plain, 0), about=facts("none", 0)),
        save_cell(folder, "good", 0.0, answers(GOOD, 3), about=facts("dspark", 3), order=1),
        save_cell(folder, "poor", 0.0, answers(POOR, 3, slow=2.0), about=facts("eagle3", 3), order=2),
    ]


def test_figures_by_hand(tmp_path: Path) -> None:
    (at,) = compare(cells(tmp_path), draws=200).temperatures
    none, good, poor = at.drafters
    rounds = [r for a in answers(GOOD, 3) if a.set == "gsm8k" for r in a.rounds]
    gsm8k = good.sets["gsm8k"]
    assert gsm8k.acceptance_length.value == acceptance_length(rounds) == 14 / 5
    assert tuple(e.value for e in gsm8k.prefix_acceptance) == pytest.approx(prefix_acceptance(rounds))
    assert tuple(e.value for e in gsm8k.conditional_acceptance) == pytest.approx(conditional_acceptance(rounds))
    assert gsm8k.committed_per_verified.value == 14 / (5 * 4)
    math_mean = (14 / 5 + 11 / 4) / 2
    assert good.domains["math"].acceptance_length.value == pytest.approx(math_mean)
    assert good.mean.acceptance_length.value == pytest.approx((14 / 5 + 11 / 4 + 10 / 6) / 3)
    assert good.mean.prompts == 7 and good.left_out == 0
    # a plain round takes 20.5 ms, a drafted one 23.5 (of which 1 sequential)
    assert gsm8k.tokens_per_second is not None and gsm8k.speedup is not None
    speeds = [7 / (3 * 0.0235), 7 / (2 * 0.0235)]
    assert gsm8k.tokens_per_second.value == pytest.approx(np.median(speeds), rel=1e-4)
    assert gsm8k.speedup.value == pytest.approx(np.median(speeds) * 0.0205, rel=1e-4)
    assert good.mean.sequential_share == pytest.approx(1 / 23.5, rel=1e-4)
    assert good.mean.round_ms is not None and good.mean.round_ms.verify == pytest.approx(20.0)
    assert none.mean.speedup is not None and none.mean.speedup.value == 1.0
    assert good.identical == (0, 7) and poor.kind == "eagle3"
    (difference,) = at.differences
    assert (difference.label, difference.against) == ("poor", "good")
    assert difference.acceptance_length["gsm8k"].value == pytest.approx(10 / 5 - 14 / 5)
    assert difference.acceptance_ratio["gsm8k"].value == pytest.approx(10 / 14)


def test_only_answers_that_all_have_count(tmp_path: Path) -> None:
    three = cells(tmp_path)
    less = replace(three[2], answers=tuple(a for a in three[2].answers if (a.set, a.prompt) != ("alpaca", "p2")))
    (at,) = compare([*three[:2], less], draws=50).temperatures
    assert [d.left_out for d in at.drafters] == [1, 1, 0]
    assert {d.sets["alpaca"].prompts for d in at.drafters} == {2}
    with pytest.raises(DataError, match="no answered prompt in common"):
        compare([three[0], replace(less, answers=())])
    other = replace(three[1], answers=tuple(replace(a, asked="other") for a in three[1].answers))
    with pytest.raises(DataError, match="asked in different words"):
        compare([three[0], other])
    with pytest.raises(ConfigError, match="there are records of good, none, poor"):
        compare(three, against="best")
    with pytest.raises(ConfigError, match="is there twice"):
        compare([three[0], three[0]])


def test_shared_passes_have_no_speeds(tmp_path: Path) -> None:
    shared = [replace(cell, made_for={**cell.made_for, "rows": 4}) for cell in cells(tmp_path)]
    (at,) = compare(shared, draws=50).temperatures
    assert at.drafters[1].mean.speedup is None and at.drafters[1].mean.tokens_per_second is None
    assert at.differences[0].speed_ratio is None


def test_a_set_called_like_a_domain_is_refused(tmp_path: Path) -> None:
    some = [*answers(GOOD, 3), answer_of([round_of(1, 3)], name="math", domain="math")]
    with pytest.raises(DataError, match="a set is called 'math'"):
        compare([save_cell(tmp_path, "good", 0.0, some, about=facts("dspark", 3))])


def test_draws_are_the_same_for_every_drafter_and_other_for_every_set() -> None:
    one = resamples(9, "gsm8k", draws=50)
    assert (one == resamples(9, "gsm8k", draws=50)).all() and (one != resamples(9, "alpaca", draws=50)).any()
    assert one.min() == 0 and one.max() == 8
    weights = weights_of(one)
    assert (weights.sum(1) == 9).all() and weights[3, 4] == (one[3] == 4).sum()


def test_one_prompt_has_no_interval() -> None:
    assert estimate(2.0, np.array([2.0, 2.0]), prompts=1).low is None
    found = estimate(2.0, np.linspace(1.0, 3.0, 1001), prompts=4)
    assert found.low == pytest.approx(1.05) and found.high == pytest.approx(2.95)
    assert math.isnan(estimate(float("nan"), np.array([np.nan]), prompts=4).value)


@pytest.mark.parametrize(("prompts", "least", "most"), [(8, 0.84, 0.96), (40, 0.91, 0.98)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts: int, least: float, most: float) -> None:
    """Acceptance lengths of prompts that differ among themselves; the truth is the ratio of means over very many."""
    random, held, trials = np.random.default_rng(5), 0, 400

    def sample(count: int) -> tuple[np.ndarray, np.ndarray]:
        rounds = random.integers(20, 60, size=count).astype(float)
        return rounds, rounds * (2.0 + random.normal(0.0, 0.4, size=count))

    many_rounds, many_tokens = sample(400_000)
    truth = many_tokens.sum() / many_rounds.sum()
    base = tally([answer_of([round_of(0, 1)], prompt=f"p{i}") for i in range(prompts)], block=1)
    for trial in range(trials):
        rounds, tokens = sample(prompts)
        sums = base.sums.copy()
        sums[:, 0], sums[:, 1] = rounds, tokens
        weights = weights_of(resamples(prompts, "set", draws=400, seed=trial))
        found = estimate(0.0, sum_ratio(replace(base, sums=sums), weights, "committed", "rounds"), prompts=prompts)
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert least <= held / trials <= most, held / trials


def test_pairing_narrows_the_interval_of_a_difference(tmp_path: Path) -> None:
    """Two drafters that differ by little on prompts that differ by much."""
    random = np.random.default_rng(2)
    ease = random.uniform(0.2, 0.8, size=30)
    one = [drawn_rounds(random, 40, [e] * 3) for e in ease]
    two = [drawn_rounds(random, 40, [e + 0.12] * 3) for e in ease]
    three = [
        save_cell(
            tmp_path, name, 1.0, [answer_of(r, prompt=f"p{i}") for i, r in enumerate(rounds)], about=facts("dspark", 3)
        )
        for name, rounds in (("one", one), ("two", two))
    ]
    (at,) = compare(three, draws=1000).temperatures
    difference = at.differences[0].acceptance_length["mean"]
    assert difference.low is not None and difference.high is not None and difference.low > 0
    widths = [e.high - e.low for d in at.drafters for e in [d.mean.acceptance_length] if e.high and e.low]
    assert difference.high - difference.low < 0.7 * min(widths)


def test_tables_and_json_hold_every_figure(tmp_path: Path) -> None:
    comparison = compare(cells(tmp_path), draws=100)
    text = markdown(tables(comparison), heading="Evaluation", facts=["model tiny"])
    for words in ("| gsm8k | 2 |", "| = math | 4 |", "| = all | 7 |", "| poor | mean |", "greedy: prefix acceptance"):
        assert words in text, words
    assert all(
        line.count("|") == text.split("\n")[i - 1].count("|") or not line.startswith("|---")
        for i, line in enumerate(text.split("\n"))
    )
    data = json.loads(json.dumps(comparison_data(comparison), allow_nan=False))
    good = data["temperatures"][0]["drafters"][1]
    assert good["sets"]["gsm8k"]["acceptance_length"]["value"] == 2.8 and good["mean"]["speedup"]["low"] > 1
