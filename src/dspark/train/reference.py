"""The plain form of a block drafter's step: DeepSpec's formulation, dense over the vocabulary.

What :func:`dspark.train.blocks.run_blocks` must equal, and what its speed is measured against
(`recipes/time_formulations.py`). Here everything is what the equations say: the draft's and the target's logits of all
slots exist whole, the target's are computed for every slot anew although neighbouring blocks share positions, both are
turned into probabilities, and autograd goes back through their L1 distance. Slots past the supervised prefix are
computed as well and weigh nothing. The backbone is the same in both forms.

Source: DeepSpec ``modeling/dspark/{qwen3/modeling,loss}.py``. As there, products are in the compute dtype, so is the
cross-entropy, and probabilities are fp32; the whole vocabulary is drafted in. DeepSpec has no state loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks
from dspark.data.features import Sample, TargetStates
from dspark.maths.losses import LossAlphas, slot_weights
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.heads import sequential_logits
from dspark.train.blocks import Shared
from dspark.train.config import TrainConfig

CachedPart = tuple[Sample, TargetStates, Blocks]  # a sample, the target's states of all its tokens, its blocks


def dense_loss(
    model: DraftModel, shared: Shared, parts: Sequence[CachedPart], config: TrainConfig, *, alphas: LossAlphas
) -> Float[Tensor, ""]:
    """The loss of a step over ``parts``, differentiable in the model.

    ``shared.head`` must be the head's rows of the whole vocabulary, in order. There is no soft cross-entropy in the
    reference, so ``alphas.soft`` is not looked at.
    """
    hidden, size = _hidden(model, shared, parts), model.config.block_size
    blocks = [part for _, _, part in parts]
    labels = torch.cat([part.labels for part in blocks]).to(hidden.device)
    prev_ids = torch.cat([part.prev_ids for part in blocks]).to(hidden.device)
    supervised = torch.cat([part.supervised for part in blocks]).to(hidden.device)

    draft_logits = sequential_logits(_logits(model, shared, hidden), hidden, prev_ids, model.markov_head)
    target_logits = _logits(model, shared, torch.cat([_label_states(states, part, size) for _, states, part in parts]))
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    draft_probs, target_probs = draft_logits.softmax(-1, dtype=wide), target_logits.softmax(-1, dtype=wide)
    l1 = (draft_probs - target_probs).abs().sum(-1)
    ce = F.cross_entropy(draft_logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    per_slot = alphas.ce * ce + alphas.l1 * l1
    if model.confidence_head is not None:
        per_slot = per_slot + config.alpha_confidence * _confidence(model, hidden, prev_ids, l1, config)
    weights = slot_weights(supervised, config.loss_decay)
    return (weights * per_slot).sum() / weights.sum().clamp(min=1e-6)


def _hidden(model: DraftModel, shared: Shared, parts: Sequence[CachedPart]) -> Float[Tensor, "blocks block hidden"]:
    contexts = [int(part.anchors[-1]) for _, _, part in parts]
    device = shared.head.device
    anchors = torch.cat([part.anchors for _, _, part in parts]).to(device)
    features = [states.features[:rows] for (_, states, _), rows in zip(parts, contexts, strict=True)]
    counts = [part.anchors.shape[0] for _, _, part in parts]
    batch = BlockBatch(torch.cat(features).to(shared.dtype), contexts, anchors, counts)
    anchor_ids = torch.cat([part.prev_ids[:, 0] for _, _, part in parts]).to(device)
    return model(batch, shared.target.embed(anchor_ids).to(shared.dtype), shared.mask_embed, model.config.block_size)


def _label_states(states: TargetStates, blocks: Blocks, size: int) -> Float[Tensor, "blocks block hidden"]:
    """The target's final state at label - 1 of every slot, clamped to the sample's last token."""
    positions = blocks.anchors[:, None] + torch.arange(size)
    return states.final[positions.clamp(max=states.final.shape[0] - 1)]


def _logits(
    model: DraftModel, shared: Shared, states: Float[Tensor, "blocks block hidden"]
) -> Float[Tensor, "blocks block vocab"]:
    logits = states.to(shared.dtype) @ shared.head.T
    cap = model.config.final_soft_cap
    return cap * torch.tanh(logits / cap) if cap else logits


def _confidence(
    model: DraftModel,
    hidden: Float[Tensor, "blocks block hidden"],
    prev_ids: Int[Tensor, "blocks block"],
    l1: Float[Tensor, "blocks block"],
    config: TrainConfig,
) -> Float[Tensor, "blocks block"]:
    """Binary cross-entropy of the predicted survival against 1 - half the L1 distance, which is detached."""
    assert model.confidence_head is not None
    inputs = hidden
    if model.markov_head is not None and model.config.confidence_head_with_markov:
        inputs = torch.cat((hidden, model.markov_head.embed(prev_ids).to(hidden.dtype)), -1)
    inputs = inputs.detach() if config.confidence_detach else inputs
    logits = model.confidence_head(inputs.to(l1.dtype))
    labels = (1 - l1.detach() / 2).clamp(0, 1)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
