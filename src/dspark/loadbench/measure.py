"""Every level of load, every way, in turn: the order of the ways moves on from level to level and from repeat to
repeat, so that a slow minute of the machine does not meet one way alone; a run of each before anything counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark.errors import ConfigError
from dspark.loadbench.client import Heard, LoadRequest, Way, ask
from dspark.loadbench.figures import LoadFigures, figures_of, merged, read_metrics
from dspark.loadbench.pattern import Pattern, play
from dspark.loadbench.servers import Served
from dspark.loadbench.wire import Wire, WireError

WARM_UP = 2  # requests


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent to every way alike."""

    patterns: tuple[Pattern, ...]
    texts: tuple[str, ...]  # user turns, taken in turn
    max_tokens: int = 128  # per answer; >= 2
    per_user: int = 3  # requests per user of a closed loop, or per request a second of an open one
    least: int = 12  # requests of a measurement, at least
    repeats: int = 1  # measurements of each way and level; the median by throughput is reported
    temperature: float = 0.0
    seed: int = 0
    timeout: float = 600.0  # seconds without a byte

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 2), ("per_user", 1), ("least", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not self.patterns or not self.texts:
            raise ConfigError("nothing to measure: give at least one level and one prompt")

    def requests(self, pattern: Pattern) -> list[LoadRequest]:
        """The requests of one measurement, the same for every way."""
        count = max(self.least, pattern.requests(self.per_user))
        return [
            LoadRequest(
                text=self.texts[i % len(self.texts)],
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed + i,
            )
            for i in range(count)
        ]


def measure(
    ways: Sequence[Served], config: LoadConfig, *, told: Callable[[str], object] = lambda text: None
) -> Iterator[LoadFigures]:
    """Yield the figures of every way at every level, level by level. All ways but the measured one are paused."""
    for served in ways:
        served.resume()
        told(f"{served.way.name}: warming up")
        run(served.way, Pattern(kind="closed", level=1.0), config.requests(config.patterns[0])[:WARM_UP], config)
        served.pause()
    turn = 0
    try:
        for pattern in config.patterns:
            runs: dict[str, list[LoadFigures]] = {served.way.name: [] for served in ways}
            for _ in range(config.repeats):
                for i in range(len(ways)):
                    served = ways[(turn + i) % len(ways)]
                    told(f"{served.way.name}: {pattern.title}")
                    served.resume()
                    runs[served.way.name].append(run(served.way, pattern, config.requests(pattern), config))
                    served.pause()
                turn += 1
            yield from (merged(runs[served.way.name]) for served in ways)
    finally:
        for served in ways:
            served.resume()


def run(way: Way, pattern: Pattern, requests: Sequence[LoadRequest], config: LoadConfig) -> LoadFigures:
    """One measurement: the requests sent by the pattern, with the server's counters read before and after."""

    async def all_of_it() -> LoadFigures:
        wire = Wire(seconds=config.timeout)
        try:
            before = await counters(wire, way)
            begin = time.monotonic()

            async def send(request: LoadRequest) -> Heard:
                return await ask(wire, way, request)

            heard = await play(pattern, requests, send, seed=config.seed)
            after = await counters(wire, way)
        finally:
            wire.close()
        replies = [one.read(begin=begin) for one in heard]
        return figures_of(way.name, pattern.kind, pattern.level, replies, before=before, after=after)

    return asyncio.run(all_of_it())


async def counters(wire: Wire, way: Way) -> dict[str, float]:
    """The server's Prometheus counters; empty where it has none."""
    try:
        received = await wire.send("GET", f"{way.url.rstrip('/')}/metrics")
    except (WireError, OSError):
        return {}
    return read_metrics(received.body.decode("utf-8", errors="replace")) if received.status == 200 else {}
