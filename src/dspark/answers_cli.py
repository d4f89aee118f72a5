"""The ``answers`` verb: the target, or a server that runs it, answers a file of prompts; progress goes to stderr."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings
from dspark.data.answers import Answer, Job, JobList, make_jobs, sample_answers
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.remote_answers import Server, Tally, named, remote_answers, served_model
from dspark.errors import ConfigError
from dspark.models.loading import load_target
from dspark.models.weights import resolve_model
from dspark.pace import Pace


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """What is answered, by which model and how."""

    prompts: tuple[Path, ...]
    out: Path
    model: str  # whose tokenizer and template hold, whoever answers
    sampling: SamplingParams
    max_new_tokens: int = 256
    samples: int = 1  # per prompt
    turns: int = 1  # of each prompt's user, answered in order
    limit: int | None = None  # prompts, from the first; None: all
    template_options: Mapping[str, Any] = field(default_factory=dict)  # Any: whatever the template reads
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.sampling.greedy and self.samples > 1:
            raise ConfigError(
                f"samples is {self.samples} at temperature 0, which would give {self.samples} equal ones; take 1"
            )
        if self.turns < 1:
            raise ConfigError(f"turns is {self.turns}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What both ways of answering start from."""

    config: AnswersConfig
    prompts: dict[str, Prompt]
    chat: ChatFormat
    file: AnswerFile

    @classmethod
    def prepare(cls, config: AnswersConfig, *, drawn_by: str = "dspark") -> _Work:
        """Read the prompts and the tokenizer, and begin or continue the file; all refusals come here."""
        given = read_prompts(config.prompts)
        folder = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
        chat = ChatFormat.from_folder(
            folder, trust_remote_code=config.trust_remote_code, template_options=config.template_options
        )
        settings = answer_settings(
            config.model,
            chat,
            config.sampling,
            max_new_tokens=config.max_new_tokens,
            turns=config.turns,
            drawn_by=drawn_by,
        )
        file = AnswerFile(config.out, settings, given)
        return cls(config=config, prompts=dict(islice(given.items(), config.limit)), chat=chat, file=file)

    def jobs(self, turn: int, max_len: int | None) -> JobList:
        """What is left to answer of a turn, given what the file holds."""
        return make_jobs(
            self.prompts,
            self.chat,
            samples=self.config.samples,
            max_len=max_len,
            turn=turn,
            history=self.file.history,
        )


