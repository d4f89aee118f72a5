"""The greedy part of an audit: drafted output against undrafted output, token by token, every difference examined."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dspark.core import Proposal, RoundRecord, SamplingParams
from dspark.decode import generate
from dspark.evaluate.bench import near_tie_gap, near_tie_tolerance
from dspark.evaluate.figures import acceptance_length
from dspark.maths.scheduling import FixedScheduler, Scheduler
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.target import Target

Say = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of running a pair."""

    name: str
    drafter: Drafter
    scheduler: Scheduler = field(default_factory=FixedScheduler)
    rule: str = "token"  # of verification, one of dspark.core.RULES


class Spoilt:
    """A drafter whose every other draft, by chance, is a random token: rejections at every place of a block.

    Its drafts count as certain, which they are as far as verification may know: a draft must stand on the target's
    own probability of it alone.
    """

    has_confidence = False

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.name, self.block_size, self.taps = f"{inner.name}, spoilt", inner.block_size, inner.taps
        self.open, self.extend = inner.open, inner.extend
        self._inner, self._vocab_size = inner, vocab_size

    def propose(
        self, state: Any, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        proposal = self._inner.propose(
            state, anchor, sampling=replace(sampling, temperature=0.0), generator=generator, limit=limit
        )
        noise = torch.randint(self._vocab_size, (proposal.block,), generator=generator)
        spoil = torch.rand(proposal.block, generator=generator) < 0.5
        drafts = torch.where(spoil, noise, proposal.draft_tokens.cpu())
        return Proposal(drafts.to(proposal.draft_tokens.device))


@dataclass(frozen=True, kw_only=True)
class Parting:
    """A drafted output that differs from the undrafted one."""

    prompt: int  # 0-based
    position: int  # of the first differing token in the output
    gap: float  # logits between the two choices there
    near_tie: bool  # whether rounding may decide it


@dataclass(frozen=True, kw_only=True)
class GreedyRow:
    """One variant over the prompts that it was given."""

    variant: str
    prompts: int
    identical: int
    partings: tuple[Parting, ...]
    tokens: int  # compared
    acceptance_length: float  # nan if no round was run

    @property
    def near_ties(self) -> int:
        return sum(parting.near_tie for parting in self.partings)

    @property
    def faults(self) -> int:
        return self.prompts - self.identical - self.near_ties


@dataclass(frozen=True, kw_only=True)
class GreedyPart:
    """Greedy outputs of all variants in one precision."""

    dtype: str
    tolerance: float  # logits; the gap up to which a parting counts as a near-tie
    context_tokens: int  # of the longest prompt
    prompts: int  # that there were
    prompts_done: int  # in the time given
    rows: tuple[GreedyRow, ...]


@dataclass
class _Tally:
    prompts: int = 0
    identical: int = 0
    tokens: int = 0


def audit_greedy(
    target: Target,
    variants: Sequence[Variant],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    seconds: float,
    say: Say,
) -> GreedyPart:
    """Answer prompt after prompt until ``seconds`` are over, at least one: undrafted, with the first variant, and with
    one of the others in turn."""
    end = time.monotonic() + seconds
    tallies = {variant.name: _Tally() for variant in variants}
    partings: dict[str, list[Parting]] = {variant.name: [] for variant in variants}
    rounds: dict[str, list[RoundRecord]] = {variant.name: [] for variant in variants}
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids}
    tolerance, done = near_tie_tolerance(target.info.dtype), 0
    for number, ids in enumerate(prompts):
        if number and time.monotonic() > end:
            break
        say(f"greedy, {_name(target.info.dtype)}: prompt {number + 1} of {len(prompts)}")
        plain = generate(target, NoDrafter(), ids, sampling=SamplingParams(), **settings).token_ids
        for variant in (variants[0], *_turn(variants[1:], number)):
            drafted = generate(
                target, variant.drafter, ids, sampling=SamplingParams(), scheduler=variant.scheduler, **settings
            )
            tally = tallies[variant.name]
            tally.prompts, tally.tokens = tally.prompts + 1, tally.tokens + len(plain)
            tally.identical += drafted.token_ids == plain
            rounds[variant.name] += drafted.rounds
            if (split := near_tie_gap(target, ids, drafted.token_ids, plain)) is not None:
                partings[variant.name].append(
                    Parting(prompt=number, position=split.position, gap=split.gap, near_tie=split.gap <= tolerance)
                )
        done = number + 1
    rows = (
        GreedyRow(
            variant=name,
            prompts=tally.prompts,
            identical=tally.identical,
            partings=tuple(partings[name]),
            tokens=tally.tokens,
            acceptance_length=acceptance_length(rounds[name]),
        )
        for name, tally in tallies.items()
        if tally.prompts
    )
    return GreedyPart(
        dtype=_name(target.info.dtype),
        tolerance=tolerance,
        context_tokens=max(map(len, prompts)),
        prompts=len(prompts),
        prompts_done=done,
        rows=tuple(rows),
    )


def _turn(variants: Sequence[Variant], number: int) -> Sequence[Variant]:
    """The variant whose turn it is, if there is any."""
    return variants[number % len(variants) :][:1] if variants else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
