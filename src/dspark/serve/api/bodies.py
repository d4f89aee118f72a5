"""From bytes to JSON, strictly and with bounds: what is no JSON object is refused before its fields are looked at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from dspark.serve.api.config import ApiConfig
from dspark.serve.api.errors import ApiError, bad_request

Checked = TypeVar("Checked")

LARGE = 64 * 1024  # bytes of a body that would hold the event loop up
MAX_KEYS = 10_000  # of one object; checking a wrong one takes time for each
LINGER = 4  # times the most that is taken: so much of a larger body is thrown away before the reply


async def read_json(request: Request, config: ApiConfig, check: Callable[[dict[str, Any]], Checked]) -> Checked:
    """What ``check`` makes of a request's body, an object. Raises :class:`ApiError` 400, 408, 413 or 415.

    Reading stops as soon as the body is larger than it may be, whatever its head said. The media type must be JSON:
    a foreign page in a browser can post anything else to a server on the same machine without asking. Large bodies
    are parsed and checked beside the event loop, so that other clients' streams go on.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, "the body must be sent as application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must be sent without content-encoding", code="unsupported_media_type")
    try:
        async with asyncio.timeout(config.body_seconds):
            raw = await _read(request, config.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {config.body_seconds:g} seconds"
        close = {"Connection": "close"}
        raise ApiError(408, message, type="timeout_error", code="request_timeout", headers=close) from None
    if len(raw) > LARGE:
        return await asyncio.to_thread(lambda: check(parse_object(raw)))
    return check(parse_object(raw))


async def _read(request: Request, most: int) -> bytes:
    """The body, of which no more than ``most`` bytes are ever held.

    What is a little too large is read to its end and thrown away, since few clients read a reply before they have sent
    everything; what is far too large is answered at once and the connection closed.
    """
    told = request.headers.get("content-length", "")
    if told.isdigit() and (len(told) > 18 or int(told) > LINGER * most):
        raise _too_large(most, close=True)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > LINGER * most:
                raise _too_large(most, close=True)
            if size <= most:
                parts.append(part)
            else:
                parts.clear()
    except ClientDisconnect:
        raise bad_request("the body ended early", code="invalid_body") from None
    if size > most:
        raise _too_large(most, close=False)
    return b"".join(parts)


def _too_large(most: int, *, close: bool) -> ApiError:
    headers = {"Connection": "close"} if close else {}
    message = f"the body is larger than {most} bytes, the most that this server reads"
    return ApiError(413, message, code="request_too_large", headers=headers)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON: an object, UTF-8, no NaN or infinity, no key twice, no lone surrogates. Raises :class:`ApiError`."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8, at byte {error.start}", code="invalid_json") from None
    except UnicodeEncodeError:
        raise bad_request("the body holds half of a surrogate pair", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})", code="invalid_json"
        ) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # a key twice, NaN, a number of thousands of digits
        raise bad_request(f"the body cannot be read: {str(error)[:160]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_KEYS} are taken")
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
