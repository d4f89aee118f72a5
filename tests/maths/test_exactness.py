"""Enumeration on a toy vocabulary: whatever drafts, rule, transformation and scheduler, the output is the target's own.

Every drafter kind, verification rule, shaping of the logits, filter and causal scheduler, over one round and several.
An example of hypothesis covers both rules and all schedulers for one target, drafter, history and set of parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes import ExactRounds, ExactVerification, TableDrafter, TableTarget, context_row, target_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import RULES, Proposal, SamplingParams
from dspark.maths.sampling import target_probs
from dspark.maths.scheduling import FixedScheduler, GreedyScheduler, Scheduler, ThresholdScheduler
from dspark.maths.shaping import shaped_logits

VOCAB = 3
STOPS = (2,)
KINDS = ("dense", "candidates", "certain", "reduced", "sequential")
SCHEDULERS: tuple[Scheduler, ...] = (
    *(FixedScheduler(length) for length in (None, 1, 0)),
    ThresholdScheduler(0.5),
    GreedyScheduler(torch.tensor([0.0, 1.0, 0.75, 0.6])),
)
SHAPINGS = {
    "none": SamplingParams(temperature=1.0),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=1.0, presence_penalty=0.9),
    "frequency": SamplingParams(temperature=0.8, frequency_penalty=-0.6),
    "bias": SamplingParams(temperature=1.0, logit_bias=((0, 1.5), (2, -0.7))),
    "banned": SamplingParams(temperature=1.0, banned_token_ids=(1,)),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=2),
    "all": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((1, 0.5),),
        banned_token_ids=(0,),
        min_tokens=3,
    ),
}
FILTERS: dict[str, dict[str, Any]] = {  # Any: fields of every type
    "none": {},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "greedy": {"temperature": 0.0},
}


class Peeking:
    """The fault that schedulers must not have: whether draft 1 is verified depends on which token draft 1 is."""

    needs_confidence: ClassVar[bool] = True

    def choose(self, proposal: Proposal, context_len: int) -> int:
        return 2 if int(proposal.draft_tokens[1]) == 0 else 1


SEEDS = st.integers(0, 2**31)
HISTORIES = st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple)
PROMPT = (0, 1)


def verification(
    seed: int, kind: str, params: SamplingParams, *, rule: str, sharpness: float = 1.5, block: int = 2
) -> ExactVerification:
    target = TableTarget(vocab_size=VOCAB, seed=seed)
    drafter = TableDrafter(vocab_size=VOCAB, block=block, kind=kind, seed=seed + 1, sharpness=sharpness)

    def next_probs(prefix: tuple[int, ...]) -> torch.Tensor:
        return target.next_probs(prefix, params, prompt_len=len(PROMPT), stop_token_ids=STOPS)

    return ExactVerification(next_probs, drafter, rule)


def gap(exact: ExactRounds, prefix: tuple[int, ...], *, rounds: int, horizon: int) -> float:
    drafted = exact.output(prefix, rounds=rounds, horizon=horizon)
    return float(np.abs(drafted - target_chain(prefix, exact.next_probs, horizon)).max())


@settings(deadline=None, max_examples=150)
@given(
    SEEDS,
    st.sampled_from(KINDS),
    st.sampled_from(sorted(SHAPINGS)),
    st.sampled_from(sorted(FILTERS)),
    HISTORIES,
    st.sampled_from([0.3, 1.5, 4.0]),
)
def test_a_round_is_distributed_as_the_target(
    seed: int, kind: str, shaping: str, filters: str, history: tuple[int, ...], sharpness: float
) -> None:
    """1,500 cases: the next three tokens after any history, and no fewer accepted by the joint rule than token-wise."""
    params, prefix = replace(SHAPINGS[shaping], **FILTERS[filters]), PROMPT + history
    verifications = [verification(seed, kind, params, rule=rule, sharpness=sharpness) for rule in RULES]
    for scheduler in SCHEDULERS:
        token, block = (ExactRounds(v, scheduler, order=None) for v in verifications)
        assert gap(token, prefix, rounds=1, horizon=3) < 1e-6
        assert gap(block, prefix, rounds=1, horizon=3) < 1e-6
        assert block.accepted(prefix) >= token.accepted(prefix) - 1e-6


@settings(deadline=None, max_examples=12)
@given(SEEDS, st.sampled_from(KINDS), st.sampled_from(sorted(SHAPINGS)), st.sampled_from(SCHEDULERS))
def test_several_rounds_are_distributed_as_the_target(seed: int, kind: str, shaping: str, scheduler: Scheduler) -> None:
    """Three rounds, and what a history of accepted drafts does to the next round's shaping."""
    for rule in RULES:
        exact = ExactRounds(verification(seed, kind, SHAPINGS[shaping], rule=rule), scheduler, order=None)
        assert gap(exact, PROMPT, rounds=3, horizon=4) < 1e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_longer_blocks(kind: str, rule: str) -> None:
    """Blocks of four, where the joint rule has something to carry along, cut anywhere by the confidences."""
    for scheduler in (FixedScheduler(), ThresholdScheduler(0.3)):
        exact = ExactRounds(verification(7, kind, SHAPINGS["none"], rule=rule, block=4), scheduler, order=None)
        assert gap(exact, PROMPT, rounds=1, horizon=5) < 1e-6


def test_the_enumeration_sees_a_history_that_leaves_out_the_drafts() -> None:
    """A tempting shortcut: shape every row of the block by the committed text alone. The oracle must notice."""
    params = SHAPINGS["presence"]
    target, honest = TableTarget(vocab_size=VOCAB, seed=3), verification(3, "dense", params, rule="token")

    def by_committed_text(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = target.head @ target.states[context_row(prefix, target.order, VOCAB)]
        return target_probs(shaped_logits(logits, PROMPT, (), params)[None], params)[0]

    flawed = ExactRounds(ExactVerification(by_committed_text, honest.drafter), FixedScheduler(), order=None)
    joint = np.zeros((VOCAB, VOCAB))
    for commit, chance in flawed.outcomes(PROMPT).items():
        rest = honest.next_probs(PROMPT + commit).numpy() if len(commit) == 1 else 1.0
        joint[commit[:2]] += chance * rest
    assert float(np.abs(joint - target_chain(PROMPT, honest.next_probs, 2)).max()) > 1e-2


def test_the_enumeration_sees_a_scheduler_that_looks_ahead() -> None:
    """The joint rule needs causality as the token-wise one does: a length that depends on x_k must not judge x_k."""

    for rule in RULES:
        exact = ExactRounds(verification(5, "dense", SHAPINGS["none"], rule=rule), Peeking(), order=None)
        assert gap(exact, PROMPT, rounds=1, horizon=3) > 1e-3, rule
