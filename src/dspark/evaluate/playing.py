"""Plays conversations with one drafter: each alone, as at batch size 1, or several at a time in shared target passes.

A later turn answers to the model's own earlier answers, which are those of this very drafter and temperature. Answers
that a record holds already are not given again: a conversation goes on behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dspark.core import Completion, SamplingParams
from dspark.decode import generate
from dspark.evaluate.batched import Ask, play_together
from dspark.evaluate.lockstep import Lockstep
from dspark.evaluate.records import AnswerRecord, Key, answer_record
from dspark.evaluate.suite import Conversation, answer_seed
from dspark.maths.scheduling import FixedScheduler, Scheduler
from dspark.models.drafter import Drafter
from dspark.models.target import Target

PromptIds = Callable[[Conversation, Sequence[Sequence[int]]], list[int]]  # ids behind the answers so far


@dataclass(frozen=True, kw_only=True)
class Table:
    """Who answers, and how: what all conversations of a cell have in common."""

    target: Target
    drafter: Drafter
    scheduler: Scheduler
    sampling: SamplingParams  # its seed is the run's; each answer's derives from it
    max_new_tokens: int  # of one answer; >= 1
    turns: int | None  # most turns of a conversation; None asks all
    stop_token_ids: Collection[int]
    prompt_ids: PromptIds


@dataclass(kw_only=True)
class _Talk:
    """A conversation under way."""

    conversation: Conversation
    answers: list[Sequence[int]]  # ids of the turns answered

    def next_ask(self, table: Table) -> Ask | None:
        """The next turn, or None if there is none, or no room for its answer."""
        turn = len(self.answers)
        if turn >= len(self.conversation.turns[: table.turns]):
            return None
        ids = table.prompt_ids(self.conversation, self.answers)
        if len(ids) >= table.target.info.max_len:
            return None
        seed = answer_seed(table.sampling.seed, self.conversation, turn)
        return Ask(prompt_ids=tuple(ids), sampling=replace(table.sampling, seed=seed))


def play_conversations(
    table: Table,
    conversations: Sequence[Conversation],
    *,
    known: Mapping[Key, AnswerRecord],
    keep: Callable[[AnswerRecord], None],
    rows: int = 1,
) -> int:
    """Answer what ``known`` lacks of ``conversations``, up to ``rows`` at a time; ``keep`` is given each answer as it
    ends. Returns the number of answers given.

    ``rows`` 1 is :func:`dspark.decode.generate` itself. With more, an answer has the same tokens (up to near-ties where
    the target's passes round otherwise for more rows) and its seconds are not its own. A turn whose prompt fills the
    target's context ends its conversation.
    """
    waiting: deque[tuple[_Talk, Ask]] = deque()
    for conversation in conversations:
        answers: list[Sequence[int]] = []
        while (record := known.get((*conversation.key, len(answers)))) is not None:
            answers.append(record.token_ids)
        talk = _Talk(conversation=conversation, answers=answers)
        if (ask := talk.next_ask(table)) is not None:
            waiting.append((talk, ask))

    given = 0

    def ended(talk: _Talk, ask: Ask, completion: Completion) -> None:
        nonlocal given
        given += 1
        turn = len(talk.answers)
        keep(
            answer_record(
                talk.conversation,
                turn,
                seed=ask.sampling.seed,
                prompt_tokens=len(ask.prompt_ids),
                completion=completion,
            )
        )
        talk.answers.append(completion.token_ids)
        if (following := talk.next_ask(table)) is not None:
            waiting.appendleft((talk, following))

    if rows > 1:
        play_together(
            table.target,
            table.drafter,
            waiting,
            rows=rows,
            max_new_tokens=table.max_new_tokens,
            stop_token_ids=table.stop_token_ids,
            scheduler=table.scheduler,
            ended=ended,
            turn=Lockstep() if table.scheduler == FixedScheduler() else None,
        )
    while waiting:
        talk, ask = waiting.popleft()
        ended(talk, ask, _alone(table, ask))
    return given


def _alone(table: Table, ask: Ask) -> Completion:
    return generate(
        table.target,
        table.drafter,
        ask.prompt_ids,
        sampling=ask.sampling,
        max_new_tokens=table.max_new_tokens,
        stop_token_ids=table.stop_token_ids,
        scheduler=table.scheduler,
    )
