"""HTTP/1.1 for a client that must not be in the way of the server it measures.

Client and server share the cores, and each millisecond that a client spends on a token is one that the server's threads
wait. So a reply's bytes are only stamped and kept as they come, at a fifth of the time that a general client takes;
what they say is read when the measurement is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

MOST_HEAD = 64 * 1024  # bytes of a reply's head


class WireError(Exception):
    """A reply that did not come, or is no HTTP."""


class Part(NamedTuple):
    """Bytes of a body, as they came together."""

    at: float  # time.monotonic
    data: bytes


@dataclass(kw_only=True)
class Received:
    """A whole reply."""

    status: int
    parts: list[Part] = field(default_factory=list)  # of the body
    ended: float = 0.0  # time.monotonic

    @property
    def body(self) -> bytes:
        return b"".join(part.data for part in self.parts)


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.open = False
        self.reusable = False  # after an exchange: whether another may follow
        self._pending: asyncio.Future[Received] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._begin(0.0)

    def _begin(self, seconds: float) -> None:
        self._rest = b""  # bytes that are no whole line or chunk yet
        self._reply: Received | None = None  # once its head is there
        self._left: int | None = (
            None  # bytes of a body of known length; None: it is chunked, or ends with the connection
        )
        self._chunked = self._trailers = self.reusable = False
        self._seconds, self.last = seconds, time.monotonic()

    async def exchange(self, request: bytes, *, seconds: float) -> Received:
        """Send a request and wait for the whole reply, at most ``seconds`` from one byte to the next."""
        loop = asyncio.get_running_loop()
        self._begin(seconds)
        self._pending = loop.create_future()
        self._idle = loop.call_later(seconds, self._check_idle)
        try:
            self.transport.write(request)
            return await self._pending
        finally:
            self._idle.cancel()
            self._pending = None
            if not self.reusable:
                self.transport.abort()

    @property
    def silent(self) -> bool:
        """Whether no byte of a reply has come."""
        return self._reply is None and not self._rest

    def _check_idle(self) -> None:
        left = self.last + self._seconds - time.monotonic()
        if left > 0:
            self._idle = asyncio.get_running_loop().call_later(left, self._check_idle)
        else:
            self._fail(f"no byte came for {self._seconds:g} seconds")

    # --- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        self.last = now = time.monotonic()
        if self._pending is None:  # bytes that nobody asked for
            self.transport.abort()
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            if self._reply is None:
                data = self._head(data)
            if self._reply is not None:
                self._body(self._reply, data, now)
        except ValueError as error:
            self._fail(f"the reply is no HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        by_closing = self._reply is not None and self._left is None and not self._chunked
        if by_closing and error is None:
            self._end(time.monotonic(), reusable=False)
        else:
            self._fail(str(error) if error else "the server closed the connection")

    # --- the reply ---------------------------------------------------------------------------------------------------

    def _head(self, data: bytes) -> bytes:
        """Read the head, if it is all there; returns what follows it."""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > MOST_HEAD:
                raise ValueError("its head does not end")
            self._rest = data
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it begins with {first[:40]!r}")
        if status.startswith("1"):  # an interim reply
            return self._head(rest)
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._reply = Received(status=int(status[:3]))
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
        if self._reply.status in (204, 304):
            self._left = 0
        self._keeps = version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        return rest

    def _body(self, reply: Received, data: bytes, now: float) -> None:
        if self._chunked:
            self._chunks(reply, data, now)
            return
        if data:
            reply.parts.append(Part(now, data))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end(now, reusable=self._keeps and self._left == 0)

    def _chunks(self, reply: Received, data: bytes, now: float) -> None:
        """Keep what whole chunks hold; the last is empty, and only trailers follow it."""
        at = 0
        while not self._trailers:
            line = data.find(b"\r\n", at)
            size = 0 if line < 0 else int(data[at:line].partition(b";")[0], 16)
            begin, end = line + 2, line + 2 + size
            if line < 0 or (size and len(data) < end + 2):
                self._rest = data[at:]
                return
            if size:
                reply.parts.append(Part(now, data[begin:end]))
                at = end + 2
            else:
                self._trailers, at = True, line  # with the line's own end, so that no trailers are an empty line
        self._rest = data[at:]
        if b"\r\n\r\n" in self._rest:
            self._end(now, reusable=self._keeps)

    def _end(self, now: float, *, reusable: bool) -> None:
        assert self._reply is not None
        self._reply.ended, self.reusable = now, reusable and self.open
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(self._reply)

    def _fail(self, why: str) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(WireError(why))


class Wire:
    """Connections to servers; one that has carried a whole reply carries the next."""

    def __init__(self, *, seconds: float, connecting: float = 30.0) -> None:
        """``seconds`` without a byte, and ``connecting`` without a connection, are failures."""
        self._seconds, self._connecting = seconds, connecting
        self._free: dict[tuple[str, str], list[_Connection]] = {}

    async def send(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Received:
        """Send a request and wait for the whole reply. Raises :class:`WireError` or :class:`OSError` if there is none.

        A kept connection that the server has closed in the meantime is replaced by another.
        """
        place = urlsplit(url)
        target = (place.path or "/") + (f"?{place.query}" if place.query else "")
        given = {"Host": place.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        if body:
            given["Content-Length"] = str(len(body))
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
        request = "\r\n".join(lines).encode("latin-1") + body
        free = self._free.setdefault((place.scheme, place.netloc), [])
        while free:
            kept = free.pop()
            if not kept.open:
                continue
            try:
                return await self._exchange(kept, request, free)
            except WireError:
                if not kept.silent or kept.open:
                    raise
        return await self._exchange(await self._connect(place.scheme, place.hostname or "", place.port), request, free)

    async def _connect(self, scheme: str, host: str, port: int | None) -> _Connection:
        secure = scheme == "https"
        opening = asyncio.get_running_loop().create_connection(
            _Connection, host, port or (443 if secure else 80), ssl=secure or None
        )
        try:
            _, connection = await asyncio.wait_for(opening, self._connecting)
        except TimeoutError:
            raise WireError(f"no connection within {self._connecting:g} seconds") from None
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, free: list[_Connection]) -> Received:
        reply = await connection.exchange(request, seconds=self._seconds)
        if connection.reusable:
            free.append(connection)
        return reply

    def close(self) -> None:
        """Let go of all kept connections."""
        for free in self._free.values():
            while free:
                free.pop().transport.abort()
