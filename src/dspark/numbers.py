"""Numbers as people and JSON read them. nan stands for a figure that nothing was measured for: a dash, and null."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any

DASH = "-"


def number_text(value: int | float | None, form: str = ".2f") -> str:
    """``value`` in the format ``form``; a dash where there is none (None, nan or an infinity)."""
    return DASH if value is None or not math.isfinite(value) else format(value, form)


def ratio(over: int | float, under: int | float) -> float:
    """``over`` / ``under``; nan unless ``under`` is positive, for then nothing was counted."""
    return over / under if under > 0 else math.nan


def measured(values: Iterable[float]) -> list[float]:
    """Those of ``values`` that something was measured for: all but nan, in order."""
    return [value for value in values if not math.isnan(value)]


def clock_text(seconds: float) -> str:
    """A length of time as hours, minutes and seconds, ``1:02:03``, or under an hour ``2:03``."""
    hours, rest = divmod(round(max(0.0, seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def json_data(value: object, *, rounded: Callable[[float], float] = float) -> Any:  # Any: what json.dumps takes
    """``value`` as JSON can hold it: dataclasses become objects, tuples and sets lists, nan and infinities null.

    ``rounded`` is applied to every finite float.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return json_data(asdict(value), rounded=rounded)
    if isinstance(value, dict):
        return {str(name): json_data(item, rounded=rounded) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        return json_data(sorted(value), rounded=rounded)
    if isinstance(value, list | tuple):
        return [json_data(item, rounded=rounded) for item in value]
    if isinstance(value, float):
        return rounded(value) if math.isfinite(value) else None
    return value
