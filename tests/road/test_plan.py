"""The plan's arithmetic: time is shared out whole, and what is too little is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from dspark.errors import ConfigError
from dspark.models.draft_config import DraftConfig
from dspark.road.plan import (
    REACHED,
    Plan,
    best_block,
    expected_gain,
    make_plan,
    plan_lines,
    survival_chances,
)
from dspark.road.probe import Probe

SHAPE = DraftConfig(
    vocab_size=49152,
    hidden_size=576,
    num_target_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    num_hidden_layers=2,
    target_layer_ids=(1, 14, 27),
    draft_vocab_size=12288,
)
SMALL = Probe(  # what a model of 135 M parameters does on two cores
    pass_seconds=((1, 0.0236), (4, 0.0245), (6, 0.0250), (8, 0.0253)),
    rows=64,
    sampling_seconds=0.053,
    sample_tokens=256,
    sample_seconds=0.3,
    target_parameters=135_000_000,
    memory_free=14 << 30,
    disk_free=70 << 30,
)


def planned(probe: Probe = SMALL, budget: float = 3600.0, spent: float = 20.0, **changes: object) -> Plan:
    settings = {"draft_parameters": 16_000_000, "max_new_tokens": 256, "own_prompts": True, **changes}
    return make_plan(probe, SHAPE, budget=budget, left=budget - spent, **settings)


@pytest.mark.parametrize("budget", [900.0, 3600.0, 6 * 3600.0])
def test_the_stages_fill_the_budget(budget: float) -> None:
    plan = planned(budget=budget)
    assert list(plan.seconds) == ["prompts", "answers", "train", "calibrate", "profile", "compare"]
    assert min(plan.seconds.values()) > 0
    assert 0.97 * budget <= sum(plan.seconds.values()) + 20.0 <= budget
    assert plan.seconds["train"] > 0.5 * budget
    assert plan.prompts == plan.answers + plan.calibration_prompts + plan.compare_prompts
    assert 0.8 * plan.answers <= plan.steps <= plan.answers  # a step sees one answer for the first time


def test_given_prompts_leave_more_time() -> None:
    assert planned(own_prompts=False).seconds["prompts"] == 0.0
    assert planned(own_prompts=False).steps > planned().steps


def test_numbers_that_the_user_fixed_stand() -> None:
    plan = planned(answers=50, steps=7, budget=200.0)
    assert (plan.answers, plan.steps) == (50, 7)


def test_too_little_time_is_refused_with_the_time_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"budget is 1:00, too little .* at least (\d+:\d+)") as error:
        planned(budget=60.0)
    minutes, seconds = str(error.value).split("at least ")[1].split(":")
    planned(budget=60.0 * int(minutes) + int(seconds))


def test_too_little_memory_or_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match="GB of memory beside the model"):
        planned(replace(SMALL, memory_free=200 << 20))
    with pytest.raises(ConfigError, match="choose another disk"):
        planned(replace(SMALL, disk_free=200 << 20))


def test_slow_models_are_evaluated_less_and_profiled_more_coarsely() -> None:
    slow = replace(SMALL, pass_seconds=tuple((n, 40 * s) for n, s in SMALL.pass_seconds), sampling_seconds=2.0)
    plan = planned(slow, budget=6 * 3600.0)
    assert plan.evaluate_prompts < planned().evaluate_prompts
    assert plan.profile_requests * plan.profile_repeats < planned().profile_requests * planned().profile_repeats


def test_the_gain_is_tokens_over_cost() -> None:
    free = replace(SMALL, pass_seconds=((1, 1.0), (8, 1.0)))
    shape = replace(SHAPE, draft_vocab_size=1)  # next to no head
    for slots, least, most in REACHED:
        found = expected_gain(free, shape, 0, slots=slots)
        assert found == pytest.approx((least / 1.1, most), rel=1e-3)
    half = expected_gain(free, shape, SMALL.target_parameters // 2, slots=REACHED[0][0])
    assert half == pytest.approx((REACHED[0][1] / 1.6, REACHED[0][2] / 1.5), rel=1e-3)
    with_head = expected_gain(free, SHAPE, 0, slots=REACHED[0][0])
    assert with_head[1] == pytest.approx(REACHED[0][2] / (1 + 576 * 12288 / SMALL.target_parameters), rel=1e-3)
    dear = replace(SMALL, pass_seconds=((1, 1.0), (8, 8.0)))
    assert expected_gain(dear, SHAPE, 0, slots=10**9)[1] < 1.0
    assert any("may not pay" in line for line in plan_lines(planned(dear, budget=1e6), dear, facts()))


def test_what_is_expected_grows_with_the_training_that_the_budget_allows() -> None:
    gains = [planned(budget=budget).gain for budget in (600.0, 1800.0, 7200.0)]
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(gains))
    known = [survival_chances(slots) for slots in (1, 10**5, 300_000, 10**6, 10**7, 10**9)]
    assert known[0] == known[1] and known[-1] == known[-2], "nothing is known outside"
    assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(known)) and all(0 < a < b < 1 for a, b in known)


def test_blocks_are_as_long_as_passes_are_cheap() -> None:
    assert best_block(SMALL, (7, 5, 3)) == 7
    assert best_block(replace(SMALL, pass_seconds=((1, 1.0), (4, 1.1), (6, 3.0), (8, 5.0))), (7, 5, 3)) == 3
    assert best_block(replace(SMALL, pass_seconds=((1, 1.0), (8, 1.0))), (7, 5, 3)) == 7


def test_the_plan_names_time_disk_memory_and_gain() -> None:
    text = "\n".join(plan_lines(planned(), SMALL, facts()))
    for words in (
        "135 M parameters",
        "23.6 ms",
        "25.3 ms over eight",
        "that it writes",
        "1208 tokens/s",
        "GB",
        "times",
    ):
        assert words in text, words


def test_a_plan_survives_the_ledger() -> None:
    plan = planned()
    fields = asdict(plan)
    assert Plan(**{**fields, "gain": tuple(list(fields["gain"]))}) == plan


def facts() -> dict[str, str]:
    return {"model": "m", "dtype": "bfloat16", "device": "cpu", "drafter": "d", "prompts": "that it writes"}
