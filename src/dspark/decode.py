"""The whole method at batch size 1: draft, schedule, verify, commit. The reference that every faster loop must equal.

The loop knows no particular drafter, and exactness never depends on one: the
target's distribution is shaped before verification, drafts are judged against the very distribution they were drawn
from, and the three kinds of random draws have a stream each.

State between rounds, with n committed tokens (prompt included), the last of which is the anchor:

    target memory    rows of the first n - 1 tokens; the anchor has not been run yet
    drafter's state  the same n - 1 tokens, with their features
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.core import Completion, DraftDistribution, RoundRecord, SamplingParams
from dspark.errors import RequestError, ScheduleError
from dspark.maths.block_verification import verify_block
from dspark.maths.rejection import Verdict, verify, verify_greedy
from dspark.maths.sampling import RequestStreams, TargetRows
from dspark.maths.scheduling import FixedScheduler, Scheduler
from dspark.maths.shaping import Shaper
from dspark.models.drafter import Drafter, MirrorsShaping
from dspark.models.target import KVMemory, Target


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    scheduler: Scheduler | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> Completion:
    """Run a request to its end; ``on_round`` sees every record of :func:`stream` as it happens."""
    rounds = stream(
        target,
        drafter,
        prompt_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        scheduler=scheduler,
    )
    while True:
        try:
            record = next(rounds)
        except StopIteration as end:
            return end.value
        if on_round is not None:
            on_round(record)


def stream(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    scheduler: Scheduler | None = None,
) -> Generator[RoundRecord, None, Completion]:
    """Yield the prefill's record (its ``committed`` is the first token), then one record a round; return the
    completion.

    Greedy output equals plain greedy decoding; sampled output has exactly the target's distribution, for every
    drafter and every scheduler whose choice depends on the past alone. Output ends at the first stop token (kept), at
    ``max_new_tokens`` exactly, or when prompt and output fill the target's context. Raises :class:`RequestError` for
    a prompt that is empty, over-long or holds an id outside the vocabulary and for rules that name such an id or
    leave no token, and :class:`ScheduleError` for a scheduler that needs confidences the drafter does not give.
    """
    scheduler = scheduler or FixedScheduler()
    check_request(target, drafter, prompt_ids, max_new_tokens=max_new_tokens, scheduler=scheduler)
    held_back = [token for token in stop_token_ids if token < target.info.vocab_size]  # others cannot come up anyway
    check_shaping(sampling, held_back, vocab_size=target.info.vocab_size)
    room = min(len(prompt_ids) + max_new_tokens, target.info.max_len)
    shaper = Shaper(sampling, prompt_ids, stop_token_ids=held_back) if sampling.shapes_logits else None
    request = _Request(
        target=target,
        drafter=drafter,
        sampling=sampling,
        streams=RequestStreams.from_seed(sampling.seed),
        stops=frozenset(stop_token_ids),
        memory=target.new_memory(rows=1, max_len=room),
        context=drafter.open(max_len=room),
        shaper=shaper,
        room=room,
    )
    if shaper is not None and isinstance(drafter, MirrorsShaping):
        drafter.mirror(request.context, shaper)
    rounds: list[RoundRecord] = []
    begin = time.perf_counter()
    first = _prefill(request, prompt_ids)
    output = [first]
    anchor, started = first, time.perf_counter()
    yield RoundRecord(
        draft_tokens=(),
        confidence=(),
        verify_len=0,
        accepted=0,
        committed=(first,),
        draft_seconds=0.0,
        sequential_seconds=0.0,
        verify_seconds=started - begin,
        host_seconds=0.0,
    )
    while output[-1] not in request.stops and len(prompt_ids) + len(output) < room:
        record = _round(request, anchor, committed=len(prompt_ids) + len(output), scheduler=scheduler)
        output += record.committed
        anchor = output[-1]
        rounds.append(record)
        yield record
    reason = "length" if len(output) == max_new_tokens else "context"
    return Completion(
        token_ids=tuple(output),
        finish_reason="stop" if output[-1] in request.stops else reason,
        rounds=tuple(rounds),
        prefill_seconds=started - begin,
        decode_seconds=time.perf_counter() - started,
    )


def check_request(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], *, max_new_tokens: int, scheduler: Scheduler
) -> None:
    """Refuse what cannot be done, before anything is computed."""
    info = target.info
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
    if len(prompt_ids) >= info.max_len:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; {info.name} takes {info.max_len}, answer included; shorten it"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < info.vocab_size:
        raise RequestError(f"the prompt holds a token id outside 0..{info.vocab_size - 1}; use this model's tokenizer")
    if scheduler.needs_confidence and drafter.block_size and not drafter.has_confidence:
        raise ScheduleError(
            f"{type(scheduler).__name__} needs confidences and {drafter.name} gives none; use a fixed length"
        )


def check_shaping(sampling: SamplingParams, stop_token_ids: Collection[int], *, vocab_size: int) -> None:
    """Refuse rules that name a token the target does not have, or that leave none to draw."""
    named = {*sampling.banned_token_ids, *(token for token, _ in sampling.logit_bias)}
    if named and max(named) >= vocab_size:
        raise RequestError(
            f"banned_token_ids or logit_bias names token {max(named)}; the target's ids are 0..{vocab_size - 1}"
        )
    excluded = {*sampling.banned_token_ids, *(stop_token_ids if sampling.min_tokens else ())}
    if len(excluded) >= vocab_size:
        raise RequestError(f"all {vocab_size} tokens are banned or held back by min_tokens; leave at least one")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What stays the same over a request's rounds, and the states that its rounds mutate."""

    target: Target
    drafter: Drafter
    sampling: SamplingParams
    streams: RequestStreams
    stops: frozenset[int]
    memory: KVMemory  # of the target, row 0
    context: Any  # the drafter's own type
    shaper: Shaper | None  # None where no rule looks at the text before a position
    room: int  # tokens that prompt and output may have together


