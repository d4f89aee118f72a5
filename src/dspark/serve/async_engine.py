"""The engine as coroutines see it: what the server runs on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from dspark.serve.engine import Engine
from dspark.serve.events import EngineStats
from dspark.serve.request import GenerationRequest
from dspark.serve.runner import LoopStream, Runner
from dspark.serve.threads import release_pool


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What a server may tell of its engine."""

    model: str
    drafter: str
    scheduler: str
    max_len: int  # most tokens of a request, prompt and output
    block_size: int  # most drafts of a round
    vocab_size: int
    seats: int
    max_waiting: int


class AsyncEngine:
    """An :class:`Engine` in one worker thread; requests are streams of events."""

    def __init__(self, engine: Engine) -> None:
        """The caller, who will have loaded the engine's model, gives its OpenMP threads back (:func:`release_pool`)."""
        self._runner = Runner(engine)
        release_pool()
        self.engine = engine
        self.info = EngineInfo(
            model=engine.target.info.name,
            drafter=engine.drafter_name,
            scheduler=engine.config.scheduler,
            max_len=engine.max_len,
            block_size=engine.drafter.block_size,
            vocab_size=engine.target.info.vocab_size,
            seats=engine.config.seats,
            max_waiting=engine.config.max_waiting,
        )

    def start(self) -> None:
        """Start the thread; :meth:`submit` does it too."""
        self._runner.start()

    def submit(self, request: GenerationRequest) -> LoopStream:
        """Start a request, from a coroutine; its events end with one that has a finish reason.

        Raises :class:`RequestError`, :class:`QueueFull` or :class:`EngineClosed` here, never in the iteration: an
        error on the way is an event. Closing the stream or being cancelled in it cancels the request.
        """
        loop = asyncio.get_running_loop()
        stream = self._runner.submit(request, lambda cancel: LoopStream(loop, cancel))
        assert isinstance(stream, LoopStream)
        release_pool()  # checking a request may have computed
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request if it is in flight; from any thread, as often as you like."""
        self._runner.cancel(request_id)

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and worked on; False after a shutdown, or when the thread has died."""
        return self._runner.healthy

    def stats(self) -> EngineStats:
        """The engine's counts."""
        return self._runner.stats()

    async def shutdown(self, *, drain: bool = True, timeout: float = 30.0) -> bool:
        """Take no more requests; with ``drain`` finish those in flight for up to ``timeout`` seconds; cancel the rest.

        False if the thread is still busy with a pass after that.
        """
        return await asyncio.to_thread(self._runner.close, drain=drain, timeout=timeout)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(drain=error is None)
