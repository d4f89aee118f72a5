"""Training a drafter: one function a step, readable beside paper equation (12).

A step takes a few sequences, opens blocks at random anchors of their answers, runs the backbone once over all blocks,
and pulls the draft distribution towards the target's. Each step sees ``fresh_per_step`` new sequences and replays
others from those already seen, whose features are still in memory: a target pass costs as much as a hundred blocks.

Everything random in step s is a function of (seed, s), so a killed run resumes to the same curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from dspark.data.anchors import Blocks, make_blocks, sample_anchors
from dspark.data.features import FeatureSource, Sample, SampleFeatures
from dspark.maths.losses import LossAlphas
from dspark.models.backbone import DraftModel
from dspark.train.blocks import Shared, StepNumbers, run_blocks, run_states
from dspark.train.config import TrainConfig


def step_generator(seed: int, train_step: int, purpose: int) -> torch.Generator:
    """The random stream of one step and purpose; neighbouring steps do not share draws."""
    mixed = torch.Generator().manual_seed((seed * 1_000_003 + train_step) * 16 + purpose)
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=mixed)))


@lru_cache(maxsize=4)
def _sample_order(count: int, seed: int) -> list[int]:
    """The run's fixed permutation of its samples, drawn once."""
    return torch.randperm(count, generator=step_generator(seed, 0, 1)).tolist()


def choose_samples(samples: Sequence[Sample], train_step: int, config: TrainConfig) -> list[Sample]:
    """Samples of a step: the next fresh ones of a fixed permutation, then replays drawn from those already seen."""
    order = _sample_order(len(samples), config.seed)
    first = train_step * config.fresh_per_step
    fresh = [order[i % len(samples)] for i in range(first, first + config.fresh_per_step)]
    seen = min(first, len(samples))
    replays: list[int] = []
    if seen:
        picks = torch.randint(
            seen, (config.sequences_per_step - len(fresh),), generator=step_generator(config.seed, train_step, 2)
        )
        replays = [order[int(i)] for i in picks]
    return [samples[i] for i in dict.fromkeys(fresh + replays)]


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
