"""What an engine's steps cost: measured on its own seats and pages, or read from a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.maths.step_costs import StepCosts, step_costs
from dspark.models.batch_drafter import BatchDrafter, DraftAsk
from dspark.models.target import Target
from dspark.schedule_files import Profile
from dspark.serve.roster import Roster

CONTEXT = 64  # committed tokens behind each request of a measurement
REPEATS = 3
SLOW_SECONDS = 1.0  # of two runs, after which no more are made
MOST_STAIR = 64  # tokens of the largest pass after which a stair is looked for
CHUNK = 256  # tokens of a pass that only fills the context


def costs_of(profile: Profile, *, seats: int, block_size: int, prefill_tokens: int) -> StepCosts:
    """The costs that `dspark profile` measured, for steps of up to ``seats`` requests; on the line beyond them."""
    passes = [{tokens: 1.0 / rate for tokens, rate in enumerate(curve) if tokens} for curve in profile.sps]
    return step_costs(
        contexts=profile.contexts,
        passes=passes,
        drafts=dict(zip(profile.draft_requests, profile.draft_seconds, strict=True)),
        draft_depths=dict(enumerate(profile.draft_depth_shares, start=1)),
        max_tokens=seats * (1 + block_size) + prefill_tokens,
        max_requests=seats,
        block_size=block_size,
    )


def measure_costs(target: Target, drafter: BatchDrafter, roster: Roster, *, prefill_tokens: int) -> StepCosts:
    """Time passes of 1 token to a full step, and drafting for 1 request to all seats, on an engine's free seats.

    The least of a few repeats each: good enough to tell what pays from what does not. A profile is better. Everything
    is given back; raises :class:`ConfigError` if requests are in flight.
    """
    if roster.running:
        raise ConfigError("costs are measured on free seats, and requests are in flight; measure before serving")
    block, seats = drafter.block_size, roster.tables.seats
    most = seats * (1 + block) + prefill_tokens
    bench = _Bench(target, drafter, roster, most_tokens=most)
    try:
        sizes = _with_stairs(_sizes(min(most, bench.room)))
        passes = _rising(least_seconds({size: partial(bench.run_pass, size) for size in sizes}))
        drafts: dict[int, float] = {}
        depths: dict[int, float] = {}
        if block:
            counts = _sizes(bench.seats)
            drafts = _rising(least_seconds({count: partial(bench.run_draft, count, block) for count in counts}))
            whole = drafts[bench.seats]
            seconds = least_seconds({d: partial(bench.run_draft, bench.seats, d) for d in _sizes(block)[:-1]})
            depths = {depth: each / whole for depth, each in _rising({**seconds, block: whole}).items()}
    finally:
        bench.close()
    return step_costs(
        contexts=(CONTEXT,),
        passes=[passes],
        drafts=drafts,
        draft_depths=depths,
        max_tokens=most,
        max_requests=seats,
        block_size=block,
    )


def _sizes(most: int) -> list[int]:
    """1, 2, 4, 6, 8, 12, 16, 24, ... and ``most``, ascending."""
    sizes = {1, most}
    power = 2
    while power < most:
        sizes |= {power, power * 3 // 2} if power > 2 else {power}
        power *= 2
    return sorted(size for size in sizes if size <= most)


def _with_stairs(sizes: list[int]) -> list[int]:
    """``sizes``, and one token more than each: products take rows in groups, and where one begins, one token costs as
    much as those that fill it."""
    return sorted({*sizes, *(size + 1 for size in sizes if 4 <= size <= MOST_STAIR and size < sizes[-1])})


def _rising(points: dict[int, float]) -> dict[int, float]:
    """``points`` without what only noise can say: that a larger size takes less time than a smaller one."""
    least, rising = float("inf"), {}
    for size in sorted(points, reverse=True):
        least = rising[size] = min(least, points[size])
    return rising


class _Bench:
    """Seats with a context each, to run passes and drafts on."""

    def __init__(self, target: Target, drafter: BatchDrafter, roster: Roster, *, most_tokens: int) -> None:
        self._target, self._drafter, self._roster = target, drafter, roster
        tables, pages = roster.tables, roster.pages
        longest = min(roster.memory.max_len, tables.max_len - roster.scratch)
        timings = len(_sizes(tables.seats)) + len(_sizes(max(1, drafter.block_size)))
        growth = 2 * (REPEATS + 1) * timings  # tokens that the drafter takes in while it is timed
        each = -(-most_tokens // tables.seats)
        self._context = max(1, min(CONTEXT, longest - each, longest - growth))
        room = min(self._context + max(each, growth), longest)
        per_seat = min(pages.pages_for(room + roster.scratch), pages.available)
        self.seats = max(1, min(tables.seats, pages.available // per_seat))
        self._per_seat = min(room, per_seat * pages.page_size - roster.scratch) - self._context
        self.room = self.seats * max(1, self._per_seat)  # tokens of the largest pass
        self._pages: list[int] = []
        self._drafted = 0  # tokens that some seat's drafter took in behind the context, at most
        for seat in range(self.seats):
            given = pages.take(per_seat)
            assert given is not None, "counted above"
            tables.assign(seat, given)
            self._pages += given
            drafter.open(seat, shaper=None)
        self._fill()

    def _fill(self) -> None:
        at_once = max(1, CHUNK // self._context)
        for first in range(0, self.seats, at_once):
            seats = list(range(first, min(first + at_once, self.seats)))
            self._pass(seats, [self._context] * len(seats), keep=True)

    def _ids(self, count: int) -> Tensor:
        info = self._target.info
        return torch.arange(count, device=info.device) * 7919 % info.vocab_size

    def _pass(self, seats: Sequence[int], counts: Sequence[int], *, keep: bool = False) -> None:
        memory, ids = self._roster.memory, self._ids(sum(counts))
        output = self._target.forward(
            ids, memory, rows=seats, counts=counts, taps=self._drafter.taps, want_logits=not keep
        )
        if keep:
            self._drafter.extend(seats, counts, ids, output.features)
            return
        assert output.logits is not None
        output.logits.argmax(-1).tolist()  # waits for the device
        for seat in seats:
            memory.rollback(seat, self._context)

    def run_pass(self, tokens: int) -> None:
        """A pass of ``tokens`` tokens, dealt to the seats as evenly as they go."""
        each, more = divmod(tokens, min(tokens, self.seats))
        counts = [each + (i < more) for i in range(min(tokens, self.seats))]
        self._pass(range(len(counts)), counts)

    def run_draft(self, requests: int, depth: int) -> None:
        """Draft for ``requests`` requests, and let two tokens of each be taken in."""
        width = len(self._drafter.taps) * self._target.info.hidden_size
        features = torch.zeros(2 * requests, width, dtype=self._target.info.dtype, device=self._target.info.device)
        sampling, generator = SamplingParams(temperature=1.0), torch.Generator().manual_seed(0)
        asks = [
            DraftAsk(seat=seat, anchor=0, sampling=sampling, generator=generator, limit=depth)
            for seat in range(requests)
        ]
        self._drafter.propose(asks).draft_tokens.tolist()
        if self._drafted + 2 <= self._per_seat:
            seats = list(range(requests))
            self._drafter.extend(seats, [2] * requests, self._ids(2 * requests), features if width else None)
            self._drafted += 2

    def close(self) -> None:
        """Free everything."""
        roster = self._roster
        for seat in range(self.seats):
            self._drafter.close(seat)
            roster.tables.clear(seat)
            roster.memory.lengths[seat] = 0
        roster.pages.give_back(self._pages, forget=True)


def least_seconds(runs: Mapping[int, Callable[[], None]]) -> dict[int, float]:
    """Least seconds of a few runs of each, a round of all after the other: what else the machine does only adds, and
    comes and goes, so it meets no size alone. The first round warms up; what is slow runs less often."""
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(REPEATS + 1):
        for size, run in runs.items():
            if len(seconds[size]) > 1 and sum(seconds[size]) > SLOW_SECONDS:
                continue
            start = time.perf_counter()
            run()
            seconds[size].append(time.perf_counter() - start)
    return {size: min(each[1:]) for size, each in seconds.items()}
