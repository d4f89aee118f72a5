"""The options that verbs share, and what several verbs make of them.

A verb is a plain function whose parameters are annotated with these; ``dspark.cli`` registers it. Heavy imports stay
inside the verbs, so that ``dspark --help`` answers at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dspark.errors import DataError

if TYPE_CHECKING:
    from typer import Context as Context

    from dspark.core import SamplingParams
else:
    Context = typer.Context.__base__  # what typer passes is of this class, not of the one that it names

EXIT_FAILED = 1  # an audit that did not pass
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

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
    Literal["fixed", "threshold", "greedy", "skip"],
    typer.Option(
        "--scheduler",
        help="Drafts to check: a fixed number, the confident ones, what pays (Algorithm 1), or none for a while where "
        "they keep dying (skip).",
        rich_help_panel=DRAFTING,
    ),
]
VerifyLen = Annotated[int | None, typer.Option(min=0, help="Number for fixed; default: all.", rich_help_panel=DRAFTING)]
Threshold = Annotated[
    float | None, typer.Option(help="Least confidence for threshold, 0..1.", rich_help_panel=DRAFTING)
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of `calibrate`, for threshold and greedy.", rich_help_panel=DRAFTING),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="File of `profile`, for greedy and skip; default: measure now.", rich_help_panel=DRAFTING
    ),
]
SglangFile = Annotated[Path | None, typer.Option("--sglang", help="Write the table that SGLang reads there as well.")]
Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup/--no-lookup",
        help="Draft what the text has said before from the text itself, and the rest with the drafter.",
        rich_help_panel=DRAFTING,
    ),
]
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


def place_of(dtype: str, device: str, implementation: str, threads: int | None, trust: bool) -> dict[str, Any]:
    """The options that say how a model is run, as :meth:`Bundle.load` takes them."""
    return {
        "dtype": dtype,
        "device": device,
        "implementation": implementation,
        "threads": threads,
        "trust_remote_code": trust,
    }


def sampling_of(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, fields: list[str] | None
) -> SamplingParams:
    """The options of a verb that draws, ``--set`` included."""
    from dspark.assignments import read_sampling

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    return read_sampling(given, fields or [])


def scheduling_of(
    scheduler: str, verify_len: int | None, threshold: float | None, calibration: Path | None, profile: Path | None
) -> dict[str, Any]:
    """The options of a verb that schedules, as :meth:`Bundle.scheduled` takes them; refused here where they do not go
    together, before anything is loaded."""
    from dspark.bundle import check_scheduler

    options = {"verify_len": verify_len, "threshold": threshold, "calibration": calibration, "profile": profile}
    check_scheduler(scheduler, **options)  # type: ignore[arg-type]
    return options


def stdin_text() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8 ({error.reason} at byte {error.start}); convert the text first") from None


def print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False))
