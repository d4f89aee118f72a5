"""The verb ``eval``: many drafters on the same prompts, every round on disk, and the comparison computed from there.

Prompts are taken in rounds over the sets; a prompt is answered by every drafter at every temperature, the order turning
from prompt to prompt, before the next one: what is there when time is up compares, and a slow minute of the machine
touches all drafters alike. The same command goes on with what is missing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark.artifacts import atomic_write_text, provenance
from dspark.errors import RunError
from dspark.eval_plays import EvalConfig, Play, check_known, load, make_plays
from dspark.evaluate.comparison import Comparison, compare
from dspark.evaluate.confidence_tables import confidence_data, confidence_figures, confidence_tables
from dspark.evaluate.playing import play_conversations
from dspark.evaluate.records import AnswerRecord, Cell, add_answer, find_cells, writing
from dspark.evaluate.suite import Conversation
from dspark.evaluate.tables import TextTable, comparison_data, markdown, print_tables, tables
from dspark.pace import Pace

UNFINISHED = 3  # exit code of a process whose time was up


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an evaluation came to."""

    comparison: Comparison
    cells: tuple[Cell, ...]
    finished: bool  # False: time was up


def run(config: EvalConfig, *, against: str | None = None) -> Result:
    """Evaluate, or go on with it, and write ``figures.json`` and ``figures.md`` into the folder.

    Raises :class:`ConfigError` if records in the folder were made for something else or are being made now, and
    :class:`RunError` if one of several processes ended early; what was answered stays.
    """
    deadline = float("inf") if config.minutes is None else time.time() + 60.0 * config.minutes
    with writing(config.out, 0, wait=False):
        finished = _play(config, deadline)
    cells = find_cells([config.out])
    comparison = compare(cells, against=against)
    write_figures(config.out, comparison, cells)
    return Result(comparison=comparison, cells=tuple(cells), finished=finished)


def _play(config: EvalConfig, deadline: float) -> bool:
    """Answer what is missing, in all processes; returns whether everything is there."""
    context = multiprocessing.get_context("spawn")
    bundle, conversations = load(config)
    plays = make_plays(config, bundle, create=True)
    check_known(plays, conversations)
    others = [
        context.Process(target=_work, args=(config, index, deadline, os.getpid()), daemon=True)
        for index in range(1, config.processes)
    ]
    for process in others:
        process.start()
    with _Progress(len(conversations)) as progress:
        finished = _share(config, plays, conversations, 0, deadline, progress.at)
    for index, process in enumerate(others, start=1):
        process.join()
        if process.exitcode not in (0, UNFINISHED):
            raise RunError(
                f"process {index} of {config.processes} ended with code {process.exitcode}; its answers are kept, and "
                "the same command goes on"
            )
        finished &= process.exitcode == 0
    return finished


def _work(config: EvalConfig, index: int, deadline: float, parent: int) -> None:
    """The share of one more process. Ends if the first one is gone."""
    bundle, conversations = load(config)

    def watch(_: int) -> None:
        if os.getppid() != parent:
            os._exit(1)

    with writing(config.out, index, wait=True):  # one of a run that was killed may still be at its last prompt
        plays = make_plays(config, bundle, create=False)
        if not _share(config, plays, conversations, index, deadline, watch):
            raise SystemExit(UNFINISHED)


def _share(
    config: EvalConfig,
    plays: Sequence[Play],
    conversations: Sequence[Conversation],
    index: int,
    deadline: float,
    on_done: Callable[[int], None],
) -> bool:
    """Answer the share of process ``index``; ``on_done`` hears how many conversations of all lie behind it. Returns
    whether all was answered.

    One group of conversations is always begun; another is not if the longest so far would end behind the deadline.
    """
    groups = [conversations[i : i + config.rows] for i in range(0, len(conversations), config.rows)]
    longest = 0.0
    for number in range(index, len(groups), config.processes):
        begin = time.time()
        if longest and begin + longest > deadline:
            return False
        turn = number % len(plays)
        given = 0
        for play in (*plays[turn:], *plays[:turn]):

            def keep(record: AnswerRecord, folder: Path = play.folder) -> None:
                add_answer(folder, index, record)

            given += play_conversations(play.table, groups[number], known=play.known, keep=keep, rows=config.rows)
        if given:
            longest = max(longest, time.time() - begin)
        on_done(min((number + 1) * config.rows, len(conversations)))
    return True


class _Progress:
    """A line on stderr: rewritten at a terminal, now and then a new one elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._pace = total, Pace()
        self._out = Console(stderr=True, highlight=False)
        self._status = self._out.status(f"0 of {total} prompts")

    def __enter__(self) -> _Progress:
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)

    def at(self, done: int) -> None:
        line = f"{done} of {self._total} prompts"
        self._status.update(line)
        if not self._out.is_terminal and self._pace.due():
            self._out.print(line)


def facts_of(cells: Sequence[Cell]) -> list[str]:
    """Where figures come from, in a line per thing that their cells share or differ in."""
    first = cells[0]
    commits = sorted({str(cell.provenance.get("git_commit"))[:12] for cell in cells})
    commands = list(dict.fromkeys(str(cell.provenance["command"]) for cell in cells))
    setting, sampling = first.made_for, first.made_for["sampling"]
    return [
        f"model {first.about['model']}, {setting['dtype']} on {setting['device']}, {setting['threads']} threads, "
        f"{setting['processes']} processes, {setting['rows']} conversations a pass",
        f"at most {setting['max_new_tokens']} tokens an answer, seed {sampling['seed']}; intervals: 95 %, over prompts",
        f"commit {', '.join(commits)}, begun {first.provenance['date']}, dspark {first.provenance['dspark']}",
        *(f"command: {command}" for command in commands),
    ]


def figures_data(comparison: Comparison, cells: Sequence[Cell]) -> dict[str, Any]:
    """The figures for JSON, with where they come from."""
    fields = {"facts": facts_of(cells), "cells": [cell.folder.name for cell in cells], **comparison_data(comparison)}
    fields["confidence"] = confidence_data(confidence_figures(cells))
    return {"kind": "eval-figures", "version": 1, "fields": fields, "provenance": provenance()}


def figures_markdown(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """The tables as a document."""
    return markdown(all_tables(comparison, cells), heading="Evaluation", facts=facts_of(cells))


def all_tables(comparison: Comparison, cells: Sequence[Cell]) -> list[TextTable]:
    """Of what was accepted, and of what the confidences are worth."""
    return [*tables(comparison), *confidence_tables(confidence_figures(cells))]


def write_figures(folder: Path, comparison: Comparison, cells: Sequence[Cell]) -> None:
    """``figures.json`` and ``figures.md``, beside the records that they come from."""
    data = json.dumps(figures_data(comparison, cells), indent=1, ensure_ascii=False, allow_nan=False)
    atomic_write_text(folder / "figures.json", data + "\n")
    atomic_write_text(folder / "figures.md", figures_markdown(comparison, cells))


def show(result: Result, out: Path) -> None:
    """The tables in the terminal, and where they lie."""
    print_tables(all_tables(result.comparison, result.cells), facts_of(result.cells))
    Console(highlight=False).print(f"records, figures.json and figures.md: {out}", soft_wrap=True, style="dim")