def _prefill(request: _Request, prompt_ids: Sequence[int]) -> int:
    """Run the prompt, hand its features to the drafter, and draw the first token."""
    token_ids = torch.tensor(prompt_ids, dtype=torch.long, device=request.target.info.device)
    output = request.target.forward(token_ids, request.memory, taps=request.drafter.taps, last_only=True)
    request.drafter.extend(request.context, token_ids, output.features)
    first = _judge(request, token_ids[:0], None, output.logits).next_token
    if request.shaper is not None:
        request.shaper.commit([first])
    return first


def _round(request: _Request, anchor: int, *, committed: int, scheduler: Scheduler) -> RoundRecord:
    """Draft, schedule, verify, commit."""
    begin = time.perf_counter()
    limit = min(request.drafter.block_size, request.room - committed - 1)  # the target's own token takes the last place
    proposal = request.drafter.propose(
        request.context, anchor, sampling=request.sampling, generator=request.streams.propose, limit=limit
    )
    drafted = time.perf_counter()

    verify_len = scheduler.choose(proposal, committed)
    device = request.target.info.device
    drafts = proposal.draft_tokens[:verify_len].to(device)
    token_ids = torch.cat((torch.tensor([anchor], device=device), drafts))
    forwarding = time.perf_counter()
    output = request.target.forward(token_ids, request.memory, taps=request.drafter.taps)
    verdict = _judge(request, drafts, proposal.distribution, output.logits)
    verified = time.perf_counter()

    run = [*drafts[: verdict.accepted].tolist(), verdict.next_token]
    run = run[: next((i + 1 for i, token in enumerate(run) if token in request.stops), len(run))]
    accepted = min(verdict.accepted, len(run))
    kept = verdict.accepted + 1  # rows: the anchor and the accepted drafts
    request.memory.rollback(0, committed - 1 + kept)
    features = None if output.features is None else output.features[:kept]
    request.drafter.extend(request.context, token_ids[:kept], features)
    if request.shaper is not None:
        request.shaper.commit(run)
    end = time.perf_counter()
    confidence = () if proposal.confidence is None else tuple(proposal.confidence.tolist())
    return RoundRecord(
        draft_tokens=tuple(proposal.draft_tokens.tolist()),
        confidence=confidence,
        verify_len=verify_len,
        accepted=accepted,
        committed=tuple(run),
        draft_seconds=drafted - begin + end - verified,  # taking in the features is drafting too
        sequential_seconds=proposal.sequential_seconds,
        verify_seconds=verified - forwarding,
        host_seconds=forwarding - drafted,
        looked_up=proposal.looked_up,
    )


def _judge(request: _Request, drafts: Tensor, distribution: DraftDistribution | None, logits: Tensor | None) -> Verdict:
    """Verify the scheduled drafts against the target's rows; with no draft, just draw the target's token."""
    assert logits is not None
    sampling = request.sampling
    if request.shaper is not None:
        logits = request.shaper.rows(logits, drafts.tolist())
    if sampling.greedy:
        return verify_greedy(drafts, logits.argmax(-1))
    rule = verify_block if sampling.rule == "block" else verify
    return rule(drafts, distribution, TargetRows(logits, sampling), request.streams)
