"""Where a simulated engine's requests come from: users who ask again (closed loop), or a stream of its own (open)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dspark.simulate.workload import Lengths, Requests


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """Requests that take a seat now."""

    arrival: Float[np.ndarray, "new"]
    prompt_tokens: Int[np.ndarray, "new"]
    output_tokens: Int[np.ndarray, "new"]
    under_way: bool = False  # in the middle of their answers already


@runtime_checkable
class Arrivals(Protocol):
    """Where requests come from."""

    def take(self, now: float, seats: int) -> Arrived:
        """At most ``seats`` of the requests that wait at ``now``, first come first served."""
        ...

    def waiting(self, now: float) -> int:
        """Requests that wait for a seat."""
        ...

    def next_after(self, now: float) -> float | None:
        """When the next one comes; None if none does."""
        ...


class ClosedLoop:
    """A fixed number of users, each of whom asks again the moment the answer is there.

    The first requests are met in the middle of their answers, or all would end in step.
    """

    def __init__(self, lengths: Lengths, rng: np.random.Generator) -> None:
        self._lengths, self._rng, self._started = lengths, rng, False

    def take(self, now: float, seats: int) -> Arrived:
        prompt, output = self._lengths.draw(seats, self._rng)
        under_way, self._started = not self._started, True
        if under_way:
            done = (self._rng.random(seats) * output).astype(np.int64)
            prompt, output = prompt + done, output - done
        return Arrived(arrival=np.full(seats, now), prompt_tokens=prompt, output_tokens=output, under_way=under_way)

    def waiting(self, now: float) -> int:
        return 0

    def next_after(self, now: float) -> float | None:
        return now


class OpenLoop:
    """Requests that come when they come, however busy the engine is."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._taken = requests, 0

    def take(self, now: float, seats: int) -> Arrived:
        upto = min(self._taken + seats, self._arrived(now))
        new = slice(self._taken, upto)
        self._taken = upto
        requests = self._requests
        return Arrived(
            arrival=requests.arrival[new],
            prompt_tokens=requests.prompt_tokens[new],
            output_tokens=requests.output_tokens[new],
        )

    def waiting(self, now: float) -> int:
        return self._arrived(now) - self._taken

    def next_after(self, now: float) -> float | None:
        return float(self._requests.arrival[self._taken]) if self._taken < len(self._requests) else None

    def _arrived(self, now: float) -> int:
        return int(np.searchsorted(self._requests.arrival, now, side="right"))
