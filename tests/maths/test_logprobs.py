"""Log-probabilities against the library's, ties by id, and rows without all of the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.maths.logprobs import ROWS_AT_ONCE, log_normalisers, row_logprobs
from dspark.models import native_logprobs, native_verification


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_log_softmax(dtype: torch.dtype) -> None:
    rows = ROWS_AT_ONCE + 3  # more than are taken at once
    logits = (torch.randn(rows, 50, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    chosen = [i % 50 for i in range(rows)]
    exact = logits.double().log_softmax(1)
    for i, found in enumerate(row_logprobs(logits, chosen, top=3)):
        assert found.token_id == chosen[i]
        assert found.logprob == pytest.approx(float(exact[i, chosen[i]]), abs=1e-6)
        assert [logprob for _, logprob in found.top] == pytest.approx(exact[i].topk(3).values.tolist(), abs=1e-6)
        assert all(exact[i, token] == pytest.approx(logprob, abs=1e-6) for token, logprob in found.top)
    assert row_logprobs(logits, chosen)[0].top == ()


def test_equals_are_ranked_by_id() -> None:
    """Whatever order the library's top-k gives: among equals the lower ids come first, also at the edge."""
    row = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]).repeat(40)[None]
    found = row_logprobs(row, [0], top=90)[0].top
    values = row[0].tolist()
    expected = sorted(range(len(values)), key=lambda token: (-values[token], token))[:90]
    assert [token for token, _ in found] == expected
    assert [token for token, _ in row_logprobs(row, [0], top=1)[0].top] == [1]


def test_every_token_of_a_small_vocabulary_and_none_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    found = row_logprobs(logits, [1], top=20)[0]
    assert found.logprob == -math.inf
    assert found.top == ((0, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))), (1, -math.inf))


def test_nothing_is_lost_far_from_zero() -> None:
    """Sums relative to the largest logit; a certain token has the log-probability 0, never above."""
    logits = torch.tensor([[30_000.0, -30_000.0], [-30_000.0, -30_000.0]])
    assert log_normalisers(logits).tolist() == pytest.approx([30_000.0, -30_000.0 + math.log(2)])
    assert row_logprobs(logits, [0, 1])[0].logprob == 0.0


def test_no_rows() -> None:
    assert row_logprobs(torch.empty(0, 5), [], top=2) == []


@pytest.mark.skipif(native_verification._library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 300, 9001])
def test_the_compiled_form_gives_the_same(vocab: int, dtype: torch.dtype) -> None:
    """The same tokens in the same order, ties included; numbers to a millionth; rows that lie apart in memory."""
    random = torch.Generator().manual_seed(vocab)
    wide = (torch.randn(9, vocab + 30, generator=random) * 5).round(decimals=1).to(dtype)
    wide[:, 20:][:, ::7] = float("-inf")
    logits = wide[:, 10 : vocab + 10]
    chosen = torch.randint(0, vocab, (9,), generator=random).tolist()
    for top in (0, 1, 5, 60, 300):
        plain = row_logprobs(logits, chosen, top=top)
        fast = native_logprobs.row_logprobs(logits, chosen, top=top)
        assert [[token for token, _ in row.top] for row in fast] == [[token for token, _ in row.top] for row in plain]
        assert [row.token_id for row in fast] == chosen
        for mine, other in zip(fast, plain, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-6)
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=1e-6)
    assert native_logprobs.row_logprobs(torch.empty(0, 5), [], top=2) == []


@pytest.mark.skipif(native_verification._library() is None, reason="no C compiler")
def test_a_spoilt_row_spoils_no_other() -> None:
    logits = torch.zeros(3, 40)
    logits[1] = math.nan
    found = native_logprobs.row_logprobs(logits, [0, 0, 0], top=3)
    assert math.isnan(found[1].logprob)
    assert found[0].top == found[2].top and found[0].logprob == pytest.approx(-math.log(40))
