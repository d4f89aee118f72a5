"""The one-operation RMSNorm equals PyTorch's own, in every dtype and for weights wider than the states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dspark.models.norm import MANY_ROWS, RMSNorm

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 8, MANY_ROWS + 1])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_equals_the_composed_form(dtype: torch.dtype, wide: bool, rows: int, size: float) -> None:
    """The smallest size brings the mean square below eps, the largest is that of a residual stream with outliers."""
    random = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 96, generator=random) * size).to(dtype)
    x[0, 7] *= 50
    weight = torch.randn(96, generator=random).to(torch.float32 if wide else dtype)
    wanted = F.rms_norm(x.double(), (96,), weight.double(), EPS)
    tolerance = 2 * torch.finfo(dtype).eps
    for norm in (RMSNorm(weight, EPS), RMSNorm(weight, EPS, composed=True)):
        result = norm(x)
        assert result.dtype == dtype and result.shape == x.shape
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=1e-6)


def test_a_row_of_weights_per_head() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    wanted = torch.stack([F.rms_norm(x[:, head], (16,), weight[head], EPS) for head in range(3)], 1)
    torch.testing.assert_close(RMSNorm(weight, EPS)(x), wanted)


def test_zeros_stay_finite() -> None:
    assert (RMSNorm(torch.ones(8), EPS)(torch.zeros(2, 8)) == 0).all()
