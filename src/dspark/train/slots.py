"""What all drafters' steps share: samples with their drawn blocks, the target's word on every slot, and the figures.

A slot is (block, k): slot k of a block at anchor a predicts the token at a + k + 1 and is held against the target's
distribution at a + k. All drafters train on the same slots, so their figures mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks
from dspark.data.features import Sample, SampleFeatures
from dspark.maths.losses import SlotLosses, SparseTarget, expected_acceptance_length, slot_weights
from dspark.models.draft_ops import draft_columns
from dspark.models.target import Target

Piece = tuple[Sample, Blocks]  # a sample of a step, and all or some of the blocks drawn in it
Part = tuple[Sample, SampleFeatures, Blocks]  # a piece, with what the target says about its sample


@dataclass(frozen=True)
class Totals:
    """What a step's means divide by: one number for all its passes on all processes, so that how a step is cut up
    does not change its gradient."""

    weight: Float[Tensor, ""]  # sum of the slots' weights, positive
    blocks: int


def block_weights(blocks: Sequence[Blocks], loss_decay: float) -> Float[Tensor, "blocks block"]:
    """Weights of the slots of all ``blocks``: their worth where a drafter played them, else
    :func:`dspark.maths.losses.slot_weights`; 0 where a slot is not supervised."""
    found = [
        slot_weights(part.supervised, loss_decay) if part.worth is None else part.worth * part.supervised
        for part in blocks
    ]
    return torch.cat(found)


def make_totals(weights: Float[Tensor, "blocks block"]) -> Totals:
    """The totals of a step whose slots weigh ``weights``."""
    return Totals(weights.sum().clamp(min=1e-6), weights.shape[0])


@dataclass(frozen=True)
class StepNumbers:
    """What one pass over blocks measured, or a step of several passes. A pass's ``loss``, ``ce`` and ``l1`` are its
    shares of the step's means, and add up; the others are means of its own."""

    loss: Float[Tensor, ""]  # differentiable, where it is one pass's
    acceptance_length: float  # analytic, mean over blocks
    acceptance_rate: Float[Tensor, "block"]  # c* per slot, mean over supervised slots
    confidence_error: float  # mean |c - c*|; nan without the head
    ce: float
    l1: float
    blocks: int
    slots: Int[Tensor, "block"]  # supervised ones, by their place in the block


def acceptance_figures(numbers: StepNumbers) -> dict[str, Any]:
    """What a step over blocks says of the drafter, for the log."""
    return {
        "ce": numbers.ce,
        "l1": numbers.l1,
        "acceptance_length": numbers.acceptance_length,
        "acceptance_rate": [round(float(x), 4) for x in numbers.acceptance_rate],
        "confidence_error": numbers.confidence_error,
    }


def as_sums(numbers: StepNumbers) -> Float[Tensor, "sums"]:
    """``numbers`` as fp64 on the CPU, means multiplied by their counts: those of several passes add up."""
    n, rates = numbers, numbers.acceptance_rate.double().cpu()
    slots = n.slots.double().cpu()
    scalars = [float(n.loss.detach()), n.ce, n.l1, n.blocks, n.acceptance_length * n.blocks]
    scalars.append(n.confidence_error * float(slots.sum()))
    return torch.cat((torch.tensor(scalars, dtype=torch.float64), rates * slots, slots))


def from_sums(sums: Float[Tensor, "sums"]) -> StepNumbers:
    """The figures of a whole step from the sums over its passes; the inverse of :func:`as_sums`."""
    ce, l1, blocks, length, error = sums[1:6].tolist()
    rates, slots = sums[6:].chunk(2)
    count = max(1.0, float(slots.sum()))
    rates = (rates / slots.clamp(min=1)).float()
    return StepNumbers(
        sums[0].float(), length / max(1.0, blocks), rates, error / count, ce, l1, int(blocks), slots.long()
    )


