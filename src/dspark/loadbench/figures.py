"""What a measurement says: throughput, the speed a user sees, first-token latency, and the verify budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.loadbench.client import Reply
from dspark.numbers import json_data, measured, ratio

COUNTERS = ("steps", "output_tokens", "drafted_tokens", "verified_tokens", "accepted_tokens")
STAGE = "dspark_stage_seconds_total"


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """One way at one level. Numbers are nan where nothing could be measured."""

    way: str
    pattern: str
    level: float
    requests: int
    ok: int
    refused: int
    failed: int
    seconds: float  # from the first request sent to the last reply ended
    tokens: int  # of answered requests
    tokens_per_second: float  # all users together
    user_tokens_per_second: float  # median over requests
    user_tokens_per_second_p10: float  # what the unluckiest tenth sees
    first_token_p50: float  # seconds
    first_token_p90: float
    first_token_p99: float
    drafted_per_step: float  # drafts proposed, verified and accepted per engine step; nan for other servers
    verified_per_step: float
    accepted_per_step: float
    stage_seconds: Mapping[str, float]  # of the engine, by stage; empty for other servers

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return dict(json_data(self))


def figures_of(
    way: str,
    pattern: str,
    level: float,
    replies: Sequence[Reply],
    *,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> LoadFigures:
    """Figures of a run; ``before`` and ``after`` are the server's counters (:func:`read_metrics`), empty if none."""
    ok = [reply for reply in replies if reply.outcome == "ok"]
    seconds = max((r.ended for r in replies), default=0.0) - min((r.sent for r in replies), default=0.0)
    tokens = sum(reply.tokens for reply in ok)
    speeds = measured([reply.tokens_per_second for reply in ok])
    waits = measured([reply.first_token_seconds for reply in ok])
    counted = {name: _difference(before, after, f"dspark_{name}_total") for name in COUNTERS}
    stages = {
        name.removeprefix(STAGE + '{stage="').removesuffix('"}'): value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(STAGE)
    }
    return LoadFigures(
        way=way,
        pattern=pattern,
        level=level,
        requests=len(replies),
        ok=len(ok),
        refused=sum(reply.outcome == "refused" for reply in replies),
        failed=sum(reply.outcome == "failed" for reply in replies),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=ratio(tokens, seconds),
        user_tokens_per_second=_quantile(speeds, 0.5),
        user_tokens_per_second_p10=_quantile(speeds, 0.1),
        first_token_p50=_quantile(waits, 0.5),
        first_token_p90=_quantile(waits, 0.9),
        first_token_p99=_quantile(waits, 0.99),
        drafted_per_step=ratio(counted["drafted_tokens"], counted["steps"]),
        verified_per_step=ratio(counted["verified_tokens"], counted["steps"]),
        accepted_per_step=ratio(counted["accepted_tokens"], counted["steps"]),
        stage_seconds=stages,
    )


def read_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus page by name with labels; what is no number is left out."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        name, _, value = line.rpartition(" ")
        try:
            samples[name] = float(value)
        except ValueError:
            continue
    return samples


def merged(runs: Sequence[LoadFigures]) -> LoadFigures:
    """The run with the median throughput of several of one way and level: a whole run, not a mixture."""
    ranked = sorted(runs, key=lambda run: run.tokens_per_second)
    return ranked[(len(ranked) - 1) // 2]


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


def _difference(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after[name] - before.get(name, 0.0) if name in after else float("nan")
