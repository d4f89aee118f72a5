"""Several requests in shared target passes: the loop of :mod:`dspark.decode`, one pass for all.

Every request keeps its own streams, drafter state and scheduler's choice, and drafts, judging and commits are those of
the loop at batch size 1. What changes is the pass that verifies: one over the tokens of all requests. So a request's
tokens are the same up to near-ties that a longer pass rounds otherwise, and what was accepted has the same
distribution. Seconds do not compare: a shared pass is counted to its requests by their tokens.

What one pass holds is a *turn*: whole rounds here (:func:`whole_rounds`), a token of each request in
:mod:`dspark.evaluate.lockstep`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dspark.core import Completion, Proposal, RoundRecord, SamplingParams
from dspark.decode import check_request, check_shaping
from dspark.errors import ConfigError
from dspark.maths.block_verification import verify_block
from dspark.maths.rejection import Verdict, verify, verify_greedy
from dspark.maths.sampling import RequestStreams, TargetRows
from dspark.maths.scheduling import Scheduler
from dspark.maths.shaping import Shaper
from dspark.models.drafter import Drafter, MirrorsShaping
from dspark.models.target import KVMemory, Target

Name = TypeVar("Name")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request: what it continues, and how it draws."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(kw_only=True)
class Seat:
    """A request in flight, on one row of the memory."""

    name: Any  # the caller's
    ask: Ask
    context: Any  # the drafter's own type
    streams: RequestStreams
    shaper: Shaper | None
    room: int  # tokens that prompt and output may have together
    output: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    started: float = 0.0

    @property
    def committed(self) -> int:
        return len(self.ask.prompt_ids) + len(self.output)

    def judge(self, drafts: torch.Tensor, proposal: Proposal | None, logits: torch.Tensor) -> Verdict:
        """The verdict on ``drafts`` [drafts] by the target's ``logits`` [drafts + 1, vocab]."""
        sampling = self.ask.sampling
        if self.shaper is not None:
            logits = self.shaper.rows(logits, drafts.tolist())
        if sampling.greedy:
            return verify_greedy(drafts, logits.argmax(-1))
        rule = verify_block if sampling.rule == "block" else verify
        distribution = None if proposal is None else proposal.distribution
        return rule(drafts, distribution, TargetRows(logits, sampling), self.streams)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What all requests share."""

    target: Target
    drafter: Drafter
    scheduler: Scheduler
    max_new_tokens: int
    stops: frozenset[int]
    memory: KVMemory
    proposed: Callable[[Any, Proposal], None]  # hears of every proposal, with its request's name


Turn = Callable[[Loop, dict[int, Seat]], None]  # one pass for the seats by row, none of which is at its end


def play_together(
    target: Target,
    drafter: Drafter,
    waiting: deque[tuple[Name, Ask]],
    *,
    rows: int,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    scheduler: Scheduler,
    ended: Callable[[Name, Ask, Completion], None],
    proposed: Callable[[Name, Proposal], None] = lambda name, proposal: None,
    turn: Turn | None = None,
) -> None:
    """Run every request of ``waiting`` to its end, up to ``rows`` at a time; a seat that frees is filled at once.

    ``ended`` is told of each as it ends, and may append to ``waiting``; ``proposed`` hears of every proposal before it
    is judged. ``turn`` None plays :func:`whole_rounds`. Mutates ``waiting``. Raises what
    :func:`dspark.decode.stream` raises for a request that cannot be, when its turn comes, and :class:`ConfigError`
    for ``rows`` under 1.
    """
    if rows < 1:
        raise ConfigError(f"rows is {rows}; it must be 1 or more")
    loop: Loop | None = None
    seats: dict[int, Seat] = {}
    while waiting or seats:
        if loop is None or (not seats and waiting and not _fits(waiting[0][1], loop)):
            longest = max(len(ask.prompt_ids) for _, ask in waiting)
            room = min(max(2 * longest, 256) + max_new_tokens, target.info.max_len)
            loop = Loop(
                target=target,
                drafter=drafter,
                scheduler=scheduler,
                max_new_tokens=max_new_tokens,
                stops=frozenset(stop_token_ids),
                memory=target.new_memory(rows=rows, max_len=room),
                proposed=proposed,
            )
        for row in [row for row in range(rows) if row not in seats]:
            if not waiting or not _fits(waiting[0][1], loop):  # a longer one waits until the memory can be larger
                break
            name, ask = waiting.popleft()
            seats[row] = _take_seat(loop, row, name, ask)
        for row in [row for row, seat in seats.items() if _over(loop, seat)]:
            seat = seats.pop(row)
            ended(seat.name, seat.ask, _completion(loop, seat))
        if seats:
            (turn or whole_rounds)(loop, seats)


def _fits(ask: Ask, loop: Loop) -> bool:
    return min(len(ask.prompt_ids) + loop.max_new_tokens, loop.target.info.max_len) <= loop.memory.max_len


def _take_seat(loop: Loop, row: int, name: Any, ask: Ask) -> Seat:
    """Check the request, run its prompt and draw its first token."""
    target, drafter, sampling = loop.target, loop.drafter, ask.sampling
    check_request(target, drafter, ask.prompt_ids, max_new_tokens=loop.max_new_tokens, scheduler=loop.scheduler)
    held_back = [token for token in loop.stops if token < target.info.vocab_size]
    check_shaping(sampling, held_back, vocab_size=target.info.vocab_size)
    room = min(len(ask.prompt_ids) + loop.max_new_tokens, target.info.max_len)
    seat = Seat(
        name=name,
        ask=ask,
        context=drafter.open(max_len=room),
        streams=RequestStreams.from_seed(sampling.seed),
        shaper=Shaper(sampling, ask.prompt_ids, stop_token_ids=held_back) if sampling.shapes_logits else None,
        room=room,
    )
    if seat.shaper is not None and isinstance(drafter, MirrorsShaping):
        drafter.mirror(seat.context, seat.shaper)
    begin = time.perf_counter()
    loop.memory.rollback(row, 0)
    token_ids = torch.tensor(ask.prompt_ids, dtype=torch.long, device=target.info.device)
    output = target.forward(token_ids, loop.memory, rows=(row,), taps=drafter.taps, last_only=True)
    assert output.logits is not None
    drafter.extend(seat.context, token_ids, output.features)
    first = seat.judge(token_ids[:0], None, output.logits).next_token
    if seat.shaper is not None:
        seat.shaper.commit([first])
    seat.output.append(first)
    seat.started = time.perf_counter()
    seat.prefill_seconds = seat.started - begin
    return seat


def _over(loop: Loop, seat: Seat) -> bool:
    return seat.output[-1] in loop.stops or seat.committed >= seat.room


def _completion(loop: Loop, seat: Seat) -> Completion:
    reason = "length" if len(seat.output) == loop.max_new_tokens else "context"
    return Completion(
        token_ids=tuple(seat.output),
        finish_reason="stop" if seat.output[-1] in loop.stops else reason,
        rounds=tuple(seat.rounds),
        prefill_seconds=seat.prefill_seconds,
        decode_seconds=time.perf_counter() - seat.started,
    )


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A request's part of the coming pass."""

    proposal: Proposal
    verify_len: int
    token_ids: torch.Tensor  # the anchor and the drafts to check
    draft_seconds: float
    host_seconds: float


