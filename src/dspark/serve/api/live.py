"""What the live page is told: steps of all requests, in batches, to a bounded number of watchers with bounded queues.

Without ``live_text`` a watcher learns how many tokens were drafted, checked and accepted, never which: whoever can open
the page must not read other people's conversations. With it, the text of what is generated goes along; prompts are
never shown.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from dspark.serve.api.config import ServedModel
from dspark.serve.api.tokens import TokenNames
from dspark.serve.events import EngineStats, StepEvent

PENDING = 4096  # entries that a watcher may lag behind; the oldest are dropped, and it is told how many
BATCH_SECONDS = 0.1
STATS_EVERY = 10  # batches


@dataclass(kw_only=True)
class Running:
    """One answer under way, as a new watcher is told of it."""

    id: int
    kind: str
    prompt_tokens: int
    most: int  # tokens that it may become
    since: float
    tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    rounds: int = 0

    def summary(self, now: float) -> dict[str, Any]:
        fields = ("id", "kind", "prompt_tokens", "most", "tokens", "drafted", "verified", "accepted", "rounds")
        return {**{name: getattr(self, name) for name in fields}, "seconds": round(now - self.since, 2)}


@dataclass(eq=False)
class Watcher:
    """One open page."""

    pending: deque[list[Any]] = field(default_factory=deque)
    dropped: int = 0

    def put(self, entry: list[Any]) -> None:
        if len(self.pending) >= PENDING:
            self.pending.popleft()
            self.dropped += 1
        self.pending.append(entry)


class LiveHub:
    """Passes on what happens, and remembers what is running."""

    def __init__(self, model: ServedModel, names: TokenNames, stats: Callable[[], EngineStats], *, text: bool) -> None:
        self._model, self._names, self._stats, self._text = model, names, stats, text
        self._numbers = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._watchers: set[Watcher] = set()
        self.watchers = 0

    def start(self, kind: str, *, prompt_tokens: int, most: int) -> Running:
        """An answer begins. Its number says nothing of the request."""
        run = Running(id=next(self._numbers), kind=kind, prompt_tokens=prompt_tokens, most=most, since=time.monotonic())
        self._running[run.id] = run
        self._tell(["start", run.id, kind, prompt_tokens, most])
        return run

    def step(self, run: Running, event: StepEvent) -> None:
        """What one step brought it."""
        run.rounds += bool(event.token_ids and run.tokens)  # the first token comes without a round
        run.tokens += len(event.token_ids)
        run.drafted += event.drafted
        run.verified += event.verify_len
        run.accepted += event.accepted
        if not self._watchers or not (event.token_ids or event.verify_len):
            return
        entry: list[Any] = ["step", run.id, event.drafted, event.verify_len, event.accepted, len(event.token_ids)]
        if self._text:
            entry.append([self._names.text(token_id) for token_id in event.token_ids])
            entry.append([self._names.text(token_id) for token_id in event.rejected_ids])
        self._tell(entry)

    def end(self, run: Running, reason: str) -> None:
        """It is over: finished, failed or cancelled."""
        if self._running.pop(run.id, None) is not None:
            self._tell(["end", run.id, reason, run.tokens, round(time.monotonic() - run.since, 2)])

    def _tell(self, entry: list[Any]) -> None:
        for watcher in self._watchers:
            watcher.put(entry)

    async def watch(self, stop: asyncio.Event) -> AsyncGenerator[str, None]:
        """Messages for one watcher, as JSON, until ``stop`` is set or the iterator is closed."""
        watcher = Watcher()
        self._watchers.add(watcher)
        self.watchers = len(self._watchers)
        try:
            yield _message("hello", self._hello())
            before, then = self._stats(), time.monotonic()
            for tick in itertools.count():
                if tick % STATS_EVERY == 0:
                    now = time.monotonic()
                    after = self._stats()
                    yield _message("stats", stats_message(before, after, now - then))
                    before, then = after, now
                if watcher.pending:
                    batch = list(watcher.pending)
                    watcher.pending.clear()
                    dropped, watcher.dropped = watcher.dropped, 0
                    yield _message("batch", {"dropped": dropped, "entries": batch})
                try:
                    await asyncio.wait_for(stop.wait(), BATCH_SECONDS)
                except TimeoutError:
                    continue
                yield _message("bye", {})
                return
        finally:
            self._watchers.discard(watcher)
            self.watchers = len(self._watchers)

    def _hello(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "model": self._model.name,
            "drafter": self._model.drafter,
            "scheduler": self._model.scheduler,
            "block_size": self._model.block_size,
            "max_len": self._model.max_len,
            "text": self._text,
            "running": [run.summary(now) for run in self._running.values()],
        }


def stats_message(before: EngineStats, after: EngineStats, seconds: float) -> dict[str, Any]:
    """The engine's figures for the page: now, since the engine was made, and the speed since the last message."""
    made = after.completion_tokens - before.completion_tokens
    return {
        "running": after.running,
        "waiting": after.waiting,
        "seats": after.seats,
        "pages_used": after.pages_used,
        "pages_cached": after.pages_cached,
        "pages_total": after.pages_total,
        "tokens": after.completion_tokens,
        "tokens_per_second": round(made / seconds, 2) if seconds > 0.05 else None,
        "acceptance_length": round(after.acceptance_length, 4) if after.rounds else None,
        "verified_at": list(after.verified_at),
        "accepted_at": list(after.accepted_at),
        "verify_lens": list(after.verify_lens),
        "stage_seconds": {name: round(value, 4) for name, value in after.stage_seconds.items()},
    }


def _message(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
