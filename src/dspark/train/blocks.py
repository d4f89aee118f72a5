"""What a step measures on the blocks of a DSpark or DFlash drafter: draft losses, confidence loss, state regression.

Readable beside paper equation (12). Pure functions of a model, the frozen parts of the target and prepared blocks; the
steps themselves are in :mod:`dspark.train.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks
from dspark.data.features import Sample, SampleFeatures
from dspark.maths.losses import (
    LossAlphas,
    SlotLosses,
    SparseTarget,
    chunked_losses,
    expected_acceptance_length,
    slot_weights,
)
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.target import Target
from dspark.train.config import TrainConfig


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
class Shared:
    """The frozen parts of the target that training reads, in the compute dtype, on the target's device."""

    target: Target
    head: Float[Tensor, "draft_vocab hidden"]
    to_draft: Int[Tensor, "vocab"]  # draft id of a target id, -1 outside the draft vocabulary
    mask_embed: Float[Tensor, "hidden"]
    dtype: torch.dtype


def make_shared(target: Target, model: DraftModel, dtype: torch.dtype) -> Shared:
    """Slice the head to the draft vocabulary and embed the mask token, once."""
    device = target.info.device
    ids = model.draft_token_ids().to(device)
    to_draft = torch.full((model.config.vocab_size,), -1, dtype=torch.long, device=device)
    to_draft[ids] = torch.arange(ids.shape[0], device=device)
    head = target.head_weight().index_select(0, ids).to(dtype).contiguous()
    mask = target.embed(torch.tensor([model.config.mask_token_id], device=device))[0].to(dtype)
    return Shared(target, head, to_draft, mask, dtype)


def run_blocks(
    model: DraftModel,
    shared: Shared,
    parts: Sequence[tuple[Sample, SampleFeatures, Blocks]],
    config: TrainConfig,
    *,
    block_size: int,
    alphas: LossAlphas,
) -> StepNumbers:
    """One forward pass over the blocks of several samples, and its loss (gradients of the head part come with it)."""
    device = shared.head.device
    prev_ids = torch.cat([blocks.prev_ids for _, _, blocks in parts]).to(device)
    labels = torch.cat([blocks.labels for _, _, blocks in parts]).to(device)
    supervised = torch.cat([blocks.supervised for _, _, blocks in parts]).to(device)
    hidden = _hidden(model, shared, parts, block_size)

    weights = slot_weights(supervised, config.loss_decay)
    weights = weights / weights.sum().clamp(min=1e-6)
    keep = supervised.flatten().nonzero().squeeze(1)  # unsupervised slots cost nothing from here on
    rows = hidden.flatten(0, 1)[keep]
    head = model.markov_head
    latents = None if head is None else head.latents(hidden, prev_ids).flatten(0, 1)[keep]
    loss, slots = chunked_losses(
        rows,
        latents,
        None if head is None else head.markov_w2.weight,
        shared.head,
        _targets(parts, block_size, keep),
        shared.to_draft[labels.flatten()[keep]],
        weights.flatten()[keep],
        alphas=alphas,
        soft_cap=model.config.final_soft_cap,
        chunk=config.chunk,
    )
    error = float("nan")
    if model.confidence_head is not None:
        previous = prev_ids.flatten()[keep]
        confidence_loss, error = _confidence_loss(model, rows, previous, slots, weights.flatten()[keep], config)
        loss = loss + config.alpha_confidence * confidence_loss
    if config.alpha_state > 0:
        loss = loss + config.alpha_state * _state_errors(hidden[:, 0], parts).mean()
    rate = torch.zeros(supervised.numel(), device=device).index_put_((keep,), slots.acceptance_rate.float())
    rate = rate.view_as(weights)
    counts = supervised.sum(0).clamp(min=1)
    lengths = expected_acceptance_length(rate, supervised)
    mean = weights.flatten()[keep]
    return StepNumbers(
        loss,
        float(lengths.mean()),
        rate.sum(0) / counts,
        error,
        float((slots.ce * mean).sum()),
        float((slots.l1 * mean).sum()),
        supervised.shape[0],
    )


