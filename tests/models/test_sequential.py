"""The sequential stage: its three forms draw the same tokens from the same distributions, and report those exactly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.core import DraftDistribution, SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import target_probs
from dspark.models import native
from dspark.models.heads import SequentialHead, make_head, sequential_logits
from dspark.models.sequential import BlockAsk, ConfidenceWeights, Drafted, SequentialStage, _library

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


@dataclass
class One:
    """What was drawn for one request."""

    token_ids: Tensor
    prev_ids: Tensor
    distribution: DraftDistribution | None


def one(drafted: Drafted, i: int, block: int) -> One:
    """Request ``i`` of several, whose block has ``block`` positions."""
    distribution = None
    if drafted.probs is not None:
        ids = None if drafted.support_ids is None else drafted.support_ids[i, :block]
        distribution = DraftDistribution(drafted.probs[i, :block], ids)
    return One(drafted.token_ids[i, :block], drafted.prev_ids[i, :block], distribution)


def ask(base: Tensor, sampling: SamplingParams, seed: int = 3, anchor: int = 1) -> BlockAsk:
    return BlockAsk(base=base, anchor=anchor, sampling=sampling, generator=torch.Generator().manual_seed(seed))


def run(stage: SequentialStage, base: Tensor, hidden: Tensor, sampling: SamplingParams, seed: int = 3) -> One:
    return one(stage.draft([ask(base, sampling, seed)], hidden), 0, len(base))


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
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("looks_back", [False, True])
def test_confidences_are_the_plain_forms(looks_back: bool, half: bool) -> None:
    """Blocks of several sizes in one call; nothing behind their ends."""
    random = torch.Generator().manual_seed(1)
    states, made = 37, head("vanilla", 500, 500, 19)
    weight = torch.randn(states + 19 * looks_back, generator=random)
    of = ConfidenceWeights(weight=weight, bias=0.3, looks_back=looks_back)
    hidden = torch.randn(9, states, generator=random)
    hidden = hidden.bfloat16() if half else hidden
    base = torch.randn(9, 500, generator=random)
    asks = [ask(part, SAMPLED, seed, anchor=seed) for seed, part in enumerate(base.split([4, 1, 4]))]
    found = []
    for fused in (False, True):
        stage = SequentialStage(made, None, width=500, candidates=12, device=CPU, native=fused, confidence=of)
        for one_ask in asks:
            one_ask.generator.manual_seed(7)
        found.append(stage.draft(asks, hidden, block=5))
    plain, compiled = found
    assert torch.equal(plain.token_ids, compiled.token_ids)
    assert plain.confidence is not None and compiled.confidence is not None
    torch.testing.assert_close(torch.from_numpy(compiled.confidence), torch.from_numpy(plain.confidence))
    assert ((compiled.confidence > 0) == [[k < size for k in range(5)] for size in (4, 1, 4)]).all()


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
        stage.draft([BlockAsk(base=base[:4], anchor=0, sampling=SAMPLED, generator=generator)], hidden[:4])
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
        asked = BlockAsk(base=base[:1], anchor=1, sampling=SAMPLED, generator=generator)
        drafted = stage.draft([asked], hidden[:1])
        counts[drafted.token_ids[0, 0]] += 1
    row = one(drafted, 0, 1).distribution.dense(0, 50)
    spread = (row * (1 - row) / 4000).sqrt()
    assert ((counts / 4000 - row).abs() <= 4.5 * spread).all()


FILTERED = [
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.5, top_p=0.6),
    SamplingParams(temperature=1.2, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=9.0, top_p=0.01),
]


@compiler
@pytest.mark.parametrize("levels", [None, 5])
@pytest.mark.parametrize("sampling", FILTERED)
def test_filters_are_the_plain_forms(sampling: SamplingParams, levels: int | None) -> None:
    """Also where many candidates are equally likely: ``levels`` distinct logits."""
    for seed in range(8):
        base, hidden = inputs(600, seed)
        if levels is not None:
            base = torch.stack([row[torch.randperm(600)] for row in base])
            base = (base + 6).div(12.0001 / levels).floor() + torch.arange(600) * 1e-9  # equal, in fp32
        plain, fused = both("vanilla" if levels is None else None, 600, 600, 30)
        ours, theirs = run(fused, base, hidden, sampling, seed), run(plain, base, hidden, sampling, seed)
        if levels is None:
            assert torch.equal(ours.distribution.token_ids, theirs.distribution.token_ids)
            assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.distribution.probs, theirs.distribution.probs, rtol=2e-4, atol=1e-6)


@compiler
def test_other_heads_and_the_full_vocabulary_go_the_plain_way() -> None:
    for kind in ("gated", "rnn"):
        assert not both(kind, 60, 60, 9)[1].native
    assert not both("vanilla", 60, 60, 0)[1].native


@compiler
@pytest.mark.parametrize("width", [700, 350])
def test_logits_in_bfloat16_are_read_as_they_are(width: int) -> None:
    """Their float32 copies give the same candidates, draws and probabilities, bit for bit."""
    stage = both("vanilla", 700, width, 40)[1]
    for seed in range(4):
        base, hidden = inputs(width, seed)
        half = base.bfloat16()
        ours, theirs = run(stage, half, hidden, SAMPLED, seed), run(stage, half.float(), hidden, SAMPLED, seed)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.distribution.token_ids, theirs.distribution.token_ids)
        assert torch.equal(ours.distribution.probs, theirs.distribution.probs)


MIXED = [GREEDY, SAMPLED, *FILTERED, GREEDY, SamplingParams(temperature=0.3)]


@pytest.mark.parametrize("candidates", [0, 12])
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=compiler)])
@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_draft_as_each_alone(kind: str | None, fused: bool, candidates: int) -> None:
    """Of unlike lengths, temperatures and filters; each from its own generator."""
    stage = both(kind, 700, 350, candidates)[fused]
    counts = [1 + i % BLOCK for i in range(len(MIXED))]
    parts = [inputs(350, seed, count) for seed, count in enumerate(counts)]
    asks = [ask(base, MIXED[i], seed=i, anchor=i) for i, (base, _) in enumerate(parts)]
    together = stage.draft(asks, torch.cat([hidden for _, hidden in parts]), block=BLOCK + 2)
    assert together.token_ids.shape == (len(MIXED), BLOCK + 2)
    for i, (base, hidden) in enumerate(parts):
        alone = one(stage.draft([ask(base, MIXED[i], seed=i, anchor=i)], hidden), 0, counts[i])
        found = one(together, i, counts[i])
        assert torch.equal(found.token_ids, alone.token_ids) and torch.equal(found.prev_ids, alone.prev_ids)
        assert not together.token_ids[i, counts[i] :].any()
        fresh = ask(base, MIXED[i], seed=i).generator
        torch.rand(0 if MIXED[i].greedy else counts[i], dtype=torch.float64, generator=fresh)
        assert torch.equal(asks[i].generator.get_state(), fresh.get_state())
        if not MIXED[i].greedy:
            for k in range(counts[i]):
                torch.testing.assert_close(found.distribution.dense(k, 700), alone.distribution.dense(k, 700))


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=compiler)])
def test_logits_that_leave_nothing_fail_their_request_alone(fused: bool) -> None:
    stage = both(None, 600, 600, 9)[fused]
    base, hidden = inputs(600)
    broken = base.clone()
    broken[2] = float("nan")
    asks = [ask(part, SAMPLED) for part in (base, broken, base)]
    drafted = stage.draft(asks, hidden.repeat(3, 1))
    assert drafted.failed == {1} and not drafted.token_ids[1].any()
    alone = stage.draft(asks[:1], hidden)  # its generator has moved on: another block, from the same distribution
    assert not alone.failed
    for i in (0, 2):
        assert torch.equal(drafted.probs[i], alone.probs[0])
    nothing = stage.draft([], hidden[:0])
    assert nothing.token_ids.shape == (0, 0) and not nothing.failed


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
