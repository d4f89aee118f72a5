"""The verb ``eval``: drafters compared on the nine sets of the paper, or on any others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.models import DEFAULT_CANDIDATES
from dspark.verbs.options import (
    DRAFTING,
    SAMPLING,
    CalibrationFile,
    Candidates,
    Device,
    Dtype,
    Implementation,
    Json,
    MaxNewTokens,
    MinP,
    Model,
    ProfileFile,
    SamplingFields,
    SchedulerName,
    Seed,
    Threads,
    Threshold,
    TopK,
    TopP,
    Trust,
    VerifyLen,
    place_of,
    print_json,
)


def evaluate(
    prompts: Annotated[
        list[str],
        typer.Option(
            "--prompts",
            help="JSONL file (its name is the set's), folder of them, one of the paper's sets by name (gsm8k, math500, "
            "aime25, mbpp, humaneval, livecodebench, mt-bench, alpaca, arena-hard-v2: from the Hub), or a Hub data set "
            "owner/name:config@split; NAME=... names a set. May be repeated.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the records; what it holds is not played again.")],
    model: Model = "smollm2",
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="default, ngram or a drafter's folder; LABEL=... names it. May be repeated; default: default.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    undrafted: Annotated[
        bool, typer.Option("--undrafted/--no-undrafted", help="Answer without drafts too, for speedups.")
    ] = True,
    against: Annotated[
        str | None, typer.Option(help="Drafter that the others are set against; default: the first.")
    ] = None,
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", help="0 is greedy; may be repeated. Default: 0.", rich_help_panel=SAMPLING),
    ] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    sampling_fields: SamplingFields = None,
    max_new_tokens: MaxNewTokens = 256,
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of a conversation to ask; default: all.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Conversations per set; default: all.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Begin nothing that would end later; the same command goes on.")
    ] = None,
    scheduler: SchedulerName = "fixed",
    verify_len: VerifyLen = None,
    threshold: Threshold = None,
    calibration: CalibrationFile = None,
    profile: ProfileFile = None,
    candidates: Candidates = DEFAULT_CANDIDATES,
    rows: Annotated[
        int, typer.Option(min=1, help="Conversations that share target passes: quicker, but no speeds are measured.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the prompts.")] = 1,
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Compare drafters prompt by prompt, with confidence intervals; every round is kept on disk."""
    from dspark import eval_cli
    from dspark.assignments import read_sampling
    from dspark.eval_plays import EvalConfig

    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    scheduling: dict[str, Any] = {"verify_len": verify_len, "threshold": threshold}
    scheduling |= {"calibration": calibration, "profile": profile}
    config = EvalConfig(
        prompts=tuple(prompts),
        out=out,
        model=model,
        drafters=tuple(drafters or ("default",)),
        undrafted=undrafted,
        temperatures=tuple(temperatures or (0.0,)),
        sampling=read_sampling(given, sampling_fields or []),
        max_new_tokens=max_new_tokens,
        turns=turns,
        limit=limit,
        minutes=minutes,
        scheduler=scheduler,
        scheduling=scheduling,
        candidates=candidates,
        rows=rows,
        processes=processes,
        place=place_of(dtype, device, implementation, threads, trust_remote_code),
    )
    result = eval_cli.run(config, against=against)
    if not result.finished:
        typer.echo("time is up before all prompts were answered; the same command goes on", err=True)
    if as_json:
        print_json(eval_cli.figures_data(result.comparison, result.cells))
    elif as_markdown:
        typer.echo(eval_cli.figures_markdown(result.comparison, result.cells), nl=False)
    else:
        eval_cli.show(result, out)
