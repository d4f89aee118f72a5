"""The ``train`` verb: reads its options, decodes held-out prompts while training, and shows the progress."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dspark.assignments import read_fields
from dspark.data.features import Sample
from dspark.evaluate.held_out import decoded_acceptance
from dspark.models.drafter import Drafter
from dspark.numbers import clock_text
from dspark.train.config import TrainConfig, drafter_defaults
from dspark.train.ranks import joined
from dspark.train.run import Corpus, train


def read_config(given: Mapping[str, Any], assignments: Sequence[str]) -> TrainConfig:
    """A config from fields already typed and ``name=value`` texts; values are JSON, or else plain words.

    What is not given stands at the default that the drafter's method wants.
    Raises :class:`ConfigError` for an unknown field, a value of another type, or a field given twice.
    """
    values = read_fields(given, assignments, {f.name: f.default for f in dataclasses.fields(TrainConfig)})
    return TrainConfig(**{**drafter_defaults(values.get("drafter", TrainConfig.drafter)), **values})


def run(config: TrainConfig, *, threads: int | None = None) -> bool:
    """Train to the end, or to the first interrupt: the state is then saved, and the same command goes on from it.

    Returns whether the run is finished. A second interrupt stops at once, and costs what was not saved.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with joined() as ranks:
        out = Console(stderr=True, highlight=False, quiet=not ranks.leads)
        with _first_interrupt() as interrupted, _Board(out, config) as board:
            best = train(config, evaluate=decode_held_out, on_step=board.show, stop=interrupted, ranks=ranks)
        if ranks.any(interrupted())[0] and ranks.first(lambda: board.step) < config.steps:
            out.print("interrupted; the state is saved, and the same command goes on from it")
            return False
        if ranks.leads:
            Console(highlight=False).print(str(best), soft_wrap=True)
    return True


def plan_lines(config: TrainConfig, *, processes: int = 1) -> list[str]:
    """What each process will take of its device's memory, part by part, and the fields that make it less; nothing of
    the target is loaded but its configuration."""
    from dspark.models.weights import read_config as read_target_config
    from dspark.models.weights import resolve_model
    from dspark.train.memory import memory_plan  # pulls in transformers

    plan = memory_plan(config, read_target_config(resolve_model(config.model)), processes=processes)
    width = max(len(item.name) for item in plan.items)
    lines = [f"{item.name:<{width}}  {item.nbytes / 2**30:7.2f} GiB  {item.bound}" for item in plan.items]
    return [*lines, f"{'together, at most':<{width}}  {plan.nbytes / 2**30:7.2f} GiB  without what CUDA itself takes"]


def decode_held_out(
    corpus: Corpus, config: TrainConfig, drafter: Drafter, samples: Sequence[Sample]
) -> dict[str, float]:
    """The decoding that a run's evaluations ask for: the samples' prompts, answered with the drafter as it stands."""
    return decoded_acceptance(
        corpus.target,
        drafter,
        [(s.domain, s.token_ids[: int(s.loss_mask.nonzero()[0, 0])].tolist()) for s in samples],
        max_new_tokens=config.evaluate_tokens,
        stop_token_ids=corpus.chat.stop_token_ids,
    )


class _Board:
    """Progress of a run: a bar with the latest figures on a terminal, a line per report elsewhere."""

    def __init__(self, out: Console, config: TrainConfig) -> None:
        self.step = 0
        self._out, self._steps = out, config.steps
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=out, disable=not out.is_terminal)
        self._task = self._bar.add_task("loading the target and the answers", total=config.steps)
        self._first: tuple[int, float] | None = None  # step and seconds of the first report, to tell the pace from

    def __enter__(self) -> _Board:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Take in one of the run's log lines."""
        self.step = line["step"]
        self._first = self._first or (self.step, line["seconds"])
        if (found := evaluation_text(line)) is not None:
            self._out.print(f"step {self.step}: {found}")
            return
        words = progress_text(line, self._steps, since=self._first)
        self._bar.update(self._task, completed=self.step, description=words)
        if not self._out.is_terminal:
            self._out.print(words, soft_wrap=True)


def progress_text(line: Mapping[str, Any], steps: int, *, since: tuple[int, float]) -> str:
    """Step, loss, analytic acceptance, speed and time left; ``since`` is an earlier (step, seconds) of the same run.

    Steps that learn the target's states have no acceptance yet; their loss is the states' relative error.
    """
    pace = (line["seconds"] - since[1]) / max(1, line["step"] - since[0])
    left = pace * (steps - line["step"])
    remaining = f"{clock_text(left)} left" if left or line["step"] == steps else "..."
    length = line.get("acceptance_length")
    figures = f"loss {line['loss']:.3f}, acceptance length {length:.2f}" if length is not None else states_text(line)
    return (
        f"{line['step']}/{steps}, {figures}, "
        f"{line['tokens_per_second']:.0f} tokens/s, {line['blocks_per_second']:.0f} blocks/s, {remaining}"
    )


def states_text(line: Mapping[str, Any]) -> str:
    """A log line of a step that learns the target's states."""
    return f"learning the target's states, error {line['loss']:.3f}"


def evaluation_text(line: Mapping[str, Any]) -> str | None:
    """Held-out acceptance of a log line, by decoding where it was decoded; None for a line of training figures."""
    for name, how in (("held_out_decoded", "decoded"), ("held_out_analytic", "analytic")):
        if name in line:
            figures = {k: v for k, v in line[name].items() if isinstance(v, float)}
            return f"held-out acceptance length, {how}: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items())
    return None


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that the run asks for; the second one interrupts as usual."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
