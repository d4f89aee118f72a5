"""Requests in shared passes give the answers of the loop at batch size 1, token for token."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import TableDrafter, TableTarget
from torch import Tensor

from dspark.core import Completion, Proposal, SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError, RequestError
from dspark.evaluate.batched import Ask, Turn, play_together, whole_rounds
from dspark.evaluate.lockstep import Lockstep
from dspark.evaluate.playing import Table, play_conversations
from dspark.evaluate.records import AnswerRecord
from dspark.evaluate.suite import Conversation, answer_seed
from dspark.maths.scheduling import FixedScheduler, Scheduler, ThresholdScheduler
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.ngram import NgramDrafter


class Tabled:
    """A drafter that is a table, behind the loop's protocol."""

    name, block_size, has_confidence = "tabled", 2, True
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.table = TableDrafter(kind="dense")

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        state += token_ids.tolist()

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        found = self.table.propose([*state, anchor], generator)
        assert found.confidence is not None
        return Proposal(found.draft_tokens[:limit], found.distribution, found.confidence[:limit])


ASKS = [
    Ask(prompt_ids=tuple((i + j) % 4 for j in range(1 + 3 * (i % 3))), sampling=SamplingParams(temperature=t, seed=i))
    for i, t in enumerate((1.0, 0.0, 0.7, 1.3, 1.0, 0.0, 0.9))
]


def together(drafter: Drafter, rows: int, scheduler: Scheduler, **changes: Any) -> dict[int, Completion]:
    found: dict[int, Completion] = {}

    def ended(name: int, ask: Ask, completion: Completion) -> None:
        assert ASKS[name] == ask
        found[name] = completion

    settings: dict[str, Any] = {"max_new_tokens": 17, "stop_token_ids": [3], **changes}
    waiting = deque(enumerate(ASKS))
    play_together(TableTarget(max_len=40), drafter, waiting, rows=rows, scheduler=scheduler, ended=ended, **settings)
    return found


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("drafter", [Tabled(), NgramDrafter(), NoDrafter()], ids=lambda d: d.name)
def test_same_answers_and_rounds(drafter: Drafter, rows: int) -> None:
    ways: list[tuple[Scheduler, Turn]] = [(FixedScheduler(), Lockstep())]
    ways += [(each, whole_rounds) for each in (FixedScheduler(), FixedScheduler(1), ThresholdScheduler(0.4))]
    for scheduler, turn in ways:
        if scheduler.needs_confidence and not drafter.has_confidence:
            continue
        found = together(drafter, rows, scheduler, turn=turn)
        for name, ask in enumerate(ASKS):
            alone = generate(
                TableTarget(max_len=40),
                drafter,
                ask.prompt_ids,
                sampling=ask.sampling,
                max_new_tokens=17,
                stop_token_ids=[3],
                scheduler=scheduler,
            )
            assert (found[name].token_ids, found[name].finish_reason) == (alone.token_ids, alone.finish_reason)
            for one, other in zip(found[name].rounds, alone.rounds, strict=True):
                assert (one.draft_tokens, one.verify_len, one.accepted, one.committed) == (
                    other.draft_tokens,
                    other.verify_len,
                    other.accepted,
                    other.committed,
                )


