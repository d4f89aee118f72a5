"""What a step measures on the chains of an Eagle3 or MTP drafter: the draft losses of every unrolled step.

A block of :mod:`dspark.data.anchors` at anchor a is a chain that starts at row a - 1: slot k is its step k, reads the
answer's token at a + k, predicts the one at a + k + 1, and is held against the target's distribution at a + k. So all
drafters train on the same blocks, and their analytic acceptance lengths mean the same.

Differences from DeepSpec's Eagle3 (``modeling/eagle3``): chains start at sampled anchors instead of everywhere, and
inside the answer only; every step of a chain counts in one mean over the whole update, with the weight step_loss_decay
^ k, where the reference adds the steps' means over all positions, padding included; the target's probabilities of a
reduced vocabulary keep their sum below 1 instead of being renormalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks
from dspark.errors import DataError
from dspark.maths.losses import LossAlphas, SlotLosses, SparseTarget, chunked_losses
from dspark.maths.own_head import own_head_losses
from dspark.models.chain import ChainBatch, ChainModel
from dspark.train.config import TrainConfig
from dspark.train.slots import (
    FrozenHead,
    Part,
    StepNumbers,
    Totals,
    block_weights,
    make_totals,
    share_of_mean,
    slot_targets,
    state_errors,
    state_numbers,
    step_numbers,
)


def run_chains(
    model: ChainModel,
    shared: FrozenHead,
    parts: Sequence[Part],
    config: TrainConfig,
    *,
    block_size: int,
    alphas: LossAlphas,
    totals: Totals | None = None,
) -> StepNumbers:
    """One forward pass over the chains of several samples, and its loss (gradients of the head part come with it).

    ``block_size`` is that of the blocks: the steps that are unrolled. ``totals`` are those of the whole step; by
    default ``parts`` are the whole step.
    """
    parts, device = usable(parts), shared.head.device
    labels = torch.cat([blocks.labels for _, _, blocks in parts]).to(device)
    supervised = torch.cat([blocks.supervised for _, _, blocks in parts]).to(device)
    hidden = model(chain_batch(shared, parts, model))
    weights = block_weights([blocks for _, _, blocks in parts], chain_decay(config)).to(device)
    totals = totals or make_totals(weights)
    weights = (weights / totals.weight.to(device)).flatten()
    keep = supervised.flatten().nonzero().squeeze(1)
    loss, slots = _losses(
        model,
        shared,
        hidden.flatten(0, 1)[keep],
        slot_targets(parts, block_size, keep),
        shared.to_draft[labels.flatten()[keep]],
        weights[keep],
        alphas=alphas,
        chunk=config.chunk,
    )
    if config.alpha_state > 0:
        loss = loss + config.alpha_state * share_of_mean(state_errors(hidden[:, 0], parts), totals)
    return step_numbers(loss, slots, supervised, weights[keep])


def chain_decay(config: TrainConfig) -> float:
    """The ``loss_decay`` under which step k of a chain weighs ``step_loss_decay`` ^ k."""
    return -1 / math.log(config.step_loss_decay) if config.step_loss_decay < 1 else math.inf


def run_chain_states(
    model: ChainModel, shared: FrozenHead, parts: Sequence[Part], totals: Totals | None = None
) -> StepNumbers:
    """One forward pass of chains of one step, and the relative squared error of its state against the target's final
    one, as :func:`dspark.train.blocks.run_states` does for blocks."""
    parts = usable(parts)
    return state_numbers(state_errors(model(chain_batch(shared, parts, model))[:, 0], parts), totals)


def startable(blocks: Blocks) -> Blocks:
    """``blocks`` without one anchored at the very first token: before it there is no row to start from, and no
    request ever decodes without a prompt."""
    if not blocks.anchors.shape[0] or int(blocks.anchors[0]) > 0:
        return blocks
    return blocks.some(1, blocks.anchors.shape[0])


def usable(parts: Sequence[Part]) -> list[Part]:
    """``parts`` with their :func:`startable` blocks; raises :class:`DataError` if that leaves none."""
    kept = [(sample, features, startable(blocks)) for sample, features, blocks in parts]
    kept = [part for part in kept if part[2].anchors.shape[0]]
    if not kept:
        raise DataError("no answer of this step has a token before its anchors; prompts must not be empty")
    return kept


def chain_batch(shared: FrozenHead, parts: Sequence[Part], model: ChainModel | None = None) -> ChainBatch:
    """The chains of ``parts``; a sample's rows end with its last start. Embeddings are the target's, unless ``model``
    has its own, to which gradients then flow."""
    device, embed = shared.head.device, shared.target.embed
    if model is not None and model.own_embedding() is not None:
        embed = model.embed
    counts = [int(blocks.anchors[-1]) for _, _, blocks in parts]
    features = [kept.features[:rows] for (_, kept, _), rows in zip(parts, counts, strict=True)]
    nexts = [sample.token_ids[1 : rows + 1] for (sample, _, _), rows in zip(parts, counts, strict=True)]
    steps = torch.cat([blocks.prev_ids for _, _, blocks in parts]).to(device)
    return ChainBatch(
        torch.cat(features).to(shared.dtype),
        embed(torch.cat(nexts).to(device)).to(shared.dtype),
        counts,
        torch.cat([blocks.anchors for _, _, blocks in parts]).to(device) - 1,
        embed(steps.flatten()).to(shared.dtype).unflatten(0, (-1, steps.shape[1])),
        [blocks.anchors.shape[0] for _, _, blocks in parts],
    )


def _losses(
    model: ChainModel,
    shared: FrozenHead,
    rows: Float[Tensor, "kept hidden"],
    target: SparseTarget,
    labels: Int[Tensor, "kept"],
    weights: Float[Tensor, "kept"],
    *,
    alphas: LossAlphas,
    chunk: int,
) -> tuple[Float[Tensor, ""], SlotLosses]:
    """Draft losses against the target's head or the drafter's own."""
    own, cap = model.own_head(), model.config.final_soft_cap
    if own is not None:
        return own_head_losses(rows, own.weight, target, labels, weights, alphas=alphas, soft_cap=cap, chunk=chunk)
    return chunked_losses(
        rows, None, None, shared.head, target, labels, weights, alphas=alphas, soft_cap=cap, chunk=chunk
    )
