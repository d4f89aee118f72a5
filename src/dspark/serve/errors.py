"""Refusals that only an engine in service knows."""

from dspark.errors import RequestError


class QueueFull(RequestError):
    """As many requests wait as may; the same request may be taken later."""


class EngineClosed(RequestError):
    """The engine takes no requests any more."""
