"""States as bytes: exact where promised, and never farther off than promised."""

from __future__ import annotations

import pytest
import torch

from dspark.data.cache_rows import ENCODINGS, decode_rows, encode_rows, encoding_named, relative_errors
from dspark.errors import ConfigError, DataError


def rows_with_outliers() -> torch.Tensor:
    """Rows as in language models: a few channels a thousand times larger than the others, and a row of zeros."""
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    rows[:, 3] *= 300
    rows[4] = 0
    return rows


def there_and_back(rows: torch.Tensor, name: str) -> torch.Tensor:
    data = encode_rows(rows, ENCODINGS[name])
    assert len(data) == rows.shape[0] * ENCODINGS[name].row_bytes(rows.shape[1])
    return decode_rows(bytearray(data), *rows.shape, ENCODINGS[name])


def test_what_fits_is_exact() -> None:
    rows = rows_with_outliers()
    assert torch.equal(there_and_back(rows, "float32"), rows)
    assert torch.equal(there_and_back(rows.bfloat16(), "bfloat16"), rows.bfloat16())
    assert torch.equal(there_and_back(rows.bfloat16(), "float32"), rows.bfloat16().float())


def test_no_value_is_farther_off_than_its_encoding_says() -> None:
    rows = rows_with_outliers()
    largest = rows.abs().amax(1, keepdim=True)
    eighth = there_and_back(rows, "float8_e4m3").float()
    assert ((eighth - rows).abs() <= torch.maximum(rows.abs() * 2**-4, largest * 2**-17)).all()
    integer = there_and_back(rows, "int8").float()
    assert ((integer - rows).abs() <= largest / 254 * 1.001 + rows.abs() * 2**-8).all()
    assert not bool(eighth[4].any()) and not bool(integer[4].any())


def test_outlier_channels_cost_int8_more_than_float8() -> None:
    rows = rows_with_outliers()[[0, 1, 2]]
    small = [i for i in range(64) if i != 3]
    errors = {n: relative_errors(there_and_back(rows, n)[:, small], rows[:, small]) for n in ("float8_e4m3", "int8")}
    assert (errors["float8_e4m3"] < 0.05).all() and (errors["int8"] > 0.2).all()


def test_float8_codes_times_scales_are_exact_in_bfloat16() -> None:
    rows = there_and_back(rows_with_outliers(), "float8_e4m3")
    assert torch.equal(there_and_back(rows, "float8_e4m3"), rows)


def test_tiny_rows_survive() -> None:
    rows = torch.full((1, 8), 1e-38)
    for name in ENCODINGS:
        assert bool(torch.isfinite(there_and_back(rows, name)).all())


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(DataError, match="not finite"):
        encode_rows(torch.tensor([[1.0, value]]), ENCODINGS[name])


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(ConfigError, match="encoding is 'int4'; supported: float32"):
        encoding_named("int4")
