"""An audit: is the output of this target with this drafter the output of the target alone?

    greedy      token by token in fp32, over prompts and over every way of running the pair
    low         the same in the precision that is served, every parting examined for a near-tie
    sampled     the joint distribution of the first tokens against the target's own, at several depths of context, and
                the same test on loops with a known flaw, which it must catch
    depth       greedy again, behind more and more text, with the acceptance length at each depth

This module puts the parts together and says what follows from them. A difference that chance or rounding does not
explain makes the verdict "changed"; a part that could not have seen one makes it "too weak".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dspark.core import SamplingParams
from dspark.evaluate.audit_greedy import GreedyPart, Variant
from dspark.evaluate.audit_sampled import Case, SampledPart
from dspark.numbers import json_data

REPORT_KIND, REPORT_VERSION = "dspark-audit", 1
SIGNIFICANT_DIGITS = 6  # of numbers in a report's JSON
SHORT_BLOCK = 3  # drafts of a round where a longer block would only cost time: as many as there are tokens to test

UNCHANGED, CHANGED, TOO_WEAK = "unchanged", "changed", "too weak"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The parts that were run; None and () for those that were not."""

    greedy: GreedyPart | None = None
    low: GreedyPart | None = None
    sampled: SampledPart | None = None
    depth: tuple[GreedyPart, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything that shows a changed output, a line each."""
        parts = [part for part in (self.greedy, self.low, *self.depth) if part is not None]
        found = [fault for part in parts for fault in greedy_faults(part)]
        return tuple(found + (sampled_faults(self.sampled) if self.sampled else []))

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """Everything for which a fault might have gone unseen."""
        return tuple(sampled_weaknesses(self.sampled)) if self.sampled else ()

    @property
    def verdict(self) -> str:
        if self.faults:
            return CHANGED
        return TOO_WEAK if self.weaknesses else UNCHANGED


def greedy_faults(part: GreedyPart) -> list[str]:
    """Outputs that part where the target's choice was clear."""
    return [
        f"greedy {part.dtype}, {row.variant}: prompt {parting.prompt + 1} parts at token {parting.position + 1}, "
        f"{parting.gap:.4f} logits apart (up to {part.tolerance:g} is a near-tie)"
        for row in part.rows
        for parting in row.partings
        if not parting.near_tie
    ] + [
        f"greedy {part.dtype}, {row.variant}: {row.faults - clear} of {row.prompts} outputs end too early or too late"
        for row in part.rows
        if row.faults > (clear := sum(not parting.near_tie for parting in row.partings))
    ]


def sampled_faults(part: SampledPart) -> list[str]:
    """Distributions that are not the target's, and trials that a run without shortcuts does not confirm."""
    faults = [
        f"sampled, {case.name}: the first {test.tokens} token(s) are not distributed as the target's "
        f"(p = {test.adjusted_p:.1e} over all tests{f', {test.fit.impossible} impossible' * (test.fit.impossible > 0)})"
        for case in part.cases
        for test in case.tests
        if test.adjusted_p < part.config.alpha
    ]
    faults += [
        f"sampled, {case.name}: {case.mismatches} of {case.checks} plain runs gave other tokens than the shared prefill"
        for case in part.cases
        if case.mismatches > part.mismatches_allowed * case.checks
    ]
    return faults + [
        f"sampled, {case.name}: a shared pass is {case.recheck:.4f} logits from a fresh one; its batches differ"
        for case in part.cases
        if case.recheck > part.recheck_allowed
    ]


def sampled_weaknesses(part: SampledPart) -> list[str]:
    """Flaws that went uncaught, and tests without drafts or without a choice of tokens."""
    weak = [
        f"the flaw '{control.flaw}' was not caught in {control.trials} trials; give more --minutes"
        for control in part.controls
        if not control.caught
    ]
    if not any(case.verified for case in part.cases):
        weak.append("no draft was ever checked; choose prompts that this drafter drafts for")
    if all(test.fit.cells < 2 for case in part.cases for test in case.tests):
        weak.append("the target had no choice of tokens, or there were too few trials; give more --minutes")
    return weak


def sampled_cases(
    variants: Sequence[Variant], contexts: Sequence[Sequence[int]], sampling: SamplingParams, *, quick: bool
) -> list[Case]:
    """The first variant behind every context, and behind the first one every other way of running the pair.

    ``quick`` keeps those that differ most: the first variant, block verification and the deepest context.
    """
    main, near = variants[0], tuple(contexts[0])
    short = min(SHORT_BLOCK, main.drafter.block_size)

    def case(name: str, variant: Variant = main, context: Sequence[int] = near, *, drafts: int = short) -> Case:
        return Case(name=name, variant=variant, context=tuple(context), sampling=sampling, drafts=drafts)

    cases = [case(main.name)]
    # block verification judges a block as a whole, so it gets whole blocks
    others = [v for v in variants[1:] if not quick or v.rule != main.rule]
    cases += [case(v.name, v, drafts=short if v.rule == "token" else v.drafter.block_size) for v in others]
    deeper = contexts[1:] if not quick else contexts[1:][-1:]
    cases += [case(f"{main.name}, {len(context)} deep", context=context) for context in deeper]
    if not quick:
        free = SamplingParams(temperature=sampling.temperature)
        cases.append(replace(cases[0], name=f"{main.name}, from the prefill", from_prefill=True))
        cases.append(replace(cases[0], name=f"{main.name}, unfiltered", sampling=free))
        penalties = replace(sampling, repetition_penalty=1.2, presence_penalty=0.2)
        cases.append(replace(cases[0], name=f"{main.name}, penalties", sampling=penalties))
    return cases


def report_data(report: AuditReport) -> dict[str, object]:
    """A report as JSON can hold it; nan and infinity become null."""
    facts = {"verdict": report.verdict, "faults": report.faults, "weaknesses": report.weaknesses}
    data = json_data({**facts, **asdict(report)}, rounded=lambda value: float(f"{value:.{SIGNIFICANT_DIGITS}g}"))
    return dict(data)
