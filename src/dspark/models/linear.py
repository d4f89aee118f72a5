"""Frozen matrix products on their fastest path.

On a CPU a decode step reads every weight once, so the layout of the weights decides its time: oneDNN's own packed
layout, made once, is read about a third faster than rows of [out, in]. Packed weights serve eager mode; nothing is
compiled. The packed products have no gradient: targets are frozen.

The library compiles a product for every number of rows that it meets and keeps it, 0.6 MB each, a thousand of them. A
server meets every number, so packed products run over rounded numbers of rows (:func:`filled_rows`): its memory stays
flat, and nobody waits for a compilation after the first minutes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dspark.models import huge_pages

ROW_QUANTUM = 8  # rows whose weights are read in the time of one
FEW_STEPS = 1024  # rows up to which there are 8 steps to each doubling; 16 beyond, where a row costs as much as any


@runtime_checkable
class Product(Protocol):
    """x W^T + b over rows: :class:`Linear`, or :class:`dspark.models.eight_bit.EightBit`."""

    out_features: int
    in_features: int

    def place(self) -> tuple[int, int]:
        """Address and bytes of the weight that products read; (0, 0) where it does not lie in this machine's memory."""
        ...

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """The products of ``x``."""
        ...


class Linear:
    """A frozen product x W^T + b with ``weight`` [out, in].

    Keeps only the packed copy where packing works, unless ``keep_raw`` asks for the plain weight too (shared heads).
    ``packed`` False forces the plain product, which is the reference of the packed one.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, "out"] | None = None,
        *,
        keep_raw: bool = False,
        packed: bool = True,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.exact_bias = None if bias is None else bias.float().contiguous()  # for compiled code
        can_pack = packed and weight.device.type == "cpu" and packing_available(weight.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach()) if can_pack else None
        self._raw = weight if keep_raw or not can_pack else None

    @property
    def packed(self) -> bool:
        return self._packed is not None

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The plain weight; only of a Linear that keeps it."""
        assert self._raw is not None, "this Linear was made without keep_raw"
        return self._raw

    def place(self) -> tuple[int, int]:
        """Address and bytes of the weight that products read; (0, 0) where it does not lie in this machine's memory."""
        if self._packed is not None and hasattr(torch.ops.mkldnn, "data_ptr"):
            return torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed)
        if self._raw is not None and self._raw.device.type == "cpu":
            return self._raw.data_ptr(), self._raw.nbytes
        return 0, 0

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        if self._packed is None:
            assert self._raw is not None
            return F.linear(x, self._raw, self.bias)
        if (missing := filled_rows(rows := x.shape[0]) - rows) == 0:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        x = F.pad(x, (0, 0, 0, missing))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")[:rows]


def filled_rows(rows: int) -> int:
    """The number of rows, ``rows`` or more, that a product runs over: 1 to 8 as they are, then multiples of eight up to
    128, and beyond 8 steps to each doubling, 16 past 1024.

    So there are 47 numbers up to 1024 and 95 up to 8192, and past 64 rows an eighth at most is filled up.
    """
    if rows <= ROW_QUANTUM:
        return rows
    step = max(ROW_QUANTUM, 1 << (rows - 1).bit_length() - (4 if rows <= FEW_STEPS else 5))
    return -(-rows // step) * step


def settle(products: Iterable[Product]) -> None:
    """Bring the weights of a model that has just been loaded into large pages (:mod:`dspark.models.huge_pages`)."""
    huge_pages.gather(place for product in products if (place := product.place())[1])


@functools.cache
def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build and CPU multiply packed weights of ``dtype``; tried once per process on a small product."""
    weight = torch.linspace(-1, 1, 64 * 32).reshape(64, 32).to(dtype)
    x = torch.linspace(-1, 1, 2 * 32).reshape(2, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # no oneDNN in this build, or no kernel for this dtype on this CPU
        return False
    return torch.allclose(product.float(), x.float() @ weight.float().T, rtol=0.05, atol=0.05)


@functools.cache
def choose_cpu_dtype(*, width: int = 576, layers: int = 6) -> torch.dtype:
    """The faster of bfloat16 and float32 for decoding on this CPU, by a measurement of some tens of milliseconds.

    bf16 halves the bytes, but only CPUs with AMX or AVX512-BF16 multiply it quickly; elsewhere fp32 can win, and then
    it is the more exact choice as well. Both are timed on packed products of one and of eight rows, over ``layers``
    matrices of 4 ``width`` x ``width`` so that caches do not hide the memory. Cached per process.
    """
    contenders = {dtype: _products(dtype, width, layers) for dtype in (torch.bfloat16, torch.float32)}
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in contenders}
    with torch.inference_mode():
        for round_ in range(6):  # interleaved, so that a busy moment hits both; the first round warms up
            for dtype, run in contenders.items():
                begin = time.perf_counter()
                run()
                if round_:
                    seconds[dtype].append(time.perf_counter() - begin)
    return min(contenders, key=lambda dtype: statistics.median(seconds[dtype]))


def _products(dtype: torch.dtype, width: int, layers: int) -> Callable[[], None]:
    linears = [Linear(torch.full((4 * width, width), 0.01, dtype=dtype)) for _ in range(layers)]
    inputs = [torch.full((rows, width), 0.5, dtype=dtype) for rows in (1, 8)]

    def run() -> None:
        for x in inputs:
            for linear in linears:
                linear(x)

    return run
