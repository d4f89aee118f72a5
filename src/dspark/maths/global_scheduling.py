"""The scheduling rules of :mod:`dspark.maths.scheduling` for many requests at once, on numpy, and two that need many.

Every rule maps what is known of a step's drafts to ``verify_len`` [requests]. Rows are requests and columns draft
positions; a request that proposed fewer drafts than the others has confidence 0 behind them. Each fast form stands
beside a plain one that reads as the rule does, and equals it, ties and rounding included.

    fixed       the first so many drafts of each request
    threshold   the drafts before the first whose confidence is too low
    greedy      Algorithm 1: the likeliest drafts first, until one does not pay
    lagged      as many drafts as pay by the survivals of two steps ago, then the likeliest of today

Non-anticipation, for all: whether draft k of a request is admitted never depends on anything computed from its x_k or
later. ``greedy`` looks no further than the first draft it refuses. ``lagged`` may search the whole table, because the
survivals it searches with are two steps old; that is also what lets an engine know a step's size before the step
before it has ended (the paper's section 5.2). Today's survivals only say which drafts fill that size, and a draft's
rank among them depends on drafts of larger survival, none of which follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ScheduleError

Table = Float[np.ndarray, "requests block"]
Lens = Int[np.ndarray, "requests"]  # int64
Sps = Float[np.ndarray, "max_tokens_plus_1"]

FEW = 32  # drafts of a step, up to which Python's numbers are faster than arrays


def survivals(confidence: Table) -> Table:
    """Chance that drafts 0..k all survive: cumulative products along the rows, in the dtype of ``confidence``.

    Never rises along a row. Raises :class:`ScheduleError` if a confidence is nan or outside [0, 1].
    """
    check_confidences(confidence)
    return np.cumprod(confidence, axis=1, dtype=confidence.dtype)


def fixed_lens(proposed: Lens, length: int | None) -> Lens:
    """The first ``length`` of the drafts each request ``proposed``; None takes all of them."""
    return proposed.astype(np.int64) if length is None else np.minimum(proposed, length).astype(np.int64)


def threshold_lens(confidence: Table, proposed: Lens, threshold: float) -> Lens:
    """Drafts of each request before its first whose conditional confidence is under ``threshold``, in [0, 1]."""
    check_confidences(confidence)
    low = confidence < threshold
    first_low = np.where(low.any(axis=1), low.argmax(axis=1), confidence.shape[1]) if low.size else proposed * 0
    return np.minimum(first_low, proposed).astype(np.int64)


def threshold_lens_plain(confidence: Table, proposed: Lens, threshold: float) -> Lens:
    """:func:`threshold_lens`, request by request."""
    check_confidences(confidence)
    lens = []
    for row, count in zip(confidence.tolist(), proposed.tolist(), strict=True):
        length = 0
        while length < count and row[length] >= threshold:
            length += 1
        lens.append(length)
    return np.array(lens, dtype=np.int64)


def greedy_lens(survival: Table, sps: Sps) -> Lens:
    """Algorithm 1 over all requests: admit the likeliest drafts while each raises expected tokens x steps per second.

    ``survival`` [requests, block]: in [0, 1], never rises along a row. ``sps`` [max_tokens + 1]: steps per second when
    a step carries B tokens; entry 0 unused. Returns ``verify_len`` [requests]. Equal survivals go in draft order, and
    at equal positions in request order. A draft of survival 0 is never admitted. Raises :class:`ScheduleError` if a
    survival or an entry of ``sps`` cannot be one, or ``sps`` is too short for a full batch. Source: DSpark Algorithm 1.
    The plain form is :func:`dspark.maths.scheduling.choose_verify_lens`.

    Only the values are sorted, never their places: how many drafts are admitted follows from the values, and which
    ones from comparing with the least of those.
    """
    _check_survivals(survival)
    return greedy_lens_of_products(survival, sps)


def greedy_lens_of_products(survival: Table, sps: Sps) -> Lens:
    """:func:`greedy_lens` of what :func:`survivals` returned, which needs no checking again."""
    requests, block = survival.shape
    check_sps(sps, first=max(requests, 1), last=requests * (1 + block))
    ordered = descending(survival)
    return admit_ordered(survival, ordered, first_peak(ordered, sps, requests))


def greedy_lens_of_few(confidence: Table, sps: Sps) -> Lens | None:
    """:func:`greedy_lens` of the :func:`survivals` of a few drafts, on Python's numbers: the same to the last bit, in
    the time of two operations on arrays. None for what the others refuse, or for any dtype but float64."""
    requests, block = confidence.shape
    rows, full = confidence.tolist(), requests * (1 + block)
    speeds = sps[max(requests, 1) : full + 1].tolist()
    sound = len(sps) > full and confidence.dtype == sps.dtype == np.float64 and all(0.0 < s < np.inf for s in speeds)
    if not sound or not all(0.0 <= chance <= 1.0 for row in rows for chance in row):
        return None
    chances = [list(accumulate(row, mul)) for row in rows]
    drafts = [(k, r) for k in range(block) for r in range(requests) if chances[r][k] > 0.0]
    drafts.sort(key=lambda kr: -chances[kr[1]][kr[0]])  # stable
    lens, tokens = [0] * requests, float(requests)
    best = tokens * speeds[0] if requests else 0.0
    for (k, r), speed in zip(drafts, speeds[1:], strict=False):
        tokens += chances[r][k]
        if tokens * speed <= best:
            break
        best, lens[r] = tokens * speed, k + 1
    return np.array(lens, dtype=np.int64)


def first_peak(ordered: Float[np.ndarray, "candidates"], sps: Sps, requests: int) -> int:
    """Number of drafts, likeliest first, before the first that does not raise expected tokens x steps per second."""
    throughput = _expected_tokens(ordered, requests) * sps[requests : requests + len(ordered) + 1]
    refused = throughput[1:] <= throughput[:-1]
    first = int(refused.argmax()) if len(ordered) else 0
    return first if len(ordered) and refused[first] else len(ordered)


def choose_capacity(survival_then: Float[np.ndarray, "rows block"], sps: Sps, requests: int) -> int:
    """Number of drafts, over all requests, that a step of ``requests`` requests carries: the best of every number.

    ``survival_then`` are survivals that were known before any draft of the step was drawn (two steps old, or a guess);
    the search is global, so ``sps`` may be as jagged as it likes. Of equally good numbers the smallest. Raises
    :class:`ScheduleError` like :func:`greedy_lens`.
    """
    _check_survivals(survival_then)
    return best_capacity(descending(survival_then), sps, requests)


def choose_capacity_plain(survival_then: Float[np.ndarray, "rows block"], sps: Sps, requests: int) -> int:
    """:func:`choose_capacity` as a loop over all numbers."""
    _check_survivals(survival_then)
    chances = sorted((chance for chance in survival_then.ravel().tolist() if chance > 0.0), reverse=True)
    check_sps(sps, first=max(requests, 1), last=requests + len(chances))
    expected_tokens, capacity = float(requests), 0
    best = expected_tokens * float(sps[requests])
    for count, chance in enumerate(chances, start=1):
        expected_tokens += chance
        throughput = expected_tokens * float(sps[requests + count])
        if throughput > best:
            best, capacity = throughput, count
    return capacity


def best_capacity(ordered: Float[np.ndarray, "candidates"], sps: Sps, requests: int) -> int:
    """:func:`choose_capacity` of survivals above 0 that are in descending order already."""
    check_sps(sps, first=max(requests, 1), last=requests + len(ordered))
    return int((_expected_tokens(ordered, requests) * sps[requests : requests + len(ordered) + 1]).argmax())


def admit_likeliest(survival: Table, capacity: int) -> Lens:
    """``verify_len`` of each request when the ``capacity`` likeliest drafts are admitted.

    Ties as in :func:`greedy_lens`; fewer are admitted if fewer have a chance at all.
    """
    _check_survivals(survival)
    if capacity < 0:
        raise ScheduleError(f"capacity is {capacity}; it must be 0 or more")
    admitted = min(capacity, int(np.count_nonzero(survival)))
    if admitted == 0:
        return np.zeros(len(survival), dtype=np.int64)
    border = survival.size - admitted
    return _admit(survival, admitted, float(np.partition(survival, border, axis=None)[border]))


def admit_likeliest_plain(survival: Table, capacity: int) -> Lens:
    """:func:`admit_likeliest`, draft by draft."""
    _check_survivals(survival)
    requests, block = survival.shape
    chances = survival.tolist()
    drafts = [(k, r) for k in range(block) for r in range(requests) if chances[r][k] > 0.0]
    drafts.sort(key=lambda kr: -chances[kr[1]][kr[0]])  # stable
    lens = [0] * requests
    for _, r in drafts[:capacity]:
        lens[r] += 1
    return np.array(lens, dtype=np.int64)


def admit_ordered(survival: Table, ordered: Float[np.ndarray, "candidates"], capacity: int) -> Lens:
    """:func:`admit_likeliest` of survivals whose :func:`descending` order is known."""
    admitted = min(capacity, len(ordered))
    return _admit(survival, admitted, float(ordered[admitted - 1]) if admitted else 1.0)


def check_confidences(confidence: Table) -> None:
    """Raise :class:`ScheduleError` naming the first confidence that is no probability."""
    if confidence.size and not (confidence.min() >= 0 and confidence.max() <= 1):  # nan fails both comparisons
        r, k = np.argwhere(~((confidence >= 0) & (confidence <= 1)))[0]
        raise ScheduleError(
            f"confidence[{r}, {k}] is {float(confidence[r, k])}; it must be in [0, 1] (apply the sigmoid)"
        )


def check_sps(sps: Sps, *, first: int, last: int) -> None:
    """Raise :class:`ScheduleError` unless entries ``first``..``last`` of ``sps`` are there, positive and finite."""
    if len(sps) <= last:
        raise ScheduleError(
            f"sps covers up to {len(sps) - 1} tokens and the step could carry {last}: profile more tokens, "
            "or limit the batch"
        )
    used = sps[first : last + 1]
    if used.size and not (used.min() > 0 and used.max() < np.inf):  # nan fails both
        i = first + int(np.flatnonzero(~((used > 0) & (used < np.inf)))[0])
        raise ScheduleError(f"sps[{i}] is {float(sps[i])}; steps per second must be positive and finite")


def _check_survivals(survival: Float[np.ndarray, "rows block"]) -> None:
    if not survival.size:
        return
    falls = survival[:, 1:] <= survival[:, :-1]
    # rows that never rise lie between their first and last entries; nan compares false everywhere
    if falls.all() and survival[:, 0].max() <= 1 and survival[:, -1].min() >= 0:
        return
    outside = np.argwhere(~((survival >= 0) & (survival <= 1)))
    if len(outside):
        r, k = outside[0]
        raise ScheduleError(f"survival[{r}, {k}] is {float(survival[r, k])}; it must be in [0, 1]")
    r, k = np.argwhere(~falls)[0]
    raise ScheduleError(
        f"survival[{r}] rises from {float(survival[r, k])} at position {k} to {float(survival[r, k + 1])}; "
        "it must be the cumulative product of the confidences"
    )


def descending(survival: Float[np.ndarray, "rows block"]) -> Float[np.ndarray, "candidates"]:
    """The survivals above 0, largest first, in their own dtype."""
    ascending = np.sort(survival, axis=None)
    return ascending[ascending.searchsorted(ascending.dtype.type(0), side="right") :][::-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """A step's drafts as the rules read them."""

    survival: Table
    ordered: Float[np.ndarray, "candidates"]  # the survivals above 0, largest first


