"""Where the time of a lean decoder's pass goes: its matrix products, and all the rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.models.lean import LeanTarget


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Times of passes with one number of new tokens, in milliseconds."""

    tokens: int
    median_ms: float
    fastest_ms: float  # on a busy machine nearer to the truth than the median
    products_median_ms: float  # all of the model's products alone, one after the other
    products_fastest_ms: float

    @property
    def overhead(self) -> float:
        """Share of the fastest pass that is not products."""
        return 1.0 - self.products_fastest_ms / self.fastest_ms


def measure_overhead(
    target: LeanTarget, *, sizes: Sequence[int] = (1, 4, 8, 16), context: int = 200, repeats: int = 20
) -> list[PassTime]:
    """Time passes of ``sizes`` new tokens behind ``context`` others, and the bare products, interleaved; on a CPU.

    The products touch every weight in the order of a pass, so they find the caches as a pass does.
    """
    memory = target.new_memory(rows=1, max_len=context + max(sizes))
    ids = torch.arange(context + max(sizes), device=target.info.device) % target.info.vocab_size
    target.forward(ids[:context], memory, want_logits=False)
    passes: dict[int, list[float]] = {size: [] for size in sizes}
    products: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes:
            begin = time.perf_counter()
            target.forward(ids[context : context + size], memory)
            middle = time.perf_counter()
            memory.rollback(0, context)
            inputs = {
                product.in_features: torch.ones(
                    size, product.in_features, dtype=target.info.dtype, device=target.info.device
                )
                for product in target.products
            }
            start = time.perf_counter()
            with torch.inference_mode():
                for product in target.products:
                    product(inputs[product.in_features])
            end = time.perf_counter()
            if repeat > 0:  # the first round warms up
                passes[size].append(1e3 * (middle - begin))
                products[size].append(1e3 * (end - start))
    return [
        PassTime(
            tokens=size,
            median_ms=statistics.median(passes[size]),
            fastest_ms=min(passes[size]),
            products_median_ms=statistics.median(products[size]),
            products_fastest_ms=min(products[size]),
        )
        for size in sizes
    ]
