"""What all requests share: the engine, how many answers are in flight, and whether the server is stopping."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Protocol, runtime_checkable

from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.errors import bad_request, overloaded, stopping
from dspark.serve.api.grammars import Compiler
from dspark.serve.api.live import LiveHub
from dspark.serve.api.metrics import Metrics
from dspark.serve.api.requests import Plan, make_plan
from dspark.serve.api.schemas import ChatRequest, CompletionRequest
from dspark.serve.api.tokens import TokenNames
from dspark.serve.events import EngineStats, StepEvent
from dspark.serve.request import GenerationRequest

PREPARERS = 2  # threads that render and tokenise
EVENTS_AHEAD = 32  # of one request, that a slow client may leave unread


@runtime_checkable
class AnyEngine(Protocol):
    """What the server asks of :class:`dspark.serve.async_engine.AsyncEngine`."""

    def submit(self, request: GenerationRequest) -> AsyncIterator[StepEvent]:
        """Events of a request to its end; closing the iterator cancels it.

        Raises RequestError, QueueFull or EngineClosed, here or with the first event.
        """
        ...

    def stats(self) -> EngineStats:
        """A picture of the engine."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and worked on."""
        ...


class Service:
    """One server's state. Everything here happens in the event loop's thread, but for :meth:`plan`'s work."""

    def __init__(self, engine: AnyEngine, model: ServedModel, config: ApiConfig) -> None:
        self.engine, self.model, self.config = engine, model, config
        self.names = TokenNames(model.chat)
        self.metrics = Metrics(engine.stats)
        self.live = LiveHub(model, self.names, engine.stats, text=config.live_text)
        self.stopping = asyncio.Event()  # nothing new is taken
        self.expired = asyncio.Event()  # nothing is waited for any longer
        self._compiler = Compiler(model)
        self._threads = ThreadPoolExecutor(PREPARERS, thread_name_prefix="dspark-prepare")
        self._in_flight = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.started = time.time()

    @property
    def in_flight(self) -> int:
        """Answers accepted and not over."""
        return self._in_flight

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Room for so many answers, given back at the end.

        Raises :class:`ApiError` 429 if there is none now, 503 when stopping, 400 if there can never be.
        """
        config = self.config
        if self.stopping.is_set():
            raise stopping(config.retry_seconds)
        if answers > config.max_requests:
            raise bad_request(f"{answers} answers are asked for; this server has room for {config.max_requests}", "n")
        if self._in_flight + answers > config.max_requests:
            message = f"{self._in_flight} answers are in flight, of at most {config.max_requests}; try again later"
            raise overloaded(config.retry_seconds, message)
        self._in_flight += answers
        self.metrics.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= answers
            self.metrics.in_flight.set(self._in_flight)

    async def plan(self, body: CompletionRequest | ChatRequest) -> Plan:
        """Render, tokenise and compile, beside the event loop. Raises :class:`ApiError` 400."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._plan, body)

    def _plan(self, body: CompletionRequest | ChatRequest) -> Plan:
        return make_plan(body, self.model, self.config, self._compiler.constraint(body))

    async def events(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, StepEvent], None]:
        """Events of several answers as they come, each with its answer's index, until all have ended.

        Closing the iterator cancels what has not. Raises what the engine raises, after cancelling the others.
        """
        if len(requests) == 1:  # nothing to merge
            async with aclosing(self._answer(requests[0])) as events:
                async for event in events:
                    yield 0, event
            return
        queue: asyncio.Queue[tuple[int, StepEvent | Exception]] = asyncio.Queue(EVENTS_AHEAD)
        tasks = [asyncio.create_task(self._pump(i, request, queue)) for i, request in enumerate(requests)]
        left = len(tasks)
        try:
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: GenerationRequest) -> AsyncGenerator[StepEvent, None]:
        """One answer's events, up to the one that ends it; closing the iterator cancels it."""
        async with aclosing(self.engine.submit(request)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event
                if event.finish_reason is not None:
                    return
        raise RuntimeError("the engine ended a request without a word")

    async def _pump(
        self, index: int, request: GenerationRequest, queue: asyncio.Queue[tuple[int, StepEvent | Exception]]
    ) -> None:
        """Pass one answer's events on; whatever goes wrong is passed on too, so that nobody waits in vain."""
        try:
            async with aclosing(self._answer(request)) as events:
                async for event in events:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    def begin_stop(self) -> None:
        """Take nothing new, and give what is under way ``drain_seconds``. To be called in the event loop."""
        if not self.stopping.is_set():
            self.stopping.set()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self.config.drain_seconds, self.expired.set)

    def close(self) -> None:
        """Let go of the threads."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
