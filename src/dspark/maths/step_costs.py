"""What a step of many requests costs: the target's pass by tokens and context, drafting by requests and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspark.errors import ScheduleError


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCosts:
    """Seconds of the parts of a step, for every size that an engine can meet."""

    contexts: tuple[int, ...]  # committed tokens per request, ascending: a curve each, the last beyond
    passes: Float[np.ndarray, "contexts tokens_plus_1"]  # by the pass's tokens; entry 0 unused
    drafts: Float[np.ndarray, "requests_plus_1 block_plus_1"]  # by requests drafted for and depth; 0 for none

    def __post_init__(self) -> None:
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)):
            raise ScheduleError(f"contexts is {list(self.contexts)}; give ascending lengths, at least one")
        if len(self.contexts) != len(self.passes):
            raise ScheduleError(f"{len(self.passes)} curves for {len(self.contexts)} contexts; give one each")
        used = self.passes[:, 1:]
        if used.size and not (used.min() > 0 and used.max() < np.inf):
            raise ScheduleError("passes has an entry that is not positive and finite; a pass takes time")
        if self.drafts.size and not (self.drafts.min() >= 0 and self.drafts.max() < np.inf):
            raise ScheduleError("drafts has an entry that is negative or not finite")

    @property
    def max_tokens(self) -> int:
        return self.passes.shape[1] - 1

    def curve(self, context: float) -> Float[np.ndarray, "tokens_plus_1"]:
        """Seconds of a pass by tokens, of requests that hold ``context`` tokens on average."""
        bucket = next((i for i, most in enumerate(self.contexts) if context <= most), len(self.contexts) - 1)
        return self.passes[bucket]

    def drafting(self, requests: int, depth: int) -> float:
        """Seconds to draft ``depth`` tokens for each of ``requests`` requests, and to take their outcome in."""
        return float(self.drafts[requests, depth])

    def own(self, *, context: float, other_tokens: int, requests: int) -> Float[np.ndarray, "more_tokens_plus_1"]:
        """Seconds that the tokens of ``requests`` decoding requests answer for, by their number, beside so many
        ``other_tokens`` of prompts: the anchors as in a pass without prompts, and each draft what it adds to this one.

        What the prompts take is spent with drafts or without. Charged to the step, it would make drafts look cheap
        just where they hold prompts up: next to a long pass any draft is a small share, and still it costs more time
        than the tokens that plain steps would write in it.
        """
        return own_seconds(self.curve(context), other_tokens=other_tokens, requests=requests)

    def sps(
        self, *, context: float, other_tokens: int, requests: int, draft_seconds: float
    ) -> Float[np.ndarray, "more_tokens_plus_1"]:
        """Steps per second by the tokens of ``requests`` requests (:meth:`own`) after so much drafting: what
        schedulers weigh expected tokens with. Entry 0 says nothing."""
        seconds = self.own(context=context, other_tokens=other_tokens, requests=requests) + draft_seconds
        seconds[:1] = np.inf
        return 1.0 / seconds


def own_seconds(
    curve: Float[np.ndarray, "tokens_plus_1"], *, other_tokens: int, requests: int
) -> Float[np.ndarray, "more_tokens_plus_1"]:
    """:meth:`StepCosts.own` of one curve."""
    if not other_tokens:
        return curve
    seconds = curve[other_tokens:] - (curve[other_tokens + requests] - curve[requests])
    seconds[:requests] = curve[:requests]
    return np.maximum(seconds, seconds[requests], out=seconds, where=np.arange(len(seconds)) >= requests)


def convex_from(seconds: Float[np.ndarray, "tokens_plus_1"], start: int) -> Float[np.ndarray, "tokens_plus_1"]:
    """``seconds`` with their lower convex hull in place of entries ``start`` and up.

    Algorithm 1 stops at the first draft that does not pay, so a step in the curve holds it up for good, drafts behind
    it that would pay or not. Any curve that was known before the drafts keeps the output exact; over a convex one the
    expected throughput has a single peak, and the first non-gain is the best stop.
    """
    corners: list[int] = []
    values = seconds.tolist()
    for at in range(start, len(values)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (values[b] - values[a]) * (at - b) < (values[at] - values[b]) * (b - a):
                break
            corners.pop()
        corners.append(at)
    hull = seconds.copy()
    if corners:
        hull[start:] = np.interp(np.arange(start, len(values)), corners, seconds[corners])
    return hull


def interpolated(points: Mapping[int, float], size: int) -> Float[np.ndarray, "size_plus_1"]:
    """Values at 0..``size``: measured where measured, on the line between neighbours elsewhere.

    Beyond the last point the line through the last one and the one nearest to half its size goes on, rising at least
    in proportion a tenth as steep as from zero, so that no size looks free. A single point stands for a proportional
    cost beyond it and a constant one before it.
    """
    if not points:
        raise ScheduleError("no size was measured; give at least one")
    known = sorted(points)
    values = np.interp(np.arange(size + 1), known, [points[at] for at in known])
    last = known[-1]
    if size > last:
        half = min(known, key=lambda at: abs(at - last / 2))
        proportional = points[last] / max(last, 1)
        slope = proportional if half == last else (points[last] - points[half]) / (last - half)
        slope = max(slope, 0.1 * proportional)
        values[last + 1 :] = points[last] + slope * np.arange(1, size - last + 1)
    return values


def step_costs(
    *,
    contexts: Sequence[int],
    passes: Sequence[Mapping[int, float]],
    drafts: Mapping[int, float],
    draft_depths: Mapping[int, float] | None = None,
    max_tokens: int,
    max_requests: int,
    block_size: int,
) -> StepCosts:
    """Costs from measured points: seconds of a pass by tokens for each context, of a whole block's drafting by
    requests, and the share of it that each depth takes (1 at ``block_size``; None: every depth costs the same)."""
    by_requests = interpolated({0: 0.0, **drafts}, max_requests)
    shares = np.ones(block_size + 1)
    if draft_depths:
        shares = np.minimum(interpolated(draft_depths, block_size), 1.0)
    shares[0] = 0.0
    return StepCosts(
        contexts=tuple(contexts),
        passes=np.stack([interpolated(points, max_tokens) for points in passes]),
        drafts=np.outer(by_requests, shares),
    )
