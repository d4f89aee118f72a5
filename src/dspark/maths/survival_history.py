"""How far drafts have survived so far: per request and over all, from committed rounds alone.

What a draft gate decides by, before a round's drafts exist, and what stands in for the confidences of a drafter that
has none. A round tells its survivals 1, 1, .., 0, .. up to where it was checked; behind that, its own confidences say
what the chances were, or else the survivals of all requests do. So rounds that a scheduler cut short count for what
they showed, and leave no optimism behind.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ScheduleError
from dspark.maths.global_scheduling import FEW

Table = Float[np.ndarray, "requests block"]


def round_survivals(
    *,
    asked: Int[np.ndarray, "requests"],
    proposed: Int[np.ndarray, "requests"],
    verified: Int[np.ndarray, "requests"],
    accepted: Int[np.ndarray, "requests"],
    confidence: Table | None,
    usual: Float[np.ndarray, "block"],
) -> Table:
    """What a round says of each position's survival, in [0, 1], never rising along a row.

    Position k below ``verified``: 1 if k < ``accepted``, else 0. Behind the checked drafts of a round that lost none:
    on by its confidences while ``proposed`` reaches, then by the ratios of ``usual`` while ``asked`` was smaller than
    the block; 0 where the drafter had nothing to offer though asked (``proposed`` < k < ``asked``).
    """
    if len(asked) * len(usual) <= FEW:
        told = (asked.tolist(), proposed.tolist(), verified.tolist(), accepted.tolist())
        sure = None if confidence is None else confidence.tolist()
        return _of_few(list(zip(*told, strict=True)), sure, usual.tolist())
    block = len(usual)
    k = np.arange(block)
    ratio = np.divide(usual[1:], usual[:-1], out=np.zeros(max(block - 1, 0)), where=usual[:-1] > 0)
    usually = np.concatenate((usual[:1], ratio)).clip(0.0, 1.0)  # conditional on the position before
    step = np.where(k < proposed[:, None], usually if confidence is None else confidence, usually)
    step = np.where((k >= proposed[:, None]) & (k < asked[:, None]), 0.0, step)
    step = np.where(k < verified[:, None], k < accepted[:, None], step)
    return np.cumprod(step, axis=1)


def _of_few(rounds: list[tuple[int, int, int, int]], confidence: list[list[float]] | None, usual: list[float]) -> Table:
    """:func:`round_survivals` of few drafts on Python's numbers, to the last bit; ``rounds``: asked, proposed, verified
    and accepted drafts of each."""
    block, table = len(usual), list[list[float]]()
    ratios = [after / before if before > 0 else 0.0 for before, after in pairwise(usual)]
    usually = [min(max(chance, 0.0), 1.0) for chance in (*usual[:1], *ratios)]
    for row, (asked, proposed, verified, accepted) in enumerate(rounds):
        own = usually if confidence is None else confidence[row]
        steps = [1.0] * accepted + [0.0] * (verified - accepted) + own[verified:proposed]
        steps += [0.0] * (asked - len(steps))
        steps += usually[len(steps) :]
        table.append(list(accumulate(steps[:block], mul)))
    return np.array(table, dtype=np.float64).reshape(len(rounds), block)


class SurvivalHistory:
    """Running mean survivals of the requests in flight, one row each, drawn to those of all where a row knows little.

    A row's weight is the number of its rounds, older ones fading by ``fade`` per drafted round and ``rust`` per
    undrafted one.
    """

    def __init__(
        self,
        rows: int,
        *,
        block_size: int,
        guess: float = 0.7,
        fade: float = 0.9,
        rust: float = 0.98,
        pull: float = 2.0,
        pool_fade: float = 0.99,
    ) -> None:
        """``guess`` in [0, 1]: confidence of every position before anything is known; ``pull``: rounds' worth of the
        common mean in each row's."""
        for name, value in (("guess", guess), ("fade", fade), ("rust", rust), ("pool_fade", pool_fade)):
            if not 0.0 <= value <= 1.0:
                raise ScheduleError(f"{name} is {value}; it must be in [0, 1]")
        if not pull > 0.0:
            raise ScheduleError(f"pull is {pull}; it must be positive")
        self._fade, self._rust, self._pull, self._pool_fade = fade, rust, pull, pool_fade
        self._sums, self._weights = np.zeros((rows, block_size)), np.zeros(rows)
        self._rests = 0  # of all rows at once
        self._rested = [0] * rows  # of these, how many a row's sums have in them
        self.rounds = 0  # observed so far
        self._pool_sum, self._pool_weight = np.full(block_size, guess).cumprod() * pull, pull

    @property
    def usual(self) -> Float[np.ndarray, "block"]:
        """Mean survivals over all requests, the recent ones most."""
        return self._pool_sum / self._pool_weight

    def open(self, row: int) -> None:
        """A new request takes ``row``: nothing is known of it."""
        self._sums[row], self._weights[row], self._rested[row] = 0.0, 0.0, self._rests

    def observe(self, rows: Int[np.ndarray, "requests"], survival: Table) -> None:
        """Take in a committed round of each of ``rows``, as :func:`round_survivals` tells it."""
        if not len(rows):
            return
        self._settle(rows)
        self._sums[rows] = self._fade * self._sums[rows] + survival
        self._weights[rows] = self._fade * self._weights[rows] + 1.0
        self.rounds += len(rows)
        fade = self._pool_fade ** len(rows)
        self._pool_sum = fade * self._pool_sum + (survival.sum(0) if len(rows) > 1 else survival[0])
        self._pool_weight = fade * self._pool_weight + len(rows)

    def rest(self, rows: Int[np.ndarray, "requests"]) -> None:
        """``rows`` went through a step without drafts: what is known of them grows old."""
        self._settle(rows)
        self._sums[rows] *= self._rust
        self._weights[rows] *= self._rust

    def rest_all(self) -> None:
        """Every row went through a step without drafts: :meth:`rest`, at no cost before one of them is asked about."""
        self._rests += 1

    def _settle(self, rows: Int[np.ndarray, "requests"]) -> None:
        """Let the rests of all show in ``rows``."""
        seats = rows.tolist()
        missed = [self._rests - self._rested[seat] for seat in seats]
        if any(missed):
            kept = self._rust ** np.array(missed)
            self._sums[rows] *= kept[:, None]
            self._weights[rows] *= kept
            for seat in seats:
                self._rested[seat] = self._rests

    def estimate(self, rows: Int[np.ndarray, "requests"]) -> Table:
        """Expected survivals of each of ``rows``: in [0, 1], never rising along a row."""
        self._settle(rows)
        mixed = self._sums[rows] + self._pull * self.usual
        return np.minimum(mixed / (self._weights[rows] + self._pull)[:, None], 1.0)

    def confidence(self, rows: Int[np.ndarray, "requests"]) -> Table:
        """The same as conditional chances c_k: the ratios along the rows."""
        survival = self.estimate(rows)
        before = np.concatenate((np.ones((len(rows), 1)), survival[:, :-1]), axis=1)
        return np.divide(survival, before, out=np.zeros_like(survival), where=before > 0).clip(0.0, 1.0)
