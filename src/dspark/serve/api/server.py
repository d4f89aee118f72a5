"""Running the application: connections with bounds, signals, and a stop that answers or refuses whoever is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dspark.serve.api.config import ApiConfig
from dspark.serve.api.errors import ApiError, bad_request, crowded
from dspark.serve.api.front import HEADERS
from dspark.serve.api.service import Service
from dspark.serve.api.streaming import offer

KEEP_ALIVE_SECONDS = 30
MAX_HEAD_BYTES = 32 * 1024
GRACE_SECONDS = 3.0  # beyond the drain, until connections that still hang are broken off
LINGER_SECONDS = 1.0  # between an error that ends a connection and its end
MAX_IDLE_SECONDS = 3600  # of a peer that takes nothing in


def _raw(error: ApiError) -> bytes:
    """An error as the bytes of a whole HTTP response, for when there is no request yet."""
    body = json.dumps(error.body).encode()
    lines = [f"HTTP/1.1 {error.status} Error".encode(), b"content-type: application/json", b"connection: close"]
    lines += [f"content-length: {len(body)}".encode(), *(name + b": " + value for name, value in HEADERS)]
    lines += [f"{name}: {value}".encode() for name, value in error.headers.items() if name != "Connection"]
    return b"\r\n".join([*lines, b"", body])


def protocol_class(config: ApiConfig) -> type[H11Protocol]:
    """Uvicorn's connection with our bounds: so many at most, a head in time, and errors in our shape."""

    class BoundedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            sock = transport.get_extra_info("socket")
            if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                # a peer that stops reading would otherwise hold its socket, and what is to be sent, for good
                with contextlib.suppress(OSError):
                    wait = int(min(config.request_seconds, MAX_IDLE_SECONDS) * 1000)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait)
            if len(self.connections) > config.max_connections:
                self._refuse(crowded(config.retry_seconds))
            else:
                self._head_timer = self.loop.call_later(config.head_seconds, self._no_head)

        def _refuse(self, error: ApiError) -> None:
            """Say why and hang up, though not so abruptly that the words are lost."""
            self._stop_timer()
            self._refused = True
            self.connections.discard(self)
            if not self.transport.is_closing():
                self.transport.write(_raw(error))
                self.transport.write_eof()
                self.loop.call_later(LINGER_SECONDS, self.transport.close)

        def _no_head(self) -> None:
            message = f"no request arrived within {config.head_seconds:g} seconds"
            self._refuse(ApiError(408, message, type="timeout_error", code="request_timeout"))

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def data_received(self, data: bytes) -> None:
            if self._refused or self.transport.is_closing():
                return
            if self._head_timer is None and self._between_requests():  # the first bytes of another request
                self._head_timer = self.loop.call_later(config.head_seconds, self._no_head)
            super().data_received(data)
            if not self._between_requests():
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._refuse(bad_request("what arrived is no HTTP request", code="invalid_http"))

    return BoundedProtocol


class Server(uvicorn.Server):
    """Uvicorn with a stop in two stages, and an exit code of its own.

    The first SIGTERM or interrupt: nothing new is taken, what is under way gets ``drain_seconds``, then an error. The
    second: now. ``listening`` is called with the port once there is one.
    """

    def __init__(self, config: uvicorn.Config, *, listening: Callable[[int], None] | None = None) -> None:
        super().__init__(config)
        self.service: Service | None = None  # set by the application when it is made
        self._listening = listening
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port and tell it."""
        await super().startup(sockets)
        if self.started and self._listening is not None:
            self._listening(self.port)

    @property
    def port(self) -> int:
        """The port that connections come in by."""
        return int(next(s.getsockname()[1] for server in self.servers for s in server.sockets))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door first, then tell the service."""
        if self.service is not None:
            self.service.begin_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal of either kind breaks off what the first let run."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handle signals while serving; unlike uvicorn's, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in kept.items():
                signal.signal(sig, handler)


class _Late:
    """An application that is made in the event loop, when the lifespan begins."""

    def __init__(self, make: Callable[[], ASGIApp]) -> None:
        self._make = make
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = self._make()
        if scope["type"] == "http":
            offer(scope, send)
        await self._app(scope, receive, send)


def make_server(
    make: Callable[[], tuple[ASGIApp, Service]],
    config: ApiConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    listening: Callable[[int], None] | None = None,
) -> Server:
    """A server that is ready to run. ``port`` 0 takes a free one. ``make`` is called in the server's event loop."""
    held: list[Server] = []

    def made() -> ASGIApp:
        app, service = make()
        held[0].service = service
        return app

    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "http": protocol_class(config),
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": config.drain_seconds + GRACE_SECONDS,
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    }
    server = Server(uvicorn.Config(_Late(made), **options), listening=listening)
    held.append(server)
    return server
