"""A server over a fake engine: in this process without sockets, or in a thread of its own with them."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from fake_engine import BLOCK, FakeEngine
from tiny_chat import MAX_LEN, SPECIAL, save_chat_model

from dspark.chat import ChatFormat
from dspark.serve.api.app import make_app
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.server import Server, make_server
from dspark.serve.api.service import Service

VOCAB = len(SPECIAL) + 256


@functools.cache
def tiny_chat_format() -> ChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        return ChatFormat.from_folder(save_chat_model(Path(folder)))


def tiny_served(**changes: Any) -> ServedModel:
    fields = {"name": "tiny", "chat": tiny_chat_format(), "max_len": MAX_LEN, "vocab_size": VOCAB, "block_size": BLOCK}
    return ServedModel(**{**fields, **changes})


def tiny_engine(**changes: Any) -> FakeEngine:
    return FakeEngine(tiny_chat_format(), vocab_size=VOCAB, **changes)


class Direct:
    """The application called directly, one event loop for all its requests; replies come whole."""

    def __init__(self, engine: FakeEngine | None = None, config: ApiConfig | None = None, **model: Any) -> None:
        self.engine, self.config = engine or tiny_engine(), config or ApiConfig()
        self.loop = asyncio.new_event_loop()
        self.service: Service
        self.app: Any
        self.loop.run_until_complete(self._make(tiny_served(**model)))

    async def _make(self, model: ServedModel) -> None:
        self.app, self.service = make_app(self.engine, model, self.config)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.run(self.client.post(path, **({"json": body} if body is not None else {}), **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.client.get(path, **options))

    def close(self) -> None:
        self.run(self.client.aclose())
        self.service.close()
        self.loop.close()


class Running:
    """A server with a port, in a thread."""

    def __init__(self, engine: Any, config: ApiConfig, model: ServedModel) -> None:
        self.engine, self.port = engine, 0
        up = threading.Event()

        def listening(port: int) -> None:
            self.port = port
            up.set()

        self.server: Server = make_server(lambda: make_app(engine, model, config), config, port=0, listening=listening)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        assert up.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def service(self) -> Service:
        assert self.server.service is not None
        return self.server.service

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        )

    def stop(self) -> None:
        self.server.handle_exit(15, None)

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def running(engine: Any = None, config: ApiConfig | None = None, **model: Any) -> Iterator[Running]:
    server = Running(engine or tiny_engine(), config or ApiConfig(), tiny_served(**model))
    try:
        yield server
    finally:
        server.stop()
        server.stop()  # at once
        server.join()
