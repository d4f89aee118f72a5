"""The command line: one verb per stage. Options are parsed here; the work is done in the modules they name.

Whatever a user can do wrong ends in one line on stderr and exit code 2; an interrupt exits with 130. Heavy imports stay
inside the verbs, so that ``dspark --help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import dspark
from dspark import cache_cli
from dspark.errors import ConfigError, DataError, DsparkError

EXIT_FAILED = 1  # an audit that did not pass
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class OneLineErrors(TyperGroup):
    """A command group that reports a user's mistakes in one line instead of a traceback or a box."""

    def main(  # the signature is typer's
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a verb and, unless ``standalone_mode`` is False, exit with its code."""
        try:
            # an interrupt comes back as 130, the result of a verb as None
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra) or 0
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except (typer.TyperException, DsparkError, OSError) as error:
            typer.echo(f"dspark: {_one_line(error)}", err=True)
            code = EXIT_USER_ERROR
        if standalone_mode:
            sys.exit(code)
        return code


def _one_line(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


app = typer.Typer(
    cls=OneLineErrors,
    help="Lossless speculative decoding: the same output as the model alone, in less time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cache_cli.app, name="cache")

MODEL, SAMPLING, DRAFTING = "Model", "Sampling", "Drafting"  # headings of --help

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="smollm2, a Hugging Face folder, a .gguf file or a Hub id.", rich_help_panel=MODEL
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto (what is fastest here), bfloat16, float32 or float16.", rich_help_panel=MODEL)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=MODEL)]
Implementation = Annotated[str, typer.Option(help="auto, lean or transformers.", rich_help_panel=MODEL)]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.", rich_help_panel=MODEL)
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that the model's repository brings along.", rich_help_panel=MODEL
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the smallest set with this mass.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the likeliest one's chance.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int, typer.Option(help="Of the random streams.", rich_help_panel=SAMPLING)]
SamplingFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other field of SamplingParams, as name=value: penalties, logit_bias, banned_token_ids, min_tokens, "
        "rule=block (joint verification). May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=SAMPLING)]
DrafterSpec = Annotated[
    str, typer.Option("--drafter", "-d", help="default, ngram, none or a drafter's folder.", rich_help_panel=DRAFTING)
]
SchedulerName = Annotated[
    Literal["fixed", "threshold", "greedy"],
    typer.Option(
        "--scheduler",
        help="Drafts to check: a fixed number, the confident ones, or what pays (Algorithm 1).",
        rich_help_panel=DRAFTING,
    ),
]
VerifyLen = Annotated[int | None, typer.Option(min=0, help="Number for fixed; default: all.", rich_help_panel=DRAFTING)]
Threshold = Annotated[float | None, typer.Option(help="Least confidence for threshold.", rich_help_panel=DRAFTING)]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of `calibrate`, for threshold and greedy.", rich_help_panel=DRAFTING),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="File of `profile`, for greedy; default: measure now.", rich_help_panel=DRAFTING),
]
SglangFile = Annotated[Path | None, typer.Option("--sglang", help="Write the table that SGLang reads there as well.")]
Candidates = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens per position that the sequential stage weighs; 0: the whole vocabulary.",
        rich_help_panel=DRAFTING,
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt; default: the chat template's own.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dspark {dspark.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _dspark(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
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
    candidates: Candidates = 64,
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
    text = _stdin_text() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty; give a text, or - and a text on stdin")
    if raw and system is not None:
        raise ConfigError("--system goes into the chat template, which --raw leaves out; give one of the two")
    from dspark import console
    from dspark.assignments import read_sampling
    from dspark.bundle import Bundle, check_scheduler

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = read_sampling(given, sampling_fields or [])
    scheduling: dict[str, Any] = {"verify_len": verify_len, "threshold": threshold}
    scheduling |= {"calibration": calibration, "profile": profile}
    check_scheduler(scheduler, **scheduling)
    place = _place(dtype, device, implementation, threads, trust_remote_code)
    bundle = Bundle.load(model, drafter, candidates=candidates, **place)
    rule = bundle.scheduler(scheduler, **scheduling, sampling=sampling)
    prompt_ids = bundle.raw_ids(text) if raw else bundle.prompt_ids(text, system=system)
    answer = bundle.answer(prompt_ids, sampling=sampling, max_new_tokens=max_new_tokens, scheduler=rule)
    if as_json:
        _print_json(console.completion_data(bundle, answer.finish(), prompt_ids, sampling))
    else:
        typer.echo(console.speed_line(console.stream_text(answer, bundle)), err=True)


@app.command()
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
    dtype: Dtype = "auto",
    device: Device = "auto",
    implementation: Implementation = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk in the terminal, or answer the lines of stdin one after the other. /reset starts afresh, /quit ends."""
    from dspark import console
    from dspark.assignments import read_sampling
    from dspark.bundle import Bundle

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = read_sampling(given, sampling_fields or [])
    bundle = Bundle.load(model, drafter, **_place(dtype, device, implementation, threads, trust_remote_code))
    console.converse(bundle, sampling=sampling, max_new_tokens=max_new_tokens, system=system, show_drafts=show_drafts)


@app.command()
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
    place = _place(dtype, device, implementation, threads, trust_remote_code)
    prompts_cli.write_own(source, out, config, evaluation=evaluation or (), rows=rows, place=place)


@app.command()
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
    place = _place(dtype, device, implementation, threads, trust_remote_code)
    del place["trust_remote_code"]
    answers_cli.run(config, rows=rows, **place)


@app.command()
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


@app.command()
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


@app.command()
def bench(
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
    candidates: Candidates = 64,
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
    """Measure drafted against undrafted decoding, prompt by prompt in one process."""
    import torch

    from dspark import console
    from dspark.artifacts import provenance
    from dspark.assignments import read_sampling
    from dspark.bundle import Bundle, check_scheduler
    from dspark.evaluate.bench import BenchConfig, prompts_of, read_prompts
    from dspark.evaluate.demo_prompts import PROMPTS
    from dspark.evaluate.llama_cpp import LlamaCppPeer
    from dspark.evaluate.peer import Peer, TransformersPeer
    from dspark.models.weights import embedded_gguf

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = read_sampling(given, sampling_fields or [])
    config = BenchConfig(max_new_tokens=max_new_tokens, sampling=sampling)
    scheduling: dict[str, Any] = {"verify_len": verify_len, "threshold": threshold}
    scheduling |= {"calibration": calibration, "profile": profile}
    check_scheduler(scheduler, **scheduling)
    chosen = read_prompts(prompts, limit=limit) if prompts else prompts_of(PROMPTS, limit=limit)
    place = _place(dtype, device, implementation, threads, trust_remote_code)
    bundle = Bundle.load(model, drafter, candidates=candidates, **place)
    rule = bundle.scheduler(scheduler, **scheduling, sampling=sampling)
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
        _print_json(console.bench_data(bundle, report, settings))
    else:
        console.print_report(report, peer=peer)


@app.command()
def audit(
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    minutes: Annotated[float | None, typer.Option(help="Most that it may take; default: 20, or 4 if quick.")] = None,
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
    place = _place(dtype, device, implementation, threads, trust_remote_code)
    if not audit_cli.run(options, place, json_file=json_file):
        raise typer.Exit(EXIT_FAILED)


@app.command()
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
    candidates: Candidates = 64,
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
        place=_place(dtype, device, implementation, threads, trust_remote_code),
    )


@app.command("profile")
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
    candidates: Candidates = 64,
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
        place=_place(dtype, device, implementation, threads, trust_remote_code),
    )


@app.command()
def demo(
    model: Model = "smollm2",
    drafter: DrafterSpec = "default",
    max_new_tokens: MaxNewTokens = 96,
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
    bundle = Bundle.load(model, drafter, **_place(dtype, device, "auto", threads, False))
    console.show_demo(bundle, prompts_of(PROMPTS, limit=DEMO_PER_DOMAIN), config)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder, in any of the formats that `convert` names.")],
    target: Annotated[str | None, typer.Option(help="Model to judge it by; exit code 1 if it does not fit.")] = None,
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Say what a drafter is, by which conventions, and whether it fits a model."""
    from dspark import formats_cli

    if code := formats_cli.run_inspect(folder, target=target, as_json=as_json, trust_remote_code=trust_remote_code):
        raise typer.Exit(code)


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    to: Annotated[str, typer.Option(help="deepspec, speculators, specforge, zlab or sglang-eagle3.")],
    target: Annotated[str | None, typer.Option(help="The model it was trained for: checked, and named inside.")] = None,
    with_embeddings: Annotated[
        bool, typer.Option("--with-embeddings", help="Store copies of the target's embedding and head.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a drafter in another project's format."""
    from dspark import formats_cli

    formats_cli.run_convert(
        folder, out, to=to, target=target, with_embeddings=with_embeddings, trust_remote_code=trust_remote_code
    )


def _place(dtype: str, device: str, implementation: str, threads: int | None, trust: bool) -> dict[str, Any]:
    """The options that say how a model is run, as :meth:`Bundle.load` takes them."""
    return {
        "dtype": dtype,
        "device": device,
        "implementation": implementation,
        "threads": threads,
        "trust_remote_code": trust,
    }


def _stdin_text() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8 ({error.reason} at byte {error.start}); convert the text first") from None


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False))


def main() -> None:
    """Entry point of the ``dspark`` command."""
    # OpenMP threads that wait for each other without yielding stall for milliseconds when another process takes a core.
    # A bounded spin costs nothing on a quiet machine; it must be set before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    app()
