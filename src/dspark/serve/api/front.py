"""What stands before every route: request ids, the key, headers for browsers, errors in one shape, one log line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.serve.api.errors import ApiError, internal
from dspark.serve.api.logs import note
from dspark.serve.api.metrics import Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN_PATHS = ("/", "/health", "/favicon.ico")  # and what lies under /static: the page asks for the key itself
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Front:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing gets past without an answer in our shape."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(scope, send)
        error: BaseException | None = None
        try:
            self._check_key(scope)
            await self._app(scope, receive, visit.send)
        except ApiError as refusal:
            await visit.refuse(refusal, receive)
        except Exception as fault:
            error = fault
            if visit.status is not None:
                raise  # half an answer is out: all that is left is to break the connection, which the protocol does
            await visit.refuse(internal(), receive)
        except BaseException as fault:
            error = fault
            raise
        finally:
            self._metrics.responses.labels(str(visit.status or 0)).inc()
            visit.log(error)

    def _check_key(self, scope: Scope) -> None:
        """Raise :class:`ApiError` 401 unless no key is needed or the right one is given. Takes equally long for all."""
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith("/static/"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, one) for one in self._keys]
        if kind.lower() != b"bearer" or not any(matches):
            words = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, words, type="authentication_error", code="invalid_api_key", headers=headers)


class Visit:
    """One request on its way: its id, its status, and what is told of it afterwards."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        self.id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.status: int | None = None
        self._scope, self._send = scope, send
        self._since = time.monotonic()
        scope["dspark"] = {}

    async def send(self, message: Message) -> None:
        """Pass a message on, with our headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = [(b"x-request-id", self.id.encode()), *HEADERS]
            message = {**message, "headers": [*message.get("headers", []), *ours]}
        await self._send(message)

    async def refuse(self, error: ApiError, receive: Receive) -> None:
        """Reply with an error."""
        self._scope["dspark"].setdefault("code", error.code)
        await error.response()(self._scope, receive, self.send)

    def log(self, error: BaseException | None) -> None:
        """One line; the path is cut, and the query left out."""
        fields: dict[str, Any] = {
            "id": self.id,
            "method": self._scope["method"][:16],
            "path": self._scope["path"][:128],
            "status": self.status,
            "seconds": round(time.monotonic() - self._since, 4),
            **self._scope["dspark"],
        }
        failed = isinstance(error, Exception)
        note("request", level=logging.ERROR if failed else logging.INFO, error=error if failed else None, **fields)
