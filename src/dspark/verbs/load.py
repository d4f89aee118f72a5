"""``bench serve``: our server under load, with every scheduler, beside other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.verbs.options import MODEL, DrafterSpec, Model, Seed, Threads


def bench_serve(
    levels: Annotated[str, typer.Option(help="Users at a time (closed loop), a measurement each.")] = "1,4,16,64",
    rates: Annotated[str, typer.Option(help="Requests a second (open loop), a measurement each.")] = "",
    ways: Annotated[
        str, typer.Option(help="none, fixed, fixed:N, threshold:C, greedy, lagged, with commas between.")
    ] = "none,fixed,threshold:0.4,greedy,lagged",
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", help="A running server beside ours, NAME=URL or NAME=URL#MODEL; may be repeated."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSONL with `turns` or `prompt`, may be repeated; default: built-in prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain; default: all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    per_user: Annotated[int, typer.Option(min=1, help="Requests per user of a level.")] = 3,
    least: Annotated[int, typer.Option(min=1, help="Requests of a measurement, at least.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each; the median is shown.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Seed = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there as well.")] = None,
    server_options: Annotated[
        list[str] | None, typer.Option("--serve", help="A further option of `dspark serve`, as seats=64; repeatable.")
    ] = None,
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    dtype: Annotated[str, typer.Option(help="As of `serve`.", rich_help_panel=MODEL)] = "auto",
    threads: Threads = None,
) -> None:
    """Measure throughput, the speed a user sees, first-token latency and the verify budget under load."""
    from dspark.loadbench import run

    run.bench_serve(
        run.LoadBenchOptions(
            model=model,
            drafter=drafter,
            dtype=dtype,
            threads=threads,
            ways=ways,
            peers=tuple(peers or ()),
            levels=levels,
            rates=rates,
            prompts=tuple(prompts or ()),
            limit=limit,
            max_new_tokens=max_new_tokens,
            per_user=per_user,
            least=least,
            repeats=repeats,
            temperature=temperature,
            seed=seed,
            server_options=tuple(server_options or ()),
        ),
        json_file=json_file,
    )