@runtime_checkable
class Arithmetic(Protocol):
    """What schedulers of a batch compute in every step. All forms give the same numbers, rounding and ties included.

    Each raises :class:`ScheduleError` for what is no probability, or no table of costs.
    """

    def ranked(self, confidence: Table) -> Ranked:
        """:func:`survivals`, and their order."""
        ...

    def descending(self, survival: Float[np.ndarray, "rows block"]) -> Float[np.ndarray, "candidates"]:
        """The order of survivals that are known."""
        ...

    def greedy(self, ranked: Ranked, sps: Sps) -> int:
        """Number of drafts that :func:`greedy_lens` admits."""
        ...

    def capacity(self, ordered: Float[np.ndarray, "candidates"], sps: Sps, requests: int) -> int:
        """:func:`best_capacity`."""
        ...

    def admit(self, ranked: Ranked, capacity: int) -> Lens:
        """:func:`admit_ordered`."""
        ...


class NumpyArithmetic:
    """The functions of this module."""

    def ranked(self, confidence: Table) -> Ranked:
        survival = survivals(confidence)
        return Ranked(survival=survival, ordered=descending(survival))

    def descending(self, survival: Float[np.ndarray, "rows block"]) -> Float[np.ndarray, "candidates"]:
        _check_survivals(survival)
        return descending(survival)

    def greedy(self, ranked: Ranked, sps: Sps) -> int:
        requests, block = ranked.survival.shape
        check_sps(sps, first=max(requests, 1), last=requests * (1 + block))
        return first_peak(ranked.ordered, sps, requests)

    def capacity(self, ordered: Float[np.ndarray, "candidates"], sps: Sps, requests: int) -> int:
        return best_capacity(ordered, sps, requests)

    def admit(self, ranked: Ranked, capacity: int) -> Lens:
        return admit_ordered(ranked.survival, ranked.ordered, capacity)


NUMPY = NumpyArithmetic()


def _expected_tokens(ordered: Float[np.ndarray, "candidates"], requests: int) -> Float[np.ndarray, "candidates_plus_1"]:
    """Expected tokens of a step with the first 0, 1, 2, ... candidates, summed one by one in float64."""
    gains = np.empty(len(ordered) + 1)
    gains[0] = requests
    gains[1:] = ordered
    return np.cumsum(gains, out=gains)


def _admit(survival: Table, admitted: int, least: float) -> Lens:
    """``verify_len`` when the ``admitted`` largest survivals are let through, the last of which is ``least``."""
    if admitted == 0:
        return np.zeros(len(survival), dtype=np.int64)
    # counted as a product, twice as fast as a sum of booleans
    lens = ((survival >= least).astype(np.float32) @ np.ones(survival.shape[1], np.float32)).astype(np.int64)
    if (surplus := int(lens.sum()) - admitted) == 0:  # no tie at the border
        return lens
    tied = np.flatnonzero((survival == least).T)  # in draft order, then request order
    refused = tied[len(tied) - surplus :] % len(survival)
    return lens - np.bincount(refused, minlength=len(survival))
