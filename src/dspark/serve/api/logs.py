"""Structured logs: one JSON object per line and per request, with figures and no word of any prompt or answer."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

LOGGER = logging.getLogger("dspark.serve")


class JsonLines(logging.Formatter):
    """A record as one line: time, level, event, and the fields that came in ``extra={"fields": ...}``.

    Of an exception its type and places are told; its words are not, for they may repeat what a client sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update(fields)
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            line["places"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
        return json.dumps(line, ensure_ascii=False, default=str)


def note(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Write one line; fields that are None are left out."""
    kept = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, extra={"fields": kept}, exc_info=error)


def set_up(stream: io.TextIOBase | None = None) -> None:
    """Send our lines and uvicorn's warnings to ``stream`` (stderr by default). Replaces what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("dspark", logging.INFO), ("uvicorn", logging.WARNING), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
        logger.setLevel(level)
