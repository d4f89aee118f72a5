"""The ways of a load bench, as a user names them: our server with a scheduler, or another server by its address."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.errors import ConfigError
from dspark.loadbench.client import Way
from dspark.loadbench.servers import Served, model_name

WAYS = ("none", "fixed", "threshold", "greedy", "lagged")
SETTINGS = {"fixed": "--verify-len", "threshold": "--threshold"}  # what a number after the colon is for


def read_ways(text: str) -> list[tuple[str, list[str]]]:
    """``none,fixed:3,greedy`` to names and options of ``dspark serve``. Raises :class:`ConfigError` for others."""
    ways: list[tuple[str, list[str]]] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        scheduler, _, number = name.partition(":")
        if scheduler not in WAYS or (number and scheduler not in SETTINGS):
            raise ConfigError(f"way is {name!r}; it must be one of {', '.join(WAYS)}, with fixed:N and threshold:C")
        if scheduler == "threshold" and not number:
            raise ConfigError("way is 'threshold'; it needs a confidence, as threshold:0.4")
        if scheduler == "none":
            ways.append((name, ["--drafter", "none"]))
        else:
            ways.append((name, ["--scheduler", scheduler, *([SETTINGS[scheduler], number] if number else [])]))
    if len({name for name, _ in ways}) != len(ways):
        raise ConfigError(f"ways is {text!r}; each way may stand there once")
    return ways


def read_peer(text: str, *, api_key: str | None = None) -> Served:
    """``NAME=URL`` or ``NAME=URL#MODEL`` to a running server. Raises :class:`ConfigError` if it is none."""
    name, equals, address = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"peer is {text!r}; write NAME=URL, or NAME=URL#MODEL")
    url, _, model = address.partition("#")
    url = url.rstrip("/").removesuffix("/v1")
    way = Way(name=name.strip(), url=url, model=model or "?", api_key=api_key)
    return Served(
        way if model else Way(name=way.name, url=url, model=model_name(url, api_key=api_key), api_key=api_key)
    )


def read_levels(text: str, *, name: str) -> list[float]:
    """``1,4,16`` to numbers. Raises :class:`ConfigError` naming what is none."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; write numbers with commas between, as 1,4,16") from None


def ratios(throughputs: Sequence[tuple[str, float]], base: str) -> dict[str, float]:
    """Each way's throughput by that of ``base``; empty if it is not there."""
    of_base = dict(throughputs).get(base)
    return {} if not of_base else {name: value / of_base for name, value in throughputs}
