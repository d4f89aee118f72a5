"""From what was asked for on the command line to a running server, and to its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bundle import Bundle
from dspark.errors import ConfigError, DataError
from dspark.serve.api.app import make_app
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.logs import note, set_up
from dspark.serve.api.server import Server, make_server
from dspark.serve.async_engine import AsyncEngine
from dspark.serve.building import build_engine
from dspark.serve.settings import EngineConfig

REPORT_NAME = "report.json"  # in a folder of `dspark accelerate`
INTERRUPTED, FAILED = 130, 1
ENGINE_SECONDS = 5.0  # that the engine's thread gets to end a pass


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which model, drafter and scheduler."""

    model: str
    drafter: str
    scheduler: str


def resolve(model: str, *, drafter: str | None = None, scheduler: str | None = None) -> Wanted:
    """Read a folder of ``dspark accelerate`` for its model, drafter and scheduler; what is given otherwise counts more.

    Raises :class:`DataError` for such a folder whose report is broken.
    """
    report = _report(Path(model))
    if report is None:
        return Wanted(model=model, drafter=drafter or "default", scheduler=scheduler or "greedy")
    try:
        target, found = report["model"], report["stages"]["compare"]["scheduler"]
    except (KeyError, TypeError):
        raise DataError(f"{Path(model) / REPORT_NAME} names no model and scheduler; run accelerate again") from None
    own = drafter is None  # its scheduler was chosen for its own drafter
    return Wanted(model=target, drafter=drafter or model, scheduler=scheduler or (found if own else "greedy"))


def _report(folder: Path) -> Mapping[str, Any] | None:
    """The report of an accelerated model's folder; None if this is no such folder."""
    path = folder / REPORT_NAME
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); run accelerate again") from None
    return report if isinstance(report, dict) and report.get("kind") == "accelerate" else None


def run(
    wanted: Wanted,
    engine_config: EngineConfig,
    config: ApiConfig,
    *,
    host: str,
    port: int,
    name: str | None,
    candidates: int,
    lookup: bool,
    calibrations: tuple[Path, ...],
    profile: Path | None,
    place: Mapping[str, Any],
    say: Callable[[str], None],
) -> int:
    """Load, serve until a signal, stop; returns the exit code: 0 after SIGTERM, 130 after an interrupt.

    ``say`` gets lines for people, on stdout; the log goes to stderr, a JSON object a line.
    """
    check_address(host, port)
    bundle = Bundle.load(wanted.model, wanted.drafter, candidates=candidates, lookup=lookup, **place)
    engine = AsyncEngine(build_engine(bundle, engine_config, calibrations=calibrations, profile=profile))
    model = ServedModel(
        name=name or wanted.model,
        chat=bundle.chat,
        max_len=engine.info.max_len,
        vocab_size=engine.info.vocab_size,
        drafter=engine.info.drafter,
        scheduler=engine.info.scheduler,
        block_size=engine.info.block_size,
        created=int(time.time()),
    )
    set_up()

    def listening(real_port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        for line in banner(f"http://{shown}:{real_port}", model, engine, config):
            say(line)
        note("listening", host=host, port=real_port, model=model.name, drafter=model.drafter, pid=os.getpid())

    server = make_server(lambda: make_app(engine, model, config), config, host=host, port=port, listening=listening)
    return serve_to_the_end(server, engine)


def check_address(host: str, port: int) -> None:
    """Raise :class:`ConfigError` for an address that cannot be listened at, before a model is loaded for it."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}; it must be 0 (any) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host is {host!r}, which has no address here ({error.strerror}); give another") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                door.bind(address)
            except OSError as error:
                raise ConfigError(f"port is {port}, which cannot be had at {host} ({error.strerror})") from None


def serve_to_the_end(server: Server, engine: AsyncEngine) -> int:
    """Run a server whose engine ends with it; returns the exit code."""
    try:
        server.run()
    except SystemExit:  # uvicorn's word for a port that is taken, which it has logged
        return FAILED
    finally:
        asyncio.run(engine.shutdown(drain=False, timeout=ENGINE_SECONDS))
        note("stopped")
    return INTERRUPTED if server.interrupted else 0


def banner(address: str, model: ServedModel, engine: AsyncEngine, config: ApiConfig) -> list[str]:
    """What people are told when the server is up."""
    info, stats = engine.info, engine.stats()
    key = "needed" if config.api_keys else "none (anyone who reaches the address may use it)"
    shown = "counts and text" if config.live_text else "counts only (--live-text shows what is generated)"
    return [
        f"dspark serves {model.name} at {address} (live page and chat), OpenAI's interface at {address}/v1",
        f"  drafter    {model.drafter}, {model.block_size} drafts a round at most, scheduler {model.scheduler}",
        f"  limits     {info.max_len} tokens a request, {info.seats} answers at once, {info.max_waiting} waiting, "
        f"{stats.pages_total} pages of KV memory",
        f"  API key    {key}",
        f"  live page  {shown}",
    ]
