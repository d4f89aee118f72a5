"""A skipping drafter in the loop: the output stays what it was, and dead drafts are soon no longer made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import TableTarget
from torch import Tensor

from dspark.core import Completion, Proposal, SamplingParams
from dspark.decode import generate
from dspark.maths.skipping import SkipPolicy
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.skipping_drafter import SkippingDrafter

SAMPLING = SamplingParams(temperature=1.0, seed=3)


class ConstantDrafter:
    """Proposes one token over and over with certainty; counts what it is told."""

    name, block_size, has_confidence = "constant", 3, False
    taps: tuple[int, ...] = ()

    def __init__(self, token: int) -> None:
        self.token, self.known, self.asked = token, 0, 0

    def open(self, *, max_len: int) -> Any:
        return None

    def extend(self, state: Any, token_ids: Tensor, features: Tensor | None) -> None:
        self.known += len(token_ids)

    def propose(
        self, state: Any, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        self.asked += 1
        return Proposal(torch.full((min(limit, 3),), self.token, dtype=torch.long))


class LastTokenTarget(TableTarget):
    """Draws ``always``, always."""

    def __init__(self, *, always: int) -> None:
        super().__init__(vocab_size=4, max_len=200)
        self.always = always

    def logits(self, final: Tensor) -> Tensor:
        logits = torch.full((final.shape[0], 4), -1e4)
        logits[:, self.always] = 0.0
        return logits


def run(target: TableTarget, drafter: Drafter, tokens: int = 60) -> Completion:
    return generate(target, drafter, [0, 1], sampling=SAMPLING, max_new_tokens=tokens)


def test_dead_drafts_are_soon_no_longer_made() -> None:
    inner = ConstantDrafter(token=2)
    drafter = SkippingDrafter(inner, SkipPolicy(start=1.0, first_pause=4, longest_pause=8))
    answer = run(LastTokenTarget(always=1), drafter)
    drafted = [bool(r.draft_tokens) for r in answer.rounds]
    assert set(answer.token_ids) == {1} and len(answer.rounds) == 59
    # means 0.8, 0.64, 0.512, 0.41: four rounds, then pauses of 4, 8, 8, ... with a probe after each
    assert drafted[:4] == [True] * 4 and [i for i, d in enumerate(drafted) if d][4:] == [8, 17, 26, 35, 44, 53]
    assert inner.asked == sum(drafted)
    assert inner.known == 2 + 59  # its context has all but the last token, pauses or not


def test_drafts_that_live_are_always_made() -> None:
    drafter = SkippingDrafter(ConstantDrafter(token=1), SkipPolicy(start=0.0, break_even=0.5, first_pause=1))
    answer = run(LastTokenTarget(always=1), drafter)
    assert all(r.draft_tokens for r in answer.rounds) and answer.acceptance_length > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_the_target(temperature: float) -> None:
    """Greedy: token for token. Sampled: how often each token follows the context, over many seeds."""
    target = TableTarget(vocab_size=4, max_len=200)
    drafter = SkippingDrafter(ConstantDrafter(token=2), SkipPolicy(start=0.6, inertia=0.5, first_pause=1))
    if temperature == 0.0:
        sampling = SamplingParams()
        ours, plain = (
            generate(target, d, [0, 1], sampling=sampling, max_new_tokens=30) for d in (drafter, NoDrafter())
        )
        assert ours.token_ids == plain.token_ids
        return
    counts, trials = torch.zeros(4), 400
    for seed in range(trials):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        tokens = generate(target, drafter, [0, 1], sampling=sampling, max_new_tokens=4).token_ids
        counts[tokens[3]] += 1
    due = sum(
        (
            target.next_probs([0, 1, a, b, c], sampling)
            * target.next_probs([0, 1], sampling)[a]
            * target.next_probs([0, 1, a], sampling)[b]
            * target.next_probs([0, 1, a, b], sampling)[c]
            for a in range(4)
            for b in range(4)
            for c in range(4)
        ),
        torch.zeros(4),
    )
    assert ((counts / trials - due).abs() < 4 * (due * (1 - due) / trials).sqrt() + 1e-3).all()
