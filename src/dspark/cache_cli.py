"""The verbs ``dspark cache estimate | build | check``: options and what is printed; the work is in ``cache_runs``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.errors import ConfigError
from dspark.numbers import clock_text
from dspark.pace import Pace

if TYPE_CHECKING:
    from dspark.cache_runs import CacheLoss, Estimate
    from dspark.data.features import Sample
    from dspark.train.config import TrainConfig

app = typer.Typer(
    no_args_is_help=True,
    help="Keep the target's features on disk instead of computing them while training.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

MIB = 1 << 20
MEASURED = 8  # samples that a drafter's acceptance is measured on unless told

Answers = Annotated[list[Path], typer.Option("--answers", help="JSONL with the target's answers; may be repeated.")]
Prompts = Annotated[list[Path], typer.Option("--prompts", help="JSONL with their prompts; may be repeated.")]
Model = Annotated[str, typer.Option("--model", "-m", help="smollm2, a Hugging Face folder, a .gguf file or a Hub id.")]
Method = Annotated[str, typer.Option("--drafter", help="Method to be trained, which decides the taps; as in `train`.")]
SetFields = Annotated[
    list[str] | None,
    typer.Option("--set", help="A field of the run's TrainConfig, as name=value, as in `train`; may be repeated."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@app.command()
def estimate(
    answers: Answers,
    prompts: Prompts,
    out: Annotated[Path, typer.Option(help="Folder that the cache would lie in; nothing is written there.")],
    model: Model = "smollm2",
    drafter: Method = "dspark",
    fields: SetFields = None,
    measured: Annotated[int, typer.Option(min=1, help="Samples whose time is measured.")] = 4,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Tell bytes and time of a cache in every form, before anything is written."""
    from dspark import cache_runs

    _set_threads(threads)
    config = _config(answers, prompts, model, drafter, fields)
    found = cache_runs.estimate(cache_runs.prepare(config, out), out, measured=measured)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        for line in estimate_lines(found):
            typer.echo(line)


@app.command()
def build(
    answers: Answers,
    prompts: Prompts,
    out: Annotated[Path, typer.Option(help="Folder of the cache; a build begun there goes on.")],
    model: Model = "smollm2",
    drafter: Method = "dspark",
    fields: SetFields = None,
    form: Annotated[
        str, typer.Option(help="deepspec (its target cache v2) or small (what anchors need).")
    ] = "deepspec",
    encoding: Annotated[
        str, typer.Option(help="Of states, in the form small: float32, bfloat16, float8_e4m3 or int8.")
    ] = "bfloat16",
    rank: Annotated[int, typer.Option(min=0, help="Number of this process, if several build one cache.")] = 0,
    world: Annotated[int, typer.Option(min=1, help="How many processes build it.")] = 1,
    shard_mib: Annotated[int, typer.Option(min=1, help="MiB of a shard; a kill costs the one under way.")] = 256,
    reserve_mib: Annotated[int, typer.Option(min=0, help="MiB to be left free on the disk.")] = 1024,
    threads: Threads = None,
) -> None:
    """Run the target over all answers and keep what `train` needs; the same command goes on after an interrupt."""
    from dspark import cache_runs

    _set_threads(threads)
    job = cache_runs.prepare(_config(answers, prompts, model, drafter, fields), out)
    cache = cache_runs.plan_build(
        job, out, form=form, encoding=encoding, shard_bytes=shard_mib * MIB, reserve_bytes=reserve_mib * MIB
    )
    todo = cache.todo(rank, world)
    tokens = sum(s.token_ids.shape[0] for shard in todo for s in job.samples[shard.first : shard.end])
    typer.echo(
        f"{len(job.samples)} samples, {cache.nbytes / MIB:,.1f} MiB in {len(cache.shards)} shards; "
        f"{len(todo)} of them to write here",
        err=True,
    )
    with _progress(tokens) as board:
        finished = cache.run(job.target, rank=rank, world=world, on_sample=board.show)
    if finished:
        typer.echo(str(out))
    else:
        typer.echo(f"this process is done; {len(cache.todo())} shards are left to the others", err=True)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A feature cache, ours or DeepSpec's.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The target that must have made it; exit code 2 if not.")
    ] = None,
    measure: Annotated[
        int, typer.Option(min=0, help="Samples computed again by the model, to measure what the cache loses.")
    ] = 0,
    drafter: Annotated[
        Path | None, typer.Option("--drafter", help="A drafter's folder: how its acceptance changes on the cache.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model when it measures; auto: as the cache was made.")] = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Read a whole cache against its checksums, and tell whether it is a model's own and what it loses."""
    from dspark import cache_runs
    from dspark.data.cache_reader import FeatureCache

    if model is None and (measure or drafter is not None):
        raise ConfigError("--model is not given; measuring needs the target that made the cache")
    _set_threads(threads)
    with FeatureCache(folder) as cache:
        if model is not None:
            cache_runs.check_identity(cache, model)
        cache_runs.check_bytes(cache)
        loss = None
        if model is not None and (measure or drafter is not None):
            lengths = [record.tokens for record in cache.records]
            samples = [cache.sample(i) for i in cache_runs.spread_by_tokens(lengths, measure or MEASURED)]
            loss = cache_runs.measure_loss(cache, cache_runs.load_for(cache, model, dtype), samples, drafter=drafter)
        facts = cache_runs.cache_facts(cache)
    if as_json:
        typer.echo(json.dumps({**facts, "loss": None if loss is None else dataclasses.asdict(loss)}))
        return
    for line in [*fact_lines(facts), *([] if loss is None else loss_lines(loss))]:
        typer.echo(line)


