"""What all drafters' steps share: samples with their drawn blocks, the target's word on every slot, and the figures.

A slot is (block, k): slot k of a block at anchor a predicts the token at a + k + 1 and is held against the target's
distribution at a + k. All drafters train on the same slots, so their figures mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks
from dspark.data.features import Sample, SampleFeatures
from dspark.maths.losses import SlotLosses, SparseTarget, expected_acceptance_length
from dspark.models.target import Target

Part = tuple[Sample, SampleFeatures, Blocks]  # a sample of a step, what the target says about it, its blocks


@dataclass(frozen=True)
class StepNumbers:
    """What one pass over blocks measured; sums where a mean would need the other passes' weights."""

    loss: Float[Tensor, ""]  # differentiable
    acceptance_length: float  # analytic, mean over blocks
    acceptance_rate: Float[Tensor, "block"]  # c* per slot, mean over supervised slots
    confidence_error: float  # mean |c - c*|; nan without the head
    ce: float
    l1: float
    blocks: int


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
    to_draft = torch.full((target.info.vocab_size,), -1, dtype=torch.long, device=device)
    to_draft[ids] = torch.arange(ids.shape[0], device=device)
    return FrozenHead(target, target.head_weight().index_select(0, ids).to(dtype).contiguous(), to_draft, dtype)


def slot_targets(parts: Sequence[Part], block_size: int, keep: Int[Tensor, "kept"]) -> SparseTarget:
    """The target's distribution at label - 1 of the slots ``keep``; slot k of anchor a reads position a + k."""
    ids, probs = [], []
    for _, kept, blocks in parts:
        last = kept.start + kept.top_ids.shape[0] - 1
        part = kept.sparse_target((blocks.anchors[:, None] + torch.arange(block_size)).clamp(max=last))
        ids.append(part.ids)
        probs.append(part.probs)
    return SparseTarget(torch.cat(ids)[keep], torch.cat(probs)[keep])


def state_errors(hidden: Float[Tensor, "blocks hidden"], parts: Sequence[Part]) -> Float[Tensor, "blocks"]:
    """Squared error of each block's h_0 relative to the target's final state at the anchor; 0 is equality."""
    wanted = torch.cat([kept.states[blocks.anchors - kept.start] for _, kept, blocks in parts]).to(hidden.device)
    wanted = wanted.to(torch.promote_types(hidden.dtype, torch.float32))
    return (hidden.to(wanted.dtype) - wanted).square().sum(-1) / wanted.square().sum(-1)


def step_numbers(
    loss: Float[Tensor, ""],
    slots: SlotLosses,
    supervised: Bool[Tensor, "blocks block"],
    weights: Float[Tensor, "kept"],
    *,
    confidence_error: float = float("nan"),
) -> StepNumbers:
    """The figures of a pass. ``slots`` and ``weights`` (which sum to 1) are of the supervised slots, in order."""
    rates = torch.zeros(supervised.shape, device=supervised.device)
    rates[supervised] = slots.acceptance_rate.float()
    return StepNumbers(
        loss,
        float(expected_acceptance_length(rates, supervised).mean()),
        rates.sum(0) / supervised.sum(0).clamp(min=1),
        confidence_error,
        float((slots.ce * weights).sum()),
        float((slots.l1 * weights).sum()),
        supervised.shape[0],
    )


def state_numbers(errors: Float[Tensor, "blocks"]) -> StepNumbers:
    """The figures of a pass that regresses states: its loss alone."""
    nan = float("nan")
    return StepNumbers(errors.mean(), nan, torch.full((1,), nan), nan, nan, nan, errors.shape[0])
