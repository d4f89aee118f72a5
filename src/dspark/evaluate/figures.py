"""From rounds to figures: acceptance, stage times and speedup, as pure functions of what a run recorded.

Definitions (positions are 0-based here; the paper counts from 1):

    acceptance_length          tokens committed per round, bonus included; a round that ends on an accepted stop token
                               has no bonus
    prefix_acceptance[k]       rounds with accepted > k / rounds with proposed > k: draft k and all before it survived
    conditional_acceptance[k]  rounds with accepted > k / rounds with accepted >= k and proposed > k: the paper's figure

A draft counts as proposed when the target checked it, up to the point where the request ended: behind a stop token or a
length limit nobody knows what would have survived. The reference (DeepSpec) reports the first kind only, under the name
``accept_rate``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.core import Completion, RoundRecord
from dspark.numbers import json_data, measured, ratio


def proposed(record: RoundRecord) -> int:
    """Drafts of a round whose fate is known: ``verify_len``, or the accepted ones where the request ended there."""
    return record.accepted if len(record.committed) == record.accepted else record.verify_len


def acceptance_length(rounds: Sequence[RoundRecord]) -> float:
    """Tokens committed per round, over all rounds alike (micro average); nan without rounds."""
    return sum(len(r.committed) for r in rounds) / len(rounds) if rounds else math.nan


def prefix_acceptance(rounds: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Share of proposed drafts at each position that survive together with all before them, 0..1; may rise along the
    positions where verify lengths vary, because every position has its own denominator."""
    return tuple(
        sum(r.accepted > k for r in rounds) / sum(proposed(r) > k for r in rounds) for k in range(_longest(rounds))
    )


