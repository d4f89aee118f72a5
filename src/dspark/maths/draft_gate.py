"""Whether a step drafts at all, for whom, and how deep: decided before drafting, so that drafting is never a loss.

A scheduler trims what is verified, but by then the drafts have been paid for; where a step is full and drafts die
young, the best trim is not to draft. The gate weighs both by measured costs. With S the survivals that each request's
committed rounds let expect, R requests, and pass(n) the seconds that n of their tokens answer for beside the prompts
in the step (:meth:`dspark.maths.step_costs.StepCosts.own`),

    without drafts   R / pass(R)
    with drafts      (R + the c likeliest of S over m requests and d positions) / (draft(m, d) + pass(R + c))

and drafts, for the m requests with the largest sums of S, where the best of the second, over c and a grid of m and d,
is more than the first. Everything it looks at was committed before the step began, so no admission depends on a token
of the step, and the output stays exact.

Deciding costs time itself. Where not even drafts for the price of a single one would pay, which is how it stands on a
busy machine, :func:`could_pay` says so after one sort, and :class:`Refusals` keep that word for some steps.

What is refused teaches nothing more, so now and then a few requests are drafted for regardless: a probe, in pauses
that double as long as nothing comes of it, and that are never so short that probes take more than a small share of the
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ScheduleError
from dspark.maths.global_scheduling import FEW, NUMPY, Arithmetic
from dspark.maths.step_costs import StepCosts

Lens = Int[np.ndarray, "requests"]

FIRST_ROUNDS, FIRST_REQUESTS = 16, 4  # until so many rounds are known, so many requests at most are drafted for


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
    curve = _own(costs, survival, other_tokens, context)
    plain = float(requests / curve[requests]) if requests else 0.0
    going_by = curve if judged is None else judged
    chosen = np.zeros(requests, dtype=np.int64)
    allowed = _allowed(survival, limits)
    order = np.argsort(-allowed.sum(1), kind="stable") if requests > 1 else np.arange(requests)
    ranked = allowed[order[: np.count_nonzero(limits)]]
    if not ranked.size:
        return GateChoice(depth=chosen, throughput=plain, plain=plain)
    counted = _few if ranked.size <= FEW else _many
    expected = functools.cache(counted(ranked, requests, curve, going_by, costs, arithmetic))
    most = len(ranked)
    depth = max(_grid(block), key=lambda d: expected(most, d))
    some = max(_grid(most), key=lambda m: expected(m, depth))
    best = expected(some, depth)
    if not best > plain * (1.0 + margin):
        return GateChoice(depth=chosen, throughput=plain, plain=plain)
    chosen[order[:some]] = np.minimum(limits[order[:some]], depth)
    return GateChoice(depth=chosen, throughput=best, plain=plain)


def could_pay(
    survival: Float[np.ndarray, "requests block"],
    limits: Lens,
    costs: StepCosts,
    *,
    other_tokens: int,
    context: float,
    arithmetic: Arithmetic = NUMPY,
    margin: float = 0.02,
) -> bool:
    """Whether :func:`choose_depths` may draft at all: False where it would not even if all drafts cost what one does.

    Takes the same arguments, and a tenth of the time.
    """
    requests, curve = len(survival), _own(costs, survival, other_tokens, context)
    if not survival.size:
        return False
    allowed, least = _allowed(survival, limits), requests / curve[requests] * (1.0 + margin)
    if survival.size <= FEW and _fall(rows := allowed.tolist()):
        counts = accumulate(_descending(rows), initial=float(requests))
        spent, drafting = curve[requests : requests + 1 + survival.size].tolist(), costs.drafting(1, 1)
        rates = [count / (each + drafting) for count, each in zip(counts, spent, strict=False)]
        return any(rate > least for rate in rates[1:])
    ordered = arithmetic.descending(allowed)
    if not len(ordered):
        return False
    tokens = np.concatenate(([float(requests)], ordered)).cumsum()
    seconds = curve[requests : requests + 1 + len(ordered)] + costs.drafting(1, 1)
    return bool((tokens[1:] / seconds[1:]).max() > least)


Expected = Callable[[int, int], float]  # tokens per second, drafting for so many of the ranked, so deep


def _many(
    ranked: Float[np.ndarray, "requests block"],
    requests: int,
    curve: Float[np.ndarray, "more_tokens_plus_1"],
    going_by: Float[np.ndarray, "judged_tokens_plus_1"],
    costs: StepCosts,
    arithmetic: Arithmetic,
) -> Expected:
    """What drafting for the first so many of ``ranked``, so deep, brings at best by ``going_by``, in time of ``curve``;
    ``requests`` have their tokens in any case."""

    def expected(some: int, depth: int) -> float:
        ordered = arithmetic.descending(ranked[:some, :depth])
        tokens = np.empty(len(ordered) + 1)
        tokens[0], tokens[1:] = requests, ordered
        tokens.cumsum(out=tokens)
        drafting, sizes = costs.drafting(some, depth), slice(requests, requests + len(tokens))
        count = int((tokens / (going_by[sizes] + drafting)).argmax())
        return float(tokens[count] / (curve[requests + count] + drafting))

    return expected


def _few(
    ranked: Float[np.ndarray, "requests block"],
    requests: int,
    curve: Float[np.ndarray, "more_tokens_plus_1"],
    going_by: Float[np.ndarray, "judged_tokens_plus_1"],
    costs: StepCosts,
    arithmetic: Arithmetic,
) -> Expected:
    """:func:`_many` on Python's numbers, the same to the last bit: of few drafts a single operation on an array takes
    longer than all of them here."""
    rows, sizes = ranked.tolist(), slice(requests, requests + 1 + ranked.size)
    if not _fall(rows):
        return _many(ranked, requests, curve, going_by, costs, arithmetic)  # which says what is wrong
    seconds, judged = curve[sizes].tolist(), going_by[sizes].tolist()

    def expected(some: int, depth: int) -> float:
        tokens = list(accumulate(_descending([row[:depth] for row in rows[:some]]), initial=float(requests)))
        drafting = costs.drafting(some, depth)
        rates = [count / (spent + drafting) for count, spent in zip(tokens, judged, strict=False)]
        count = rates.index(max(rates))
        return tokens[count] / (seconds[count] + drafting)

    return expected


def _fall(rows: Sequence[Sequence[float]]) -> bool:
    """Whether all rows are survivals: in [0, 1], never rising."""
    return all(before >= after for row in rows for before, after in pairwise((1.0, *row, 0.0)))


def _descending(rows: Sequence[Sequence[float]]) -> list[float]:
    """The survivals above 0, largest first."""
    return sorted((chance for row in rows for chance in row if chance > 0.0), reverse=True)


def _allowed(survival: Float[np.ndarray, "requests block"], limits: Lens) -> Float[np.ndarray, "requests block"]:
    """Survivals of the drafts that may be asked for, 0 behind each request's limit."""
    block = survival.shape[1]
    if limits.min(initial=block) >= block:
        return survival
    return np.where(np.arange(block) < limits[:, None], survival, 0.0)


