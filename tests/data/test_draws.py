"""A token per row: the fast draws are the plain ones, every token has its share, and odd logits are refused."""

from __future__ import annotations

import pytest
import torch
from fakes import chi_square_p
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.data import draws
from dspark.data.draws import draw_tokens
from dspark.errors import RequestError
from dspark.maths.sampling import blockwise_inverse_cdf, inverse_cdf, target_probs

SAMPLINGS = {
    "warm": SamplingParams(temperature=1.3),
    "cold": SamplingParams(temperature=0.2),
    "top_k": SamplingParams(temperature=1.5, top_k=40),
    "top_p": SamplingParams(temperature=1.2, top_p=0.9),
    "all_but_little": SamplingParams(temperature=2.5, top_p=0.999),
    "min_p": SamplingParams(temperature=1.5, min_p=0.02),
    "filtered": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01),
    "greedy": SamplingParams(),
}
NATIVE = pytest.param(True, marks=pytest.mark.skipif(draws._library(True) is None, reason="no C compiler"))


def test_the_compiled_form_is_tested_here() -> None:
    """Where a compiler is, the native parameters must not be skipped."""
    from dspark.models import native

    assert (native._compiler() is None) == (draws._library(False) is None)


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize("vocab", [3, 257, 5000])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fast_draws_are_the_plain_ones_up_to_rounding(
    sampling: SamplingParams, vocab: int, native: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(150, vocab, generator=random).mul_(3).to(dtype)
    logits[::3, ::2] = float("-inf")
    u = torch.rand(150, dtype=torch.float64, generator=random)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    kept = logits.clone()
    fast = draw_tokens(logits, sampling, u, native=native)
    plain = draw_tokens(logits, sampling, u, fast=False)
    assert torch.equal(logits, kept)
    assert int((fast != plain).sum()) <= 2
    probs = target_probs(logits, sampling).double()
    assert bool((probs.gather(1, fast[:, None]) > 0).all())
    if not sampling.greedy:
        upper = (probs / probs.sum(1, keepdim=True)).cumsum(1).gather(1, fast[:, None])[:, 0]
        lower = upper - probs.gather(1, fast[:, None])[:, 0]
        assert bool(((u >= lower - 1e-6) & (u <= upper + 1e-6)).all())


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
    ],
    ids=["all", "top_k", "top_p"],
)
def test_filters_break_ties_alike(sampling: SamplingParams, native: bool) -> None:
    """Equal logits at the edge: top-k keeps all of them, top-p the lower ids."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.5, 1.0]]).repeat(500, 100)[:, :601]
    u = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    fast, plain = draw_tokens(logits, sampling, u, native=native), draw_tokens(logits, sampling, u, fast=False)
    assert torch.equal(fast, plain)


@pytest.mark.parametrize("native", [False, NATIVE])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.9), SamplingParams(temperature=1.2, top_k=30)])
def test_draws_have_the_distribution(sampling: SamplingParams, native: bool) -> None:
    """20,000 draws from 600 tokens, binned so that every bin is expected often enough."""
    random = torch.Generator().manual_seed(1)
    row = (torch.randn(600, generator=random) * 2).bfloat16()
    u = torch.rand(20_000, dtype=torch.float64, generator=random)
    drawn = draw_tokens(row.expand(20_000, -1), sampling, u, native=native)
    expected = 20_000 * target_probs(row[None], sampling)[0].double()
    seen = torch.bincount(drawn, minlength=600).double()
    often = expected >= 10
    rest = torch.tensor([float(expected[~often].sum())]), torch.tensor([float(seen[~often].sum())])
    due, got = torch.cat((expected[often], rest[0])), torch.cat((seen[often], rest[1]))
    due, got = (due, got) if due[-1] > 0 else (due[:-1], got[:-1])
    assert chi_square_p(got, due * (got.sum() / due.sum())) > 0.001
    warmer = 20_000 * target_probs(row[None], SamplingParams(temperature=1.4, top_k=sampling.top_k))[0].double()
    other = warmer[often] * (seen[often].sum() / warmer[often].sum())
    assert chi_square_p(seen[often], other) < 1e-6, "a test that cannot fail"


@pytest.mark.parametrize("native", [False, NATIVE])
def test_rows_may_lie_apart_in_memory(native: bool) -> None:
    wide = torch.randn(6, 900, generator=torch.Generator().manual_seed(0))
    u = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature=1.0)
    for view in (wide[::2, 100:700], wide.T[:600].T[:3], wide[:, :3].T):
        assert torch.equal(
            draw_tokens(view, sampling, u, native=native), draw_tokens(view.contiguous(), sampling, u, fast=False)
        )


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.floats(0, 1, exclude_max=True), st.integers(1, 9))
def test_two_levels_find_the_token_of_one(counts: list[int], share: float, block: int) -> None:
    """Whole weights have exact sums, so that the versions may differ at the very edges of tokens only."""
    weights, u = torch.tensor([counts], dtype=torch.float32), torch.tensor([share], dtype=torch.float64)
    if not sum(counts):
        with pytest.raises(RequestError):
            blockwise_inverse_cdf(weights, u, block=block)
        return
    token = int(blockwise_inverse_cdf(weights, u, block=block)[0])
    assert counts[token] > 0
    edge = share * sum(counts)
    if abs(edge - round(edge)) > 1e-9:
        assert token == int(inverse_cdf(weights, u)[0])
    else:
        assert sum(counts[:token]) <= edge + 1e-9 and edge - 1e-9 <= sum(counts[: token + 1])


def test_every_token_gets_exactly_its_share() -> None:
    """1,024 equal weights and the middles of as many equal shares: each token once, in order."""
    u = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    assert blockwise_inverse_cdf(torch.full((1024, 1024), 0.3), u).tolist() == list(range(1024))
    assert blockwise_inverse_cdf(torch.ones(1024, 1024), u - 0.5 / 1024).tolist() == list(range(1024))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_without_a_distribution_are_refused(value: float) -> None:
    logits = torch.zeros(2, 300)
    logits[:, 0 if value < 0 else 280 :] = value
    for form in ({}, {"native": False}, {"fast": False}):
        with pytest.raises(RequestError, match=r"positive and finite"):
            draw_tokens(logits, SamplingParams(temperature=1.0), torch.rand(2, dtype=torch.float64), **form)