def conditional_acceptance(rounds: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Share of drafts at each position that survive once all before them have, 0..1; nan where that never happened."""
    return tuple(
        ratio(sum(r.accepted > k for r in rounds), sum(r.accepted >= k and proposed(r) > k for r in rounds))
        for k in range(_longest(rounds))
    )


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Milliseconds of one round, by stage: each a median over rounds, so they add up to ``round`` only nearly."""

    draft: float  # the drafter's parallel pass, without the sequential stage
    sequential: float  # drawing the block left to right
    verify: float  # the target's pass
    host: float  # everything else
    round: float


def stage_times(rounds: Sequence[RoundRecord]) -> StageTimes:
    """Median milliseconds of each stage; nan without rounds."""
    return StageTimes(
        draft=_median_ms(r.draft_seconds - r.sequential_seconds for r in rounds),
        sequential=_median_ms(r.sequential_seconds for r in rounds),
        verify=_median_ms(r.verify_seconds for r in rounds),
        host=_median_ms(r.host_seconds for r in rounds),
        round=_median_ms(r.draft_seconds + r.verify_seconds + r.host_seconds for r in rounds),
    )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two greedy outputs for one prompt part, and how close the target's choice was there."""

    position: int  # of the first differing token, 0-based in the output
    gap: float  # logits: the best minus the lesser of the two tokens taken, in one pass over the common prefix


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One prompt answered both ways, and by a peer if one was asked."""

    domain: str
    drafted: Completion
    plain: Completion
    divergence: Divergence | None  # None when the outputs agree, and for sampled output, which need not agree
    peer_tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How many drafted outputs equal the undrafted ones, and what became of the others."""

    count: int
    total: int
    near_ties: int  # differ first where both tokens taken were at most ``tolerance`` below the best
    largest_gap: float  # logits, over all divergences; 0 without any


@dataclass(frozen=True, kw_only=True)
class DomainFigures:
    """Figures of the prompts of one domain, or the mean of the domains' figures."""

    prompts: int
    speedup: float  # tokens_per_second / plain_tokens_per_second
    acceptance_length: float
    looked_up: float  # share of rounds whose drafts were from the text itself, 0..1
    tokens_per_second: float  # median over prompts, after the first token
    plain_tokens_per_second: float  # the same without drafts, same process
    peer_tokens_per_second: float | None
    peer_speedup: float | None  # tokens_per_second / peer_tokens_per_second
    prefix_acceptance: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    round_ms: StageTimes
    plain_round_ms: float
    identical: Agreement | None  # None when sampled


def domain_figures(pairs: Sequence[Pair], *, greedy: bool, tolerance: float) -> DomainFigures:
    """Figures over ``pairs`` (at least one). Speeds are medians over prompts and speedups their ratios.

    ``tolerance`` in logits: a divergence with a gap up to it is a near-tie, which rounding may break either way.
    """
    rounds = [r for p in pairs for r in p.drafted.rounds]
    speed = _median(p.drafted.tokens_per_second for p in pairs)
    plain = _median(p.plain.tokens_per_second for p in pairs)
    peer_speeds = [p.peer_tokens_per_second for p in pairs if p.peer_tokens_per_second is not None]
    peer = _median(peer_speeds) if peer_speeds else None
    return DomainFigures(
        prompts=len(pairs),
        speedup=ratio(speed, plain),
        acceptance_length=acceptance_length(rounds),
        looked_up=ratio(sum(r.looked_up for r in rounds), len(rounds)),
        tokens_per_second=speed,
        plain_tokens_per_second=plain,
        peer_tokens_per_second=peer,
        peer_speedup=None if peer is None else ratio(speed, peer),
        prefix_acceptance=prefix_acceptance(rounds),
        conditional_acceptance=conditional_acceptance(rounds),
        round_ms=stage_times(rounds),
        plain_round_ms=stage_times([r for p in pairs for r in p.plain.rounds]).round,
        identical=agreement([p.divergence for p in pairs], tolerance=tolerance) if greedy else None,
    )


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Figures of every domain and their mean, for greedy or sampled decoding."""

    domains: dict[str, DomainFigures]
    mean: DomainFigures
    tolerance: float  # logits; the gap up to which a divergence counts as a near-tie


def bench_report(pairs: Sequence[Pair], *, greedy: bool, tolerance: float) -> BenchReport:
    """Figures by domain, in the order in which the domains first occur; ``pairs`` must not be empty."""
    names = list(dict.fromkeys(p.domain for p in pairs))
    domains = {
        name: domain_figures([p for p in pairs if p.domain == name], greedy=greedy, tolerance=tolerance)
        for name in names
    }
    return BenchReport(domains=domains, mean=mean_figures(list(domains.values())), tolerance=tolerance)


def agreement(divergences: Sequence[Divergence | None], *, tolerance: float) -> Agreement:
    """Count agreeing outputs (None) and near-ties among the others; ``tolerance`` in logits."""
    found = [d for d in divergences if d is not None]
    return Agreement(
        count=len(divergences) - len(found),
        total=len(divergences),
        near_ties=sum(d.gap <= tolerance for d in found),
        largest_gap=max((d.gap for d in found), default=0.0),
    )


def mean_figures(domains: Sequence[DomainFigures]) -> DomainFigures:
    """The plain mean of the domains' figures, every domain counting alike; counts are summed."""
    return DomainFigures(
        prompts=sum(d.prompts for d in domains),
        speedup=_mean(d.speedup for d in domains),
        acceptance_length=_mean(d.acceptance_length for d in domains),
        looked_up=_mean(d.looked_up for d in domains),
        tokens_per_second=_mean(d.tokens_per_second for d in domains),
        plain_tokens_per_second=_mean(d.plain_tokens_per_second for d in domains),
        peer_tokens_per_second=_mean_or_none(d.peer_tokens_per_second for d in domains),
        peer_speedup=_mean_or_none(d.peer_speedup for d in domains),
        prefix_acceptance=_mean_rows([d.prefix_acceptance for d in domains]),
        conditional_acceptance=_mean_rows([d.conditional_acceptance for d in domains]),
        round_ms=StageTimes(**{s: _mean(getattr(d.round_ms, s) for d in domains) for s in StageTimes.__annotations__}),
        plain_round_ms=_mean(d.plain_round_ms for d in domains),
        identical=_sum_agreements([d.identical for d in domains]),
    )


def plain_data(value: object) -> Any:  # Any: what json.dumps takes
    """:func:`dspark.numbers.json_data` to four decimals."""
    return json_data(value, rounded=lambda number: round(number, 4))


def _sum_agreements(parts: Sequence[Agreement | None]) -> Agreement | None:
    known = [p for p in parts if p is not None]
    if not known:
        return None
    return Agreement(
        count=sum(p.count for p in known),
        total=sum(p.total for p in known),
        near_ties=sum(p.near_ties for p in known),
        largest_gap=max(p.largest_gap for p in known),
    )


def _longest(rounds: Sequence[RoundRecord]) -> int:
    return max((proposed(r) for r in rounds), default=0)


def _median(values: Iterable[float]) -> float:
    """Median of the values that are numbers: a prompt that ends at its first token has no speed."""
    known = measured(values)
    return statistics.median(known) if known else math.nan


def _median_ms(seconds: Iterable[float]) -> float:
    return 1e3 * _median(seconds)


def _mean(values: Iterable[float]) -> float:
    known = measured(values)
    return statistics.fmean(known) if known else math.nan


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return _mean(known) if known else None


def _mean_rows(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Mean at each position over the domains that reach it."""
    longest = max((len(r) for r in rows), default=0)
    return tuple(_mean(r[k] for r in rows if k < len(r)) for k in range(longest))