def _own(
    costs: StepCosts, survival: Float[np.ndarray, "requests block"], other_tokens: int, context: float
) -> Float[np.ndarray, "more_tokens_plus_1"]:
    """Seconds by the requests' own tokens; raises :class:`ScheduleError` if the costs do not reach a full step."""
    requests, block = survival.shape
    if costs.max_tokens < other_tokens + requests * (1 + block):
        raise ScheduleError(
            f"costs cover {costs.max_tokens} tokens and the step could carry {other_tokens + requests * (1 + block)}"
        )
    return costs.own(context=context, other_tokens=other_tokens, requests=requests)


def _grid(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``; the largest first, so that it wins ties."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [most, *reversed(powers)]


def first_few(depth: Lens, *, known_rounds: int) -> Lens:
    """``depth``, for four requests at most until sixteen rounds are known: what is only guessed is tried on a few."""
    if known_rounds < FIRST_ROUNDS:
        depth = depth.copy()
        depth[np.flatnonzero(depth)[FIRST_REQUESTS:]] = 0
    return depth


class Refusals:
    """Keeps a refusal of all drafts for a few steps: on a busy machine the next step looks like this one.

    It ends early when an eighth of the requests have gone or are new, for with fewer or others drafts may pay, and when
    a drafted round has been committed. (On a busy machine a request or two come and go in most steps.)
    """

    def __init__(self, *, steps: int = 8) -> None:
        self._steps, self._left, self._requests, self._new = steps, 0, 0, 0

    def refuse(self, requests: int) -> None:
        """All drafts of a step of so many requests were refused."""
        self._left, self._requests, self._new = self._steps, requests, 0

    def come(self) -> None:
        """A new request has taken a seat."""
        self._new += 1

    def end(self) -> None:
        """Decide anew in the next step."""
        self._left = 0

    def holds(self, requests: int) -> bool:
        """Whether the next step, of so many requests, is refused without a look; counts it if so."""
        if not self._left or 8 * requests < 7 * self._requests or 8 * self._new >= self._requests:
            return False
        self._left -= 1
        return True


class Consents:
    """Keeps the depths of a step that drafted for all of its few requests, for a few steps: they change slowly, and
    with so few tokens in a step deciding takes a noticeable share of it."""

    def __init__(self, *, steps: int = 4, requests: int = 4) -> None:
        """``steps`` that one decision serves, its own included; ``requests``: the most it is kept for."""
        self._steps, self._most, self._left = steps, requests, 0
        self._numbers: list[int] = []
        self._depth: Lens = np.zeros(0, dtype=np.int64)

    def keep(self, numbers: list[int], depth: Lens) -> None:
        """The requests ``numbers`` were given ``depth``."""
        self._left = self._steps - 1 if len(numbers) <= self._most and bool(depth.all()) else 0
        self._numbers, self._depth = numbers, depth

    def held(self, numbers: list[int]) -> Lens | None:
        """What the same requests were given, if it still stands; counts a step."""
        if not self._left or numbers != self._numbers:
            return None
        self._left -= 1
        return self._depth


class ProbeClock:
    """When refused requests are drafted for regardless, and which: those that have waited longest, a few at a time."""

    def __init__(
        self,
        rows: int,
        *,
        first_pause: int = 8,
        longest_pause: int = 256,
        requests: int = 2,
        share: float = 0.004,
    ) -> None:
        """Pauses in steps; ``requests``: most of one probe; ``share``: most of the time that probes may take, where
        their cost is told, in (0, 1]: it stretches the first pause, and the longest too if it must."""
        if not 1 <= first_pause <= longest_pause or requests < 1:
            raise ScheduleError(
                f"first_pause is {first_pause}, longest_pause {longest_pause} and requests {requests}; pauses must be "
                "ordered and all at least 1"
            )
        if not 0.0 < share <= 1.0:
            raise ScheduleError(f"share is {share}; it must be a share of the time in (0, 1]")
        self._first, self._longest, self.requests, self._share = first_pause, longest_pause, requests, share
        self._probes = self._since = self._now = 0  # since the last time that nobody was refused; steps; all steps
        self._drafted = [0] * rows  # step in which each row was drafted for last, or opened

    def open(self, row: int) -> None:
        self._drafted[row] = self._now

    def tick(self, cost: float = 0.0) -> bool:
        """Go through a step that refuses somebody; whether a probe is due in it. ``cost``: of a probe, in steps."""
        self._now += 1
        self._since += 1
        first = max(self._first, cost / self._share)
        return self._since >= min(first * 2.0 ** min(self._probes, 30), max(self._longest, first))

    def probe(
        self, rows: Int[np.ndarray, "requests"], refused: Int[np.ndarray, "refused"]
    ) -> Int[np.ndarray, "probed"]:
        """Those of the places ``refused`` among ``rows`` whose turn it is; none if there is no one to probe."""
        if not len(refused):
            return refused
        self._since, self._probes = 0, self._probes + 1
        seats = rows.tolist()
        longest = sorted(refused.tolist(), key=lambda place: self._drafted[seats[place]])[: self.requests]
        for place in longest:
            self._drafted[seats[place]] = self._now
        return np.array(longest, dtype=np.int64)

    def due(
        self, rows: Int[np.ndarray, "requests"], depth: Lens, limits: Lens, *, cost: float = 0.0
    ) -> Int[np.ndarray, "probed"]:
        """Places among ``rows`` to be drafted for besides those with a ``depth``; advances the clock by a step."""
        depths = depth.tolist()
        refused = [place for place, most in enumerate(limits.tolist()) if most > 0 and not depths[place]]
        due = False
        if refused:
            due = self.tick(cost)
        else:
            self._now, self._probes, self._since = self._now + 1, 0, 0
        for row, drafts in zip(rows.tolist(), depths, strict=True):
            if drafts:
                self._drafted[row] = self._now
        return self.probe(rows, np.array(refused if due else [], dtype=np.int64))


def probe_cost(costs: StepCosts, clock: ProbeClock, *, requests: int, known_rounds: int) -> float:
    """What a probe of ``clock`` beside so many plain requests takes, in steps: drafting (of its drafts those are
    verified that pay). Nothing while next to nothing is known: then a probe may be worth a server's whole gain."""
    if known_rounds < FIRST_ROUNDS:
        return 0.0
    spent = costs.drafting(min(clock.requests, requests), costs.drafts.shape[1] - 1)
    return spent / float(costs.passes[0, requests])