def run_states(
    model: DraftModel, shared: Shared, parts: Sequence[tuple[Sample, SampleFeatures, Blocks]]
) -> StepNumbers:
    """One forward pass of blocks of one slot, and the relative squared error of h_0 against the target's final state.

    Given the anchor and the context, that state is certain, and matching it matches the logits, since the head is
    shared. Every channel carries a signal, and no product over the vocabulary is needed: a cheap start for the
    backbone.
    """
    errors = _state_errors(_hidden(model, shared, parts, 1)[:, 0], parts)
    nan = float("nan")
    return StepNumbers(errors.mean(), nan, torch.full((1,), nan), nan, nan, nan, errors.shape[0])


def _state_errors(
    hidden: Float[Tensor, "blocks hidden"], parts: Sequence[tuple[Sample, SampleFeatures, Blocks]]
) -> Float[Tensor, "blocks"]:
    """Squared error of each anchor slot's h_0 relative to the target's final state there; 0 is equality."""
    wanted = torch.cat([kept.states[blocks.anchors - kept.start] for _, kept, blocks in parts]).to(hidden.device)
    wanted = wanted.to(torch.promote_types(hidden.dtype, torch.float32))
    return (hidden.to(wanted.dtype) - wanted).square().sum(-1) / wanted.square().sum(-1)


def _hidden(
    model: DraftModel,
    shared: Shared,
    parts: Sequence[tuple[Sample, SampleFeatures, Blocks]],
    block_size: int,
) -> Float[Tensor, "blocks block hidden"]:
    """The backbone's states of every slot that predicts; a sample's context is cut at its last anchor."""
    contexts = [int(blocks.anchors[-1]) for _, _, blocks in parts]
    features = [kept.features[:rows] for (_, kept, _), rows in zip(parts, contexts, strict=True)]
    device = shared.head.device
    anchor_ids = torch.cat([blocks.prev_ids[:, 0] for _, _, blocks in parts]).to(device)
    batch = BlockBatch(
        torch.cat(features).to(shared.dtype),
        contexts,
        torch.cat([blocks.anchors for _, _, blocks in parts]).to(device),
        [blocks.anchors.shape[0] for _, _, blocks in parts],
    )
    return model(batch, shared.target.embed(anchor_ids).to(shared.dtype), shared.mask_embed, block_size)


def _targets(
    parts: Sequence[tuple[Sample, SampleFeatures, Blocks]], block_size: int, keep: Int[Tensor, "kept"]
) -> SparseTarget:
    """The target's distribution at label - 1 of every slot; slot k of anchor a reads position a + k."""
    ids, probs = [], []
    for _, kept, blocks in parts:
        last = kept.start + kept.top_ids.shape[0] - 1
        part = kept.sparse_target((blocks.anchors[:, None] + torch.arange(block_size)).clamp(max=last))
        ids.append(part.ids)
        probs.append(part.probs)
    return SparseTarget(torch.cat(ids)[keep], torch.cat(probs)[keep])


def _confidence_loss(
    model: DraftModel,
    rows: Float[Tensor, "kept hidden"],
    prev_ids: Int[Tensor, "kept"],
    slots: SlotLosses,
    weights: Float[Tensor, "kept"],
    config: TrainConfig,
) -> tuple[Float[Tensor, ""], float]:
    """Binary cross-entropy against c* (detached); its gradient stops at the head if ``confidence_detach``.

    Whatever the sequential head, the input is W1[previous token] beside the state, or the state alone.
    """
    assert model.confidence_head is not None
    inputs = rows
    if model.markov_head is not None and model.config.confidence_head_with_markov:
        inputs = torch.cat((rows, model.markov_head.embed(prev_ids).to(rows.dtype)), 1)
    inputs = inputs.detach() if config.confidence_detach else inputs
    logits = model.confidence_head(inputs.to(torch.promote_types(inputs.dtype, torch.float32)))
    labels = slots.acceptance_rate.to(logits.dtype)
    loss = (F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weights).sum()
    return loss, float((logits.detach().sigmoid() - labels).abs().mean())
