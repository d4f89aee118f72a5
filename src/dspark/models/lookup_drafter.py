"""A drafter behind a look into the text: what the text has said before is proposed first, the rest by the drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.lookup import Lookup
from dspark.maths.shaping import Shaper
from dspark.models.drafter import Drafter, MirrorsShaping


@dataclass
class LookupContext:
    """The inner drafter's state, and the request's text.

    | tokens of ``text``   | state                                                                    |
    |----------------------|--------------------------------------------------------------------------|
    | [0, length)          | handed to :meth:`LookupDrafter.extend`                                   |
    | [length, len(text))  | the anchor, once a proposal was asked for; the next `extend` brings it   |
    """

    inner: Any  # the inner drafter's own type
    text: list[int] = field(default_factory=list)
    length: int = 0
    lookup: Lookup | None = None  # made when the first proposal tells the temperature


class LookupDrafter:
    """``inner``, asked only where :class:`dspark.maths.lookup.Lookup` finds nothing.

    The engine takes the two apart: it looks into its requests' texts itself, before its gate, and runs the batched form
    of ``inner`` for the others (:mod:`dspark.serve.drafting`).
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name = inner, f"{inner.name} with lookup"
        self.block_size, self.taps, self.has_confidence = inner.block_size, inner.taps, inner.has_confidence

    def open(self, *, max_len: int) -> LookupContext:
        return LookupContext(self.inner.open(max_len=max_len))

    def mirror(self, state: LookupContext, shaper: Shaper) -> None:
        """Let the inner drafter follow the request's rules if it can."""
        if isinstance(self.inner, MirrorsShaping):
            self.inner.mirror(state.inner, shaper)

    def extend(
        self, state: LookupContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        new = token_ids.tolist()
        state.text += new[len(state.text) - state.length :]
        state.length += len(new)
        self.inner.extend(state.inner, token_ids, features)

    def propose(
        self, state: LookupContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """What stood in the text, with certainty and with confidences that are chances as they stand; else the inner
        drafter's proposal."""
        if len(state.text) == state.length:
            state.text.append(anchor)
        if state.lookup is None:
            state.lookup = Lookup(state.text, temperature=0.0 if sampling.greedy else sampling.temperature)
        drafts, confidence = state.lookup.drafts(min(limit, self.block_size))
        if not drafts:
            return self.inner.propose(state.inner, anchor, sampling=sampling, generator=generator, limit=limit)
        return Proposal(torch.tensor(drafts), confidence=torch.tensor(confidence), looked_up=True)