@pytest.mark.parametrize("turn", [whole_rounds, Lockstep()], ids=["whole", "lockstep"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_on_the_text_before_hold_in_shared_passes(turn: Turn, temperature: float) -> None:
    shaped = SamplingParams(temperature=temperature, repetition_penalty=1.7, rule="block")
    asks = [Ask(prompt_ids=(0, 1), sampling=replace(shaped, seed=i)) for i in range(4)]
    found: dict[int, Completion] = {}
    play_together(
        TableTarget(max_len=40),
        Tabled(),
        deque(enumerate(asks)),
        rows=3,
        max_new_tokens=12,
        stop_token_ids=(),
        scheduler=FixedScheduler(),
        ended=lambda name, ask, done: found.__setitem__(name, done),
        turn=turn,
    )
    for name, ask in enumerate(asks):
        alone = generate(TableTarget(max_len=40), Tabled(), (0, 1), sampling=ask.sampling, max_new_tokens=12)
        assert found[name].token_ids == alone.token_ids


def test_in_lockstep_the_target_runs_what_is_committed_and_nothing_else() -> None:
    """Drafts behind the first rejection have a fate without a pass; a scheduler that cuts blocks has no place there."""
    target, ran = TableTarget(max_len=40), 0
    inner = target.forward

    def counting(token_ids: Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal ran
        ran += len(token_ids)
        return inner(token_ids, *rest, **options)

    target.forward = counting  # type: ignore[method-assign]
    asks = [Ask(prompt_ids=(0, 1), sampling=SamplingParams(temperature=1.0, seed=i)) for i in range(5)]
    kept: list[Completion] = []

    def ended(name: int, ask: Ask, done: Completion) -> None:
        kept.append(done)

    settings: dict[str, Any] = {"rows": 3, "max_new_tokens": 17, "stop_token_ids": (), "ended": ended}
    play_together(target, Tabled(), deque(enumerate(asks)), scheduler=FixedScheduler(), turn=Lockstep(), **settings)
    assert ran == sum(2 + len(done.token_ids) - 1 for done in kept)  # each prompt, and all but the last token
    assert all(r.verify_len == len(r.draft_tokens) for done in kept for r in done.rounds)
    with pytest.raises(ConfigError, match="a scheduler cut a block"):
        play_together(
            target, Tabled(), deque(enumerate(asks)), scheduler=FixedScheduler(1), turn=Lockstep(), **settings
        )


def test_the_seconds_of_a_round_add_up_to_no_more_than_the_run() -> None:
    found = together(Tabled(), 4, FixedScheduler())
    for done in found.values():
        spent = sum(r.draft_seconds + r.verify_seconds + r.host_seconds for r in done.rounds)
        assert spent <= done.decode_seconds and (spent > 0) == bool(done.rounds)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows is 0"):
        together(Tabled(), 0, FixedScheduler())
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        together(Tabled(), 2, FixedScheduler(), max_new_tokens=0)


def test_conversations_go_on_behind_what_is_known_and_end_at_the_context() -> None:
    def ids(conversation: Conversation, answers: Any) -> list[int]:
        return [0, 1, *(token for answer in answers for token in (*answer, 2))]

    table = Table(
        target=TableTarget(max_len=30),
        drafter=Tabled(),
        scheduler=FixedScheduler(),
        sampling=SamplingParams(temperature=1.0, seed=5),
        max_new_tokens=8,
        turns=None,
        stop_token_ids=(),
        prompt_ids=ids,
    )
    talks = [Conversation(set_name="s", domain="d", id=str(i), turns=("a", "b", "c", "d")) for i in range(3)]
    kept: dict[int, dict[Any, AnswerRecord]] = {}
    for rows in (1, 2):
        whole: dict[Any, AnswerRecord] = {}
        assert (
            play_conversations(table, talks, known={}, keep=lambda r, w=whole: w.__setitem__(r.key, r), rows=rows) == 12
        )
        kept[rows] = whole
    # 2, 11, 20 and 29 tokens: the last answer has room for one token
    assert [kept[1]["s", "0", turn].prompt_tokens for turn in range(4)] == [2, 11, 20, 29]
    assert kept[1]["s", "0", 3].finish_reason == "context"
    assert {k: (r.token_ids, r.seed) for k, r in kept[1].items()} == {
        k: (r.token_ids, r.seed) for k, r in kept[2].items()
    }
    assert kept[1]["s", "1", 2].seed == answer_seed(5, talks[1], 2)
    known = {key: record for key, record in kept[1].items() if key[2] < 2}
    rest: dict[Any, AnswerRecord] = {}
    assert play_conversations(table, talks, known=known, keep=lambda r: rest.__setitem__(r.key, r)) == 6
    assert all(kept[1][key].token_ids == record.token_ids for key, record in rest.items())
    short = play_conversations(Table(**{**table.__dict__, "turns": 1}), talks, known={}, keep=lambda r: None)
    assert short == 3
