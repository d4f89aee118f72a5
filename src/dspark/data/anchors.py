"""Anchors: the positions of an answer from which blocks are drafted in training.

Position a opens a block iff both a and a + 1 are supervised. Slot k of its block predicts the token at a + k + 1, and
is supervised while every label up to it is inside the sequence and the loss mask (DeepSpec
`modeling/dspark/common.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Training blocks of one sequence."""

    anchors: Int[Tensor, "blocks"]  # ascending positions
    prev_ids: Int[Tensor, "blocks block"]  # token before each label: the anchor, then the labels before it
    labels: Int[Tensor, "blocks block"]  # token at anchor + k + 1 (the last token where that is past the end)
    supervised: Bool[Tensor, "blocks block"]  # contiguous prefix of valid labels
    # of rounds that a drafter played (:mod:`dspark.train.rounds`); None for blocks drawn from an answer
    worth: Float[Tensor, "blocks block"] | None = None  # a slot's weight, in place of one that falls with its number
    rows: Int[Tensor, "blocks block"] | None = None  # of the target's distributions that the slots are held against

    def some(self, start: int, stop: int, *, slots: int | None = None) -> Blocks:
        """Blocks ``start`` to ``stop`` - 1, cut to their first ``slots`` slots (None: whole)."""
        part = slice(start, stop), slice(slots)
        return Blocks(
            self.anchors[start:stop],
            self.prev_ids[part],
            self.labels[part],
            self.supervised[part],
            None if self.worth is None else self.worth[part],
            None if self.rows is None else self.rows[part],
        )


def anchor_candidates(loss_mask: Bool[Tensor, "tokens"]) -> Int[Tensor, "candidates"]:
    """All positions that may open a block, ascending."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(1)


def sample_anchors(loss_mask: Bool[Tensor, "tokens"], count: int, generator: torch.Generator) -> Int[Tensor, "blocks"]:
    """min(count, candidates) anchors, uniformly without replacement, ascending."""
    candidates = anchor_candidates(loss_mask)
    picked = torch.randperm(candidates.shape[0], generator=generator)[:count]
    return candidates[picked].sort().values


def make_blocks(
    token_ids: Int[Tensor, "tokens"], loss_mask: Bool[Tensor, "tokens"], anchors: Int[Tensor, "blocks"], block_size: int
) -> Blocks:
    """Labels, previous tokens and the supervised prefix of every block."""
    last = token_ids.shape[0] - 1
    positions = anchors[:, None] + 1 + torch.arange(block_size)
    inside = positions <= last
    positions = positions.clamp(max=last)
    labels = token_ids[positions]
    prev_ids = torch.cat((token_ids[anchors][:, None], labels[:, :-1]), 1)
    supervised = (inside & loss_mask[positions]).long().cumprod(1).bool()
    return Blocks(anchors, prev_ids, labels, supervised)
