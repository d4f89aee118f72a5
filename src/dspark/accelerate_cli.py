"""The ``accelerate`` verb: shows the plan, the progress and what came out."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dspark.numbers import clock_text, number_text
from dspark.pace import Pace
from dspark.road.road import Progress as RoadProgress
from dspark.road.road import RoadConfig
from dspark.road.walk import Result, accelerate


def default_out(model: str) -> Path:
    """Where the result lies if nobody says: ``runs/`` and the model's last name."""
    return Path("runs") / f"{Path(model).stem or 'model'}-drafter"


def run(config: RoadConfig, *, threads: int | None, plan_only: bool) -> None:
    """Walk the road, or go on with it. An interrupt or a kill costs seconds; the same command goes on."""
    if threads is not None:
        torch.set_num_threads(threads)
    out = Console(stderr=True, highlight=False)
    try:
        with _Board(out) as board:
            result = accelerate(config, progress=board.road_progress(), plan_only=plan_only)
    except KeyboardInterrupt:
        out.print("interrupted; what is done is saved, and the same command goes on")
        raise
    if not result.finished:
        return
    for line in result_lines(result, config):
        out.print(line, soft_wrap=True, markup=False)
    Console(highlight=False).print(str(result.folder), soft_wrap=True)


def result_lines(result: Result, config: RoadConfig) -> list[str]:
    """The speedup that was measured, and what to do with the folder."""
    compared = result.stages["compare"]
    lines = []
    for name, report in compared["reports"].items():
        mean = report["mean"]
        lines.append(
            f"{name}: {number_text(mean['speedup'])} times the speed, "
            f"{number_text(mean['acceptance_length'])} tokens a round, "
            f"{number_text(mean['tokens_per_second'])} tokens/s "
            f"instead of {number_text(mean['plain_tokens_per_second'])}"
        )
    chosen = f"--model {config.model} --drafter {result.folder} --scheduler {compared['scheduler']}"
    lines.append(f"worked for {clock_text(result.seconds)}; try it: dspark generate PROMPT {chosen}")
    return lines


class _Board:
    """Lines that stay, and what is going on: a bar at a terminal, a line now and then elsewhere."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=out, disable=not out.is_terminal)
        self._task = self._bar.add_task("loading the model", total=1.0)
        self._pace = Pace()

    def __enter__(self) -> _Board:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def road_progress(self) -> RoadProgress:
        return RoadProgress(say=self.say, show=self.show)

    def say(self, text: str) -> None:
        self._out.print(text, soft_wrap=True, markup=False)

    def show(self, text: str, share: float) -> None:
        self._bar.update(self._task, completed=min(1.0, max(0.0, share)), description=text)
        if not self._out.is_terminal and self._pace.due():
            self._out.print(text, soft_wrap=True, markup=False)
