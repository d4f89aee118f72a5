"""What a drafter learns from: ``prompts``, ``answers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.errors import ConfigError
from dspark.verbs.options import (
    Device,
    Dtype,
    Implementation,
    MaxNewTokens,
    MinP,
    Model,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trust,
    place_of,
)


def prompts(
    out: Annotated[Path, typer.Option(help="JSONL of prompts, as `answers` and `train` read them.")],
    files: Annotated[
        list[Path] | None,
        typer.Option("--from", help="JSONL with turns, messages, conversations, prompt or instruction; repeatable."),
    ] = None,
    hub: Annotated[str | None, typer.Option(help="Hub data set, owner/name or owner/name:config.")] = None,
    split: Annotated[str, typer.Option(help="Of the Hub data set.")] = "train",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model that writes its own prompts, from its chat template.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to keep; default: all, or 1000 from a model.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--not-in", help="Evaluation set: prompts that share 13 words with it are refused; repeatable."),
    ] = None,
    similarity: Annotated[
        float | None,
        typer.Option(help="Refuse what repeats an earlier prompt by so much; default: 0.7 from a model, else off."),
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Domain of all these prompts; default: the rows' own.")] = None,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    rows: Annotated[int, typer.Option(min=1, help="Prompts under way at a time, from a model.")] = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Make one file of prompts: from files of any shape, from the Hub, or from nothing, by the model itself."""
    from dspark import prompts_cli
    from dspark.data.self_prompts import SelfPromptConfig

    source = prompts_cli.Source(files=tuple(files or ()), hub=hub, split=split, model=model)
    if model is None:
        prompts_cli.convert(source, out, evaluation=evaluation or (), limit=limit, domain=domain, similarity=similarity)
        return
    if domain is not None:
        raise ConfigError("--domain is for prompts that are given; a model's own have the domain `self`")
    config = SelfPromptConfig(
        count=limit or 1000, seed=seed, max_new_tokens=max_new_tokens, similarity=similarity or 0.7
    )
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    prompts_cli.write_own(source, out, config, evaluation=evaluation or (), rows=rows, place=place)


def answers(
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", help="JSONL of prompts, in any shape that `prompts` reads; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(help="JSONL of answers; what it holds already is kept and not done again.")],
    model: Model = "smollm2",
    server: Annotated[
        str | None,
        typer.Option(help="Server with the OpenAI interface that runs the model, http://...; default: we run it."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name on the server; default: the only one there.")
    ] = None,
    api_key_variable: Annotated[
        str, typer.Option(help="Environment variable with the server's key, if it wants one.")
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at the server.")] = 32,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each prompt to answer, one after the other.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Answers under way at a time, without a server.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to answer, from the first; default: all.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Template option enable_thinking.")
    ] = None,
    template_option: Annotated[
        list[str] | None, typer.Option(help="Any other option of the chat template, name=value; may be repeated.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Let the model answer prompts for `train`; the same command goes on with an interrupted file."""
    from dspark import answers_cli
    from dspark.core import SamplingParams

    config = answers_cli.AnswersConfig(
        prompts=tuple(prompts),
        out=out,
        model=model,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        max_new_tokens=max_new_tokens,
        samples=samples,
        turns=turns,
        limit=limit,
        template_options=answers_cli.template_options(template_option or [], thinking),
        trust_remote_code=trust_remote_code,
    )
    if server is not None:
        answers_cli.run_remote(
            config, url=server, name=served_model, api_key_variable=api_key_variable, concurrency=concurrency
        )
        return
    place = place_of(dtype, device, implementation, threads, trust_remote_code)
    del place["trust_remote_code"]
    answers_cli.run(config, rows=rows, **place)
