"""Training a drafter: one function a step, readable beside paper equation (12).

A step takes a few sequences, opens blocks at random anchors of their answers, runs the drafter once over all blocks,
and pulls the draft distribution towards the target's; how, its method says (:mod:`dspark.train.methods`). Each step
sees ``fresh_per_step`` new sequences and replays others from those already seen, whose features are still in memory: a
target pass costs as much as a hundred blocks.

Everything random in step s is a function of (seed, s), so a killed run resumes to the same curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from dspark.data.anchors import make_blocks, sample_anchors
from dspark.data.features import FeatureSource, Sample
from dspark.maths.losses import LossAlphas
from dspark.train.config import TrainConfig
from dspark.train.methods import Method
from dspark.train.slots import Part, StepNumbers


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


def step_parts(samples: Sequence[Sample], features: FeatureSource, config: TrainConfig, train_step: int) -> list[Part]:
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


def loss_alphas(config: TrainConfig, train_step: int) -> LossAlphas:
    """Weights of the draft losses at a step: soft cross-entropy at first, fading into the others."""
    soft = config.soft_share(train_step)
    rest = 1 - soft
    return LossAlphas(config.alpha_ce * rest, soft + config.alpha_soft * rest, config.alpha_l1 * rest)


def train_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    config: TrainConfig,
    *,
    step: int,
    rate: float,
) -> tuple[StepNumbers, float]:
    """Forward, backward, clip, update. Returns the numbers and the gradient's norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    if step < config.state_steps:
        numbers = method.state_numbers(parts)
    else:
        numbers = method.numbers(parts, block_size=config.block_at(step), alphas=loss_alphas(config, step))
    numbers.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(method.model.parameters(), config.clip)
    optimizer.step()
    return numbers, float(norm)


@torch.no_grad()
def held_out_numbers(
    method: Method,
    features: FeatureSource,
    samples: Sequence[Sample],
    config: TrainConfig,
    *,
    anchors: int = 32,
) -> dict[str, float]:
    """Analytic acceptance length on held-out answers, per domain and as the domains' mean.

    Blocks have the drafter's full size, and the anchors are always the same, whatever the method.
    """
    by_domain: dict[str, list[float]] = {}
    for i, sample in enumerate(samples):
        positions = sample_anchors(sample.loss_mask, anchors, step_generator(config.seed, i, 4))
        if not positions.shape[0]:
            continue
        blocks = make_blocks(sample.token_ids, sample.loss_mask, positions, config.block_size)
        part = [(sample, features.get(sample), blocks)]
        numbers = method.numbers(part, block_size=config.block_size, alphas=LossAlphas())
        by_domain.setdefault(sample.domain, []).append(numbers.acceptance_length)
    means = {domain: sum(values) / len(values) for domain, values in sorted(by_domain.items())}
    return {"mean": sum(means.values()) / max(1, len(means)), **means}
