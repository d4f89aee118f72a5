"""One request to a generating endpoint, from its checked body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark.errors import RequestError
from dspark.serve.api.errors import ApiError, bad_request, internal, overloaded, stopping, too_slow
from dspark.serve.api.live import Running
from dspark.serve.api.logs import note
from dspark.serve.api.replies import Choice, Shape, as_json, usage_of
from dspark.serve.api.requests import Plan, check_sizes, choices_of
from dspark.serve.api.schemas import ChatRequest, CompletionRequest
from dspark.serve.api.service import Service
from dspark.serve.api.streaming import short_cut
from dspark.serve.errors import EngineClosed, QueueFull
from dspark.serve.events import StepEvent

FAREWELL_SECONDS = 2.0  # that a client gets to take an error in, when its answer is cut off
OUTCOME_OF = {400: "invalid", 429: "overloaded", 503: "stopping", 504: "timeout"}


class Outlet:
    """Where a reply goes: one JSON object, or a stream of events. Knows what has been sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._write = short_cut(scope)
        self.begun = self.done = False

    async def reply(self, body: dict[str, Any]) -> None:
        """The whole reply."""
        response = Response(as_json(body), media_type="application/json")
        self.begun = True
        await response(self._scope, self._receive, self._send)
        self.done = True

    async def event(self, body: dict[str, Any] | str) -> None:
        """One event of a stream, an object or its JSON; the first opens it."""
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            headers.append((b"x-accel-buffering", b"no"))  # a proxy in between must not collect them
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        text = body if isinstance(body, str) else as_json(body)
        data = f"data: {text}\n\n".encode()
        if self._write is None or not self._write(data):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.done = True

    async def fail(self, error: ApiError) -> None:
        """The error as the reply, or as the last event of a stream that has begun; such a stream has no ``[DONE]``."""
        if self.done:
            return
        if not self.begun:
            self.begun = True
            await error.response()(self._scope, self._receive, self._send)
            self.done = True
        else:
            await self.event(error.body)
            await self.end()


class Answering(Response):
    """A response that generates while it is sent.

    However it ends (answered, refused, the client gone, too slow, the server stopping), the engine's requests are over
    and their room is given back before the call returns.
    """

    def __init__(self, service: Service, body: CompletionRequest | ChatRequest) -> None:
        super().__init__()
        self._service, self._body = service, body
        self._since = time.monotonic()
        self._first: float | None = None
        self._plan: Plan | None = None
        self._choices: list[Choice] = []
        self._runs: list[Running] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see the class."""
        outlet = Outlet(scope, receive, send)
        outcome = await self._guarded(outlet, receive)
        self._record(scope, outcome)

    async def _guarded(self, outlet: Outlet, receive: Receive) -> str:
        """Do the work, unless something ends it early; returns the outcome."""
        service = self._service
        work = asyncio.create_task(self._work(outlet))
        gone = asyncio.create_task(disconnected(receive))
        expired = asyncio.create_task(service.expired.wait())
        try:
            waited = {work, gone, expired}
            seconds = service.config.request_seconds
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            await cancelled(work)
            if gone.done():
                return "disconnected"
            error = stopping(service.config.retry_seconds) if expired.done() else too_slow(seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await outlet.fail(error)
            return OUTCOME_OF[error.status]
        finally:
            for task in (work, gone, expired):
                await cancelled(task)
            for choice, run in zip(self._choices, self._runs, strict=True):
                service.live.end(run, choice.finish_reason or "cancelled")

    async def _work(self, outlet: Outlet) -> str:
        try:
            await self._answer(outlet)
            return "answered"
        except ApiError as error:
            refusal = error
        except QueueFull as error:
            refusal = overloaded(self._service.config.retry_seconds, str(error))
        except EngineClosed:
            refusal = stopping(self._service.config.retry_seconds)
        except RequestError as error:
            refusal = bad_request(str(error), code="invalid_request")
        except Exception as error:
            note("request failed", level=logging.ERROR, error=error, request=self._plan.id if self._plan else None)
            refusal = internal()
        await outlet.fail(refusal)
        return OUTCOME_OF.get(refusal.status, "failed")

    async def _answer(self, outlet: Outlet) -> None:
        service, body = self._service, self._body
        check_sizes(body, service.config)
        with service.admitted(max(1, choices_of(body))):
            plan = self._plan = await service.plan(body)
            self._choices = [Choice(plan, i, service.model, service.names) for i in range(len(plan.choices))]
            self._runs = [
                service.live.start(body.endpoint, prompt_tokens=len(r.prompt_ids), most=r.max_new_tokens)
                for r in plan.choices
            ]
            shape = Shape(plan, service.model, created=int(time.time()))
            async with aclosing(service.events(plan.choices)) as events:
                async for index, event in events:
                    service.live.step(self._runs[index], event)
                    if self._first is None and event.token_ids:
                        self._first = time.monotonic() - self._since
                    if body.stream:
                        await self._stream(outlet, shape, index, event)
                    else:
                        self._choices[index].take(event)
        await self._close(outlet, shape)

    async def _stream(self, outlet: Outlet, shape: Shape, index: int, event: StepEvent) -> None:
        """Send what one event brought; an answer's first event also opens it."""
        choice = self._choices[index]
        delta = choice.take(event)
        opening = shape.first(choice) if choice.opens() else None
        if opening is not None:
            await outlet.event(opening)
        told = shape.told(choice, event, delta)
        if told is not None:
            await outlet.event(told)

    async def _close(self, outlet: Outlet, shape: Shape) -> None:
        if not self._body.stream:
            await outlet.reply(shape.whole(self._choices))
            return
        last = shape.last(self._choices)
        if last is not None:
            await outlet.event(last)
        await outlet.event("[DONE]")
        await outlet.end()

    def _record(self, scope: Scope, outcome: str) -> None:
        """Count the request, and put its figures into the log line of the connection's side."""
        metrics, endpoint = self._service.metrics, self._body.endpoint
        seconds = time.monotonic() - self._since
        metrics.requests.labels(endpoint, outcome).inc()
        line: dict[str, Any] = {"outcome": outcome, "stream": bool(self._body.stream), "n": self._body.n or 1}
        if self._body.user is not None:
            line["user"] = hash_of(self._body.user)
        if self._plan is not None:
            usage = usage_of(self._choices, self._plan)
            metrics.prompt_tokens.inc(usage["prompt_tokens"])
            metrics.output_tokens.inc(usage["completion_tokens"])
            line |= {"answer": self._plan.id, "prompt_tokens": usage["prompt_tokens"]}
            line |= {"completion_tokens": usage["completion_tokens"], **usage["drafts"]}
        if outcome == "answered":
            metrics.whole.labels(endpoint).observe(seconds)
        if self._first is not None:
            metrics.first_token.labels(endpoint).observe(self._first)
            line["first_token_seconds"] = round(self._first, 4)
        scope.setdefault("dspark", {}).update(line)


def hash_of(user: str) -> str:
    """What the log keeps of a user's name: enough to tell users apart."""
    return hashlib.sha256(user.encode()).hexdigest()[:12]


async def disconnected(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it is over; its outcome is not ours any more."""
    if not task.done():
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
