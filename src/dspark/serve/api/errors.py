"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}`` and a status.

400  invalid_request_error        a field, an option or the body is wrong; ``param`` names the place
401  authentication_error         no key, or not one of ours
404  invalid_request_error        no such path or model
405  invalid_request_error        another method
408  timeout_error                the body did not come in time
413  invalid_request_error        the body is too large
415  invalid_request_error        the body is not sent as JSON
429  rate_limit_error             as many requests are in flight as may be; Retry-After
500  server_error                 our fault; the message says no more, the log does
503  server_error                 stopping, or no more connections; Retry-After
504  timeout_error                the answer took longer than a request may; not to be tried again as it is
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

SHOWN = 120  # characters of a wrong value that a message repeats


class ApiError(Exception):
    """A reply that is an error; raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets, in a reply or as the last event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The reply."""
        return Response(
            json.dumps(self.body), status_code=self.status, media_type="application/json", headers=self.headers
        )


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A mistake of the client's, at the place ``param``."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """An option that we know and do not have; it is never ignored."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def overloaded(retry_seconds: int, message: str) -> ApiError:
    """Too many requests in flight."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def stopping(retry_seconds: int) -> ApiError:
    """The server is going down, and takes or finishes nothing more."""
    headers = {"Retry-After": str(retry_seconds), "Connection": "close"}
    message = "the server is stopping; try again when it is back"
    return ApiError(503, message, type="server_error", code="shutting_down", headers=headers)


def crowded(retry_seconds: int) -> ApiError:
    """One connection too many."""
    headers = {"Retry-After": str(retry_seconds), "Connection": "close"}
    message = "too many connections are open; try again later"
    return ApiError(503, message, type="server_error", code="too_many_connections", headers=headers)


def too_slow(seconds: float) -> ApiError:
    """The answer is cut off, and would be again."""
    message = f"the answer took longer than {seconds:g} seconds, the most that this server allows a request"
    headers = {"x-should-retry": "false"}  # OpenAI's clients obey it
    return ApiError(504, message, type="timeout_error", code="timeout", headers=headers)


def internal() -> ApiError:
    """Our fault. What happened stands in the log, under the request's id."""
    return ApiError(500, "the server failed; its log has the reason", type="server_error", code="internal_error")


def shown(value: Any) -> str:
    """A value for a message, cut where it is long; never slow, however large the value."""
    if isinstance(value, str):
        text = repr(value[:SHOWN])
    elif isinstance(value, bool | float) or value is None or (isinstance(value, int) and value.bit_length() < 256):
        text = json.dumps(value)
    else:
        text = {list: "a list", dict: "an object", int: "a very large number"}.get(type(value), type(value).__name__)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
