"""Making a drafter: ``train``, ``accelerate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.verbs.options import (
    EXIT_INTERRUPTED,
    SAMPLING,
    Device,
    Dtype,
    Implementation,
    MaxNewTokens,
    Model,
    Seed,
    Threads,
)


def train(
    answers: Annotated[list[Path], typer.Option("--answers", help="JSONL with the target's answers; may be repeated.")],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSONL with their prompts; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Run folder; an interrupted run found there goes on.")],
    model: Model = "smollm2",
    drafter: Annotated[str, typer.Option(help="Method: `dspark`, `dflash`, `eagle3` or `mtp`.")] = "dspark",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer updates; default: the config's.")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other field of TrainConfig, as name=value; may be repeated."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Features from `cache build`; default: the target runs beside the trainer.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print what memory it will take, and stop.")] = False,
    threads: Threads = None,
) -> None:
    """Train a drafter on the target's own answers; ends with the folder of the best one. `torchrun` starts it in many
    processes."""
    from dspark import train_cli

    given: dict[str, Any] = {"model": model, "drafter": drafter, "out": str(out)}
    given |= {"answers": tuple(map(str, answers)), "prompts": tuple(map(str, prompts))}
    given |= {} if steps is None else {"steps": steps}
    given |= {} if cache is None else {"cache": str(cache)}
    config = train_cli.read_config(given, fields or [])
    if plan_only:
        for line in train_cli.plan_lines(config):
            typer.echo(line)
    elif not train_cli.run(config, threads=threads):
        raise typer.Exit(EXIT_INTERRUPTED)


def accelerate(
    model: Annotated[str, typer.Argument(help="smollm2, a Hugging Face folder, a .gguf file or a Hub id.")],
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="JSONL of any shape, or a Hub data set; default: the model writes its own."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time to work, as 60m, 90s or 2h.")] = "60m",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; what is done there is not done again.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Measure, print the plan, and stop.")] = False,
    split: Annotated[str, typer.Option(help="Of a Hub data set.")] = "train",
    temperature: Annotated[
        float, typer.Option(help="The model will be run at; calibrated and compared there.", rich_help_panel=SAMPLING)
    ] = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    answers: Annotated[int | None, typer.Option(min=8, help="To learn from; default: what the time allows.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training; default: what the time allows.")] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of TrainConfig, as name=value; may be repeated.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
) -> None:
    """Make a model faster: prompts, answers, training, calibration, profile, and a measured before and after."""
    import dataclasses

    from dspark import accelerate_cli
    from dspark.assignments import read_fields
    from dspark.road.budget import read_budget
    from dspark.road.road import RoadConfig
    from dspark.train.config import TrainConfig

    config = RoadConfig(
        model=model,
        out=str(out or accelerate_cli.default_out(model)),
        budget=read_budget(budget),
        prompts=prompts,
        split=split,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        answers=answers,
        steps=steps,
        fields=read_fields({}, fields or [], {f.name: f.default for f in dataclasses.fields(TrainConfig)}),
        seed=seed,
        dtype=dtype,
        device=device,
        implementation=implementation,
    )
    accelerate_cli.run(config, threads=threads, plan_only=plan_only)
