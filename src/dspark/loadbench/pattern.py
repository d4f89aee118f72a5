"""How requests arrive: in a closed loop, each user asking again as soon as he is answered, or at an open rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dspark.errors import ConfigError
from dspark.loadbench.client import LoadRequest

Answer = TypeVar("Answer")
Ask = Callable[[LoadRequest], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """``closed``: ``level`` users at a time. ``open``: ``level`` requests a second on average, whatever is still under
    way (Poisson: independent exponential pauses)."""

    kind: Literal["closed", "open"]
    level: float  # users, a whole number >= 1; or requests per second, > 0

    def __post_init__(self) -> None:
        if not 0 < self.level < float("inf") or (self.kind == "closed" and self.level != int(self.level)):
            wanted = "a whole number of users, 1 or more" if self.kind == "closed" else "a positive rate"
            raise ConfigError(f"level is {self.level}; a {self.kind} loop needs {wanted}")

    @property
    def title(self) -> str:
        return f"{int(self.level)} at a time" if self.kind == "closed" else f"{self.level:g} a second"

    def requests(self, per_user: int) -> int:
        """How many requests a measurement takes, at ``per_user`` for every user (or for every second's rate)."""
        return max(per_user, round(self.level * per_user))


async def play(pattern: Pattern, requests: Sequence[LoadRequest], ask: Ask[Answer], *, seed: int = 0) -> list[Answer]:
    """Send all requests in their order by the pattern; replies in the order of the requests."""
    if pattern.kind == "closed":
        return await _closed(int(pattern.level), requests, ask)
    return await _open(pattern.level, requests, ask, random.Random(seed))


async def _closed(users: int, requests: Sequence[LoadRequest], ask: Ask[Answer]) -> list[Answer]:
    replies: list[Answer | None] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def user() -> None:
        for i in waiting:
            replies[i] = await ask(requests[i])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, len(requests))):
            group.create_task(user())
    return [reply for reply in replies if reply is not None]


async def _open(rate: float, requests: Sequence[LoadRequest], ask: Ask[Answer], rng: random.Random) -> list[Answer]:
    loop = asyncio.get_running_loop()
    due, tasks = loop.time(), []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, due - loop.time()))  # by the clock: a late start does not delay the rest
            tasks.append(group.create_task(_reply(ask, request)))
            due += rng.expovariate(rate)
    return [task.result() for task in tasks]


async def _reply(ask: Ask[Answer], request: LoadRequest) -> Answer:
    return await ask(request)
