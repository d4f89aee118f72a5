"""The loop: greedy identity, exact lengths and stops, limits, and the distribution of what it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fakes import TableDrafter, TableTarget, chi_square_p, target_chain
from tiny_drafter import tiny_drafter
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.decode import generate, stream
from dspark.errors import RequestError, ScheduleError
from dspark.maths import sampling as sampling_module
from dspark.maths.scheduling import FixedScheduler, GreedyScheduler, ThresholdScheduler
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.ngram import NgramDrafter

GREEDY = SamplingParams()


class FromTable:
    """A :class:`TableDrafter` behind the drafter protocol; it checks that what it is told is what was committed."""

    name, taps, has_confidence = "table", (1, 3), True

    def __init__(self, table: TableDrafter, target: TableTarget) -> None:
        self.table, self.target, self.block_size = table, target, table.block

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        assert features is not None and features.shape == (len(token_ids), 2 * self.target.info.hidden_size)
        for token, row in zip(token_ids.tolist(), features, strict=True):
            state.append(token)
            own = self.target.forward(torch.tensor(state), self.target.new_memory(rows=1, max_len=99), taps=self.taps)
            assert torch.equal(row, own.features[-1])  # the features of this very position

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        prefix = [*state, anchor]
        return (
            replace(self.table, block=limit).propose(prefix, generator)
            if limit > 0
            else Proposal(torch.empty(0).long())
        )


def dspark(target: TableTarget, *, block_size: int = 4, candidates: int = 2, limit: int = 256) -> DsparkDrafter:
    model = tiny_drafter(
        seed=5,
        scale=0.7,
        vocab_size=target.info.vocab_size,
        hidden_size=target.info.hidden_size,
        num_target_layers=target.info.num_layers,
        intermediate_size=8,
        block_size=block_size,
        mask_token_id=1,
        markov_rank=3,
        max_position_embeddings=limit,
    )
    return DsparkDrafter(model, target, candidates=candidates)


def sps(block: int) -> Tensor:
    return torch.tensor([0.0, *[1.0 / (1 + 0.05 * b) for b in range(block + 1)]])


DRAFTERS: dict[str, Callable[[TableTarget], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "ngram": lambda target: NgramDrafter(min_match=1),
    "dspark-candidates": lambda target: dspark(target),
    "dspark-full": lambda target: dspark(target, candidates=0),
    "table": lambda target: FromTable(TableDrafter(vocab_size=4, block=3), target),
    "bad": lambda target: FromTable(TableDrafter(vocab_size=4, block=3, kind="certain", seed=9), target),
}


def plain_greedy(target: TableTarget, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.next_probs(tokens, GREEDY).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("scheduler", [FixedScheduler(), FixedScheduler(1), FixedScheduler(0)])
def test_greedy_output_is_the_targets_own(name: str, scheduler: FixedScheduler) -> None:
    for seed in range(5):
        target = TableTarget(order=3, seed=seed, max_len=200)
        done = generate(target, DRAFTERS[name](target), [1, 2], sampling=GREEDY, max_new_tokens=60, scheduler=scheduler)
        assert list(done.token_ids) == plain_greedy(target, [1, 2], 60)
        assert done.finish_reason == "length"


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens_is_exact(name: str, count: int) -> None:
    target = TableTarget(order=2, seed=1)
    done = generate(target, DRAFTERS[name](target), [3], sampling=GREEDY, max_new_tokens=count)
    assert len(done.token_ids) == count
    assert sum(len(r.committed) for r in done.rounds) == count - 1


def test_a_stop_token_inside_an_accepted_run_ends_the_output_there() -> None:
    hit = 0
    for seed in range(40):
        target = TableTarget(order=3, seed=seed)
        free = plain_greedy(target, [0, 1], 40)
        stop = free[10]
        wanted = free[: free.index(stop) + 1]
        drafter = FromTable(TableDrafter(vocab_size=4, block=4, order=3), target)
        drafter.table.logits = torch.stack([target.head @ s for s in target.states]) * 50  # the target's own argmax
        done = generate(target, drafter, [0, 1], sampling=GREEDY, max_new_tokens=40, stop_token_ids=[stop])
        assert list(done.token_ids) == wanted
        assert done.finish_reason == "stop"
        if done.rounds and done.rounds[-1].committed and done.rounds[-1].accepted == len(done.rounds[-1].committed):
            hit += 1  # the stop was a draft: no bonus token counts in this round
            assert done.rounds[-1].committed[-1] == stop
    assert hit > 5


def test_context_limit_of_the_target_ends_the_request() -> None:
    target = TableTarget(order=2, max_len=12)
    for name in DRAFTERS:
        done = generate(target, DRAFTERS[name](target), [1, 2, 3], sampling=GREEDY, max_new_tokens=50)
        assert list(done.token_ids) == plain_greedy(target, [1, 2, 3], 9)
        assert done.finish_reason == "context"


def test_past_the_drafters_limit_decoding_goes_on_without_drafts() -> None:
    target = TableTarget(order=2, max_len=80)
    done = generate(target, dspark(target, limit=20), [1, 2], sampling=GREEDY, max_new_tokens=60)
    assert list(done.token_ids) == plain_greedy(target, [1, 2], 60)
    assert done.rounds[0].draft_tokens and not done.rounds[-1].draft_tokens


def test_the_stream_begins_with_the_prefills_token_and_holds_every_token() -> None:
    target = TableTarget(order=2)
    records = list(stream(target, dspark(target), [1], sampling=SamplingParams(temperature=1.0), max_new_tokens=30))
    assert records[0].draft_tokens == () and len(records[0].committed) == 1
    assert sum(len(r.committed) for r in records) == 30
    for record in records[1:]:
        assert record.committed[: record.accepted] == record.draft_tokens[: record.accepted]
        assert record.accepted <= record.verify_len <= len(record.draft_tokens) == len(record.confidence)


def test_a_seed_reproduces_and_another_does_not() -> None:
    target = TableTarget(vocab_size=6, order=2)
    runs = [
        generate(
            target, dspark(target), [1], sampling=SamplingParams(temperature=1.0, seed=s), max_new_tokens=40
        ).token_ids
        for s in (7, 7, 8)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 5, "empty"),
        ([1], 0, "max_new_tokens is 0"),
        ([1] * 64, 5, "64 tokens"),
        ([1, 4], 5, r"outside 0\.\.3"),
        ([-1], 5, "outside"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], count: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(TableTarget(), NoDrafter(), prompt, sampling=GREEDY, max_new_tokens=count)


def test_a_scheduler_without_its_confidences_is_refused_before_any_work() -> None:
    with pytest.raises(ScheduleError, match="ngram gives none"):
        generate(
            TableTarget(),
            NgramDrafter(),
            [1],
            sampling=GREEDY,
            max_new_tokens=5,
            scheduler=ThresholdScheduler(threshold=0.5),
        )


SAMPLED = SamplingParams(temperature=0.8, top_k=3)
SCHEDULERS = [FixedScheduler(), FixedScheduler(1), ThresholdScheduler(threshold=0.4), GreedyScheduler(sps(4))]


def p_value(
    target: TableTarget,
    drafter: Drafter,
    scheduler: object,
    *,
    sampling: SamplingParams = SAMPLED,
    draws: int = 1200,
) -> float:
    """Chi-square of the joint distribution of the first three tokens against the target's own."""
    prompt, counts = [1, 2], Counter()
    for seed in range(draws):
        done = generate(
            target, drafter, prompt, sampling=replace(sampling, seed=seed), max_new_tokens=3, scheduler=scheduler
        )
        counts[done.token_ids] += 1
    exact = target_chain(tuple(prompt), lambda prefix: target.next_probs(prefix, sampling, prompt_len=2), 3)
    cells = sorted((c for c in product(range(4), repeat=3) if exact[c] > 0), key=lambda c: exact[c])
    assert set(counts) <= set(cells)
    observed, expected = [0.0], [0.0]
    for cell in cells:  # rare cells share one bin, or Pearson's statistic would not follow its distribution
        if expected[-1] >= 5:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[cell]
        expected[-1] += exact[cell] * draws / exact.sum()
    return chi_square_p(observed, expected)


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("dspark-full", SCHEDULERS[0]), *(("dspark-candidates", s) for s in SCHEDULERS[1:]), ("table", SCHEDULERS[2])],
    ids=str,
)
def test_sampled_output_has_the_targets_distribution(name: str, scheduler: object) -> None:
    target = TableTarget(order=2, seed=3)
    assert p_value(target, DRAFTERS[name](target), scheduler) > 1e-3


PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, logit_bias=((3, 0.8),))


@pytest.mark.parametrize("name", ["dspark-candidates", "table"])
def test_sampled_output_has_the_shaped_distribution_under_the_joint_rule(name: str) -> None:
    """Every row of a block with its own history, over two rounds, cut by the confidences."""
    target = TableTarget(order=2, seed=3)
    joint = replace(PENALISED, rule="block")
    assert p_value(target, DRAFTERS[name](target), ThresholdScheduler(threshold=0.3), sampling=joint, draws=500) > 1e-3


RULES = {
    "repetition": SamplingParams(repetition_penalty=1.6),
    "frequency": SamplingParams(frequency_penalty=0.4),
    "all": SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((0, 0.5),),
        banned_token_ids=(2,),
        min_tokens=9,
    ),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_argmax_of_the_shaped_logits(name: str, rules: str) -> None:
    sampling, prompt = RULES[rules], [1, 2]
    for seed in range(3):
        target = TableTarget(order=3, seed=seed, max_len=200)
        tokens = list(prompt)
        while len(tokens) < 42 and (len(tokens) == 2 or tokens[-1] != 3):
            probs = target.next_probs(tokens, sampling, prompt_len=2, stop_token_ids=[3])
            tokens.append(int(probs.argmax()))
        drafter = DRAFTERS[name](target)
        done = generate(target, drafter, prompt, sampling=sampling, max_new_tokens=40, stop_token_ids=[3])
        assert list(done.token_ids) == tokens[2:]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_banned_tokens_never_and_stops_not_too_early(temperature: float, rule: str) -> None:
    sampling = SamplingParams(temperature=temperature, banned_token_ids=(1,), min_tokens=12, rule=rule)
    for seed in range(4):
        target = TableTarget(order=2, seed=seed)
        drafter = FromTable(TableDrafter(vocab_size=4, block=3), target)  # it mirrors nothing
        done = generate(
            target, drafter, [1], sampling=replace(sampling, seed=seed), max_new_tokens=40, stop_token_ids=[0, 99]
        )
        assert 1 not in done.token_ids and 0 not in done.token_ids[:12]
        assert len(done.token_ids) > 12


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"banned_token_ids": (4,)}, r"names token 4; the target's ids are 0\.\.3"),
        ({"logit_bias": ((9, 1.0),)}, "names token 9"),
        ({"banned_token_ids": (0, 1, 2, 3)}, "all 4 tokens are banned"),
        ({"banned_token_ids": (0, 1, 2), "min_tokens": 1}, "all 4 tokens are banned or held back by min_tokens"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(
            TableTarget(),
            NoDrafter(),
            [1],
            sampling=SamplingParams(**rules),
            max_new_tokens=3,
            stop_token_ids=[3],
        )


def test_the_same_test_catches_one_stream_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: drafts and coins that come from the same uniforms bias the output."""
    honest = sampling_module.RequestStreams.from_seed

    def flawed(seed: int) -> sampling_module.RequestStreams:
        one = honest(seed).propose
        twin = torch.Generator()
        twin.set_state(one.get_state())
        return sampling_module.RequestStreams(propose=one, accept=twin, residual=one)

    monkeypatch.setattr(sampling_module.RequestStreams, "from_seed", staticmethod(flawed))
    target = TableTarget(order=2, seed=3)
    drafter = FromTable(TableDrafter(vocab_size=4, block=3), target)
    assert p_value(target, drafter, FixedScheduler()) < 1e-6