# --- printing --------------------------------------------------------------------------------------------------------


def estimate_lines(found: Estimate) -> list[str]:
    """An estimate as text, a form a line."""
    lines = [f"{found.samples} samples, {found.tokens:,} tokens"]
    for cast in found.forecasts:
        fits = "" if cast.nbytes < found.free_bytes else "  DOES NOT FIT"
        lines.append(
            f"{cast.form:<9} {cast.encoding:<12} {cast.nbytes / MIB:>12,.1f} MiB  "
            f"{cast.nbytes / found.tokens:>9,.0f} bytes a token  {clock_text(cast.seconds)}{fits}"
        )
    lines += [f"left out: {reason}" for reason in found.left_out]
    lines.append(
        f"free: {found.free_bytes / MIB:,.1f} MiB; time from {found.measured_samples} samples of "
        f"{found.measured_tokens} tokens, one process"
    )
    return lines


def fact_lines(facts: dict[str, Any]) -> list[str]:
    """A cache as text, a fact a line; all of its bytes were good."""
    shown = {**facts, "bytes": f"{facts['bytes']:,}", "taps": ", ".join(map(str, facts["taps"]))}
    shown["checksums"] = "all good" if facts["checksums"] else "none: not written by dspark"
    width = max(map(len, shown))
    return [f"{name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items()]


def loss_lines(loss: CacheLoss) -> list[str]:
    """What a cache loses, as text."""
    lines = [
        f"features differ from the target's by {loss.feature_error:.3%} of a row's length (mean of {loss.samples} "
        f"samples; at most {loss.feature_error_max:.3%}), final states by {loss.state_error:.3%}"
    ]
    if loss.acceptance_length is not None and loss.acceptance_length_cached is not None:
        change = loss.acceptance_length_cached - loss.acceptance_length
        lines.append(
            f"analytic acceptance length {loss.acceptance_length:.4f} on the target's features, "
            f"{loss.acceptance_length_cached:.4f} on the cache's ({change:+.4f})"
        )
    return lines


class _Board:
    """Progress of a build: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, tokens: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._total, self._done = tokens, 0
        self._begin, self._pace = time.monotonic(), Pace()
        self._out = Console(stderr=True, highlight=False)
        self.bar = Progress(
            BarColumn(), TextColumn("{task.description}"), console=self._out, disable=not self._out.is_terminal
        )
        self._task = self.bar.add_task("", total=tokens)

    def show(self, sample: Sample) -> None:
        """Take in a sample that was written."""
        self._done += sample.token_ids.shape[0]
        speed = self._done / max(time.monotonic() - self._begin, 1e-9)
        left = clock_text((self._total - self._done) / speed)
        words = f"{self._done:,}/{self._total:,} tokens, {speed:.0f} tokens/s, {left} left"
        self.bar.update(self._task, completed=self._done, description=words)
        if not self._out.is_terminal and self._pace.due(finished=self._done == self._total):
            self._out.print(words, soft_wrap=True)


@contextmanager
def _progress(tokens: int) -> Iterator[_Board]:
    board = _Board(tokens)
    with board.bar:
        yield board


def _config(
    answers: list[Path], prompts: list[Path], model: str, drafter: str, fields: list[str] | None
) -> TrainConfig:
    """The configuration of the run that the cache is for."""
    from dspark import train_cli

    given: dict[str, Any] = {"model": model, "drafter": drafter}
    given |= {"answers": tuple(map(str, answers)), "prompts": tuple(map(str, prompts))}
    return train_cli.read_config(given, fields or [])


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
