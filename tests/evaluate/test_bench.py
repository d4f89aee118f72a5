"""Measuring: the order of the ways, what is warmed up, where outputs part, prompt files, and the cost table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TableTarget
from torch import Tensor

import dspark.evaluate.bench as bench
from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError, DataError, RequestError
from dspark.evaluate.bench import BenchConfig, BenchPrompt, measure, near_tie_gap, prompts_of, read_prompts
from dspark.evaluate.demo_prompts import DEMO_PER_DOMAIN, PROMPTS
from dspark.evaluate.peer import PeerRun
from dspark.evaluate.profile import profile_sps
from dspark.maths.scheduling import FixedScheduler
from dspark.models.drafter import NoDrafter
from dspark.models.ngram import NgramDrafter

PROMPT_IDS = [("a", [0, 1, 2, 3, 0, 1]), ("b", [3, 3, 1]), ("a", [2, 0])]


class CountingPeer:
    """An engine that writes zeros at a fixed speed and remembers what it was asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def run(self, prompt_ids: Any, *, sampling: SamplingParams, max_new_tokens: int, stop_token_ids: Any) -> PeerRun:
        self.asked.append(max_new_tokens)
        return PeerRun(token_ids=(0,) * max_new_tokens, tokens_per_second=50.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(drafter, max_new_tokens) of every run, in order; the runs themselves are real."""
    seen: list[tuple[str, int]] = []

    def noted(target: Any, drafter: Any, *rest: Any, **options: Any) -> Any:
        seen.append((drafter.name, options["max_new_tokens"]))
        return generate(target, drafter, *rest, **options)

    monkeypatch.setattr(bench, "generate", noted)
    return seen


def run(config: BenchConfig, peer: CountingPeer | None = None) -> list:
    pairs = measure(TableTarget(), NgramDrafter(), PROMPT_IDS, config, scheduler=FixedScheduler(), peer=peer)
    return list(pairs)


def test_ways_alternate_after_a_short_warm_up_of_each(calls: list[tuple[str, int]]) -> None:
    peer = CountingPeer()
    run(BenchConfig(max_new_tokens=20), peer)
    warm, long = bench.WARM_UP_TOKENS, 20
    assert calls[:2] == [("ngram", warm), ("none", warm)]
    assert calls[2:] == [(name, long) for name in ("ngram", "none", "none", "ngram", "ngram", "none")]
    assert peer.asked == [warm, long, long, long]


def test_greedy_pairs_agree_and_carry_their_domain() -> None:
    pairs = run(BenchConfig(max_new_tokens=20), CountingPeer())
    assert [p.domain for p in pairs] == ["a", "b", "a"]
    for pair in pairs:
        assert pair.divergence is None and pair.peer_tokens_per_second == 50.0
        assert pair.drafted.token_ids == pair.plain.token_ids and len(pair.plain.rounds) == 19
    assert len(pairs[0].drafted.rounds) < 19  # something was drafted at all


def test_sampled_pairs_are_not_compared() -> None:
    config = BenchConfig(max_new_tokens=12, sampling=SamplingParams(temperature=1.0, seed=5))
    pairs = run(config)
    assert all(p.divergence is None for p in pairs)
    assert any(p.drafted.token_ids != p.plain.token_ids for p in pairs)


def test_no_prompts_no_pairs() -> None:
    assert list(measure(TableTarget(), NoDrafter(), [], BenchConfig(), scheduler=FixedScheduler())) == []


def test_a_speed_takes_two_tokens() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens is 1"):
        BenchConfig(max_new_tokens=1)


# --- near-ties -------------------------------------------------------------------------------------------------------


def test_outputs_that_agree_do_not_part() -> None:
    assert near_tie_gap(TableTarget(), [0, 1], [2, 3, 1], [2, 3, 1]) is None
    assert near_tie_gap(TableTarget(), [0, 1], [2, 3, 1], [2, 3]) is None  # cut by a limit


def test_gap_is_read_where_outputs_part() -> None:
    target, prompt = TableTarget(vocab_size=4), [0, 1]
    common = [2, 3]
    ranked = target.next_probs([*prompt, *common], SamplingParams(temperature=1.0)).log().sort(descending=True)
    best, second, third = ranked.indices.tolist()[:3]
    gaps = (ranked.values[0] - ranked.values).tolist()
    for tokens, gap in (((best, second), gaps[1]), ((second, best), gaps[1]), ((second, third), gaps[2])):
        found = near_tie_gap(target, prompt, [*common, tokens[0], 0], [*common, tokens[1], 1])
        assert found is not None and found.position == 2
        assert found.gap == pytest.approx(gap, abs=1e-5)


def test_tolerances_grow_with_the_rounding() -> None:
    exact, half, brain = (bench.near_tie_tolerance(t) for t in (torch.float32, torch.float16, torch.bfloat16))
    assert 0 < exact < half < brain


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_domains_take_turns() -> None:
    found = prompts_of({"a": ["1", "2", "3"], "b": ["4"]})
    assert found == [BenchPrompt(domain=d, text=t) for d, t in (("a", "1"), ("b", "4"), ("a", "2"), ("a", "3"))]
    assert [p.text for p in prompts_of({"a": ["1", "2"], "b": ["4", "5"]}, limit=1)] == ["1", "4"]


def test_prompt_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text(json.dumps({"id": 1, "turns": ["one", "later"]}) + "\n")
    second.write_text(json.dumps({"prompt": "two\u2028still two"}) + "\n" + json.dumps({"prompt": "3", "domain": "x"}))
    found = read_prompts([first, second])
    assert [(p.domain, p.text) for p in found] == [("first", "one"), ("second", "two\u2028still two"), ("x", "3")]


def test_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for row in ({}, {"prompt": " "}, {"turns": "text"}, {"turns": [1]}):
        path.write_text(json.dumps({"prompt": "good"}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(DataError, match="row 2"):
            read_prompts([path])


def test_built_in_prompts() -> None:
    texts = [text for domain in PROMPTS.values() for text in domain]
    assert set(PROMPTS) == {"math", "code", "chat"} and len(set(texts)) == len(texts)
    assert all(len(domain) >= DEMO_PER_DOMAIN for domain in PROMPTS.values())


# --- profile ---------------------------------------------------------------------------------------------------------


class SlowTarget(TableTarget):
    """Takes at least two milliseconds a token."""

    def forward(self, token_ids: Tensor, *rest: Any, **options: Any) -> Any:
        time.sleep(2e-3 * len(token_ids))
        return super().forward(token_ids, *rest, **options)


def test_profile_measures_steps_per_second() -> None:
    sps = profile_sps(SlowTarget(), max_tokens=3, context=4, repeats=3)
    assert sps.shape == (4,) and sps[0] == 0
    for size in (1, 2, 3):
        assert 0 < sps[size] <= 1 / (2e-3 * size)


def test_profile_fits_its_context_into_the_target() -> None:
    assert profile_sps(TableTarget(max_len=6), max_tokens=5, context=128, repeats=1).shape == (6,)
    with pytest.raises(RequestError, match="max_len 6"):
        profile_sps(TableTarget(max_len=6), max_tokens=6)
