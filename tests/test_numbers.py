"""Figures as people and JSON read them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from dspark.numbers import clock_text, json_data, measured, number_text, ratio


@dataclass(frozen=True)
class Part:
    speed: float
    rates: tuple[float, ...]


def test_where_there_is_no_number_there_is_a_dash() -> None:
    assert [number_text(value, ".1f") for value in (1.25, 3, None, math.nan, math.inf)] == ["1.2", "3.0", "-", "-", "-"]


def test_a_time_has_hours_where_it_has_any() -> None:
    assert [clock_text(seconds) for seconds in (3725.0, 59.6, 0.2, -1.0)] == ["1:02:05", "1:00", "0:00", "0:00"]


def test_nothing_counted_is_no_ratio() -> None:
    assert ratio(1, 4) == 0.25 and math.isnan(ratio(0, 0)) and math.isnan(ratio(1.0, math.nan))


def test_json_has_null_for_what_is_no_number_at_any_depth() -> None:
    value = {"a": Part(math.nan, (0.123456, -math.inf)), "b": frozenset({2, 1}), 3: [True, None, "nan"]}
    found = json_data(value, rounded=lambda number: round(number, 2))
    assert found == {"a": {"speed": None, "rates": [0.12, None]}, "b": [1, 2], "3": [True, None, "nan"]}
    assert json.loads(json.dumps(found, allow_nan=False), parse_constant=pytest.fail) == found


def test_what_was_measured_is_all_but_nan() -> None:
    assert measured(iter([1.0, float("nan"), float("inf"), 0.0])) == [1.0, float("inf"), 0.0]
