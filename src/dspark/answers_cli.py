"""The ``answers`` verb: the target answers a file of prompts, with its progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings
from dspark.data.answers import Answer, make_jobs, sample_answers
from dspark.data.samples import read_prompts
from dspark.errors import ConfigError
from dspark.models.loading import load_target
from dspark.models.weights import resolve_model

REPORT_SECONDS = 30.0  # between lines where there is no terminal


def run(
    prompts: Sequence[Path],
    out: Path,
    *,
    model: str,
    sampling: SamplingParams,
    samples: int,
    max_new_tokens: int,
    rows: int,
    limit: int | None,
    dtype: str,
    device: str,
    implementation: str,
    threads: int | None,
    trust_remote_code: bool,
) -> None:
    """Answer the first ``limit`` prompts ``samples`` times each, leaving out what ``out`` holds already.

    An interrupt costs the answers under way; the same command goes on. All refusals come before the model is loaded.
    """
    if sampling.greedy and samples > 1:
        raise ConfigError(f"samples is {samples} at temperature 0, which would give {samples} equal ones; take 1")
    if threads is not None:
        torch.set_num_threads(threads)
    given = read_prompts(prompts)
    folder = resolve_model(model, trust_remote_code=trust_remote_code)
    chat = ChatFormat.from_folder(folder, trust_remote_code=trust_remote_code)
    file = AnswerFile(out, answer_settings(model, chat, sampling, max_new_tokens=max_new_tokens), given)
    target = load_target(
        model, dtype=dtype, device=device, implementation=implementation, trust_remote_code=trust_remote_code
    )
    chosen = dict(islice(given.items(), limit))
    todo = make_jobs(chosen, chat, samples=samples, max_len=target.info.max_len, done=file.done)
    console = Console(stderr=True, highlight=False)
    with _Board(console, len(todo.jobs)) as board:
        for answer in sample_answers(
            target,
            todo.jobs,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=chat.stop_token_ids,
            rows=rows,
            on_pass=board.count,
        ):
            file.add(answer, chat)
            board.show(answer)
    console.print(f"{len(file.done)} answers, {len(todo.jobs)} of them new", soft_wrap=True)
    if todo.skipped:
        console.print(f"{len(todo.skipped)} prompts skipped: over the context limit of {target.info.max_len} tokens")
    Console(highlight=False).print(str(out), soft_wrap=True)


class _Board:
    """Progress of a run: a bar with the latest figures on a terminal, a line now and then elsewhere."""

    def __init__(self, out: Console, jobs: int) -> None:
        self._out, self._jobs = out, jobs
        self._answers = self._answer_tokens = self._tokens = 0
        self._begin = self._reported = time.monotonic()
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=out, disable=not out.is_terminal)
        self._task = self._bar.add_task(f"0/{jobs} answers", total=jobs)

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
        now = time.monotonic()
        words = progress_text(
            self._answers, self._jobs, tokens=self._tokens, answered=self._answer_tokens, seconds=now - self._begin
        )
        self._bar.update(self._task, completed=self._answers, description=words)
        if not self._out.is_terminal and (now - self._reported >= REPORT_SECONDS or self._answers == self._jobs):
            self._reported = now
            self._out.print(words, soft_wrap=True)


def progress_text(answers: int, jobs: int, *, tokens: int, answered: int, seconds: float) -> str:
    """Answers finished, speed and time left. ``tokens`` were drawn so far, ``answered`` of them for finished
    answers."""
    speed = tokens / max(seconds, 1e-9)
    still = max(0.0, answered / answers * jobs - tokens)  # an answer to come is as long as those that have ended
    left = round(still / speed)
    return f"{answers}/{jobs} answers, {speed:.0f} tokens/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
