"""The target's distribution against a plain version and the library's; the inverse CDF's edges; the streams."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fakes import chi_square_p
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.maths.sampling import RequestStreams, _keep_nucleus, draw, draw_rows, inverse_cdf, target_probs, uniforms

STREAM_NAMES = ("propose", "accept", "residual")


def plain_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """The rule of `target_probs` in Python floats: a list of kept ids, cut by one filter after the other."""
    peak = max(logits)
    weights = [math.exp((z - peak) / params.temperature) for z in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        last = logits[kept[min(params.top_k, len(kept)) - 1]]
        kept = [i for i in kept if logits[i] >= last]
    mass, before, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if params.top_p < 1.0 and before >= params.top_p * mass:
            break
        nucleus.append(i)
        before += weights[i]
    kept = [i for i in nucleus if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


# Eighths tie often and are exact; top_p with odd decimals keeps the edge away from sums of such weights' rounding.
LOGITS = st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0137, 0.3171, 0.7393, 0.9371, 1.0]),
    min_p=st.sampled_from([0.0, 0.0313, 0.4717]),
)


@settings(deadline=None, max_examples=300)
@given(LOGITS, PARAMS)
def test_target_probs_equal_the_plain_rule(logits: list[float], params: SamplingParams) -> None:
    probs = target_probs(torch.tensor([logits]), params)[0]
    assert probs.tolist() == pytest.approx(plain_probs(logits, params), abs=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.8, min_p=0.02),
    ],
)
def test_target_probs_equal_the_library_warpers(params: SamplingParams) -> None:
    from transformers.generation import logits_process as library

    scores = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3)) * torch.tensor([[0.2, 1, 2, 3, 5, 9]]).T
    ours = target_probs(scores, params)
    chain = [library.TemperatureLogitsWarper(params.temperature)]
    chain += [library.TopKLogitsWarper(params.top_k)] if params.top_k else []
    chain += [library.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    chain += [library.MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warp in chain:
        scores = warp(None, scores)
    theirs = scores.softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-12])
def test_nucleus_does_not_depend_on_how_many_tokens_are_looked_at_first(top_p: float) -> None:
    random = torch.Generator().manual_seed(5)
    flat_to_peaked = torch.randn(8, 3000, generator=random) * torch.logspace(-2, 1, 8)[:, None]
    tied = (torch.randn(4, 3000, generator=random) * 2).round() / 4  # as coarse as bf16 logits: hundreds of ties
    logits = torch.cat([flat_to_peaked, tied, torch.zeros(1, 3000)])
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    results = []
    for head in (1, 64, 1024, 3000):
        results.append(weights.clone())
        _keep_nucleus(results[-1], top_p, head)
    assert all(torch.equal(results[-1], result) for result in results[:-1])
    kept = (results[-1] > 0).sum(1)
    assert kept[-1] == math.ceil(top_p * 3000)
    assert torch.equal(results[-1][-1].nonzero()[:, 0], torch.arange(int(kept[-1])))  # ties: lower ids first


def test_ties_are_kept_as_documented() -> None:
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert (target_probs(row, SamplingParams(temperature=1.0, top_k=2))[0] > 0).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    nucleus = target_probs(row, SamplingParams(temperature=1.0, top_p=0.5))[0]  # each of the equals holds 0.27
    assert (nucleus > 0).tolist() == [False, True, True, False, False]
    assert target_probs(row, SamplingParams(temperature=0.0))[0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_target_probs_leave_logits_alone_and_take_any_float_type() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01)
    target_probs(logits, params)
    assert torch.equal(logits, before)
    half = logits.bfloat16()
    assert torch.equal(target_probs(half, params), target_probs(half.float(), params))


def test_target_probs_survive_extreme_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, float("-inf"), 2e38]])
    assert target_probs(logits, SamplingParams(temperature=1e-3))[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    masked = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    assert target_probs(masked, SamplingParams(temperature=1.0, top_k=3, top_p=0.9))[0].tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("bad", [[float("nan"), 1.0, 0.0], [float("inf"), 1.0, 0.0], [float("-inf")] * 3])
def test_unusable_logits_are_refused_when_drawn_from(bad: list[float], filters: dict[str, float]) -> None:
    probs = target_probs(torch.tensor([bad]), SamplingParams(temperature=1.0, **filters))
    with pytest.raises(RequestError, match="check the logits for nan"):
        draw(probs[0], torch.Generator())


def test_rows_sum_to_one_over_a_large_vocabulary() -> None:
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(1)) * 0.1
    sums = target_probs(logits, SamplingParams(temperature=1.0)).sum(1, dtype=torch.float64)
    assert float((sums - 1).abs().max()) < 1e-6


def test_inverse_cdf_never_takes_a_zero_at_either_end() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.75, 0.0, 0.0]])
    just_under_one = 1.0 - 2.0**-53
    for u, token in [(0.0, 2), (0.25 - 2.0**-40, 2), (0.25, 4), (0.5, 4), (just_under_one, 4), (1.0, 4)]:
        assert inverse_cdf(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [token]
        # unnormalised weights draw the same: 3 has no exact binary reciprocal
        assert inverse_cdf(weights * 3, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=9).filter(any),
    st.one_of(st.sampled_from([0.0, 1.0 - 2.0**-53]), st.floats(0.0, 1.0 - 2.0**-53)),
)
def test_inverse_cdf_brackets_the_uniform(weights: list[float], u: float) -> None:
    row = torch.tensor([weights])
    token = int(inverse_cdf(row, torch.tensor([u], dtype=torch.float64))[0])
    cdf = row[0].double().cumsum(0)
    assert row[0, token] > 0
    assert token == 0 or cdf[token - 1] <= u * cdf[-1]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_draw_refuses_weights_without_a_positive_finite_sum(weights: list[float]) -> None:
    with pytest.raises(RequestError, match=r"weights of a token to draw sum to \["):
        draw(torch.tensor(weights), torch.Generator())


def test_draw_uses_one_uniform_per_token() -> None:
    weights = torch.rand(5, 30, generator=torch.Generator().manual_seed(0))
    one_call, one_by_one, counted = (torch.Generator().manual_seed(7) for _ in range(3))
    assert draw_rows(weights, one_call).tolist() == [draw(row, one_by_one) for row in weights]
    uniforms(5, counted)
    assert torch.equal(one_call.get_state(), one_by_one.get_state())
    assert torch.equal(one_call.get_state(), counted.get_state())


def test_draw_follows_its_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.5, 0.0, 5.5])
    counts = torch.bincount(draw_rows(weights.expand(20_000, 6), torch.Generator().manual_seed(2)), minlength=6)
    assert counts[weights == 0].sum() == 0
    positive = weights > 0
    assert chi_square_p(counts[positive].tolist(), (weights[positive] * 2000).tolist()) > 1e-3


def test_streams_are_numpys_twisters_on_the_children_of_the_seed() -> None:
    streams = RequestStreams.from_seed(1234)
    for name, child in zip(STREAM_NAMES, np.random.SeedSequence(1234).spawn(3), strict=True):
        words = np.random.MT19937(child).random_raw(1401)[1:]  # numpy first hands out one word of the seeded state
        ours = torch.rand(1400, generator=getattr(streams, name))  # fp32: the low 24 bits of a word each
        assert (ours * 2**24).tolist() == (words % 2**24).tolist()


def test_streams_are_reproducible_and_distinct() -> None:
    seeds = [*range(300), -1, 2**32, 2**32 + 1, 2**63, 2**64 + 1]
    starts = []
    for seed in seeds:
        one, two = RequestStreams.from_seed(seed), RequestStreams.from_seed(seed)
        for name in STREAM_NAMES:
            values = uniforms(3, getattr(one, name)).tolist()
            assert values == uniforms(3, getattr(two, name)).tolist()
            starts.append(values[0])
    assert len(set(starts)) == len(starts)


def test_streams_of_a_request_are_jointly_uniform() -> None:
    """4 x 4 x 4 cells of one draw of each stream: a dependence of any pair or of all three would fill them unevenly."""
    streams = RequestStreams.from_seed(0)
    draws = torch.stack([uniforms(32_000, getattr(streams, name)) for name in STREAM_NAMES])
    cells = ((draws * 4).long() * torch.tensor([[16], [4], [1]])).sum(0)
    assert chi_square_p(torch.bincount(cells, minlength=64).tolist(), [500] * 64) > 1e-3


def test_streams_of_adjacent_seeds_are_unrelated() -> None:
    """First draws over consecutive seeds: each stream against itself at the next seed, and against the others."""
    per_seed = [RequestStreams.from_seed(seed) for seed in range(1601)]
    first = torch.stack(
        [torch.cat([uniforms(1, getattr(streams, name)) for streams in per_seed]) for name in STREAM_NAMES]
    )
    for a in range(3):
        for b in range(3):
            cells = (first[a, :-1] * 4).long() * 4 + (first[b, 1:] * 4).long()
            assert chi_square_p(torch.bincount(cells, minlength=16).tolist(), [100] * 16) > 1e-4
