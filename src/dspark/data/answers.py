"""Answers of the target to training prompts, with a continuous batch: a row that ends is refilled before the next pass.

A drafter learns from what its target says, so the target answers every prompt itself, and the ids are kept as drawn.
Each job, a sample of a prompt, has a random stream of its own, and its i-th token uses the stream's i-th uniform. So in
exact arithmetic an answer does not depend on its neighbours, on the number of rows, on the order of the jobs or on a
resume: it is the one that :func:`dspark.decode.generate` gives without a drafter for the seed :func:`job_seed`. (Where
products of other batch sizes round otherwise, as in bf16, an answer keeps its distribution and not its tokens.)
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from dspark.chat import ChatFormat, Message
from dspark.core import SamplingParams
from dspark.data.draws import draw_tokens
from dspark.data.prompts import prompt_messages
from dspark.errors import ConfigError, DataError, RequestError
from dspark.maths.sampling import RequestStreams, uniforms
from dspark.models.target import KVMemory, Target

PREFILL_TOKENS = 2048  # most prompt tokens of one pass, if they are more than one prompt; bounds its activations
NAMED = 8  # skipped prompts that the log names

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One turn of one sample of one prompt."""

    id: str  # of the prompt
    sample: int  # 0, 1, ... of this prompt
    domain: str
    prompt_ids: tuple[int, ...]  # the conversation up to the answer
    turn: int = 0  # of the user, 0-based, that is answered
    messages: tuple[Message, ...] = field(default=(), compare=False, repr=False)  # what prompt_ids render


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished job. ``token_ids`` end with the stop token unless ``finish_reason`` is "length"."""

    job: Job
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length": max_new_tokens, or the end of the target's context
    text: str | None = None  # as the server sent it; None: what the ids decode to
    exact_ids: bool = True  # False: tokenised again from a text that they do not decode back to

    def row(self, chat: ChatFormat) -> dict[str, Any]:  # Any: whatever JSON holds
        """The answer as a line of an answers file; its text is without the stop token."""
        text_ids = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return {
            "id": self.job.id,
            "sample": self.job.sample,
            **({"turn": self.job.turn} if self.job.turn else {}),
            "domain": self.job.domain,
            "answer": chat.decode(text_ids) if self.text is None else self.text,
            "answer_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            **({} if self.exact_ids else {"exact_ids": False}),
        }


@dataclass(frozen=True, kw_only=True)
class PastTurn:
    """What later turns must know of an answered one."""

    answer: str
    finished: bool  # False: cut by a limit, so that the conversation ends with it


History = Mapping[tuple[str, int], Sequence[PastTurn]]  # answered turns of each (prompt id, sample)


@dataclass(frozen=True, kw_only=True)
class JobList:
    """What there is to do, and the ids of prompts that no answer fits behind."""

    jobs: tuple[Job, ...]
    skipped: tuple[str, ...]


def make_jobs(
    prompts: Mapping[str, Mapping[str, Any]],
    chat: ChatFormat,
    *,
    samples: int,
    max_len: int | None,
    turn: int = 0,
    history: History | None = None,
) -> JobList:
    """Jobs for the user's turn number ``turn`` of every prompt that has it, all first samples before the second ones.

    ``history`` holds what is answered already: a sample whose turn is there is left out, and so is one whose turn
    before is not there, or was cut. A conversation of ``max_len`` tokens or more, the target's context, leaves no room
    for an answer: it is skipped, named, and logged (None: the length is the server's to judge). Raises
    :class:`DataError` naming the prompt that cannot be rendered.
    """
    history = history or {}
    jobs: list[Job] = []
    skipped: dict[str, None] = {}
    first: dict[str, tuple[int, ...]] = {}  # ids of a first turn, the same for all samples
    for sample in range(samples):
        for key, prompt in prompts.items():
            past = history.get((key, sample), ())
            if len(past) != turn or len(prompt["turns"]) <= turn or not all(before.finished for before in past):
                continue
            try:
                messages = prompt_messages(prompt, [before.answer for before in past])
                ids = first.get(key) or tuple(chat.prompt_ids(messages))
            except DataError as error:
                raise DataError(f"prompt {key!r}: {error}") from None
            if turn == 0:
                first[key] = ids
            if max_len is not None and len(ids) >= max_len:
                skipped[key] = None
                continue
            domain = prompt.get("domain", "all")
            jobs.append(Job(id=key, sample=sample, turn=turn, domain=domain, prompt_ids=ids, messages=tuple(messages)))
    if skipped:
        _log.warning(
            "%d prompts are skipped, %d tokens (the context limit) or longer: %s%s",
            len(skipped),
            max_len,
            ", ".join(list(skipped)[:NAMED]),
            ", ..." if len(skipped) > NAMED else "",
        )
    return JobList(jobs=tuple(jobs), skipped=tuple(skipped))


def job_seed(seed: int, prompt_id: str, sample: int, turn: int = 0) -> int:
    """Seed of one job's streams, 128 bits of a hash: near seeds and ids give unrelated ones."""
    place = f"{sample}.{turn}" if turn else str(sample)
    return int.from_bytes(hashlib.sha256(f"{seed}\n{place}\n{prompt_id}".encode()).digest()[:16], "big")


def check_drawable(sampling: SamplingParams) -> None:
    """Raise :class:`ConfigError` for a ``sampling`` that shapes the logits by the text before: a drafter is to learn
    the target's own habits."""
    if sampling.shapes_logits:
        raise ConfigError(
            "answers are drawn without penalties, logit_bias, banned_token_ids and min_tokens; unset them"
        )


# --- the continuous batch --------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Slot:
    """A row of the memory with the job it works on."""

    job: Job
    uniforms: list[float]  # one per token that the answer may have
    pending: list[int]  # tokens that the target has not seen: the prompt, then the latest token
    drawn: list[int] = field(default_factory=list)


def sample_answers(
    target: Target,
    jobs: Sequence[Job],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    rows: int = 32,
    on_pass: Callable[[int], object] = lambda tokens: None,
) -> Iterator[Answer]:
    """Answer every job, up to ``rows`` of them at a time; answers come in the order in which they end.

    ``sampling.seed`` is the run's; each job's own derives from it. An answer has 1..``max_new_tokens`` tokens, fewer
    where the context ends. The KV memory is as long as the longest job. ``on_pass`` is told the tokens drawn after
    each target pass. Raises :class:`ConfigError` for a number below 1 and for a ``sampling`` that shapes the logits by
    the text before (a drafter is to learn the target's own habits), :class:`RequestError` for a job without prompt or
    room.
    """
    check_drawable(sampling)
    for name, value in (("rows", rows), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    most = target.info.max_len - 1
    for job in jobs:
        if not 0 < len(job.prompt_ids) <= most:
            raise RequestError(
                f"prompt {job.id!r} has {len(job.prompt_ids)} tokens; it must have 1..{most}, so that an answer fits"
            )
    return _answers(target, jobs, sampling, max_new_tokens, frozenset(stop_token_ids), rows, on_pass)


def _answers(
    target: Target,
    jobs: Sequence[Job],
    sampling: SamplingParams,
    max_new_tokens: int,
    stops: frozenset[int],
    rows: int,
    on_pass: Callable[[int], object],
) -> Iterator[Answer]:
    """Fill the free rows, run one pass, hand out what has ended; until nothing is left."""
    if not jobs:
        return
    longest = min(max(len(job.prompt_ids) for job in jobs) + max_new_tokens, target.info.max_len)
    memory = target.new_memory(rows=min(rows, len(jobs)), max_len=longest)
    waiting = iter(jobs)
    slots: dict[int, _Slot] = {}
    while True:
        free = (row for row in range(memory.rows) if row not in slots)
        for row, job in zip(free, islice(waiting, memory.rows - len(slots)), strict=False):
            memory.rollback(row, 0)
            slots[row] = _open(job, sampling.seed, min(max_new_tokens, target.info.max_len - len(job.prompt_ids)))
        if not slots:
            return
        chosen = _rows_of_pass(slots)
        tokens = _pass(target, memory, {row: slots[row] for row in chosen}, sampling)
        on_pass(len(chosen))
        for row, token in zip(chosen, tokens, strict=True):
            slot = slots[row]
            slot.drawn.append(token)
            slot.pending = [token]
            if token in stops or len(slot.drawn) == len(slot.uniforms):
                del slots[row]
                reason = "stop" if token in stops else "length"
                yield Answer(job=slot.job, token_ids=tuple(slot.drawn), finish_reason=reason)


def _open(job: Job, seed: int, room: int) -> _Slot:
    stream = RequestStreams.from_seed(job_seed(seed, job.id, job.sample, job.turn)).residual
    return _Slot(job=job, uniforms=uniforms(room, stream).tolist(), pending=list(job.prompt_ids))


def _rows_of_pass(slots: Mapping[int, _Slot]) -> list[int]:
    """Rows of the next pass: new prompts first and by themselves, within :data:`PREFILL_TOKENS`; else everyone."""
    chosen: list[int] = []
    total = 0
    for row in sorted(row for row in slots if not slots[row].drawn):
        total += len(slots[row].pending)
        if chosen and total > PREFILL_TOKENS:
            break
        chosen.append(row)
    return chosen or sorted(slots)


def _pass(target: Target, memory: KVMemory, slots: Mapping[int, _Slot], sampling: SamplingParams) -> list[int]:
    """One target pass over the rows of ``slots``, and the next token of each."""
    device = target.info.device
    token_ids = torch.tensor([token for slot in slots.values() for token in slot.pending], device=device)
    counts = [len(slot.pending) for slot in slots.values()]
    output = target.forward(token_ids, memory, rows=tuple(slots), counts=counts, last_only=True)
    assert output.logits is not None
    shares = [slot.uniforms[len(slot.drawn)] for slot in slots.values()]
    return draw_tokens(output.logits, sampling, torch.tensor(shares, dtype=torch.float64, device=device)).tolist()