@dataclass(frozen=True)
class FrozenHead:
    """The target's head in training, sliced to a drafter's vocabulary, in the compute dtype on the target's device."""

    target: Target
    head: Float[Tensor, "draft_vocab hidden"]
    to_draft: Int[Tensor, "vocab"]  # draft id of a target id, -1 outside the draft vocabulary
    dtype: torch.dtype


def freeze_head(target: Target, draft_token_ids: Int[Tensor, "draft_vocab"], dtype: torch.dtype) -> FrozenHead:
    """Slice the head once; ``draft_token_ids`` are the target ids that the drafter speaks."""
    device = target.info.device
    ids = draft_token_ids.to(device)
    head = target.head_weight().index_select(0, ids).to(dtype).contiguous()
    return FrozenHead(target, head, draft_columns(ids, target.info.vocab_size), dtype)


def slot_targets(parts: Sequence[Part], block_size: int, keep: Int[Tensor, "kept"]) -> SparseTarget:
    """The target's distribution at label - 1 of the slots ``keep``; slot k of anchor a reads position a + k, unless
    the blocks name their rows."""
    ids, probs = [], []
    for _, kept, blocks in parts:
        last = kept.top_ids.shape[0] - 1
        rows = blocks.rows
        if rows is None:
            rows = (blocks.anchors[:, None] + torch.arange(block_size) - kept.start).clamp(max=last)
        part = kept.sparse_target(rows)
        ids.append(part.ids)
        probs.append(part.probs)
    return SparseTarget(torch.cat(ids)[keep], torch.cat(probs)[keep])


def state_errors(hidden: Float[Tensor, "blocks hidden"], parts: Sequence[Part]) -> Float[Tensor, "blocks"]:
    """Squared error of each block's h_0 relative to the target's final state at the anchor; 0 is equality."""
    wanted = torch.cat([kept.states[blocks.anchors - kept.start] for _, kept, blocks in parts]).to(hidden.device)
    wanted = wanted.to(torch.promote_types(hidden.dtype, torch.float32))
    return (hidden.to(wanted.dtype) - wanted).square().sum(-1) / wanted.square().sum(-1)


def nothing_of(numbers: StepNumbers) -> StepNumbers:
    """``numbers`` of a pass that does not count: zero, in the same form."""
    zeros = torch.zeros_like(numbers.acceptance_rate)
    return StepNumbers(torch.zeros(()), 0.0, zeros, 0.0, 0.0, 0.0, 0, torch.zeros_like(numbers.slots))


def share_of_mean(values: Float[Tensor, "blocks"], totals: Totals) -> Float[Tensor, ""]:
    """What one pass's ``values`` contribute to their mean over all of the step's blocks."""
    return values.mean() * (values.shape[0] / totals.blocks)


def step_numbers(
    loss: Float[Tensor, ""],
    slots: SlotLosses,
    supervised: Bool[Tensor, "blocks block"],
    weights: Float[Tensor, "kept"],
    *,
    confidence_error: float = float("nan"),
) -> StepNumbers:
    """The figures of a pass. ``slots`` and ``weights`` (which sum to 1 over the whole step) are of the supervised
    slots, in order."""
    rates = torch.zeros(supervised.shape, device=supervised.device)
    rates[supervised] = slots.acceptance_rate.float()
    counts = supervised.sum(0)
    return StepNumbers(
        loss,
        float(expected_acceptance_length(rates, supervised).mean()),
        rates.sum(0) / counts.clamp(min=1),
        confidence_error,
        float((slots.ce * weights).sum()),
        float((slots.l1 * weights).sum()),
        supervised.shape[0],
        counts,
    )


def state_numbers(errors: Float[Tensor, "blocks"], totals: Totals | None = None) -> StepNumbers:
    """The figures of a pass that regresses states: its loss alone, its share of the mean over ``totals``' blocks
    (by default its own)."""
    blocks, nan = errors.shape[0], float("nan")
    loss = share_of_mean(errors, totals) if totals else errors.mean()
    return StepNumbers(loss, nan, torch.full((1,), nan), nan, nan, nan, blocks, torch.ones(1, dtype=torch.long))
