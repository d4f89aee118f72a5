"""Answering: ``generate``, ``chat``, ``demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from dspark.errors import ConfigError
from dspark.models import DEFAULT_CANDIDATES
from dspark.verbs.options import (
    CalibrationFile,
    Candidates,
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
    System,
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
    stdin_text,
)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    sampling_fields: SamplingFields = None,
    max_new_tokens: MaxNewTokens = 256,
    scheduler: SchedulerName = "fixed",
    verify_len: VerifyLen = None,
    threshold: Threshold = None,
    calibration: CalibrationFile = None,
    profile: ProfileFile = None,
    lookup: Lookup = True,
    candidates: Candidates = DEFAULT_CANDIDATES,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    system: System = None,
    as_json: Json = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Answer one prompt, streaming the text."""
    text = stdin_text() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty; give a text, or - and a text on stdin")
    if raw and system is not None:
        raise ConfigError("--system goes into the chat template, which --raw leaves out; give one of the two")
    from dspark import console
    from dspark.bundle import Bundle

    sampling = sampling_of(temperature, top_k, top_p, min_p, seed, sampling_fields)
    scheduling = scheduling_of(scheduler, verify_len, threshold, calibration, profile)
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    pair = Bundle.load(model, drafter, candidates=candidates, lookup=lookup, **place)
    scheduled = pair.scheduled(scheduler, **scheduling, sampling=sampling)
    bundle, rule = scheduled.bundle, scheduled.scheduler
    prompt_ids = bundle.raw_ids(text) if raw else bundle.prompt_ids(text, system=system)
    answer = bundle.answer(prompt_ids, sampling=sampling, max_new_tokens=max_new_tokens, scheduler=rule)
    if as_json:
        print_json(console.completion_data(bundle, answer.finish(), prompt_ids, sampling))
    else:
        typer.echo(console.speed_line(console.stream_text(answer, bundle)), err=True)


def chat(
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    sampling_fields: SamplingFields = None,
    max_new_tokens: MaxNewTokens = 512,
    system: System = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the accepted draft tokens.")] = False,
    lookup: Lookup = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk in the terminal, or answer the lines of stdin one after the other. /reset starts afresh, /quit ends."""
    from dspark import console
    from dspark.bundle import Bundle

    sampling = sampling_of(temperature, top_k, top_p, min_p, seed, sampling_fields)
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    bundle = Bundle.load(model, drafter, lookup=lookup, **place)
    console.converse(bundle, sampling=sampling, max_new_tokens=max_new_tokens, system=system, show_drafts=show_drafts)


def demo(
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    max_new_tokens: MaxNewTokens = 96,
    lookup: Lookup = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Answer a handful of prompts with and without drafts, and show the same text and the speedup."""
    from dspark import console
    from dspark.bundle import Bundle
    from dspark.evaluate.bench import BenchConfig, prompts_of
    from dspark.evaluate.demo_prompts import DEMO_PER_DOMAIN, PROMPTS

    config = BenchConfig(max_new_tokens=max_new_tokens)
    bundle = Bundle.load(model, drafter, lookup=lookup, **place_of(dtype, device, "auto", threads, False))
    console.show_demo(bundle, prompts_of(PROMPTS, limit=DEMO_PER_DOMAIN), config)
