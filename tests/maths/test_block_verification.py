"""The joint rule by hand, its fast form against its plain one, its gain, and `verify_block` against the enumeration."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fakes import ExactRounds, ExactVerification, TableDrafter, TableTarget, chi_square_p
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import DraftDistribution, SamplingParams
from dspark.maths import block_verification
from dspark.maths.block_verification import block_coin_chances, coin_chance, joint_ratios, verify_block
from dspark.maths.rejection import Verdict, acceptance_probs, verify_greedy
from dspark.maths.sampling import RequestStreams, TargetRows, target_probs, uniforms
from dspark.maths.scheduling import FixedScheduler

KINDS = ("dense", "candidates", "certain", "reduced", "sequential")
SAMPLED = SamplingParams(temperature=1.0)


def a_block(seed: int, kind: str) -> tuple[Tensor, DraftDistribution | None, Tensor]:
    """Three drafts, what they were drawn from, and the target's logits around them."""
    drafter = TableDrafter(vocab_size=4, block=3, kind=kind, seed=seed)
    proposal = drafter.propose((0, 1), torch.Generator().manual_seed(seed))
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) * 1.5
    return proposal.draft_tokens, proposal.distribution, logits


def test_the_rule_by_hand() -> None:
    """Sun et al.'s example: target (1/3, 2/3), draft (2/3, 1/3) at every position, blocks of two.

    A first draft of token 0 leaves r = 1/2; then 1 as the second brings it back to 1, and both stand: token by token
    the first would have fallen half of the time.
    """
    rows, draft = torch.tensor([[1 / 3, 2 / 3]] * 3), DraftDistribution(torch.tensor([[2 / 3, 1 / 3]] * 2))
    assert joint_ratios(torch.tensor([0, 1]), draft, rows).tolist() == pytest.approx([0.5, 1.0])
    assert joint_ratios(torch.tensor([0, 0]), draft, rows).tolist() == pytest.approx([0.5, 0.25])
    # after 0: s = max(1/6 - 2/3, 0) + max(1/3 - 1/3, 0) = 0; after 1: s = max(1/3 - 2/3, 0) + max(2/3 - 1/3, 0) = 1/3
    assert block_coin_chances(torch.tensor([0, 1]), draft, rows).tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert block_coin_chances(torch.tensor([0, 0]), draft, rows).tolist() == pytest.approx([0.0, 0.25], abs=1e-6)
    assert block_coin_chances(torch.tensor([1, 0]), draft, rows).tolist() == pytest.approx([1.0, 0.5])
    assert block_coin_chances(torch.tensor([0]), draft, rows[:2]).tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(("rule", "accepted"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_papers_figures(rule: str, accepted: float) -> None:
    """The same example: 10/9 drafts accepted token by token, 11/9 jointly."""
    drafter = TableDrafter(vocab_size=2, block=2)
    drafter.logits = torch.tensor([2 / 3, 1 / 3]).log().expand_as(drafter.logits)
    target = torch.tensor([1 / 3, 2 / 3])
    exact = ExactRounds(ExactVerification(lambda prefix: target, drafter, rule), FixedScheduler())
    assert exact.accepted((0,)) == pytest.approx(accepted, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from(KINDS))
def test_at_least_k_stand_with_chance_r_k(seed: int, kind: str) -> None:
    """For every block, not only on average: r_k is no less than the token-wise chance, and equal to it if certain."""
    drafts, distribution, logits = a_block(seed, kind)
    rows = target_probs(logits, SAMPLED)
    ratios, alone = joint_ratios(drafts, distribution, rows), acceptance_probs(drafts, distribution, rows).cumprod(0)
    assert bool((ratios >= alone - 1e-12).all())
    if kind == "certain":
        assert ratios.tolist() == pytest.approx(alone.tolist())


class Coins:
    """Stands in for `uniforms` with coins of our choice."""

    def __init__(self, *coins: float) -> None:
        self.coins = torch.tensor(coins, dtype=torch.float64)

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        return self.coins[:count]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from(KINDS), st.lists(st.floats(0, 0.999), min_size=3, max_size=3))
def test_the_fast_form_decides_as_the_plain_one(seed: int, kind: str, coins: list[float]) -> None:
    """`verify_block` reads rows and s_k only as needed; where a coin is within rounding of h_k, either may be right."""
    drafts, distribution, logits = a_block(seed, kind)
    chances = block_coin_chances(drafts, distribution, target_probs(logits, SAMPLED))
    stands = torch.tensor(coins, dtype=torch.float64) < chances
    accepted = max((k + 1 for k in range(3) if stands[k]), default=0)
    close = min(abs(coin - chance) for coin, chance in zip(coins, chances.tolist(), strict=True)) < 1e-5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_verification, "uniforms", Coins(*coins))
        verdicts = [
            verify_block(drafts, distribution, rows, RequestStreams.from_seed(seed))
            for rows in (target_probs(logits, SAMPLED), TargetRows(logits, SAMPLED))
        ]
    assert verdicts[0] == verdicts[1]
    assert close or verdicts[0].accepted == accepted


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(KINDS))
def test_a_greedy_target_is_served_alike(seed: int, kind: str) -> None:
    drafts, distribution, logits = a_block(seed, kind)
    rows = target_probs(logits, SamplingParams())
    assert verify_block(drafts, distribution, rows, RequestStreams.from_seed(seed)) == verify_greedy(
        drafts, logits.argmax(1)
    )