def whole_rounds(loop: Loop, seats: dict[int, Seat]) -> None:
    """A turn: draft for every seat, verify all in one pass, commit."""
    drafted = {row: draft(loop, seat) for row, seat in seats.items()}
    counts = [len(part.token_ids) for part in drafted.values()]
    begin = time.perf_counter()
    output = loop.target.forward(
        torch.cat([part.token_ids for part in drafted.values()]),
        loop.memory,
        rows=tuple(seats),
        counts=counts,
        taps=loop.drafter.taps,
    )
    assert output.logits is not None
    logits = output.logits.split(counts)
    features = [None] * len(counts) if output.features is None else list(output.features.split(counts))
    passed = time.perf_counter() - begin
    for i, (row, seat) in enumerate(seats.items()):
        judging, part = time.perf_counter(), drafted[row]
        verdict = seat.judge(part.token_ids[1:], part.proposal, logits[i])
        spent = passed * counts[i] / sum(counts) + time.perf_counter() - judging
        commit(loop, row, seat, part, verdict, features[i], verify_seconds=spent)


def draft(loop: Loop, seat: Seat) -> Drafted:
    """A proposal for one request, and how much of it is checked."""
    begin = time.perf_counter()
    limit = min(loop.drafter.block_size, seat.room - seat.committed - 1)
    proposal = loop.drafter.propose(
        seat.context,
        seat.output[-1],
        sampling=seat.ask.sampling,
        generator=seat.streams.propose,
        limit=limit,
    )
    proposed = time.perf_counter()
    loop.proposed(seat.name, proposal)
    verify_len = loop.scheduler.choose(proposal, seat.committed)
    device = loop.target.info.device
    anchor = torch.tensor([seat.output[-1]], device=device)
    return Drafted(
        proposal=proposal,
        verify_len=verify_len,
        token_ids=torch.cat((anchor, proposal.draft_tokens[:verify_len].to(device))),
        draft_seconds=proposed - begin,
        host_seconds=time.perf_counter() - proposed,
    )


def commit(
    loop: Loop,
    row: int,
    seat: Seat,
    part: Drafted,
    verdict: Verdict,
    features: torch.Tensor | None,
    *,
    verify_seconds: float,
) -> None:
    """Keep what stands of one request's drafts and write the round down. ``features`` are those of the anchor and of
    the accepted drafts at least."""
    begin, committed = time.perf_counter(), seat.committed
    run = [*part.token_ids[1 : 1 + verdict.accepted].tolist(), verdict.next_token]
    run = run[: next((i + 1 for i, token in enumerate(run) if token in loop.stops), len(run))]
    kept = verdict.accepted + 1  # rows: the anchor and the accepted drafts
    loop.memory.rollback(row, committed - 1 + kept)
    loop.drafter.extend(seat.context, part.token_ids[:kept], None if features is None else features[:kept])
    if seat.shaper is not None:
        seat.shaper.commit(run)
    confidence = part.proposal.confidence
    seat.output += run
    seat.rounds.append(
        RoundRecord(
            draft_tokens=tuple(part.proposal.draft_tokens.tolist()),
            confidence=() if confidence is None else tuple(confidence.tolist()),
            verify_len=part.verify_len,
            accepted=min(verdict.accepted, len(run)),
            committed=tuple(run),
            draft_seconds=part.draft_seconds + time.perf_counter() - begin,
            sequential_seconds=part.proposal.sequential_seconds,
            verify_seconds=verify_seconds,
            host_seconds=part.host_seconds,
            looked_up=part.proposal.looked_up,
        )
    )
