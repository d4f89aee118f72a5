"""What the command line prints: streamed answers, drafts in colour, tables and JSON."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dspark.bundle import Answer, Bundle, messages
from dspark.core import Completion, RoundRecord, SamplingParams
from dspark.errors import RequestError
from dspark.evaluate.bench import BenchConfig, BenchPrompt, measure, near_tie_tolerance
from dspark.evaluate.figures import (
    Agreement,
    BenchReport,
    Pair,
    acceptance_length,
    bench_report,
    conditional_acceptance,
    plain_data,
    prefix_acceptance,
    stage_times,
)
from dspark.evaluate.peer import Peer
from dspark.maths.scheduling import FixedScheduler, Scheduler
from dspark.numbers import DASH, number_text

DRAFT_STYLE = "green"  # of tokens that the drafter wrote and the target accepted


# --- answers ---------------------------------------------------------------------------------------------------------


def tokens_of(rounds: Iterable[RoundRecord]) -> Iterator[tuple[int, bool]]:
    """Committed tokens, and whether each was an accepted draft."""
    for record in rounds:
        yield from ((token, place < record.accepted) for place, token in enumerate(record.committed))


def pieces(tokens: Iterable[tuple[int, bool]], bundle: Bundle) -> Iterator[tuple[str, bool]]:
    """Text as it becomes certain, with the mark of the token that completed it; stop tokens have no text."""
    stream = bundle.chat.stream()
    for token, drafted in tokens:
        if token not in bundle.chat.stop_token_ids:
            yield stream.push(token), drafted
    yield stream.flush(), False


def stream_text(answer: Answer, bundle: Bundle) -> Completion:
    """Write an answer to stdout while it arrives, and a line end after it."""
    for text, _ in pieces(tokens_of(answer), bundle):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return answer.completion


def stream_drafts(answer: Answer, bundle: Bundle, out: Console) -> Completion:
    """Like :func:`stream_text`, with accepted draft tokens in colour where the terminal has any."""
    for text, drafted in pieces(tokens_of(answer), bundle):
        out.print(Text(text, style=DRAFT_STYLE if drafted else ""), end="", soft_wrap=True)
    out.print()
    return answer.completion


def speed_line(completion: Completion) -> str:
    """Tokens, speed and acceptance of an answer, in a few words."""
    words = [f"{len(completion.token_ids)} tokens ({completion.finish_reason})"]
    if completion.rounds:
        words.append(f"{completion.tokens_per_second:.1f} tokens/s")
        words.append(f"acceptance length {completion.acceptance_length:.2f}")
    return ", ".join(words)


def completion_data(
    bundle: Bundle, completion: Completion, prompt_ids: Sequence[int], sampling: SamplingParams
) -> dict[str, Any]:
    """An answer and its figures for ``--json``; names as in :mod:`dspark.evaluate.figures`, times in milliseconds."""
    return {
        "text": bundle.text_of(completion),
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(prompt_ids),
        "tokens_per_second": plain_data(completion.tokens_per_second),
        "rounds": len(completion.rounds),
        "acceptance_length": plain_data(acceptance_length(completion.rounds)),
        "prefix_acceptance": plain_data(prefix_acceptance(completion.rounds)),
        "conditional_acceptance": plain_data(conditional_acceptance(completion.rounds)),
        "milliseconds": {
            "prefill": plain_data(1e3 * completion.prefill_seconds),
            "decode": plain_data(1e3 * completion.decode_seconds),
            "per_round": plain_data(stage_times(completion.rounds)),
        },
        "sampling": plain_data(sampling),
        **bundle_data(bundle),
    }


def bundle_data(bundle: Bundle) -> dict[str, str]:
    """What was run: model, drafter, precision and place."""
    return {
        "model": bundle.model,
        "drafter": bundle.drafter.name,
        "dtype": str(bundle.target.info.dtype).removeprefix("torch."),
        "device": str(bundle.target.info.device),
    }


# --- conversations ---------------------------------------------------------------------------------------------------


def converse(
    bundle: Bundle, *, sampling: SamplingParams, max_new_tokens: int, system: str | None, show_drafts: bool
) -> None:
    """Answer line after line of stdin in one conversation. ``/reset`` forgets it, ``/quit`` or the input's end ends it.

    Every turn draws from streams of its own: the seed counts up with the turns.
    """
    out = Console(highlight=False)
    talk = messages(system=system)
    for turn, line in enumerate(_lines()):
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            talk = messages(system=system)
        elif command.startswith("/"):
            raise RequestError(f"{command} is no command; there are /reset and /quit")
        elif command:
            asked = [*talk, {"role": "user", "content": line}]
            answer = bundle.answer(
                bundle.chat.prompt_ids(asked),
                sampling=replace(sampling, seed=sampling.seed + turn),
                max_new_tokens=max_new_tokens,
                scheduler=FixedScheduler(),
            )
            completion = stream_drafts(answer, bundle, out) if show_drafts else stream_text(answer, bundle)
            talk = [*asked, {"role": "assistant", "content": bundle.text_of(completion)}]


def _lines() -> Iterator[str]:
    """The lines that the user types, with a prompt and a history at a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history; not there on every system
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


# --- benchmarks ------------------------------------------------------------------------------------------------------


def run_bench(
    bundle: Bundle, prompts: Sequence[BenchPrompt], config: BenchConfig, *, scheduler: Scheduler, peer: Peer | None
) -> BenchReport:
    """Measure with a progress line on stderr."""
    pairs = []
    with Console(stderr=True).status("warming up") as status:
        for pair in _measured(bundle, prompts, config, scheduler=scheduler, peer=peer):
            pairs.append(pair)
            status.update(f"{len(pairs)} of {len(prompts)} prompts")
    tolerance = near_tie_tolerance(bundle.target.info.dtype)
    return bench_report(pairs, greedy=config.sampling.greedy, tolerance=tolerance)


