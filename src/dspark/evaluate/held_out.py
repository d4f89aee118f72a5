"""Acceptance on held-out prompts by actual decoding: what a training run steers by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dspark.core import RoundRecord, SamplingParams
from dspark.decode import generate
from dspark.errors import DataError
from dspark.evaluate.figures import acceptance_length
from dspark.models.drafter import Drafter
from dspark.models.target import Target


def decoded_acceptance(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
) -> dict[str, float]:
    """Answer each (domain, prompt ids) greedily; return the acceptance length of every domain and, as
    ``acceptance_length``, their mean.

    Prompts whose answer ends at its first token say nothing and are left out. Raises :class:`DataError` if all do.
    """
    rounds: dict[str, list[RoundRecord]] = {}
    for domain, ids in prompts:
        answer = generate(
            target,
            drafter,
            ids,
            sampling=SamplingParams(),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )
        rounds.setdefault(domain, []).extend(answer.rounds)
    lengths = {domain: acceptance_length(found) for domain, found in rounds.items() if found}
    if not lengths:
        raise DataError(f"none of {len(prompts)} held-out prompts led to a drafted round; give more prompts or tokens")
    return {"acceptance_length": sum(lengths.values()) / len(lengths), **lengths}
