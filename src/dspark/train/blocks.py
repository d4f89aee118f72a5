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

from dspark.maths.losses import LossAlphas, SlotLosses, chunked_losses
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.target import Target
from dspark.train.config import TrainConfig
from dspark.train.slots import (
    FrozenHead,
    Part,
    StepNumbers,
    Totals,
    block_weights,
    freeze_head,
    make_totals,
    share_of_mean,
    slot_targets,
    state_errors,
    state_numbers,
    step_numbers,
)


@dataclass(frozen=True)
class Shared(FrozenHead):
    """The frozen parts of the target that training reads, in the compute dtype, on the target's device."""

    mask_embed: Float[Tensor, "hidden"]


def make_shared(target: Target, model: DraftModel, dtype: torch.dtype) -> Shared:
    """Slice the head to the draft vocabulary and embed the mask token, once."""
    frozen = freeze_head(target, model.draft_token_ids(), dtype)
    mask = target.embed(torch.tensor([model.config.mask_token_id], device=target.info.device))[0].to(dtype)
    return Shared(target, frozen.head, frozen.to_draft, dtype, mask)


def run_blocks(
    model: DraftModel,
    shared: Shared,
    parts: Sequence[Part],
    config: TrainConfig,
    *,
    block_size: int,
    alphas: LossAlphas,
    totals: Totals | None = None,
) -> StepNumbers:
    """One forward pass over the blocks of several samples, and its loss (gradients of the head part come with it).

    ``totals`` are those of the whole step; by default ``parts`` are the whole step.
    """
    device = shared.head.device
    prev_ids = torch.cat([blocks.prev_ids for _, _, blocks in parts]).to(device)
    labels = torch.cat([blocks.labels for _, _, blocks in parts]).to(device)
    supervised = torch.cat([blocks.supervised for _, _, blocks in parts]).to(device)
    hidden = _hidden(model, shared, parts, block_size)

    weights = block_weights([blocks for _, _, blocks in parts], config.loss_decay).to(device)
    totals = totals or make_totals(weights)
    weights = weights / totals.weight.to(device)
    keep = supervised.flatten().nonzero().squeeze(1)  # unsupervised slots cost nothing from here on
    rows = hidden.flatten(0, 1)[keep]
    head = model.markov_head
    latents = None if head is None else head.latents(hidden, prev_ids).flatten(0, 1)[keep]
    loss, slots = chunked_losses(
        rows,
        latents,
        None if head is None else head.markov_w2.weight,
        shared.head,
        slot_targets(parts, block_size, keep),
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
        loss = loss + config.alpha_state * share_of_mean(state_errors(hidden[:, 0], parts), totals)
    return step_numbers(loss, slots, supervised, weights.flatten()[keep], confidence_error=error)


def run_states(model: DraftModel, shared: Shared, parts: Sequence[Part], totals: Totals | None = None) -> StepNumbers:
    """One forward pass of blocks of one slot, and the relative squared error of h_0 against the target's final state.

    Given the anchor and the context, that state is certain, and matching it matches the logits, since the head is
    shared. Every channel carries a signal, and no product over the vocabulary is needed: a cheap start for the
    backbone.
    """
    return state_numbers(state_errors(_hidden(model, shared, parts, 1)[:, 0], parts), totals)


def _hidden(
    model: DraftModel,
    shared: Shared,
    parts: Sequence[Part],
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