def _measured(
    bundle: Bundle, prompts: Sequence[BenchPrompt], config: BenchConfig, *, scheduler: Scheduler, peer: Peer | None
) -> Iterator[Pair]:
    ids = [(prompt.domain, bundle.prompt_ids(prompt.text)) for prompt in prompts]
    stops = frozenset(bundle.chat.stop_token_ids)
    return measure(
        bundle.target, bundle.drafter, ids, replace(config, stop_token_ids=stops), scheduler=scheduler, peer=peer
    )


def bench_data(bundle: Bundle, report: BenchReport, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark's figures for ``--json``."""
    return {**bundle_data(bundle), **{k: plain_data(v) for k, v in settings.items()}, **plain_data(report)}


def print_report(report: BenchReport, *, peer: str | None = None) -> None:
    """A row per domain and one for their mean, narrow enough for 80 columns, and a line on what is identical."""
    out = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("domain")
    speeds = ["tokens/s", "undrafted", *([peer] if peer else [])]
    for name in ["n", "speedup", "accepted", *speeds, "ms/round", "same"]:
        table.add_column(name, justify="right")
    for name, figures in (*report.domains.items(), ("mean", report.mean)):
        same = figures.identical
        table.add_row(
            name,
            str(figures.prompts),
            number_text(figures.speedup, ".2f") + ("x" if math.isfinite(figures.speedup) else ""),
            number_text(figures.acceptance_length),
            number_text(figures.tokens_per_second, ".1f"),
            number_text(figures.plain_tokens_per_second, ".1f"),
            *([number_text(figures.peer_tokens_per_second, ".1f")] if peer else []),
            number_text(figures.round_ms.round, ".1f"),
            f"{same.count}/{same.total}" if same else DASH,
            style="bold" if name == "mean" else "",
        )
    out.print(table)
    out.print("n prompts with and without drafts, interleaved; medians; accepted: tokens per round.", soft_wrap=True)
    if report.mean.identical:
        out.print(f"Identical texts: {agreement_text(report.mean.identical)}.", soft_wrap=True)


def agreement_text(agreement: Agreement) -> str:
    """``6 of 6``, or what became of the others: near-ties, or texts that differ for no such reason."""
    faults = agreement.total - agreement.count - agreement.near_ties
    others = [f"{agreement.near_ties} part at a near-tie"] if agreement.near_ties else []
    others += [f"{faults} DIFFER"] if faults else []
    words = f"{agreement.count} of {agreement.total}"
    return f"{words}; {', '.join(others)} (at most {agreement.largest_gap:.3f} logits apart)" if others else words


# --- demo ------------------------------------------------------------------------------------------------------------


def show_demo(bundle: Bundle, prompts: Sequence[BenchPrompt], config: BenchConfig) -> None:
    """Show every prompt's answer with its drafts in colour, both speeds, and whether the text is the same."""
    out = Console(highlight=False)
    tolerance = near_tie_tolerance(bundle.target.info.dtype)
    facts = bundle_data(bundle)
    out.print(
        f"{facts['model']} ({facts['dtype']} on {facts['device']}), drafter {facts['drafter']}; "
        "every prompt is answered with and without drafts"
    )
    out.print(Text.assemble("In ", ("this colour", DRAFT_STYLE), ": drafted tokens that the model accepted.\n"))
    pairs: list[Pair] = []
    with out.status("warming up") as status:
        measured = _measured(bundle, prompts, config, scheduler=FixedScheduler(), peer=None)
        for prompt, pair in zip(prompts, measured, strict=True):
            pairs.append(pair)
            out.print(Text(f"{prompt.domain}: {prompt.text}", style="bold"))
            out.print(Padding(_coloured(pair.drafted, bundle), (0, 0, 0, 2)))
            out.print(f"  = {speeds_text(pair)}\n  = {sameness_text(pair, tolerance=tolerance)}\n")
            status.update(f"{len(pairs)} of {len(prompts)} prompts")
    report = bench_report(pairs, greedy=True, tolerance=tolerance)
    print_report(report)
    if math.isfinite(report.mean.speedup):
        out.print(f"{report.mean.speedup:.2f}x the speed of the same engine without drafts.")


def _coloured(completion: Completion, bundle: Bundle) -> Text:
    """An answer with its accepted drafts in colour; its first token is the prefill's, which no round records."""
    tokens = chain([(completion.token_ids[0], False)], tokens_of(completion.rounds))
    parts = pieces(tokens, bundle)
    return Text.assemble(*((text, DRAFT_STYLE if drafted else "") for text, drafted in parts))


def speeds_text(pair: Pair) -> str:
    """Speeds of both ways, where the answer went on after its first token."""
    drafted, plain = pair.drafted, pair.plain
    if not drafted.rounds or not plain.rounds:
        return "the answer ended at its first token, which needs no draft"
    return (
        f"{drafted.tokens_per_second:.1f} tokens/s instead of {plain.tokens_per_second:.1f} "
        f"({drafted.tokens_per_second / plain.tokens_per_second:.2f}x), acceptance {drafted.acceptance_length:.2f}"
    )


def sameness_text(pair: Pair, *, tolerance: float) -> str:
    """An honest word on whether both ways gave the same text; ``tolerance`` in logits."""
    parted = pair.divergence
    if parted is None:
        return "identical text"
    where = f"token {parted.position + 1}, where the two choices are within {parted.gap:.3f} logits"
    if parted.gap <= tolerance:
        return f"same text up to {where}: a near-tie that rounding decides"
    return f"DIFFERENT text from {where}"
