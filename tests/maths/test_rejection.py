"""The rule by hand, the exact distribution of rounds, and `verify` itself against the enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import ExactRounds, ExactVerification, TableDrafter, TableTarget, chi_square_p, target_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import DraftDistribution, SamplingParams
from dspark.maths import rejection
from dspark.maths.rejection import Verdict, acceptance_probs, residual_probs, residual_weights, verify, verify_greedy
from dspark.maths.sampling import RequestStreams, target_probs, uniforms
from dspark.maths.scheduling import FixedScheduler, GreedyScheduler, Scheduler, ThresholdScheduler

TARGET = TableTarget(vocab_size=4)
KINDS = ["dense", "candidates", "certain"]
SCHEDULERS: list[Scheduler] = [
    *(FixedScheduler(length) for length in (0, 1, 2, None)),
    *(ThresholdScheduler(threshold) for threshold in (0.3, 0.6)),
    GreedyScheduler(torch.tensor([0.0, 1.0, 0.8, 0.6])),
    GreedyScheduler(torch.tensor([0.0, 1.0, 0.62, 0.6])),  # a cliff at two tokens, then flat: what tempts to look ahead
]
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3, top_p=0.9),
    SamplingParams(temperature=0.0),
]


def table_drafter(kind: str) -> TableDrafter:
    return TableDrafter(vocab_size=4, block=2, kind=kind)


def verification(params: SamplingParams, kind: str) -> ExactVerification:
    return ExactVerification(lambda prefix: TARGET.next_probs(prefix, params), table_drafter(kind))


def exact_rounds(params: SamplingParams, kind: str, scheduler: Scheduler) -> ExactRounds:
    return ExactRounds(verification(params, kind), scheduler)


def worst_gap(exact: ExactRounds, *, rounds: int, horizon: int) -> float:
    """Largest difference between the joint distribution of drafted and undrafted text after a fixed prompt."""
    drafted = exact.output((0, 1), rounds=rounds, horizon=horizon)
    return float(np.abs(drafted - target_chain((0, 1), exact.next_probs, horizon)).max())


@pytest.mark.parametrize("params", PARAMS, ids=["T=1", "filters", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_three_rounds_are_distributed_as_the_target(params: SamplingParams, kind: str) -> None:
    shared = verification(params, kind)
    for scheduler in SCHEDULERS:
        exact = ExactRounds(shared, scheduler)
        assert worst_gap(exact, rounds=1, horizon=3) < 1e-6, scheduler
        assert worst_gap(exact, rounds=3, horizon=4) < 1e-6, scheduler


def test_the_schedulers_of_the_enumeration_do_choose_differently() -> None:
    """Or exactness for each of them would say little: every adaptive one takes all lengths from 0 to the block."""
    drafter = table_drafter("dense")
    proposals = [drafter.proposal_of((a, b), (c, 0)) for a in range(4) for b in range(4) for c in range(4)]
    for scheduler in SCHEDULERS[4:7]:
        assert {scheduler.choose(proposal, 2) for proposal in proposals} == {0, 1, 2}, scheduler


@pytest.mark.parametrize("kind", KINDS)
def test_the_enumeration_sees_a_residual_drawn_from_the_target(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tempting shortcut "after a rejection draw from p" is biased, and the oracle must notice."""
    monkeypatch.setattr(rejection, "residual_probs", lambda target_row, draft_row, *, share: target_row.double())
    assert worst_gap(exact_rounds(PARAMS[0], kind, FixedScheduler(None)), rounds=1, horizon=3) > 1e-2


def test_the_rule_by_hand() -> None:
    target_rows = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    draft = DraftDistribution(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.3, 0.2]]))
    assert acceptance_probs(torch.tensor([0, 0]), draft, target_rows).tolist() == pytest.approx([1.0, 0.2])
    assert acceptance_probs(torch.tensor([2, 1]), draft, target_rows).tolist() == pytest.approx([0.0, 1.0])
    assert acceptance_probs(torch.tensor([1, 2]), None, target_rows).tolist() == pytest.approx([0.3, 0.3])
    assert residual_probs(target_rows[0], draft.probs[0]).tolist() == pytest.approx([0.8, 0.2, 0.0], abs=1e-6)
    assert residual_probs(target_rows[1], draft.probs[1]).tolist() == pytest.approx([0.0, 0.75, 0.25], abs=1e-6)
    one_hot = rejection.draft_row(0, torch.tensor([1]), None, vocab_size=3)
    assert residual_probs(target_rows[1], one_hot).tolist() == pytest.approx([0.25, 0.0, 0.75])