def run(
    config: AnswersConfig,
    *,
    rows: int,
    dtype: str,
    device: str,
    implementation: str,
    threads: int | None,
) -> None:
    """Answer with our own batched sampler, leaving out what the file holds already.

    An interrupt costs the answers under way; the same command goes on. All refusals come before the model is loaded.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    work = _Work.prepare(config)
    target = load_target(
        config.model,
        dtype=dtype,
        device=device,
        implementation=implementation,
        trust_remote_code=config.trust_remote_code,
    )
    console = Console(stderr=True, highlight=False)
    skipped: dict[str, None] = {}
    before = work.file.answers
    for turn in range(config.turns):
        todo = work.jobs(turn, target.info.max_len)
        skipped |= dict.fromkeys(todo.skipped)
        with _Board(console, todo.jobs, turn) as board:
            for answer in sample_answers(
                target,
                todo.jobs,
                sampling=config.sampling,
                max_new_tokens=config.max_new_tokens,
                stop_token_ids=work.chat.stop_token_ids,
                rows=rows,
                on_pass=board.count,
            ):
                work.file.add(answer, work.chat)
                board.show(answer)
    _conclude(console, work, before)
    if skipped:
        console.print(f"{len(skipped)} prompts skipped: over the context limit of {target.info.max_len} tokens")
    Console(highlight=False).print(str(config.out), soft_wrap=True)


def run_remote(
    config: AnswersConfig,
    *,
    url: str,
    name: str | None,
    api_key_variable: str = "OPENAI_API_KEY",
    concurrency: int,
    transport: Any = None,  # Any: httpx is imported only where it is needed
) -> None:
    """Answer through an OpenAI-compatible server, leaving out what the file holds already.

    ``name`` is the model's on the server; None takes the only one that it offers. An interrupt or a kill costs the
    answers under way, and the same command goes on. Raises :class:`RequestError` once the server is gone.
    """
    key = os.environ.get(api_key_variable) or None
    if name is None:
        name = asyncio.run(served_model(url, api_key=key, transport=transport))
    server = Server(url=url, model=name, api_key=key, concurrency=concurrency)
    work = _Work.prepare(config, drawn_by=name)
    console, tally = Console(stderr=True, highlight=False), Tally()
    before = work.file.answers
    for turn in range(config.turns):
        todo = work.jobs(turn, None)
        with _Board(console, todo.jobs, turn) as board:
            asyncio.run(_ask(work, server, todo.jobs, board, tally, transport))
    _conclude(console, work, before)
    for line in tally_lines(tally):
        console.print(line, soft_wrap=True, markup=False)
    Console(highlight=False).print(str(config.out), soft_wrap=True)


async def _ask(work: _Work, server: Server, jobs: Sequence[Job], board: _Board, tally: Tally, transport: Any) -> None:
    async for answer in remote_answers(
        server,
        jobs,
        work.chat,
        sampling=work.config.sampling,
        max_new_tokens=work.config.max_new_tokens,
        tally=tally,
        transport=transport,
    ):
        work.file.add(answer, work.chat)
        board.count(len(answer.token_ids))
        board.show(answer)


def tally_lines(tally: Tally) -> Iterator[str]:
    """What a run through a server has to tell beside its answers; nothing where all went well."""
    if tally.retries:
        yield f"{tally.retries} requests were tried again"
    if tally.retokenised:
        yield (
            f"{tally.retokenised} answers came as text and were tokenised again, {tally.inexact} of them not exactly "
            "(exact_ids is false there)"
        )
    if tally.miscounted:
        yield (
            f"{tally.miscounted} prompts have another number of tokens on the server than by the model's template; "
            "check that it serves this model with its own template"
        )
    if tally.refused:
        yield f"{len(tally.refused)} prompts refused by the server: {named(tally.refused)}"
    if tally.failed:
        yield f"{len(tally.failed)} prompts given up, to be asked by the same command: {named(tally.failed)}"


def template_options(chosen: Sequence[str], thinking: bool | None) -> dict[str, Any]:
    """Options of the chat template from ``name=value`` texts (JSON, or else plain words) and the switch for thinking.

    Raises :class:`ConfigError` for a text without value, and for an option given twice.
    """
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for text in chosen:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"template option {text!r} has no value; write name=value")
        if name in options:
            raise ConfigError(f"template option {name} is given twice; leave one out")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _conclude(console: Console, work: _Work, before: int) -> None:
    console.print(f"{work.file.answers} answers, {work.file.answers - before} of them new", soft_wrap=True)


class _Board:
    """Progress of a run: a bar with the latest figures on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Console, jobs: Sequence[Job], turn: int) -> None:
        self._out, self._jobs = out, len(jobs)
        self._turn = f"turn {turn + 1}: " if turn else ""
        self._answers = self._answer_tokens = self._tokens = 0
        self._begin, self._pace = time.monotonic(), Pace()
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=out, disable=not out.is_terminal)
        self._task = self._bar.add_task(f"{self._turn}0/{len(jobs)} answers", total=len(jobs))

    def __enter__(self) -> _Board:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if error[0] is KeyboardInterrupt:
            self._out.print(f"interrupted; {self._answers} new answers are saved, and the same command goes on")

    def count(self, tokens: int) -> None:
        """Take in the tokens of one target pass."""
        self._tokens += tokens

    def show(self, answer: Answer) -> None:
        """Take in a finished answer."""
        self._answers += 1
        self._answer_tokens += len(answer.token_ids)
        seconds = time.monotonic() - self._begin
        words = self._turn + progress_text(
            self._answers, self._jobs, tokens=self._tokens, answered=self._answer_tokens, seconds=seconds
        )
        self._bar.update(self._task, completed=self._answers, description=words)
        if not self._out.is_terminal and self._pace.due(finished=self._answers == self._jobs):
            self._out.print(words, soft_wrap=True)


def progress_text(answers: int, jobs: int, *, tokens: int, answered: int, seconds: float) -> str:
    """Answers finished, speed and time left. ``tokens`` were drawn so far, ``answered`` of them for finished
    answers."""
    speed = tokens / max(seconds, 1e-9)
    still = max(0.0, answered / answers * jobs - tokens)  # an answer to come is as long as those that have ended
    left = round(still / speed)
    return f"{answers}/{jobs} answers, {speed:.0f} tokens/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
