"""The ``audit`` verb: loads the pair once a precision, runs the parts within the time, prints a page."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dspark.artifacts import provenance, write_json
from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError
from dspark.evaluate.audit import (
    REPORT_KIND,
    REPORT_VERSION,
    UNCHANGED,
    AuditReport,
    report_data,
    sampled_cases,
)
from dspark.evaluate.audit_greedy import GreedyPart, Say, Spoilt, Variant, audit_greedy
from dspark.evaluate.audit_sampled import SampledConfig, SampledPart, audit_sampled
from dspark.evaluate.bench import prompts_of, read_prompts
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.maths.scheduling import GreedyScheduler, ThresholdScheduler
from dspark.models.drafter import NoDrafter
from dspark.models.lookup_drafter import LookupDrafter
from dspark.models.registry import default_drafter_folder, load_drafter
from dspark.models.target import Target
from dspark.numbers import number_text

PARTS = {"greedy": 0.2, "low": 0.15, "sampled": 0.65, "depth": 0.3}  # and their shares of the time
DEFAULT_PARTS = ("greedy", "low", "sampled")
SAMPLED_DEPTHS = (0, 512, 2048)  # tokens of context; 0: the prompt alone
ACCEPTANCE_DEPTHS = (100, 1000, 4000)
DEPTH_PROMPTS = 4  # asked at each depth
ANSWER_BEGUN = 6  # tokens of the answer that stand before the sampled tests begin
THRESHOLD = 0.5  # of the confidence scheduler that is tried
TOKEN_COST = 0.15  # of a step, in the made-up cost table of the load-aware scheduler that is tried

FILLER = (
    "The harbour town lies where the river meets the sea. In spring the fishing boats leave before dawn and come back "
    "with herring and mackerel. Behind the market hall an old printer still sets type by hand. Its windows look out on "
    "the square, where children play between the benches while their parents talk about the weather and the price of "
    "bread. A narrow road climbs from there to the lighthouse, past gardens with apple trees and low stone walls. "
)


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the command line says."""

    model: str
    drafter: str
    parts: tuple[str, ...] = DEFAULT_PARTS
    minutes: float = 20.0  # that the parts may take together, loading apart
    quick: bool = False  # fewer cases, a coarser shift
    prompts: tuple[Path, ...] = ()
    limit: int | None = None  # prompts per domain
    max_new_tokens: int = 64  # of greedy answers
    depths: tuple[int, ...] = ()  # of the sampled and the depth part; () for their defaults
    low_dtype: str = "bfloat16"
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, top_k=6))
    statistics: SampledConfig = field(default_factory=SampledConfig)

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"part is {part!r}; it must be one of {', '.join(PARTS)}")
        if not 0.0 < self.minutes < float("inf"):
            raise ConfigError(f"minutes is {self.minutes}; it must be positive")
        if self.drafter == "none":
            raise ConfigError("drafter is none, which never drafts; name the drafter to be audited")
        if self.sampling.greedy and "sampled" in self.parts:
            raise ConfigError("temperature is 0; the sampled part needs one above 0 (greedy is a part of its own)")


def read_depths(text: str) -> tuple[int, ...]:
    """``100,1000`` as numbers; () for nothing. Raises :class:`ConfigError` for anything else."""
    try:
        depths = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"depths is {text!r}; write numbers of tokens with commas between, as 100,1000") from None
    if depths and min(depths) < 0:
        raise ConfigError(f"depths is {text!r}; a context has 0 tokens or more")
    return depths


def run(options: AuditOptions, place: dict[str, Any], *, json_file: Path | None) -> bool:
    """Run an audit and print its page; return whether the verdict is "unchanged". ``place`` as :meth:`Bundle.load`
    takes it; its dtype is that of all parts but "low"."""
    out, begin = Console(stderr=True, highlight=False), time.monotonic()
    out.print(
        f"auditing {options.model} with drafter {options.drafter}: {', '.join(options.parts)}; "
        f"{options.minutes:g} minutes at most, loading apart",
        soft_wrap=True,
    )
    with out.status("loading") as status:

        def say(line: str) -> None:
            status.update(f"{(time.monotonic() - begin) / 60:.1f} min, {line}")

        report = _run_parts(options, place, say)
    if json_file is not None:
        write_json(json_file, audit_data(options, report))
    print_report(report, options)
    return report.verdict == UNCHANGED


