"""What a target pass costs as a function of its tokens: the table that schedulers weigh drafts against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.models.batch_drafter import DraftAsk, batched
from dspark.models.drafter import Drafter
from dspark.models.paged_memory import PageTables
from dspark.models.target import Target


def profile_sps(
    target: Target, *, max_tokens: int, context: int = 128, repeats: int = 7
) -> Float[Tensor, "max_tokens_plus_1"]:
    """Measure the target's steps per second for 1..``max_tokens`` tokens of one request behind ``context`` others.

    Returns [max_tokens + 1] in float64, entry 0 unused (0): the SPS table of single-request scheduling. A context that
    does not fit the target's limit is shortened. Raises :class:`RequestError` if the tokens alone do not fit.
    """
    context = min(context, target.info.max_len - max_tokens)
    seconds = step_seconds(
        target, max_tokens=max_tokens, tokens_per_request=max_tokens, context=context, repeats=repeats
    )
    return torch.tensor([0.0, *(1.0 / each for each in seconds)], dtype=torch.float64)


def step_seconds(
    target: Target,
    *,
    max_tokens: int,
    tokens_per_request: int,
    context: int,
    repeats: int,
    taps: Sequence[int] = (),
) -> list[float]:
    """Median seconds of a step with 1, 2, ..., ``max_tokens`` tokens behind ``context`` committed ones per request.

    A step's tokens are dealt evenly to as few requests as hold ``tokens_per_request`` each. Each figure is a median of
    ``repeats`` passes, taken in rounds over all sizes so that a slow moment spoils no single one. Raises
    :class:`RequestError` if context and tokens exceed the target's limit, :class:`ConfigError` for a count under 1.
    """
    for name, value in (("max_tokens", max_tokens), ("tokens_per_request", tokens_per_request), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    if context < 1 or context + min(tokens_per_request, max_tokens) > target.info.max_len:
        raise RequestError(
            f"max_len {target.info.max_len} of {target.info.name} leaves no room to profile "
            f"{min(tokens_per_request, max_tokens)} tokens behind a context of {context}"
        )
    requests = -(-max_tokens // tokens_per_request)
    memory = target.new_memory(rows=requests, max_len=context + min(tokens_per_request, max_tokens))
    ids = torch.arange(context + max_tokens, device=target.info.device) % target.info.vocab_size
    for row in range(requests):
        target.forward(ids[:context], memory, rows=(row,), want_logits=False)
    seconds: dict[int, list[float]] = {size: [] for size in range(1, max_tokens + 1)}
    for repeat in range(repeats + 1):
        for size, times in seconds.items():
            counts = _dealt(size, -(-size // tokens_per_request))
            rows = range(len(counts))
            start = time.perf_counter()
            output = target.forward(ids[context : context + size], memory, rows=rows, counts=counts, taps=taps)
            if output.logits is not None:
                output.logits[-1].argmax().item()  # waits for the device
            if repeat > 0:  # the first round warms up
                times.append(time.perf_counter() - start)
            for row in rows:
                memory.rollback(row, context)
    return [statistics.median(times) for times in seconds.values()]


def draft_seconds(
    target: Target,
    drafter: Drafter,
    *,
    requests: Sequence[int],
    context: int,
    repeats: int,
    depth: int | None = None,
) -> list[float]:
    """Median seconds to draft a block for each number of ``requests`` behind ``context`` tokens, and to take in a
    round's outcome (the anchor and one draft) afterwards.

    All requests of a number draft at once, as an engine has it (:func:`dspark.models.batch_drafter.batched`); at most
    ``depth`` drafts each (None: whole blocks). Raises :class:`ConfigError` for a number under 1, :class:`RequestError`
    if the context and the rounds played exceed the target's limit.
    """
    if not requests or min(requests) < 1:
        raise ConfigError(f"requests is {list(requests)}; give numbers of 1 or more")
    played = 2 * (repeats + 1) * len(requests)  # tokens that each request takes in on the way
    if context < 2 or context + played + drafter.block_size > target.info.max_len:
        raise RequestError(
            f"max_len {target.info.max_len} of {target.info.name} leaves no room to profile drafting behind a context "
            f"of {context}; shorten it or take fewer repeats"
        )
    seats, room = max(requests), context + played + drafter.block_size
    ids = torch.arange(room, device=target.info.device) % target.info.vocab_size
    memory = target.new_memory(rows=1, max_len=context)
    features = target.forward(ids[:context], memory, taps=drafter.taps, want_logits=False).features
    form, tables = batched(drafter, target), PageTables(seats=seats, pages_per_seat=1, page_size=room + 1)
    form.attach(tables, pages=seats, max_len=room)
    for seat in range(seats):
        tables.assign(seat, [seat])
        form.open(seat, shaper=None)
        form.extend([seat], [context], ids[:context], features)
    sampling, generator = SamplingParams(temperature=1.0), torch.Generator().manual_seed(0)
    limit = drafter.block_size if depth is None else depth
    asks = [
        DraftAsk(seat=seat, anchor=int(ids[context]), sampling=sampling, generator=generator, limit=limit)
        for seat in range(seats)
    ]
    seconds: dict[int, list[float]] = {count: [] for count in requests}
    for repeat in range(repeats + 1):
        for count, times in seconds.items():
            new = ids[context : context + 2].repeat(count)
            states = None if features is None else features[-2:].repeat(count, 1)
            start = time.perf_counter()
            form.propose(asks[:count]).draft_tokens.tolist()  # waits for the device
            form.extend(range(count), [2] * count, new, states)
            if repeat > 0:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds.values()]


def draft_depth_shares(
    target: Target, drafter: Drafter, *, requests: int, context: int, repeats: int
) -> tuple[float, ...]:
    """What 1, 2, ... drafts each cost for ``requests`` requests at once, as shares of the last number, a whole block;
    never falling."""
    whole = [
        draft_seconds(target, drafter, requests=[requests], context=context, repeats=repeats, depth=depth)[0]
        for depth in range(1, drafter.block_size + 1)
    ]
    rising = np.maximum.accumulate(whole)
    return tuple((rising / rising[-1]).tolist()) if whole else ()


def _dealt(tokens: int, requests: int) -> list[int]:
    """``tokens`` dealt to ``requests`` as evenly as they go."""
    each, more = divmod(tokens, requests)
    return [each + (i < more) for i in range(requests)]
