"""A drafter that sits rounds out while its drafts keep dying: for one request, and for each of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.shaping import Shaper
from dspark.maths.skipping import RequestSkip, SkipPolicy, after_round, open_request
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk, batched
from dspark.models.drafter import EMPTY, Drafter, MirrorsShaping
from dspark.models.forwarding_batch import ForwardingBatch
from dspark.models.target import Target


@dataclass
class Rounds:
    """What a request's rounds have come to so far."""

    skip: RequestSkip
    round_open: bool = False  # a proposal was asked for and its outcome is not in yet
    drafted: bool = False  # that proposal was made, not sat out

    def ask(self) -> bool:
        """A round opens: whether to draft in it."""
        self.round_open, self.drafted = True, False
        return self.skip.drafts

    def note(self, tokens: int, policy: SkipPolicy) -> None:
        """``tokens`` were committed; the first after a proposal are the anchor and the drafts that stood."""
        if self.round_open:
            self.skip = after_round(self.skip, policy, accepted=tokens - 1 if self.drafted else None)
            self.round_open = False


@dataclass
class SkippingContext:
    """The inner drafter's state, and the request's rounds."""

    inner: Any  # the inner drafter's own type
    rounds: Rounds


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
        return SkippingContext(self.inner.open(max_len=max_len), Rounds(open_request(self.policy)))

    def mirror(self, state: SkippingContext, shaper: Shaper) -> None:
        """Let the inner drafter follow the request's rules if it can."""
        if isinstance(self.inner, MirrorsShaping):
            self.inner.mirror(state.inner, shaper)

    def extend(
        self, state: SkippingContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        state.rounds.note(token_ids.shape[0], self.policy)
        self.inner.extend(state.inner, token_ids, features)

    def propose(
        self, state: SkippingContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """The inner drafter's proposal, or none in a pause."""
        if not state.rounds.ask():
            return EMPTY
        proposal = self.inner.propose(state.inner, anchor, sampling=sampling, generator=generator, limit=limit)
        state.rounds.drafted = proposal.block > 0  # an n-gram that found nothing cost nothing and says nothing
        return proposal

    def batch_form(self, target: Target) -> BatchDrafter:
        """Many requests, each with pauses of its own, over the inner drafter's batched form."""
        return SkippingBatch(batched(self.inner, target), self.policy)


class SkippingBatch(ForwardingBatch):
    """A batched ``inner`` under a :class:`SkipPolicy`: who pauses is left out of the pass."""

    def __init__(self, inner: BatchDrafter, policy: SkipPolicy) -> None:
        super().__init__(inner)
        self.name, self.policy = f"{inner.name}, skipping", policy
        self._rounds: dict[int, Rounds] = {}

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """See :meth:`BatchDrafter.open`."""
        super().open(seat, shaper=shaper)
        self._rounds[seat] = Rounds(open_request(self.policy))

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """See :meth:`BatchDrafter.extend`."""
        for seat, count in zip(seats, counts, strict=True):
            self._rounds[seat].note(count, self.policy)
        super().extend(seats, counts, token_ids, features)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """The inner drafter's proposals for those who do not pause."""
        places = [i for i, ask in enumerate(asks) if self._rounds[ask.seat].ask()]
        proposal = super().propose([asks[i] for i in places])
        for i, count in zip(places, proposal.proposed, strict=True):
            self._rounds[asks[i].seat].drafted = bool(count)
        return proposal.spread(places, len(asks))

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`."""
        super().close(seat)
        del self._rounds[seat]