def test_a_residual_of_rounding_noise_gives_way_to_the_target() -> None:
    row = torch.tensor([0.25, 0.5, 0.25])
    assert residual_probs(row, row).tolist() == row.tolist()
    nearly = row.double() - torch.tensor([9e-9, 0.0, 0.0], dtype=torch.float64)
    assert residual_probs(row, nearly).tolist() == pytest.approx(row.tolist())
    further = row.double() - torch.tensor([2e-8, 0.0, 0.0], dtype=torch.float64)
    assert residual_probs(row, further).tolist() == pytest.approx([1.0, 0.0, 0.0])


class ScriptedCoins:
    """Stands in for `uniforms`: `accept` reads from a script; to be checked at the edges no generator reaches."""

    def __init__(self, *coins: float) -> None:
        self.coins = torch.tensor(coins, dtype=torch.float64)

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        return self.coins[:count]


def test_a_coin_of_zero_does_not_save_a_draft_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniforms", ScriptedCoins(0.0, 0.0))
    rows = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    draft = DraftDistribution(torch.full((2, 2), 0.5))
    verdict = verify(torch.tensor([0, 1]), draft, rows, RequestStreams.from_seed(0))
    assert verdict == Verdict(accepted=0, next_token=1)


def test_a_draft_likelier_under_the_target_always_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniforms", ScriptedCoins(1.0 - 2.0**-53, 0.5))
    rows = torch.tensor([[0.5, 0.5], [0.2, 0.8], [1.0, 0.0]])
    draft = DraftDistribution(torch.tensor([[0.5, 0.5], [0.6, 0.4]]))
    streams = RequestStreams.from_seed(0)
    assert verify(torch.tensor([1, 1]), draft, rows, streams) == Verdict(accepted=2, next_token=0)
    # p/q = 1/3 is under the second coin: the first rejection ends the round, with the residual's only token
    assert verify(torch.tensor([1, 0]), draft, rows, streams) == Verdict(accepted=1, next_token=1)


def test_later_drafts_do_not_stand_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniforms", ScriptedCoins(0.9, 0.0, 0.0))
    rows = torch.tensor([[0.5, 0.5]] * 4)
    verdict = verify(torch.tensor([0, 0, 0]), None, rows, RequestStreams.from_seed(0))
    assert verdict == Verdict(accepted=0, next_token=1)


@pytest.mark.parametrize("seed", range(8))
def test_randomness_is_used_in_fixed_amounts(seed: int) -> None:
    """One uniform per verified draft and one for the closing token, whatever is accepted; none to propose."""
    drafter, streams, counted = table_drafter("dense"), RequestStreams.from_seed(seed), RequestStreams.from_seed(seed)
    proposal = drafter.propose((0, 1), torch.Generator().manual_seed(seed))
    rows = torch.stack([TARGET.next_probs((0, 1, *proposal.draft_tokens[:k].tolist()), PARAMS[0]) for k in range(3)])
    verify(proposal.draft_tokens, proposal.distribution, rows, streams)
    uniforms(2, counted.accept)
    uniforms(1, counted.residual)
    for name in ("propose", "accept", "residual"):
        assert torch.equal(getattr(streams, name).get_state(), getattr(counted, name).get_state())


def test_nothing_to_verify_is_plain_decoding() -> None:
    row = torch.tensor([[0.0, 0.0, 1.0]])
    none = torch.empty(0, dtype=torch.int64)
    assert verify(none, None, row, RequestStreams.from_seed(0)) == Verdict(accepted=0, next_token=2)
    assert verify_greedy(none, torch.tensor([2])) == Verdict(accepted=0, next_token=2)


def test_a_longer_distribution_is_cut_to_the_scheduled_drafts() -> None:
    drafter = TableDrafter(vocab_size=4, block=3, kind="candidates")
    proposal = drafter.propose((0, 1), torch.Generator().manual_seed(0))
    rows = torch.stack([TARGET.next_probs((0, 1, *proposal.draft_tokens[:k].tolist()), PARAMS[0]) for k in range(4)])
    whole = acceptance_probs(proposal.draft_tokens, proposal.distribution, rows)
    assert torch.equal(acceptance_probs(proposal.draft_tokens[:1], proposal.distribution, rows[:2]), whole[:1])


def test_a_draft_outside_its_own_distribution_is_our_mistake() -> None:
    draft = DraftDistribution(torch.tensor([[0.5, 0.5]]), torch.tensor([[2, 0]]))
    with pytest.raises(AssertionError, match="probability 0 in the distribution"):
        acceptance_probs(torch.tensor([1]), draft, torch.full((2, 3), 1 / 3))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.sampled_from([*KINDS, "reduced"]), st.sampled_from([1.0, 0.7, 0.05]))
