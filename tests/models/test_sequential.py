"""The sequential stage: its three forms draw the same tokens from the same distributions, and report those exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.sampling import target_probs
from dspark.models import native
from dspark.models.heads import SequentialHead, make_head, sequential_logits
from dspark.models.sequential import Drafted, SequentialStage, _library

CPU, BLOCK, HIDDEN = torch.device("cpu"), 6, 8
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8)
KINDS = (None, "vanilla", "gated", "rnn")
compiler = pytest.mark.skipif(native._compiler() is None, reason="needs a C compiler")


def head(kind: str | None, vocab: int, width: int, rank: int = 5) -> SequentialHead | None:
    if kind is None:
        return None
    torch.manual_seed(0)
    made = make_head(kind, vocab_size=vocab, output_size=width, rank=rank, hidden_size=HIDDEN)
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter)
    return made


def names(vocab: int, width: int) -> Tensor | None:
    """Target ids of the draft vocabulary, every other one, or None where it is the whole."""
    return None if width == vocab else torch.arange(width) * (vocab // width)


def run(stage: SequentialStage, base: Tensor, hidden: Tensor, sampling: SamplingParams, seed: int = 3) -> Drafted:
    return stage.draft(base, hidden, 1, sampling=sampling, generator=torch.Generator().manual_seed(seed))


def inputs(width: int, seed: int = 0, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Base logits, no two of a position equal, and states."""
    random = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(width, generator=random) for _ in range(block)])
    return torch.linspace(-6, 6, width)[order], torch.randn(block, HIDDEN, generator=random)


def both(kind: str | None, vocab: int, width: int, candidates: int, rank: int = 5) -> list[SequentialStage]:
    made = head(kind, vocab, width, rank)
    return [
        SequentialStage(made, names(vocab, width), width=width, candidates=candidates, device=CPU, native=fused)
        for fused in (False, True)
    ]


@pytest.mark.parametrize("candidates", [0, 7])
@pytest.mark.parametrize("width", [40, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_those_of_equation_4(kind: str | None, width: int, candidates: int) -> None:
    """Teacher forced on what was drawn, the training form says the same, position by position."""
    made = head(kind, 40, width)
    stage = SequentialStage(made, names(40, width), width=width, candidates=candidates, device=CPU)
    base, hidden = inputs(width)
    drafted = run(stage, base, hidden, SAMPLED)
    logits = base if made is None else sequential_logits(base[None], hidden[None], drafted.prev_ids[None], made)[0]
    if candidates:
        kept = torch.full_like(base, float("-inf"))
        chosen = base.topk(candidates).indices
        logits = kept.scatter(1, chosen, logits.gather(1, chosen))
    expected = torch.zeros(BLOCK, 40)
    ids = names(40, width)
    expected[:, torch.arange(40) if ids is None else ids] = target_probs(logits.detach(), SAMPLED)
    dense = torch.stack([drafted.distribution.dense(k, 40) for k in range(BLOCK)])
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-6)
    assert drafted.prev_ids.tolist() == [1, *drafted.token_ids[:-1].tolist()]
    assert (drafted.distribution.of(drafted.token_ids) > 0).all()


@compiler
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.05), SamplingParams(temperature=9.0)]
)
@pytest.mark.parametrize(("vocab", "width"), [(50, 50), (1000, 1000), (6000, 3000), (9001, 9001)])
@pytest.mark.parametrize("kind", [None, "vanilla"])
def test_the_fused_form_draws_what_the_plain_one_draws(
    kind: str | None, vocab: int, width: int, sampling: SamplingParams
) -> None:
    for rank, candidates in ((5, 1), (16, 3), (37, 48)):
        plain, fused = both(kind, vocab, width, candidates, rank)
        assert fused.native and not plain.native
        for seed in range(5):
            base, hidden = inputs(width, seed)
            ours, theirs = run(fused, base, hidden, sampling, seed), run(plain, base, hidden, sampling, seed)
            assert torch.equal(ours.token_ids, theirs.token_ids)
            assert torch.equal(ours.prev_ids, theirs.prev_ids)
            if sampling.greedy:
                assert ours.distribution is None and theirs.distribution is None
                continue
            assert torch.equal(ours.distribution.token_ids, theirs.distribution.token_ids)
            torch.testing.assert_close(ours.distribution.probs, theirs.distribution.probs, rtol=2e-4, atol=1e-6)


@compiler
@settings(max_examples=60, deadline=None)
@given(st.integers(300, 900), st.integers(1, 40), st.integers(0, 10**6))
def test_candidates_are_the_largest_whatever_the_ties(width: int, candidates: int, seed: int) -> None:
    """Logits of few distinct values: the sets may differ in which of the equals they hold, their logits may not."""
    base = torch.randint(-4, 4, (2, width), generator=torch.Generator().manual_seed(seed)).float()
    stage = both(None, width, width, candidates)[1]
    drafted = run(stage, base, torch.zeros(2, HIDDEN), SAMPLED)
    support = drafted.distribution.token_ids
    assert torch.equal(base.gather(1, support), base.topk(candidates).values)
    assert all(len(set(row)) == candidates for row in support.tolist())


@compiler
def test_both_forms_consume_one_uniform_per_draft() -> None:
    base, hidden = inputs(60)
    left = []
    for stage in both("vanilla", 60, 60, 9):
        generator = torch.Generator().manual_seed(5)
        stage.draft(base[:4], hidden[:4], 0, sampling=SAMPLED, generator=generator)
        left.append(torch.rand(3, dtype=torch.float64, generator=generator))
    generator = torch.Generator().manual_seed(5)
    torch.rand(4, dtype=torch.float64, generator=generator)
    left.append(torch.rand(3, dtype=torch.float64, generator=generator))
    assert torch.equal(left[0], left[2]) and torch.equal(left[1], left[2])


@compiler
def test_frequencies_are_the_reported_probabilities() -> None:
    stage = both("vanilla", 50, 50, 6)[1]
    base, hidden = inputs(50)
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(50)
    for _ in range(4000):
        drafted = stage.draft(base[:1], hidden[:1], 1, sampling=SAMPLED, generator=generator)
        counts[drafted.token_ids[0]] += 1
    row = drafted.distribution.dense(0, 50)
    spread = (row * (1 - row) / 4000).sqrt()
    assert ((counts / 4000 - row).abs() <= 4.5 * spread).all()


@compiler
def test_filters_and_other_heads_go_the_plain_way() -> None:
    base, hidden = inputs(60)
    stage = both("vanilla", 60, 60, 9)[1]
    filtered = run(stage, base, hidden, SamplingParams(temperature=1.0, top_k=2))
    assert ((filtered.distribution.probs > 0).sum(1) == 2).all()
    for kind in ("gated", "rnn"):
        assert not both(kind, 60, 60, 9)[1].native
    assert not both("vanilla", 60, 60, 0)[1].native


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=compiler)])
def test_logits_that_leave_nothing_are_refused(fused: bool) -> None:
    stage = both(None, 600, 600, 9)[fused]
    base, hidden = inputs(600)
    base[2] = float("nan")
    with pytest.raises(RequestError):
        run(stage, base, hidden, SAMPLED)


def test_without_a_compiler_the_plain_form_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/does/not/exist")
    _library.cache_clear()
    assert not both("vanilla", 60, 60, 9)[1].native
    _library.cache_clear()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("DSPARK_NATIVE", "0")
    assert not both("vanilla", 60, 60, 9)[1].native


def test_a_negative_number_of_candidates_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidates is -1"):
        SequentialStage(None, None, width=4, candidates=-1, device=CPU)
