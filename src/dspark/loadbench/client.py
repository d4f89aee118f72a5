"""One streamed chat completion, timed: what is asked, and what the reply says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.errors import ConfigError
from dspark.loadbench.wire import Part, Received, Wire, WireError

Outcome = Literal["ok", "refused", "failed"]  # refused: 429 or 503, the server's own word that it is full


@dataclass(frozen=True, kw_only=True)
class Way:
    """A server to send to, as the reports call it."""

    name: str
    url: str  # up to and without /v1
    model: str  # as the server calls it
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url of {self.name} is {self.url!r}; it must begin with http:// or https://")


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What is asked: one user turn, greedy or sampled."""

    text: str
    max_tokens: int  # >= 2
    temperature: float = 0.0
    seed: int = 0

    def body(self, model: str) -> dict[str, Any]:
        """The request in the form of OpenAI's chat interface."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What became of a request; times in seconds since the run began."""

    outcome: Outcome
    sent: float
    first: float | None  # first text; None: there was none
    ended: float  # the stream's end
    tokens: int  # as the server counts them
    text: str
    error: str = ""  # of a request that was refused or failed

    @property
    def first_token_seconds(self) -> float:
        """From sending to the first text; nan without one."""
        return float("nan") if self.first is None else self.first - self.sent

    @property
    def tokens_per_second(self) -> float:
        """The speed that its user sees: tokens after the first by the time after the first text; nan under two."""
        if self.first is None or self.tokens < 2 or self.ended <= self.first:
            return float("nan")
        return (self.tokens - 1) / (self.ended - self.first)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A request's reply as it came, not yet read; times by ``time.monotonic``."""

    sent: float
    ended: float
    received: Received | None  # None: there was none
    error: str = ""

    def read(self, *, begin: float) -> Reply:
        """What it says, in times since ``begin``. Never raises for what a server sends."""
        received = self.received
        if received is None:
            return self._reply("failed", begin, error=self.error)
        if received.status != 200:
            outcome: Outcome = "refused" if received.status in (429, 503) else "failed"
            text = received.body.decode("utf-8", errors="replace")
            return self._reply(outcome, begin, error=f"status {received.status}: {text[:200]}")
        first: float | None = None
        pieces: list[str] = []
        tokens, error = 0, ""
        try:
            for at, event in events(received.parts):
                if "error" in event:
                    error = str(event["error"])[:200]
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if text := piece(event):
                    first = at - begin if first is None else first
                    pieces.append(text)
        except (ValueError, TypeError, AttributeError, LookupError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error and tokens == 0:
            error = "the stream ended without usage"
        return self._reply("failed" if error else "ok", begin, first, tokens, "".join(pieces), error)

    def _reply(
        self,
        outcome: Outcome,
        begin: float,
        first: float | None = None,
        tokens: int = 0,
        text: str = "",
        error: str = "",
    ) -> Reply:
        return Reply(
            outcome=outcome,
            sent=self.sent - begin,
            first=first,
            ended=self.ended - begin,
            tokens=tokens,
            text=text,
            error=error,
        )


async def ask(wire: Wire, way: Way, request: LoadRequest) -> Heard:
    """Send a request and keep its stream to the end, unread. Never raises for what the server does."""
    headers = {"Content-Type": "application/json"}
    if way.api_key:
        headers["Authorization"] = f"Bearer {way.api_key}"
    body = json.dumps(request.body(way.model)).encode()
    sent = time.monotonic()
    try:
        received = await wire.send("POST", f"{way.url.rstrip('/')}/v1/chat/completions", headers=headers, body=body)
    except (WireError, OSError) as failure:
        return Heard(sent=sent, ended=time.monotonic(), received=None, error=f"{type(failure).__name__}: {failure}")
    return Heard(sent=sent, ended=received.ended, received=received)


def events(parts: Iterable[Part]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """The JSON objects of a server-sent stream, each with the time at which it was complete, up to its ``[DONE]``."""
    rest = b""
    for at, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                told = line[5:].strip()
                if told == b"[DONE]":
                    return
                yield at, json.loads(told)


def piece(event: Mapping[str, Any]) -> str:
    """Text that an event of a chat stream adds."""
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