def _run_parts(options: AuditOptions, place: dict[str, Any], say: Say) -> AuditReport:
    """The parts by precision, so that one model is in memory at a time; time saved by one goes to the next."""
    report, left = AuditReport(), options.minutes * 60
    shares = {part: share for part, share in PARTS.items() if part in options.parts}
    stages = ((place, ("greedy", "depth", "sampled")), ({**place, "dtype": options.low_dtype}, ("low",)))
    for where, parts in stages:
        if not shares.keys() & set(parts):
            continue
        say("loading the model")
        pair = _Pair(Bundle.load(options.model, options.drafter, **where), options)
        for part in (part for part in parts if part in shares):
            begin, seconds = time.monotonic(), left * shares[part] / sum(shares.values())
            report = replace(report, **{part: getattr(pair, part)(seconds, say)})
            left = max(0.0, left - (time.monotonic() - begin))
            del shares[part]
        del pair
        gc.collect()
    return report


class _Pair:
    """A loaded pair and the parts of its audit, named as on the command line."""

    def __init__(self, bundle: Bundle, options: AuditOptions) -> None:
        self.bundle, self.options, self.target = bundle, options, bundle.target
        self.variants = list(variants_of(bundle, options.drafter))
        given = read_prompts(options.prompts, limit=options.limit) if options.prompts else None
        self.texts = [p.text for p in given or prompts_of(PROMPTS, limit=options.limit)]

    def greedy(self, seconds: float, say: Say) -> GreedyPart:
        return self._greedy([self.bundle.prompt_ids(text) for text in self.texts], seconds, say)

    low = greedy

    def depth(self, seconds: float, say: Say) -> tuple[GreedyPart, ...]:
        room = self.options.max_new_tokens
        depths = depths_within(self.target, self.options.depths or ACCEPTANCE_DEPTHS, room, self.options.depths)
        parts = []
        for i, depth in enumerate(depths):
            begin = time.monotonic()
            prompts = [behind_text(self.bundle, text, depth) for text in self.texts[:DEPTH_PROMPTS]]
            say(f"depth {depth}")
            parts.append(self._greedy(prompts, seconds / (len(depths) - i), say))
            seconds -= time.monotonic() - begin
        return tuple(parts)

    def _greedy(self, prompts: Sequence[Sequence[int]], seconds: float, say: Say) -> GreedyPart:
        return audit_greedy(
            self.target,
            [variant for variant in self.variants if variant.rule == "token"],  # greedy judging knows no other
            prompts,
            max_new_tokens=self.options.max_new_tokens,
            stop_token_ids=self.bundle.chat.stop_token_ids,
            seconds=seconds,
            say=say,
        )

    def sampled(self, seconds: float, say: Say) -> SampledPart:
        wanted = self.options.depths or SAMPLED_DEPTHS[: 2 if self.options.quick else None]
        room = 2 * ANSWER_BEGUN + self.variants[0].drafter.block_size  # depths are met up to a few tokens
        depths = depths_within(self.target, wanted, room, self.options.depths)
        contexts = [context_of(self.bundle, self.texts[i % len(self.texts)], depth) for i, depth in enumerate(depths)]
        cases = sampled_cases(self.variants, contexts, self.options.sampling, quick=self.options.quick)
        return audit_sampled(self.target, cases, self.options.statistics, seconds=seconds, say=say)


def variants_of(bundle: Bundle, spec: str) -> Iterator[Variant]:
    """The ways of running a pair: as given, and whatever else its drafter can do."""
    drafter, target = bundle.drafter, bundle.target
    yield Variant(name="as given", drafter=drafter)
    if spec != "ngram":
        yield Variant(name="full vocabulary", drafter=load_drafter(spec, target, candidates=0))
        yield Variant(name="lookup", drafter=LookupDrafter(drafter))
    if drafter.has_confidence:
        yield Variant(name=f"threshold {THRESHOLD:g}", drafter=drafter, scheduler=ThresholdScheduler(THRESHOLD))
        sps = torch.tensor([0.0, *(1.0 / (1.0 + TOKEN_COST * b) for b in range(drafter.block_size + 1))])
        yield Variant(name="load-aware lengths", drafter=drafter, scheduler=GreedyScheduler(sps))
    yield Variant(name="block verification", drafter=drafter, rule="block")
    yield Variant(name="spoilt drafts", drafter=Spoilt(drafter, target.info.vocab_size))


def depths_within(target: Target, depths: Sequence[int], room: int, asked: Sequence[int]) -> list[int]:
    """The depths that leave ``room`` tokens of the target's context. Raises :class:`ConfigError` for one in ``asked``
    that does not; of the defaults, those that do not are left out, and the report shows which were run."""
    most = target.info.max_len - room
    if max(asked, default=min(depths)) > most:
        deepest = max(asked, default=min(depths))
        raise ConfigError(f"depth {deepest} does not fit {target.info.name}, which has room for {most}")
    return [depth for depth in depths if depth <= most]


