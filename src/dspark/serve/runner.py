"""An engine in a thread of its own, and streams of events out of it.

Requests are checked in the caller's thread and entered between two steps; so are cancellations. What a step brings is
handed out when it ends: to a queue that a thread waits on, or to an event loop, one wake-up per loop and step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol, runtime_checkable

from dspark.errors import DsparkError, RequestError
from dspark.serve.engine import Engine
from dspark.serve.errors import EngineClosed
from dspark.serve.events import EngineStats, StepEvent
from dspark.serve.flight import Flight
from dspark.serve.request import GenerationRequest

IDLE_SECONDS = 1.0  # a sleeping thread looks around so often

_log = logging.getLogger(__name__)


@runtime_checkable
class Stream(Protocol):
    """Where a request's events go. ``loop`` None: ``put`` may be called in the engine's thread."""

    loop: asyncio.AbstractEventLoop | None

    def put(self, event: StepEvent) -> None:
        """The next event."""
        ...


class ThreadStream(Iterator[StepEvent]):
    """Events for a thread that waits for them; ends behind the one with a finish reason."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[StepEvent] = queue.SimpleQueue()
        self._cancel, self._ended = cancel, False

    def put(self, event: StepEvent) -> None:
        """In any thread."""
        self._queue.put(event)

    def __next__(self) -> StepEvent:
        if self._ended:
            raise StopIteration
        event = self._queue.get()
        self._ended = event.finish_reason is not None
        return event

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._cancel()


class LoopStream(AsyncIterator[StepEvent]):
    """Events for a coroutine. Closing it, dropping it, or being cancelled in its iteration cancels the request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._events: deque[StepEvent] = deque()
        self._arrived = asyncio.Event()
        self._cancel, self._ended = cancel, False

    def put(self, event: StepEvent) -> None:
        """In the loop's thread."""
        self._events.append(event)
        self._arrived.set()

    async def __anext__(self) -> StepEvent:
        if self._ended:
            raise StopAsyncIteration
        try:
            while not self._events:
                self._arrived.clear()
                await self._arrived.wait()
        except asyncio.CancelledError:
            self._close()
            raise
        event = self._events.popleft()
        self._ended = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self._cancel()


class Runner:
    """Steps an engine as long as there is work, in one thread. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._entering: deque[Flight] = deque()
        self._cancelled: deque[str] = deque()
        self._streams: dict[str, weakref.ref[Stream]] = {}  # weak, so that a stream nobody reads any more cancels
        self._closing = False
        self._deadline = float("inf")  # of draining, by time.monotonic
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; nothing happens if it runs."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dspark-engine", daemon=True)
                self._thread.start()

    def submit(self, request: GenerationRequest, make: Callable[[Callable[[], None]], Stream]) -> Stream:
        """Check a request and let it wait; ``make`` builds its stream from what cancels it.

        Raises :class:`RequestError`, :class:`QueueFull` or :class:`EngineClosed`, and then nothing has happened.
        """
        request_id = request.request_id
        self._check(request_id)  # cheap refusals first
        flight = self.engine.open(request)
        with self._changed:
            self._check(request_id)
            stream = make(lambda: self.cancel(request_id))
            self._streams[request_id] = weakref.ref(stream)
            self._entering.append(flight)
            self._changed.notify()
        self.start()
        return stream

    def _check(self, request_id: str) -> None:
        if self._closing:
            raise EngineClosed("the engine is shutting down and takes no requests any more")
        if request_id in self._streams:
            raise RequestError(f"request_id is {request_id!r}, which is in flight; choose another")
        self.engine.check_queue(entering=len(self._entering))

    def cancel(self, request_id: str) -> None:
        """End a request, if it is in flight; it has ended for others when its last event says so."""
        with self._changed:
            if request_id in self._streams:
                self._cancelled.append(request_id)
                self._changed.notify()

    def stats(self) -> EngineStats:
        """The engine's counts; requests about to enter are counted as waiting."""
        return self.engine.stats(entering=len(self._entering))

    def close(self, *, drain: bool, timeout: float) -> bool:
        """Take no more requests; finish those in flight for up to ``timeout`` seconds if ``drain``, cancel the rest,
        and end the thread. False if a pass is still running then; its requests are told that they are cancelled."""
        with self._changed:
            self._closing = True
            self._deadline = time.monotonic() + (timeout if drain else 0.0)
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout + IDLE_SECONDS)
        left = [StepEvent(request_id=name, finish_reason="cancelled") for name in self._names()]
        self._hand_out(left)
        return thread is None or not thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and worked on."""
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.exception("the engine's thread ends")
            self._closing = True
            why = f"the engine's thread has ended: {error}"
            self._hand_out([StepEvent(request_id=name, finish_reason="error", error=why) for name in self._names()])
            raise

    def _names(self) -> list[str]:
        with self._changed:
            return list(self._streams)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._entering or self._cancelled or self.engine.has_work or self._closing):
                    self._changed.wait(IDLE_SECONDS)
                entering, self._entering = self._entering, deque()
                cancelled, self._cancelled = self._cancelled, deque()
            for flight in entering:
                try:
                    self.engine.enter(flight)
                except DsparkError as error:
                    name = flight.request.request_id
                    self._hand_out([StepEvent(request_id=name, finish_reason="error", error=str(error))])
            for request_id in cancelled:
                self.engine.cancel(request_id)
            if self._closing and (not self.engine.has_work or time.monotonic() >= self._deadline):
                self.engine.close()
                while self.engine.has_work:
                    self._step()
                return
            if self.engine.has_work:
                self._step()

    def _step(self) -> None:
        try:
            self._hand_out(self.engine.step(self._hand_out))
        except Exception as error:  # the engine's own books are wrong: nothing in flight can be trusted
            _log.exception("a step failed outside of any request")
            names, why = self._names(), f"the engine failed: {error}"
            for name in names:
                self.engine.cancel(name)
            self._hand_out([StepEvent(request_id=name, finish_reason="error", error=why) for name in names])

    def _hand_out(self, events: list[StepEvent]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, StepEvent]]] = {}
        for event in events:
            with self._changed:
                ended, name = event.finish_reason is not None, event.request_id
                found = self._streams.pop(name, None) if ended else self._streams.get(name)
            stream = None if found is None else found()
            if stream is None:
                continue
            if stream.loop is None:
                stream.put(event)
            else:
                by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed; nobody listens any more
                for _, event in pairs:
                    self.cancel(event.request_id)


def _put_all(pairs: list[tuple[Stream, StepEvent]]) -> None:
    for stream, event in pairs:
        stream.put(event)
