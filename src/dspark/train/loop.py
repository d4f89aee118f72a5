"""Training a drafter: one function a step, readable beside paper equation (12).

A step takes a few sequences, opens blocks at random anchors of their answers, runs the drafter once over all blocks,
and pulls the draft distribution towards the target's; how, its method says (:mod:`dspark.train.methods`). Each step
sees ``fresh_per_step`` new sequences and replays others from those already seen, whose features are still in memory: a
target pass costs as much as a hundred blocks.

Everything random in step s is a function of (seed, s), so a killed run resumes to the same curve; and the step is cut
up among processes and into passes only after that (:mod:`dspark.train.shares`), so both leave it as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from dspark.data.anchors import make_blocks, sample_anchors
from dspark.data.features import Features, FeatureSource, Sample
from dspark.errors import DataError
from dspark.maths.losses import LossAlphas
from dspark.train.config import TrainConfig
from dspark.train.methods import Method
from dspark.train.parallel import Parallel, gradient_norm
from dspark.train.ranks import ALONE, Ranks
from dspark.train.shares import pass_count, passes_of, share_out
from dspark.train.slots import Part, Piece, StepNumbers, Totals, as_sums, from_sums, nothing_of


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


def step_pieces(samples: Sequence[Sample], config: TrainConfig, train_step: int) -> list[Piece]:
    """A step's samples with freshly drawn blocks, without those that have no anchor."""
    size = config.block_at(train_step)
    generator = step_generator(config.seed, train_step, 3)
    count = max(1, config.slots_at(train_step) // (size * len(samples)))
    drawn = [(sample, sample_anchors(sample.loss_mask, count, generator)) for sample in samples]
    return [(s, make_blocks(s.token_ids, s.loss_mask, anchors, size)) for s, anchors in drawn if anchors.shape[0]]


def step_parts(samples: Sequence[Sample], features: FeatureSource, config: TrainConfig, train_step: int) -> list[Part]:
    """Features and freshly drawn blocks of a step's samples."""
    return [(s, features.get(s), blocks) for s, blocks in step_pieces(samples, config, train_step)]


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
    """The plain step, one pass in one process: forward, backward, clip, update. Returns the numbers and the gradient's
    norm before clipping."""
    optimizer.zero_grad(set_to_none=True)
    numbers = measure(method, parts, config, step)
    numbers.loss.backward()
    return numbers, update(method, optimizer, config, rate)


def measure(
    method: Method, parts: Sequence[Part], config: TrainConfig, step: int, totals: Totals | None = None
) -> StepNumbers:
    """The forward part of a pass of a step: states at first, then blocks; by default the pass is the whole step."""
    if step < config.state_steps:
        return method.state_numbers(parts, totals)
    alphas = loss_alphas(config, step)
    return method.numbers(parts, block_size=config.block_at(step), alphas=alphas, totals=totals)


def update(method: Method, optimizer: torch.optim.Optimizer, config: TrainConfig, rate: float) -> float:
    """Clip the gradients and take the step; returns their norm before."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = gradient_norm(method.model.parameters(), config.clip)
    optimizer.step()
    return norm


@dataclass(frozen=True)
class StepResult:
    """A step as a whole, over all its passes and processes."""

    numbers: StepNumbers
    gradient_norm: float  # before clipping
    tokens: int  # of its samples
    feature_seconds: float  # this process spent waiting for features


def cut_step(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Piece],
    features: Features,
    config: TrainConfig,
    *,
    step: int,
    rate: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """:func:`train_step` among processes and in passes of at most ``blocks_per_pass`` blocks. ``pieces`` are the whole
    step's; a pass asks for its features when it begins. Raises :class:`DataError` if no block can be trained on."""
    method = parallel.method
    pieces = [(sample, method.usable(blocks)) for sample, blocks in pieces]
    pieces = [(sample, blocks) for sample, blocks in pieces if blocks.anchors.shape[0]]
    if not pieces:
        raise DataError("no answer of this step has a token before its anchors; prompts must not be empty")
    totals = method.totals([blocks for _, blocks in pieces])
    shares = share_out(pieces, ranks.size)
    passes = passes_of(shares[ranks.rank], pass_count(shares, config.blocks_per_pass))
    sample, blocks = pieces[0]
    spare = [(sample, blocks.some(0, 1))]  # what a process runs when it has nothing to add to an exchange
    optimizer.zero_grad(set_to_none=True)
    found, waited = [], 0.0
    for i, part in enumerate(passes):
        begin = time.perf_counter()
        parts = [(sample, features.get(sample), blocks) for sample, blocks in part or spare]
        waited += time.perf_counter() - begin
        forward = partial(measure, method, parts, config, step, totals)
        numbers = parallel.backward(forward, last=i == len(passes) - 1, idle=not part)
        found.append(numbers if part else nothing_of(numbers))
    norm = update(method, optimizer, config, rate)
    tokens = sum(sample.token_ids.shape[0] for sample, _ in pieces)
    return StepResult(_together(found, ranks), norm, tokens, waited)


def _together(found: Sequence[StepNumbers], ranks: Ranks) -> StepNumbers:
    """The numbers of a step from those of this process's passes."""
    if ranks.size == 1 and len(found) == 1:
        return found[0]
    return from_sums(ranks.add(torch.stack([as_sums(numbers) for numbers in found]).sum(0)))


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