def behind_text(bundle: Bundle, question: str, depth: int) -> list[int]:
    """A prompt of about ``depth`` tokens: the question behind unrelated text; alone where it is long enough."""
    ids = bundle.prompt_ids(question)
    if len(ids) >= depth:
        return ids
    filler = bundle.chat.tokenizer(FILLER, add_special_tokens=False)["input_ids"]
    text = bundle.chat.decode((filler * (1 + depth // len(filler)))[: depth - len(ids)])
    return bundle.prompt_ids(f"{text}\n\n{question}")


def context_of(bundle: Bundle, question: str, depth: int) -> list[int]:
    """:func:`behind_text` and a begun answer, drawn without drafts."""
    ids = behind_text(bundle, question, depth)
    begun = generate(
        bundle.target,
        NoDrafter(),
        ids,
        sampling=SamplingParams(temperature=1.0, top_k=20),
        max_new_tokens=ANSWER_BEGUN,
    )
    return [*ids, *begun.token_ids]


# --- the page --------------------------------------------------------------------------------------------------------


def audit_data(options: AuditOptions, report: AuditReport) -> dict[str, Any]:
    """The report's JSON: what was audited, how, where, and what came of it."""
    return {
        "kind": REPORT_KIND,
        "version": REPORT_VERSION,
        "model": options.model,
        "drafter": options.drafter,
        "drafter_sha256": _fingerprint(options.drafter),
        "minutes": options.minutes,
        "quick": options.quick,
        "prompts": [str(path) for path in options.prompts],
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.sampling.temperature,
        "top_k": options.sampling.top_k,
        "top_p": options.sampling.top_p,
        "min_p": options.sampling.min_p,
        **report_data(report),
        "provenance": provenance(),
    }


def _fingerprint(spec: str) -> dict[str, str]:
    """SHA-256 of a drafter's files; empty for one that has none."""
    folder = default_drafter_folder() if spec == "default" else Path(spec)
    files = sorted(p for p in folder.glob("*") if p.suffix in (".json", ".safetensors")) if folder.is_dir() else []
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def print_report(report: AuditReport, options: AuditOptions) -> None:
    """One page: a table per part, then the verdict and what it rests on."""
    out = Console(highlight=False)
    for part in (report.greedy, report.low, *report.depth):
        if part is not None:
            _print_greedy(out, part)
    if report.sampled is not None:
        _print_sampled(out, report.sampled)
    for line in (*report.faults, *report.weaknesses):
        out.print(f"- {line}", soft_wrap=True)
    out.print(f"{options.model} with {options.drafter}: output {report.verdict}.", style="bold", soft_wrap=True)


def _table(out: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    out.print(title, style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print()


def _print_greedy(out: Console, part: GreedyPart) -> None:
    rows = [
        (
            row.variant,
            str(row.prompts),
            str(row.identical),
            str(row.near_ties),
            str(row.faults),
            f"{max((p.gap for p in row.partings), default=0.0):.4f}",
            str(row.tokens),
            number_text(row.acceptance_length),
        )
        for row in part.rows
    ]
    title = (
        f"Greedy, {part.dtype}: drafted against undrafted, {part.prompts_done} of {part.prompts} prompts "
        f"(up to {part.context_tokens} tokens); near-ties are within {part.tolerance:g} logits"
    )
    names = ("way", "prompts", "identical", "near-ties", "faults", "largest gap", "tokens", "accepted")
    _table(out, title, names, rows)


def _print_sampled(out: Console, part: SampledPart) -> None:
    config = part.config
    rows = [
        (
            case.name,
            str(case.context_tokens),
            str(case.trials),
            f"{case.accepted:.2f}/{case.verified:.2f}",
            *(f"{test.fit.p_value:.1g}" for test in case.tests),
            f"{max(test.detectable for test in case.tests):.3f}",
            f"{case.checks - case.mismatches}/{case.checks}",
        )
        for case in part.cases
    ]
    title = (
        f"Sampled, {part.dtype}: chi-square of the first 1, 2 and 3 tokens; a shift by `seen` shows with chance "
        f"{config.power:g}, a false alarm in any test has chance {config.alpha:g} (Holm, {part.level:.1e} a test)"
    )
    _table(out, title, ("way", "context", "trials", "accepted", "p1", "p2", "p3", "seen", "plain"), rows)
    for control in part.controls:
        word = "caught" if control.caught else "NOT CAUGHT"
        out.print(
            f"control, {control.flaw} ({control.says}): {word}, p = {control.p_value:.1e} in {control.trials} trials",
            soft_wrap=True,
        )
    for line in part.skipped:
        out.print(f"control, {line}", soft_wrap=True)
    out.print()
