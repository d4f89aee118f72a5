"""Packed products equal plain ones, and the choice of dtype is a measurement made once."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from dspark.models import linear
from dspark.models.linear import Linear, choose_cpu_dtype, filled_rows, packing_available

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_equals_plain(dtype: torch.dtype, rows: int, biased: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(70, 48, generator=random).to(dtype)
    bias = torch.randn(70, generator=random).to(dtype) if biased else None
    x = torch.randn(rows, 48, generator=random).to(dtype)
    fast, plain = Linear(weight, bias), Linear(weight, bias, packed=False)
    assert not plain.packed
    assert fast.packed == packing_available(dtype)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 4 * torch.finfo(dtype).eps
    for product in (fast, plain):
        result = product(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * 20)


def test_falls_back_where_the_operation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_available", lambda dtype: False)
    weight, x = torch.randn(5, 4), torch.randn(2, 4)
    product = Linear(weight)
    assert not product.packed
    torch.testing.assert_close(product(x), x @ weight.T)


def test_availability_is_tried_and_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without the operation, or one whose kernel computes nonsense, gets the plain product."""

    class Broken:
        @staticmethod
        def _reorder_linear_weight(weight: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel")

    class Wrong:
        @staticmethod
        def _reorder_linear_weight(weight: torch.Tensor) -> torch.Tensor:
            return weight

        @staticmethod
        def _linear_pointwise(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
            return torch.zeros(x.shape[0], weight.shape[0])

    for operations in (object(), Broken, Wrong):
        monkeypatch.setattr(torch.ops, "mkldnn", operations)
        assert not packing_available.__wrapped__(torch.float32)


def test_plain_weight_is_kept_on_request_only() -> None:
    weight = torch.randn(6, 4)
    assert Linear(weight, keep_raw=True).weight is weight
    if packing_available(torch.float32):
        with pytest.raises(AssertionError, match="keep_raw"):
            _ = Linear(weight).weight


def test_works_in_inference_mode_and_without() -> None:
    product, x = Linear(torch.randn(6, 4)), torch.randn(3, 4)
    with torch.inference_mode():
        inside = product(x)
    with torch.no_grad():
        torch.testing.assert_close(product(x), inside.clone())


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_cpu_dtype_is_the_one_that_measures_faster(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def products(dtype: torch.dtype, width: int, layers: int):  # type: ignore[no-untyped-def]
        def run() -> None:
            nonlocal clock
            clock += 1.0 if dtype == faster else 2.0

        return run

    monkeypatch.setattr(linear, "_products", products)
    monkeypatch.setattr(linear.time, "perf_counter", lambda: clock)
    assert choose_cpu_dtype.__wrapped__() == faster


def test_cpu_dtype_is_measured_once() -> None:
    first = choose_cpu_dtype(width=32, layers=2)
    assert first in (torch.bfloat16, torch.float32)
    hits = choose_cpu_dtype.cache_info().hits
    assert choose_cpu_dtype(width=32, layers=2) is first
    assert choose_cpu_dtype.cache_info().hits == hits + 1


def test_few_numbers_of_rows_are_multiplied() -> None:
    """A bounded set that grows with the logarithm, and never much more than was asked for."""
    found = [filled_rows(rows) for rows in range(1, 8193)]
    assert all(rows <= filled for rows, filled in zip(range(1, 8193), found, strict=True))
    assert all(filled <= rows * 9 / 8 for rows, filled in zip(range(64, 8193), found[63:], strict=True))
    assert len(set(found[:1024])) == 47 and len(set(found)) == 95
    assert found[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert [filled_rows(filled) for filled in set(found)] == list(set(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_random_numbers_of_rows_leave_few_compiled_products(
    dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    """Counted by the library itself; and rows are those of the plain product all the same."""
    if not packing_available(dtype):
        pytest.skip("no packed products")
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=random).to(dtype)
    product, x = Linear(weight), torch.randn(1000, 48, generator=random).to(dtype)
    counts = torch.randint(1, 1000, (1000,), generator=random).tolist()
    assert len(set(counts)) > 500
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        for rows in counts:
            assert product(x[:rows]).shape == (rows, 64)
        ctypes.CDLL(None).fflush(None)
    made = [line for line in capfd.readouterr().out.splitlines() if "create:cache_miss" in line]
    assert 20 < len(made) <= 2 * 47, "a product and at most one reordering for each number"
    torch.testing.assert_close(product(x[:333]), x[:333] @ weight.T, rtol=0.02, atol=0.05)
