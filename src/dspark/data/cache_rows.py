"""Rows of states as bytes: as they are, or smaller, with a scale per row and a loss that can be measured.

| encoding    | bytes of a row of d   | what is lost                                                                 |
|-------------|-----------------------|------------------------------------------------------------------------------|
| float32     | 4 d                   | nothing                                                                      |
| bfloat16    | 2 d                   | nothing of a bfloat16 target; 2**-9 of each value of a wider one             |
| float8_e4m3 | d + 4                 | 2**-4 of each value, and values about 2**-17 below the row's largest         |
| int8        | d + 4                 | 1/254 of the row's largest value, of every value: outlier channels cost dear |

A row is one position's state of one layer: layers differ in magnitude by orders, so they do not share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How rows are stored."""

    name: str
    dtype: torch.dtype  # of the codes
    limit: float = 0.0  # largest code; 0 stores values as they are, without a scale

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of ``width`` values, its scale included."""
        return width * self.dtype.itemsize + (4 if self.limit else 0)


ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding(name="float32", dtype=torch.float32),
        Encoding(name="bfloat16", dtype=torch.bfloat16),
        Encoding(name="float8_e4m3", dtype=torch.float8_e4m3fn, limit=448.0),
        Encoding(name="int8", dtype=torch.int8, limit=127.0),
    )
}


def encoding_named(name: str) -> Encoding:
    """The encoding called ``name``; raises :class:`ConfigError` if there is none."""
    if name not in ENCODINGS:
        raise ConfigError(f"encoding is {name!r}; supported: {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def encode_rows(rows: Float[Tensor, "rows width"], encoding: Encoding) -> bytes:
    """All scales (fp32, little-endian), then all codes. Raises :class:`DataError` for a value that is not finite."""
    rows = rows.detach().cpu()
    if not bool(torch.isfinite(rows).all()):
        raise DataError("the target's states hold values that are not finite; run it in bfloat16 or float32")
    if not encoding.limit:
        return tensor_bytes(rows.to(encoding.dtype))
    rows = rows.float()
    scales = _scales(rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(rows.shape[0]), encoding)
    codes = rows / scales[:, None]
    if not encoding.dtype.is_floating_point:
        codes = codes.round_()
    codes = codes.clamp_(-encoding.limit, encoding.limit)
    return tensor_bytes(scales) + tensor_bytes(codes.to(encoding.dtype))


def decode_rows(data: bytearray, count: int, width: int, encoding: Encoding) -> Float[Tensor, "{count} {width}"]:
    """What :func:`encode_rows` stored: fp32 from float32, bfloat16 from everything else."""
    if not encoding.limit:
        return from_bytes(data, encoding.dtype).view(count, width)
    scales = from_bytes(data[: 4 * count], torch.float32)
    codes = from_bytes(data[4 * count :], encoding.dtype).view(count, width)
    return (codes.float() * scales[:, None]).bfloat16()


def _scales(largest: Float[Tensor, "rows"], encoding: Encoding) -> Float[Tensor, "rows"]:
    """What a code of 1 stands for. Float codes get a power of two, so that code times scale is exact in bfloat16."""
    scales = largest / encoding.limit
    if encoding.dtype.is_floating_point:
        # at least the quotient, and at most twice it
        scales = torch.ldexp(torch.ones_like(scales), torch.frexp(scales).exponent)
    return torch.where(largest > 0, scales.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def relative_errors(stored: Float[Tensor, "rows width"], exact: Float[Tensor, "rows width"]) -> Float[Tensor, "rows"]:
    """Per row, the length of the difference over the length of the exact row (0 where both are zero)."""
    exact = exact.float()
    difference = (stored.float() - exact).norm(dim=1)
    return difference / exact.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The tensor's numbers in order, as they lie in memory (little-endian on every machine that torch supports)."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytearray, dtype: torch.dtype) -> Tensor:
    """A flat tensor over ``data``, which it shares; an empty one if there is none."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
