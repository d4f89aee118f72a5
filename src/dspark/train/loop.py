"""Training a drafter: one function a step, readable beside paper equation (12).

A step takes a few sequences, opens blocks at random anchors of their answers, runs the backbone once over all blocks,
and pulls the draft distribution towards the target's. Each step sees ``fresh_per_step`` new sequences and replays
others from those already seen, whose features are still in memory: a target pass costs as much as a hundred blocks.

Everything random in step s is a function of (seed, s), so a killed run resumes to the same curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data.anchors import Blocks, make_blocks, sample_anchors
from dspark.data.features import FeatureSource, Sample, SampleFeatures
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


def step_generator(seed: int, train_step: int, purpose: int) -> torch.Generator:
    """The random stream of one step and purpose; neighbouring steps do not share draws."""
    mixed = torch.Generator().manual_seed((seed * 1_000_003 + train_step) * 16 + purpose)
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=mixed)))


def choose_samples(samples: Sequence[Sample], train_step: int, config: TrainConfig) -> list[Sample]:
    """Samples of a step: the next fresh ones of a fixed permutation, then replays drawn from those already seen."""
    order = torch.randperm(len(samples), generator=step_generator(config.seed, 0, 1))
    first = train_step * config.fresh_per_step
    fresh = [int(order[i % len(samples)]) for i in range(first, first + config.fresh_per_step)]
    seen = min(first, len(samples))
    replays: list[int] = []
    if seen:
        picks = torch.randint(
            seen, (config.sequences_per_step - len(fresh),), generator=step_generator(config.seed, train_step, 2)
        )
        replays = [int(order[int(i)]) for i in picks]
    return [samples[i] for i in dict.fromkeys(fresh + replays)]


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
    prev = None if model.markov_head is None else model.markov_head.embed(prev_ids.flatten()[keep]).to(shared.dtype)
    w2 = None if model.markov_head is None else model.markov_head.markov_w2.weight
    loss, slots = chunked_losses(
        rows,
        prev,
        w2,
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
        confidence_loss, error = _confidence_loss(model, rows, prev, slots, weights.flatten()[keep], config)
        loss = loss + config.alpha_confidence * confidence_loss
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
    hidden = _hidden(model, shared, parts, 1).flatten(0, 1).float()
    wanted = torch.cat([kept.states[blocks.anchors - kept.start] for _, kept, blocks in parts]).float()
    errors = (hidden - wanted).square().sum(-1) / wanted.square().sum(-1)
    nan = float("nan")
    return StepNumbers(errors.mean(), nan, torch.full((1,), nan), nan, nan, nan, errors.shape[0])


def _hidden(
    model: DraftModel,
    shared: Shared,
    parts: Sequence[tuple[Sample, SampleFeatures, Blocks]],
    block_size: int,
) -> Float[Tensor, "blocks block hidden"]:
    """The backbone's states of every slot; a sample's context is cut at its last anchor."""
    contexts = [int(blocks.anchors[-1]) for _, _, blocks in parts]
    features = [kept.features[:rows] for (_, kept, _), rows in zip(parts, contexts, strict=True)]
    device = shared.head.device
    anchor_ids = torch.cat([blocks.prev_ids[:, 0] for _, _, blocks in parts]).to(device)
    batch = BlockBatch(
        torch.cat(features).to(shared.dtype),
        contexts,
        torch.cat([blocks.anchors for _, _, blocks in parts]).to(device),
        anchor_ids,
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
    prev: Float[Tensor, "kept rank"] | None,
    slots: SlotLosses,
    weights: Float[Tensor, "kept"],
    config: TrainConfig,
) -> tuple[Float[Tensor, ""], float]:
    """Binary cross-entropy against c* (detached); its gradient stops at the head if ``confidence_detach``."""
    assert model.confidence_head is not None
    inputs = torch.cat((rows, prev), 1) if prev is not None and model.config.confidence_head_with_markov else rows
    inputs = (inputs.detach() if config.confidence_detach else inputs).float()
    logits, labels = model.confidence_head(inputs), slots.acceptance_rate.float()
    loss = (F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weights).sum()
    return loss, float((logits.detach().sigmoid() - labels).abs().mean())


def step_parts(
    samples: Sequence[Sample], features: FeatureSource, config: TrainConfig, train_step: int
) -> list[tuple[Sample, SampleFeatures, Blocks]]:
    """Features and freshly drawn blocks of a step's samples."""
    size = config.block_at(train_step)
    generator = step_generator(config.seed, train_step, 3)
    count = max(1, config.slots_at(train_step) // (size * len(samples)))
    parts = []
    for sample in samples:
        anchors = sample_anchors(sample.loss_mask, count, generator)
        if anchors.shape[0]:
            kept = features.get(sample)
            parts.append((sample, kept, make_blocks(sample.token_ids, sample.loss_mask, anchors, size)))
    return parts


def train_step(
    model: DraftModel,
    optimizer: torch.optim.Optimizer,
    shared: Shared,
    parts: Sequence[tuple[Sample, SampleFeatures, Blocks]],
    config: TrainConfig,
    *,
    step: int,
    rate: float,
) -> tuple[StepNumbers, float]:
    """Forward, backward, clip, update. Returns the numbers and the gradient's norm before clipping."""
    soft = config.soft_share(step)
    alphas = LossAlphas(config.alpha_ce * (1 - soft), soft, config.alpha_l1 * (1 - soft))
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    if step < config.state_steps:
        numbers = run_states(model, shared, parts)
    else:
        numbers = run_blocks(model, shared, parts, config, block_size=config.block_at(step), alphas=alphas)
    numbers.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return numbers, float(norm)


@torch.no_grad()
def held_out_numbers(
    model: DraftModel,
    shared: Shared,
    features: FeatureSource,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    anchors: int = 32,
) -> dict[str, float]:
    """Analytic acceptance length on held-out answers, per domain and as the domains' mean; the anchors are always the
    same."""
    by_domain: dict[str, list[float]] = {}
    for i, sample in enumerate(samples):
        positions = sample_anchors(sample.loss_mask, anchors, step_generator(config.seed, i, 4))
        if not positions.shape[0]:
            continue
        blocks = make_blocks(sample.token_ids, sample.loss_mask, positions, config.block_size)
        part = [(sample, features.get(sample), blocks)]
        numbers = run_blocks(model, shared, part, config, block_size=config.block_size, alphas=LossAlphas())
        by_domain.setdefault(sample.domain, []).append(numbers.acceptance_length)
    means = {domain: sum(values) / len(values) for domain, values in sorted(by_domain.items())}
    return {"mean": sum(means.values()) / max(1, len(means)), **means}
