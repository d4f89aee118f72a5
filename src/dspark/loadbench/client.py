"""One streamed chat completion, timed; the part that speaks HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from dspark.errors import ConfigError

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
    ended: float
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


async def ask(client: httpx.AsyncClient, way: Way, request: LoadRequest, *, begin: float) -> Reply:
    """Send a request and read its stream to the end. Never raises for what the server does; ``begin`` is the run's
    ``time.monotonic()``."""
    headers = {"Authorization": f"Bearer {way.api_key}"} if way.api_key else {}
    sent = time.monotonic() - begin
    first: float | None = None
    pieces: list[str] = []
    tokens, outcome, error = 0, "ok", ""
    try:
        async with client.stream(
            "POST", f"{way.url.rstrip('/')}/v1/chat/completions", json=request.body(way.model), headers=headers
        ) as response:
            if response.status_code != 200:
                await response.aread()
                outcome = "refused" if response.status_code in (429, 503) else "failed"
                error = f"status {response.status_code}: {response.text[:200]}"
            else:
                async for event in events(response):
                    if "error" in event:
                        outcome, error = "failed", str(event["error"])[:200]
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    if text := piece(event):
                        first = time.monotonic() - begin if first is None else first
                        pieces.append(text)
    except (httpx.HTTPError, json.JSONDecodeError) as failure:
        outcome, error = "failed", f"{type(failure).__name__}: {failure}"
    ended = time.monotonic() - begin
    if outcome == "ok" and tokens == 0:
        outcome, error = "failed", "the stream ended without usage"
    return Reply(
        outcome=outcome,  # type: ignore[arg-type]
        sent=sent,
        first=first,
        ended=ended,
        tokens=tokens,
        text="".join(pieces),
        error=error,
    )


async def events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent stream, up to its ``[DONE]``."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def piece(event: Mapping[str, Any]) -> str:
    """Text that an event of a chat stream adds."""
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
