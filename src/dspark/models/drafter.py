"""The drafter's protocol, and the drafter that never proposes.

A drafter is told of committed tokens (their ids and the target's tapped states) and proposes a block after the anchor.
What it holds per request it owns. Behind the protocol stand

    DsparkDrafter    models/dspark            a block in parallel, then a sequential head: DSpark, and DFlash without it
    Eagle3Drafter    models/eagle3_drafter    one layer, run once per draft over its own states
    MTPDrafter       models/mtp_drafter       the same with DeepSeek's prediction module
    NgramDrafter     models/ngram             what stood after the last occurrence of the current ending
    SkippingDrafter  models/skipping_drafter  any of them, sitting rounds out while its drafts keep dying
    NoDrafter        here                     nothing: plain decoding
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.shaping import Shaper

EMPTY = Proposal(torch.empty(0, dtype=torch.long))


@runtime_checkable
class Drafter(Protocol):
    """What the decoding loop knows of a drafter. A request's state is Any: each drafter has its own type of it."""

    name: str
    block_size: int  # most drafts of one proposal; 0 never proposes
    taps: tuple[int, ...]  # target layers whose states `extend` wants; empty for none
    has_confidence: bool

    def open(self, *, max_len: int) -> Any:
        """State of one request of up to ``max_len`` tokens."""
        ...

    def extend(self, state: Any, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None) -> None:
        """Take in the next committed tokens that the target has run; mutates ``state``."""
        ...

    def propose(
        self, state: Any, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """At most ``limit`` drafts after ``anchor``; an empty proposal past the drafter's own context limit."""
        ...


@runtime_checkable
class MirrorsShaping(Protocol):
    """A drafter that can follow the request's penalties, biases and bans; optional, and a matter of acceptance only."""

    def mirror(self, state: Any, shaper: Shaper) -> None:
        """Called once after :meth:`Drafter.open`, if the request has such rules. ``shaper`` is the request's own and
        knows the committed text, anchor included, whenever a proposal is asked for (:meth:`Shaper.mirrored`)."""
        ...


class NoDrafter:
    """Never proposes: plain decoding through the same loop."""

    name = "none"
    block_size = 0
    taps: tuple[int, ...] = ()
    has_confidence = False

    def open(self, *, max_len: int) -> None:
        return None

    def extend(self, state: None, token_ids: Tensor, features: Tensor | None) -> None:
        return None

    def propose(
        self, state: None, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        return EMPTY
