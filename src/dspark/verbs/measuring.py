"""Measuring a pair of target and drafter: ``bench``, ``audit``, ``calibrate``, ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dspark.errors import ConfigError
from dspark.models import DEFAULT_CANDIDATES
from dspark.verbs.options import (
    EXIT_FAILED,
    MODEL,
    SAMPLING,
    CalibrationFile,
    Candidates,
    Context,
    Device,
    DrafterSpec,
    Dtype,
    Implementation,
    Json,
    Lookup,
    MaxNewTokens,
    MinP,
    Model,
    ProfileFile,
    SamplingFields,
    SchedulerName,
    Seed,
    SglangFile,
    Temperature,
    Threads,
    Threshold,
    TopK,
    TopP,
    Trust,
    VerifyLen,
    place_of,
    print_json,
    sampling_of,
    scheduling_of,
)


def bench(
    context: Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSONL with `turns` or `prompt`, may be repeated; default: built-in prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain; default: all.")] = None,
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    sampling_fields: SamplingFields = None,
    max_new_tokens: MaxNewTokens = 128,
    scheduler: SchedulerName = "fixed",
    verify_len: VerifyLen = None,
    threshold: Threshold = None,
    calibration: CalibrationFile = None,
    profile: ProfileFile = None,
    lookup: Lookup = True,
    candidates: Candidates = DEFAULT_CANDIDATES,
    peer: Annotated[
        Literal["transformers", "llama.cpp"] | None, typer.Option(help="Measure another engine as well.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="For llama.cpp: a Python whose environment has xllamacpp.")
    ] = None,
    peer_model: Annotated[
        Path | None, typer.Option(help="For llama.cpp: a GGUF file; default: the one of `smollm2`.")
    ] = None,
    as_json: Json = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure drafted against undrafted decoding, prompt by prompt in one process; or `serve`, under load."""
    if context.invoked_subcommand is not None:
        return
    import torch

    from dspark import console
    from dspark.artifacts import provenance
    from dspark.bundle import Bundle
    from dspark.evaluate.bench import BenchConfig, prompts_of, read_prompts
    from dspark.evaluate.demo_prompts import PROMPTS
    from dspark.evaluate.llama_cpp import LlamaCppPeer
    from dspark.evaluate.peer import Peer, TransformersPeer
    from dspark.models.weights import embedded_gguf

    sampling = sampling_of(temperature, top_k, top_p, min_p, seed, sampling_fields)
    config = BenchConfig(max_new_tokens=max_new_tokens, sampling=sampling)
    scheduling = scheduling_of(scheduler, verify_len, threshold, calibration, profile)
    chosen = read_prompts(prompts, limit=limit) if prompts else prompts_of(PROMPTS, limit=limit)
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    pair = Bundle.load(model, drafter, candidates=candidates, lookup=lookup, **place)
    scheduled = pair.scheduled(scheduler, **scheduling, sampling=sampling)
    bundle, rule = scheduled.bundle, scheduled.scheduler
    info = bundle.target.info
    other: Peer | None = None
    if peer == "transformers":
        other = TransformersPeer(bundle.folder, dtype=info.dtype, device=info.device)
    elif peer == "llama.cpp":
        if peer_python is None:
            raise ConfigError("peer_python is not given; --peer llama.cpp needs a Python with the package xllamacpp")
        other = LlamaCppPeer(peer_python, peer_model or embedded_gguf(), threads=torch.get_num_threads())
    report = console.run_bench(bundle, chosen, config, scheduler=rule, peer=other)
    if as_json:
        settings = {"config": config, "scheduler": repr(rule), "peer": peer, "provenance": provenance()}
        print_json(console.bench_data(bundle, report, settings))
    else:
        console.print_report(report, peer=peer)