def test_randomness_is_used_in_fixed_amounts() -> None:
    for seed in range(8):
        drafts, distribution, logits = a_block(seed, "dense")
        streams, counted = RequestStreams.from_seed(seed), RequestStreams.from_seed(seed)
        verify_block(drafts, distribution, TargetRows(logits, SAMPLED), streams)
        uniforms(3, counted.accept)
        uniforms(1, counted.residual)
        for name in ("propose", "accept", "residual"):
            assert torch.equal(getattr(streams, name).get_state(), getattr(counted, name).get_state())


def test_nothing_to_verify_is_plain_decoding() -> None:
    none = torch.empty(0, dtype=torch.int64)
    row = torch.tensor([[0.0, 0.0, 1.0]])
    assert block_coin_chances(none, None, row).shape == (0,)
    assert verify_block(none, None, row, RequestStreams.from_seed(0)) == Verdict(accepted=0, next_token=2)


def test_a_draft_of_probability_zero_never_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any after it, on coins of zero; and a coin at the edge of certainty does not fell a certain draft."""
    monkeypatch.setattr(block_verification, "uniforms", Coins(0.0, 0.0))
    rows = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    draft = DraftDistribution(torch.full((2, 2), 0.5))
    assert verify_block(torch.tensor([0, 1]), draft, rows, RequestStreams.from_seed(0)).accepted == 0
    monkeypatch.setattr(block_verification, "uniforms", Coins(1 - 2**-53, 1 - 2**-53))
    same = torch.full((3, 2), 0.5)
    assert verify_block(torch.tensor([0, 1]), draft, same, RequestStreams.from_seed(0)).accepted == 2
    assert (coin_chance(1.0, 0.0), coin_chance(0.0, 0.0), coin_chance(0.5, 0.0)) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", ["dense", "candidates"])
def test_verify_block_samples_what_the_enumeration_says(kind: str) -> None:
    target, drafter, prefix = TableTarget(vocab_size=3), TableDrafter(vocab_size=3, block=3, kind=kind), (0, 1)
    exact = ExactVerification(lambda p: target.next_probs(p, SAMPLED), drafter, "block")
    due = ExactRounds(exact, FixedScheduler()).outcomes(prefix)
    streams, count = RequestStreams.from_seed(5), 1000
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(count):
        proposal = drafter.propose(prefix, streams.propose)
        drafts = tuple(proposal.draft_tokens.tolist())
        rows = torch.stack([exact.next_probs(prefix + drafts[:k]) for k in range(4)])
        verdict = verify_block(proposal.draft_tokens, proposal.distribution, rows, streams)
        seen[(*drafts[: verdict.accepted], verdict.next_token)] += 1
    assert set(seen) <= set(due), "it committed what the rule cannot"
    common = [commit for commit in due if due[commit] * count >= 8]
    observed, expected = [float(seen[c]) for c in common], [due[c] * count for c in common]
    if count - sum(expected) > 1e-3:
        observed.append(count - sum(observed))
        expected.append(count - sum(expected))
    assert chi_square_p(observed, expected) > 1e-3
