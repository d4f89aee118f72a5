"""Which requests come, when, and how long they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dspark.artifacts import read_jsonl
from dspark.errors import ConfigError, DataError

LONGEST = 1_000_000  # tokens of a prompt or an answer


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompts and answers of lognormal length: means in tokens, and the standard deviation of the logarithm."""

    prompt_tokens: float = 512.0  # >= 1
    output_tokens: float = 256.0  # >= 1
    variety: float = 0.6  # 0: all alike

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if not 1.0 <= getattr(self, name) <= LONGEST:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in 1..{LONGEST}")
        if not 0.0 <= self.variety <= 3.0:
            raise ConfigError(f"variety is {self.variety}; it must be in [0, 3]")

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Int[np.ndarray, "count"], Int[np.ndarray, "count"]]:
        """Prompt and answer lengths of ``count`` requests, each at least 1."""
        shift = -0.5 * self.variety**2  # so that the means are the means
        prompt, output = np.exp(shift + self.variety * rng.standard_normal((2, count)))
        return _tokens(self.prompt_tokens * prompt), _tokens(self.output_tokens * output)

    def describe(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests in the order of their arrival."""

    arrival: Float[np.ndarray, "requests"]  # seconds from the start, never falling
    prompt_tokens: Int[np.ndarray, "requests"]  # >= 1
    output_tokens: Int[np.ndarray, "requests"]  # >= 1

    def __post_init__(self) -> None:
        arrival = self.arrival
        if not len(arrival):
            raise DataError("there are no requests to simulate")
        if not (np.isfinite(arrival).all() and arrival[0] >= 0 and (np.diff(arrival) >= 0).all()):
            raise DataError("arrivals must be finite seconds from 0 on, in ascending order")
        for name in ("prompt_tokens", "output_tokens"):
            if not ((getattr(self, name) >= 1) & (getattr(self, name) <= LONGEST)).all():
                raise DataError(f"{name} must be in 1..{LONGEST} for every request")

    def __len__(self) -> int:
        return len(self.arrival)


def poisson(count: int, rate: float, lengths: Lengths, rng: np.random.Generator) -> Requests:
    """``count`` requests that arrive independently of each other, ``rate`` a second on average."""
    if count < 1:
        raise ConfigError(f"requests is {count}; it must be 1 or more")
    if not 0.0 < rate < float("inf"):
        raise ConfigError(f"rate is {rate}; it must be a positive number of requests per second")
    prompt, output = lengths.draw(count, rng)
    return Requests(arrival=np.cumsum(rng.exponential(1.0 / rate, count)), prompt_tokens=prompt, output_tokens=output)


def read_trace(path: Path | str) -> Requests:
    """Requests of a JSONL file with ``arrival`` (seconds), ``prompt_tokens`` and ``output_tokens`` in every line.

    Raises :class:`DataError` naming the line for a field that is missing, unknown, or no number.
    """
    rows = list(_trace_rows(path, read_jsonl(path)))
    if not rows:
        raise DataError(f"{path} holds no requests; a line needs arrival, prompt_tokens and output_tokens")
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    if (np.diff(arrival) < 0).any():
        line = 2 + int(np.argmax(np.diff(arrival) < 0))
        raise DataError(f"{path}: request {line} arrives before the one in front of it; sort the trace by arrival")
    return Requests(arrival=arrival.astype(float), prompt_tokens=prompt, output_tokens=output)


def _trace_rows(path: Path | str, objects: Iterable[Mapping[str, Any]]) -> Iterable[tuple[float, int, int]]:
    names = ("arrival", "prompt_tokens", "output_tokens")
    for number, row in enumerate(objects, start=1):
        if set(row) != set(names):
            raise DataError(f"{path}:{number}: the fields are {sorted(row)}; a request has exactly {', '.join(names)}")
        arrival, prompt, output = (row[name] for name in names)
        if isinstance(arrival, bool) or not isinstance(arrival, int | float):
            raise DataError(f"{path}:{number}: arrival is {arrival!r}; it must be a number of seconds")
        for name, value in (("prompt_tokens", prompt), ("output_tokens", output)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise DataError(f"{path}:{number}: {name} is {value!r}; it must be a whole number")
        yield float(arrival), prompt, output


def _tokens(lengths: Float[np.ndarray, "count"]) -> Int[np.ndarray, "count"]:
    return np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)
