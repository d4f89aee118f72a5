"""What a target pass costs as a function of its tokens: the table that schedulers weigh drafts against."""

from __future__ import annotations

import statistics
import time

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.errors import RequestError
from dspark.models.target import Target


def profile_sps(
    target: Target, *, max_tokens: int, context: int = 128, repeats: int = 7
) -> Float[Tensor, "max_tokens_plus_1"]:
    """Measure the target's steps per second for 1..``max_tokens`` tokens of one request behind ``context`` others.

    Returns [max_tokens + 1] in float64, entry 0 unused (0): the SPS table of single-request scheduling. Each entry is a
    median of ``repeats`` passes, taken in rounds over all sizes so that a slow moment spoils no single one. Raises
    :class:`RequestError` if context and tokens exceed the target's limit.
    """
    context = min(context, target.info.max_len - max_tokens)
    if context < 1:
        raise RequestError(
            f"max_len {target.info.max_len} of {target.info.name} leaves no room to profile {max_tokens}"
        )
    memory = target.new_memory(rows=1, max_len=context + max_tokens)
    ids = torch.arange(context + max_tokens, device=target.info.device) % target.info.vocab_size
    target.forward(ids[:context], memory, want_logits=False)
    seconds: dict[int, list[float]] = {size: [] for size in range(1, max_tokens + 1)}
    for repeat in range(repeats + 1):
        for size, times in seconds.items():
            start = time.perf_counter()
            output = target.forward(ids[context : context + size], memory)
            if output.logits is not None:
                output.logits[-1].argmax().item()  # waits for the device
            if repeat > 0:  # the first round warms up
                times.append(time.perf_counter() - start)
            memory.rollback(0, context)
    rates = [0.0, *(1.0 / statistics.median(times) for times in seconds.values())]
    return torch.tensor(rates, dtype=torch.float64)