def audit(
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    minutes: Annotated[
        float | None, typer.Option(help="Minutes that it may take at most; default: 20, or 4 if quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer ways of running the pair, a coarser test.")] = False,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="greedy, low, sampled or depth; may be repeated; default: all but depth."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there as well.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSONL with `turns` or `prompt`, may be repeated; default: built-in prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain; default: all.")] = None,
    max_new_tokens: MaxNewTokens = 64,
    depths: Annotated[
        str, typer.Option(help="Context lengths of the parts sampled and depth, as 100,1000; default: their own.")
    ] = "",
    shift: Annotated[
        float | None, typer.Option(help="Total variation to be seen; default: 0.03, or 0.1 if quick.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Chance of a false alarm, all sampled tests together.")] = 1e-3,
    power: Annotated[float, typer.Option(help="Chance that the shift is seen.")] = 0.9,
    temperature: Annotated[float, typer.Option(help="Of the sampled part.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: TopK = 6,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help="Of all parts but low.", rich_help_panel=MODEL)] = "float32",
    low_dtype: Annotated[str, typer.Option(help="Of the part low.", rich_help_panel=MODEL)] = "bfloat16",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show that drafts leave your pair's output as it is; exit code 1 if they do not, or if nobody could tell."""
    from dspark import audit_cli
    from dspark.core import SamplingParams
    from dspark.evaluate.audit_sampled import SampledConfig

    options = audit_cli.AuditOptions(
        model=model,
        drafter=drafter,
        parts=tuple(parts or audit_cli.DEFAULT_PARTS),
        minutes=minutes if minutes is not None else 4.0 if quick else 20.0,
        quick=quick,
        prompts=tuple(prompts or ()),
        limit=limit,
        max_new_tokens=max_new_tokens,
        depths=audit_cli.read_depths(depths),
        low_dtype=low_dtype,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        statistics=SampledConfig(
            alpha=alpha, power=power, shift=shift if shift is not None else 0.1 if quick else 0.03, seed=seed
        ),
    )
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    if not audit_cli.run(options, place, json_file=json_file):
        raise typer.Exit(EXIT_FAILED)


def calibrate(
    out: Annotated[Path, typer.Option(help="The calibration's file.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSONL with `turns` or `prompt`, may be repeated; default: built-in prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per domain; default: all.")] = None,
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    method: Annotated[
        str,
        typer.Option(help="platt: a temperature and a bias per position; sts: temperatures alone, as --sglang needs."),
    ] = "platt",
    records: Annotated[
        Path | None,
        typer.Option(
            help="Fit to the rounds in this folder of `dspark eval --rows 32 ...`, which may be stopped and "
            "goes on; nothing is played."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts that share target passes.")] = 16,
    candidates: Candidates = DEFAULT_CANDIDATES,
    sglang: SglangFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Make a drafter's confidences true: play prompts at full length, fit on some, judge on the others."""
    from dspark import calibrate_cli
    from dspark.core import SamplingParams

    calibrate_cli.run(
        out,
        model=model,
        drafter=drafter,
        prompts=prompts or (),
        limit=limit,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        max_new_tokens=max_new_tokens,
        candidates=candidates,
        sglang=sglang,
        method=method,
        rows=rows,
        records=records,
        place=place_of(dtype, device, implementation, threads, trust_remote_code),
    )


def profile_costs(
    out: Annotated[Path, typer.Option(help="The profile's file.")],
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a step; default: four requests with whole blocks.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Committed tokens behind each request: a curve each.")] = "128,1024",
    requests: Annotated[str, typer.Option(help="Numbers of requests to time drafting for.")] = "1,2,4",
    repeats: Annotated[int, typer.Option(min=1, help="Passes behind every median.")] = 7,
    candidates: Candidates = DEFAULT_CANDIDATES,
    sglang: SglangFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure what a step costs for every number of tokens, and drafting, on this machine."""
    from dspark import profile_cli

    profile_cli.run(
        out,
        model=model,
        drafter=drafter,
        max_tokens=max_tokens,
        contexts=profile_cli.read_numbers(contexts, name="contexts"),
        requests=profile_cli.read_numbers(requests, name="requests"),
        repeats=repeats,
        candidates=candidates,
        sglang=sglang,
        place=place_of(dtype, device, implementation, threads, trust_remote_code),
    )