def test_the_residual_as_it_is_drawn_from_is_the_stated_one(seed: int, kind: str, share: float) -> None:
    """`verify` draws from fp32 weights, the draft on its own support; the rule is stated in float64 and spread out."""
    drafter = TableDrafter(vocab_size=5, block=2, kind=kind, seed=seed)
    proposal = drafter.propose((0, 1), torch.Generator().manual_seed(seed))
    row = torch.randn(5, generator=torch.Generator().manual_seed(seed)).softmax(0)
    weights = residual_weights(row, 1, proposal.draft_tokens, proposal.distribution, share=share)
    draft_row = rejection.draft_row(1, proposal.draft_tokens, proposal.distribution, vocab_size=5)
    stated = residual_probs(row, draft_row, share=share)
    mass = float((share * row.double() - draft_row.double()).clamp(min=0).sum())
    drawn = weights.double() / weights.double().sum()
    assert float((drawn - stated).abs().max()) * mass < 1e-7  # a residual is reached with a chance of its mass


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_greedy_form_equals_the_general_rule(seed: int, kind: str) -> None:
    random = torch.Generator().manual_seed(seed)
    drafter = TableDrafter(vocab_size=3, block=3, kind=kind, seed=seed)
    proposal = drafter.propose((0,), random)
    logits = torch.randn(4, 3, generator=random)
    one_hot = target_probs(logits, SamplingParams(temperature=0.0))
    general = verify(proposal.draft_tokens, proposal.distribution, one_hot, RequestStreams.from_seed(seed))
    assert general == verify_greedy(proposal.draft_tokens, logits.argmax(1))


def sampled_rounds(kind: str, streams: RequestStreams, count: int) -> dict[tuple[int, ...], int]:
    """How often each commit comes out of ``count`` rounds of drafting and verifying after one fixed prefix."""
    drafter, prefix = table_drafter(kind), (0, 1)
    rows = {
        drafts: TARGET.next_probs((*prefix, *drafts), PARAMS[0])
        for drafts in [(), *((a,) for a in range(4)), *((a, b) for a in range(4) for b in range(4))]
    }
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(count):
        proposal = drafter.propose(prefix, streams.propose)
        drafts = tuple(proposal.draft_tokens.tolist())
        target_rows = torch.stack([rows[drafts[:k]] for k in range(3)])
        verdict = verify(proposal.draft_tokens, proposal.distribution, target_rows, streams)
        commit = (*drafts[: verdict.accepted], verdict.next_token)
        counts[commit] = counts.get(commit, 0) + 1
    return counts


def fit(kind: str, streams: RequestStreams, count: int) -> float:
    """p-value of sampled rounds under their enumeration; rare commits share a cell."""
    seen = sampled_rounds(kind, streams, count)
    due = exact_rounds(PARAMS[0], kind, FixedScheduler(None)).outcomes((0, 1))
    assert all(due.get(commit, 0.0) > 0 for commit in seen), "verify committed what the rule cannot"
    common = [commit for commit in due if due[commit] * count >= 8]
    observed = [float(seen.get(commit, 0)) for commit in common]
    expected = [due[commit] * count for commit in common]
    if count - sum(expected) > 1e-3:
        observed.append(count - sum(observed))
        expected.append(count - sum(expected))
    return chi_square_p(observed, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_samples_what_the_enumeration_says(kind: str) -> None:
    assert fit(kind, RequestStreams.from_seed(11), 1600) > 1e-3


def test_one_set_of_uniforms_for_all_roles_is_detected() -> None:
    """Positive control: three generators in one state make the coin of a draft the very uniform that drew it."""
    shared = RequestStreams(**{role: torch.Generator().manual_seed(11) for role in ("propose", "accept", "residual")})
    assert fit("dense", shared, 1600) < 1e-6


def test_the_table_target_answers_from_its_memory() -> None:
    """The oracle of the loop's tests: chunks, ragged rows and rollback give the logits of the text that is left."""
    params, memory = SamplingParams(temperature=1.0), TARGET.new_memory(rows=2, max_len=16)
    TARGET.forward(torch.tensor([0, 1, 2, 3, 3]), memory, rows=(0, 1), counts=(3, 2))
    memory.rollback(0, 1)
    out = TARGET.forward(torch.tensor([3, 1, 2]), memory, rows=(1, 0), counts=(1, 2), taps=(-1, 4))
    assert memory.lengths == [3, 3] and out.logits is not None and out.features is not None
    expected = [TARGET.next_probs(text, params) for text in [(3, 3, 3), (0, 1), (0, 1, 2)]]
    torch.testing.assert_close(target_probs(out.logits, params), torch.stack(expected))
    torch.testing.assert_close(out.logits, out.final @ TARGET.head_weight().T)
    assert out.features.shape == (3, 2 * TARGET.info.hidden_size)
    memory.rollback(0, 1)
    memory.rollback(1, 2)
    last = TARGET.forward(torch.tensor([3, 1, 2]), memory, rows=(1, 0), counts=(1, 2), last_only=True)
    assert last.logits is not None
    torch.testing.assert_close(last.logits, out.logits[[0, 2]])
