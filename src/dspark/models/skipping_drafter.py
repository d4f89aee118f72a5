"""A drafter that sits rounds out while its drafts keep dying, for the loop at batch size 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.shaping import Shaper
from dspark.maths.skipping import RequestSkip, SkipPolicy, after_round, open_request
from dspark.models.drafter import EMPTY, Drafter, MirrorsShaping


@dataclass
class SkippingContext:
    """The inner drafter's state, and what the request's rounds have come to so far."""

    inner: Any  # the inner drafter's own type
    skip: RequestSkip
    round_open: bool = False  # a proposal was asked for and its outcome is not in yet
    drafted: bool = False  # that proposal was made, not sat out


class SkippingDrafter:
    """``inner`` under a :class:`SkipPolicy`. Its context keeps up in pauses, so a probe drafts as well as ever.

    It learns a round's outcome from the tokens that are handed to :meth:`extend` after it: the anchor and the accepted
    drafts. Nothing else is needed, so it decides from committed tokens alone.
    """

    def __init__(self, inner: Drafter, policy: SkipPolicy) -> None:
        self.inner, self.policy = inner, policy
        self.name = f"{inner.name}, skipping"
        self.block_size, self.taps, self.has_confidence = inner.block_size, inner.taps, inner.has_confidence

    def open(self, *, max_len: int) -> SkippingContext:
        return SkippingContext(self.inner.open(max_len=max_len), open_request(self.policy))

    def mirror(self, state: SkippingContext, shaper: Shaper) -> None:
        """Let the inner drafter follow the request's rules if it can."""
        if isinstance(self.inner, MirrorsShaping):
            self.inner.mirror(state.inner, shaper)

    def extend(
        self, state: SkippingContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        if state.round_open:
            accepted = token_ids.shape[0] - 1 if state.drafted else None
            state.skip = after_round(state.skip, self.policy, accepted=accepted)
            state.round_open = False
        self.inner.extend(state.inner, token_ids, features)

    def propose(
        self, state: SkippingContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """The inner drafter's proposal, or none in a pause."""
        state.round_open, state.drafted = True, False
        if not state.skip.drafts:
            return EMPTY
        proposal = self.inner.propose(state.inner, anchor, sampling=sampling, generator=generator, limit=limit)
        state.drafted = proposal.block > 0  # an n-gram that found nothing cost nothing and says nothing
        return proposal
