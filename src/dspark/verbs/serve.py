"""``serve``: OpenAI's interface over the engine, with a live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dspark.models import DEFAULT_CANDIDATES
from dspark.verbs.options import (
    DRAFTING,
    Candidates,
    Device,
    Dtype,
    Implementation,
    Lookup,
    ProfileFile,
    Threads,
    Threshold,
    Trust,
    VerifyLen,
    place_of,
)

SERVER, ENGINE = "Server", "Engine"  # headings of --help


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2, a Hugging Face folder, a .gguf file, a Hub id, or a folder of `accelerate` with its drafter."
        ),
    ] = "smollm2",
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            help="default, ngram, none or a drafter's folder; default: the given folder's own, else `default`.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    scheduler: Annotated[
        Literal["none", "fixed", "threshold", "greedy", "lagged"] | None,
        typer.Option(help="Drafts to check; default: greedy, or what `accelerate` found.", rich_help_panel=DRAFTING),
    ] = None,
    verify_len: VerifyLen = None,
    threshold: Threshold = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of `calibrate`; repeatable, one of a greedy and one of a sampled run.", rich_help_panel=DRAFTING
        ),
    ] = None,
    profile: ProfileFile = None,
    lookup: Lookup = True,
    candidates: Candidates = DEFAULT_CANDIDATES,
    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", rich_help_panel=SERVER)] = 8000,
    served_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: as given.", rich_help_panel=SERVER)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DSPARK_API_KEY",
            help="Key that clients must give; repeatable. Better in the variable than in the list of processes.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    live_text: Annotated[
        bool,
        typer.Option("--live-text", help="Show on the live page what is generated, for all.", rich_help_panel=SERVER),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.", rich_help_panel=SERVER)] = 600.0,
    drain: Annotated[
        float, typer.Option(help="Seconds for requests under way, when stopping.", rich_help_panel=SERVER)
    ] = 30.0,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=SERVER)
    ] = None,
    seats: Annotated[int, typer.Option(min=1, help="Answers that run at once.", rich_help_panel=ENGINE)] = 64,
    waiting: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; more get 429.", rich_help_panel=ENGINE)
    ] = 128,
    memory: Annotated[
        int | None, typer.Option(min=1, help="MiB of KV memory; default: 1024 at most.", rich_help_panel=ENGINE)
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer.", rich_help_panel=ENGINE)
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Prompt tokens per step.", rich_help_panel=ENGINE)] = 256,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Prepare a step while the last one runs.", rich_help_panel=ENGINE)
    ] = False,
    prefix_sharing: Annotated[
        bool,
        typer.Option(
            "--prefix-sharing/--no-prefix-sharing", help="Share pages of equal prefixes.", rich_help_panel=ENGINE
        ),
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Serve a model with OpenAI's interface and a live page."""
    from dspark.serve.api import serving
    from dspark.serve.api.config import ApiConfig
    from dspark.serve.settings import EngineConfig

    what = serving.resolve(model, drafter=drafter, scheduler=scheduler)
    engine = EngineConfig(
        seats=seats,
        max_waiting=waiting,
        memory_mib=memory,
        max_len=context,
        prefill_tokens=prefill,
        overlap=overlap,
        prefix_sharing=prefix_sharing,
        scheduler=what.scheduler,
        verify_len=verify_len,
        threshold=threshold,
    )
    api = ApiConfig(
        api_keys=tuple(api_key or ()),
        live_text=live_text,
        max_requests=seats + waiting,
        request_seconds=timeout,
        drain_seconds=drain,
        max_completion_tokens=max_output,
    )
    code = serving.run(
        what,
        engine,
        api,
        host=host,
        port=port,
        name=served_name,
        candidates=candidates,
        lookup=lookup,
        calibrations=tuple(calibration or ()),
        profile=profile,
        place=place_of(dtype, device, implementation, threads, trust_remote_code),
        say=lambda line: typer.echo(line),
    )
    raise typer.Exit(code)
