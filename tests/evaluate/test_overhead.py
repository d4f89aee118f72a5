"""Passes and their products are timed, each size by itself, and the target is left as it was."""

from __future__ import annotations

import torch
from tiny_models import tiny_model

from dspark.evaluate.overhead import PassTime, measure_overhead
from dspark.models.decoder_config import from_transformers
from dspark.models.lean import LeanTarget


def test_times_are_plausible() -> None:
    model = tiny_model("qwen3")
    target = LeanTarget(from_transformers(model.config), dict(model.state_dict()), name="tiny", dtype=torch.float32)
    assert len(target.products) == 4 * 4 + 1
    times = measure_overhead(target, sizes=(1, 3), context=5, repeats=3)
    assert [t.tokens for t in times] == [1, 3]
    for t in times:
        assert 0 < t.products_fastest_ms <= t.products_median_ms
        assert t.products_fastest_ms < t.fastest_ms <= t.median_ms
        assert 0 < t.overhead < 1


def test_overhead_is_what_is_not_products() -> None:
    time = PassTime(tokens=1, median_ms=30.0, fastest_ms=20.0, products_median_ms=25.0, products_fastest_ms=15.0)
    assert time.overhead == 0.25
