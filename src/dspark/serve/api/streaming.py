"""A short cut from an answer to its connection, for the pieces of a stream.

A piece that takes the regular way passes six layers of the framework, none of which looks at it, and a general state
machine for HTTP. On a machine whose cores the engine needs that is felt with each token.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

EXTENSION = "dspark.stream"

Write = Callable[[bytes], bool]


def short_cut(scope: Scope) -> Write | None:
    """What the server offers with a request; None under a server that offers nothing."""
    found: Write | None = scope.get("extensions", {}).get(EXTENSION)
    return found


def offer(scope: Scope, send: Send) -> None:
    """Put the short cut into the scope of a request that uvicorn's h11 connection has read.

    It writes a piece of a body and says True; or it says False, has done nothing, and the piece must take the regular
    way: the response has not begun or is over, the client reads too slowly or is gone, or it is no HTTP/1.1. It may be
    used for a body without a length only, which HTTP/1.1 sends in chunks.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or scope["http_version"] != "1.1" or scope["method"] == "HEAD":
        return

    def write(data: bytes) -> bool:
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.response_started:
            return False
        if data:  # an empty chunk would end the body
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    scope.setdefault("extensions", {})[EXTENSION] = write
