"""Whether a step drafts at all, for whom, and how deep: decided before drafting, so that drafting is never a loss.

A scheduler trims what is verified, but by then the drafts have been paid for; where a step is full and drafts die
young, the best trim is not to draft. The gate weighs both by measured costs. With S the survivals that each request's
committed rounds let expect, R requests, b other tokens in the step,

    without drafts   R / pass(b + R)
    with drafts      (R + the c likeliest of S over m requests and d positions) / (draft(m, d) + pass(b + R + c))

and drafts, for the m requests with the largest sums of S, where the best of the second, over c and a grid of m and d,
is more than the first. Everything it looks at was committed before the step began, so no admission depends on a token
of the step, and the output stays exact.

What is refused teaches nothing more, so now and then a few requests are drafted for regardless: a probe, in pauses
that double as long as nothing comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ScheduleError
from dspark.maths.global_scheduling import NUMPY, Arithmetic
from dspark.maths.step_costs import StepCosts

Lens = Int[np.ndarray, "requests"]


@dataclass(frozen=True, kw_only=True, eq=False)
class GateChoice:
    """Drafts to ask for, and what the choice expects in tokens per second."""

    depth: Lens  # most drafts of each request; 0: do not draft for it
    throughput: float
    plain: float  # without drafting


def choose_depths(
    survival: Float[np.ndarray, "requests block"],
    limits: Lens,
    costs: StepCosts,
    *,
    other_tokens: int,
    context: float,
    judged: Float[np.ndarray, "more_tokens_plus_1"] | None = None,
    arithmetic: Arithmetic = NUMPY,
    margin: float = 0.02,
) -> GateChoice:
    """The best of not drafting and of drafting for the most promising requests, by expected tokens per second.

    ``survival``: expected, in [0, 1], never rising along a row. ``limits``: most drafts of each request, 0..block.
    ``other_tokens``: tokens of the step besides the requests' own; ``context``: committed tokens per request.
    ``judged``: seconds of a pass, by tokens on top of the others, that the scheduler which follows goes by, if not the
    costs' own: then the number of drafts is the one best by those, and its time is the costs' all the same.
    ``margin``: share by which drafting must look better. ``throughput`` is never below ``plain``.
    """
    requests, block = survival.shape
    curve = costs.curve(context)[other_tokens:]
    if len(curve) <= requests * (1 + block):
        raise ScheduleError(
            f"costs cover {costs.max_tokens} tokens and the step could carry {other_tokens + requests * (1 + block)}"
        )
    plain = float(requests / curve[requests]) if requests else 0.0
    going_by = curve if judged is None else judged
    none = GateChoice(depth=np.zeros(requests, dtype=np.int64), throughput=plain, plain=plain)
    allowed = np.where(np.arange(block) < limits[:, None], survival, 0.0)
    order = np.argsort(-allowed.sum(1), kind="stable")
    ranked = allowed[order[: np.count_nonzero(limits)]]
    if not ranked.size:
        return none

    def expected(some: int, depth: int) -> float:
        ordered = arithmetic.descending(ranked[:some, :depth])
        tokens = np.empty(len(ordered) + 1)
        tokens[0], tokens[1:] = requests, ordered
        tokens.cumsum(out=tokens)
        drafting, sizes = costs.drafting(some, depth), slice(requests, requests + len(tokens))
        count = int((tokens / (going_by[sizes] + drafting)).argmax())
        return float(tokens[count] / (curve[requests + count] + drafting))

    most = len(ranked)
    depth = max(_grid(block), key=lambda d: expected(most, d))
    some = max(_grid(most), key=lambda m: expected(m, depth))
    best = expected(some, depth)
    if not best > plain * (1.0 + margin):
        return none
    chosen = np.zeros(requests, dtype=np.int64)
    chosen[order[:some]] = np.minimum(limits[order[:some]], depth)
    return GateChoice(depth=chosen, throughput=best, plain=plain)


def _grid(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``; the largest first, so that it wins ties."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [most, *reversed(powers)]


class ProbeClock:
    """When refused requests are drafted for regardless, and which: those that have waited longest, a few at a time."""

    def __init__(self, rows: int, *, first_pause: int = 8, longest_pause: int = 256, requests: int = 2) -> None:
        """Pauses in steps; ``requests``: most of one probe."""
        if not 1 <= first_pause <= longest_pause or requests < 1:
            raise ScheduleError(
                f"first_pause is {first_pause}, longest_pause {longest_pause} and requests {requests}; pauses must be "
                "ordered and all at least 1"
            )
        self._first, self._longest, self._most = first_pause, longest_pause, requests
        self._pause, self._since = first_pause, 0
        self._undrafted = np.zeros(rows, dtype=np.int64)  # steps that each row has gone without drafts

    def open(self, row: int) -> None:
        self._undrafted[row] = 0

    def due(self, rows: Int[np.ndarray, "requests"], depth: Lens, limits: Lens) -> Int[np.ndarray, "probed"]:
        """Places among ``rows`` to be drafted for besides those with a ``depth``; advances the clock by a step."""
        refused = np.flatnonzero((depth == 0) & (limits > 0))
        self._undrafted[rows[depth > 0]] = 0
        if not len(refused):
            self._pause, self._since = self._first, 0
            return refused
        self._undrafted[rows[refused]] += 1
        self._since += 1
        if self._since < self._pause:
            return refused[:0]
        self._since, self._pause = 0, min(2 * self._pause, self._longest)
        longest = np.argsort(-self._undrafted[rows[refused]], kind="stable")[: self._most]
        probed = refused[longest]
        self._undrafted[rows[probed]] = 0
        return probed
