"""What a simulated engine did, step by step and request by request, and the figures made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark.errors import DataError
from dspark.numbers import json_data

LEAST_TOKENS = 8  # decoded tokens that a request needs to have a speed worth counting
COLUMNS = (
    "seconds",
    "draft_seconds",
    "target_seconds",
    "decoding",  # requests with a round in the step
    "drafted",  # of them, those that were drafted for
    "checked",  # drafts that the target checked
    "accepted",
    "prompt_tokens",
    "begun",  # answers that got their first token of their prompt's last chunk
    "in_flight",  # decoding or with their prompts still worked on
    "waiting",  # for a seat
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity over requests: its mean and percentiles; nan without any."""

    mean: float
    p5: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Float[np.ndarray, "requests"]) -> Spread:
        values = values[np.isfinite(values)]
        if not len(values):
            return cls(mean=np.nan, p5=np.nan, p50=np.nan, p95=np.nan)
        p5, p50, p95 = np.percentile(values, (5, 50, 95)).tolist()
        return cls(mean=float(values.mean()), p5=p5, p50=p50, p95=p95)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to decode under one load. Times in seconds, speeds in tokens per second."""

    scheduler: str
    loop: str  # "closed", "open" or "trace"
    load: float  # closed: users; open: requests per second; trace: requests
    throughput: float  # of all users; prompts do not count
    user_speed: Spread  # of one user, while the answer decodes
    first_token: Spread  # from arrival to the answer's first token
    running: float  # requests decoding, mean over steps
    waiting: float  # requests without a seat, mean over time
    waiting_at_end: int  # if it grows with the run, the load is more than the engine can take
    verify_tokens: float  # tokens checked per request and step, the anchor included
    acceptance_length: float  # tokens committed per request and step
    committed_per_verified: float  # of the tokens checked, the share that was committed
    drafted_share: float  # of the requests' rounds, those that were drafted for
    batch_tokens: float  # of a target pass, prompts included
    step_seconds: float
    draft_share: float  # of the time that steps took
    target_share: float
    busy: float  # share of the time in which there was anything to do
    seats_used: float  # share of the seats
    steps: int
    finished: int  # answers that ended in the measured part


class Log:
    """Grows with the run. :meth:`point` leaves the first steps out, in which the load builds up."""

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self._steps: list[tuple[float, ...]] = []
        self._idle: list[tuple[int, float]] = []  # step that it came before, seconds
        self._requests: list[tuple[int, bool, float, float, int]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, **values: int | float) -> None:
        self._steps.append(tuple(values[name] for name in COLUMNS))

    def idle(self, seconds: float) -> None:
        self._idle.append((len(self._steps), seconds))

    def request(self, *, finished: bool, first_token: float, seconds: float, tokens: int) -> None:
        """A request that ended, or was still there at the end. ``tokens`` decoded in ``seconds``."""
        self._requests.append((len(self._steps), finished, first_token, seconds, tokens))

    def point(self, *, scheduler: str, loop: str, load: float, seats: int, warm_up: float) -> Point:
        """Figures of the steps behind the first ``warm_up`` share of them. Raises :class:`DataError` if none is
        left."""
        first = int(warm_up * len(self._steps))
        if first >= len(self._steps):
            raise DataError(f"a run of {len(self._steps)} steps with warm_up {warm_up} leaves nothing to measure")
        rows = np.array(self._steps[first:])
        of = dict(zip(COLUMNS, rows.T, strict=True))
        total = {name: float(column.sum()) for name, column in of.items()}
        rounds = max(total["decoding"], 1.0)
        verified = total["decoding"] + total["checked"]
        idle = sum(seconds for step, seconds in self._idle if step >= first)
        elapsed = total["seconds"] + idle
        ended = [request for request in self._requests if request[0] > first]
        speeds = [n / seconds for _, _, _, seconds, n in ended if n >= LEAST_TOKENS and seconds > 0]
        committed = total["decoding"] + total["accepted"]
        return Point(
            scheduler=scheduler,
            loop=loop,
            load=load,
            throughput=(committed + total["begun"]) / elapsed,
            user_speed=Spread.of(np.array(speeds)),
            first_token=Spread.of(np.array([request[2] for request in ended])),
            running=total["decoding"] / len(rows),
            waiting=float((of["waiting"] * of["seconds"]).sum()) / elapsed,
            waiting_at_end=int(rows[-1, COLUMNS.index("waiting")]),
            verify_tokens=verified / rounds,
            acceptance_length=committed / rounds,
            committed_per_verified=committed / max(verified, 1.0),
            drafted_share=total["drafted"] / rounds,
            batch_tokens=(verified + total["prompt_tokens"]) / len(rows),
            step_seconds=total["seconds"] / len(rows),
            draft_share=total["draft_seconds"] / total["seconds"],
            target_share=total["target_seconds"] / total["seconds"],
            busy=total["seconds"] / elapsed,
            seats_used=total["in_flight"] / len(rows) / seats,
            steps=len(rows),
            finished=sum(1 for request in ended if request[1]),
        )


def plain(point: Point) -> dict[str, Any]:
    """A point as JSON has it."""
    return dict(json_data(point))
