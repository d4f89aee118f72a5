"""Leaving frees what was held, a flood is refused, a stop answers first, and a kill hangs nobody."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from api_run import Direct, Running, running, tiny_engine, tiny_served
from fake_engine import FakeEngine

from dspark.serve.api.app import make_app
from dspark.serve.api.config import ApiConfig
from dspark.serve.api.server import make_server
from dspark.serve.errors import EngineClosed, QueueFull

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
PATH = "/v1/chat/completions"


def eventually(what: Callable[[], Any], *, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def outcomes(server: Running) -> dict[str, float]:
    """Requests by how they ended, each counted a moment behind its reply."""
    return {
        outcome: server.service.metrics.requests.labels("chat", outcome)._value.get()
        for outcome in ("answered", "disconnected", "timeout", "stopping", "overloaded")
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_frees_its_seats(streamed: bool) -> None:
    engine = tiny_engine(step_seconds=0.02)
    with running(engine) as server:
        body = {**CHAT, "max_tokens": 200, "n": 3, "stream": streamed}
        with httpx.Client(base_url=server.url, timeout=httpx.Timeout(5, read=0.15)) as client:
            try:
                with client.stream("POST", PATH, json=body) as reply:
                    pieces = reply.iter_bytes()  # kept: closing it would close the connection
                    assert streamed and next(pieces)
                    eventually(lambda: len(engine.running) == 3)
            except httpx.ReadTimeout:
                assert not streamed
        eventually(lambda: not engine.running and server.service.in_flight == 0)
        assert engine.finished["cancelled"] == 3
        eventually(lambda: outcomes(server)["disconnected"] == 1)


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    engine = tiny_engine(step_seconds=0.02, seats=1)
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=httpx.Timeout(5, read=0.2)) as client:
        first = threading.Thread(
            target=lambda: httpx.post(server.url + PATH, json={**CHAT, "max_tokens": 60}, timeout=20)
        )
        first.start()
        eventually(lambda: engine.running)
        with pytest.raises(httpx.ReadTimeout):
            client.post(PATH, json={**CHAT, "max_tokens": 5})
        eventually(lambda: not engine.waiting)
        first.join()
        assert engine.finished == {"length": 1}


def test_a_flood_gets_429_and_hangs_nobody() -> None:
    engine = tiny_engine(step_seconds=0.03, seats=2, max_waiting=2)

    async def flood(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=httpx.Limits(max_connections=60)) as client:
            return list(await asyncio.gather(*(client.post(PATH, json={**CHAT, "max_tokens": 12}) for _ in range(50))))

    with running(engine, ApiConfig(max_requests=4)) as server:
        started = time.monotonic()
        replies = asyncio.run(flood(server.url))
        assert time.monotonic() - started < 10
        codes = [reply.status_code for reply in replies]
        assert set(codes) == {200, 429} and 4 <= codes.count(200) < 25
        assert engine.finished["length"] == codes.count(200)
        eventually(lambda: outcomes(server)["answered"] == codes.count(200))
        for reply in replies:
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) >= 1 and reply.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(openai.BadRequestError, match="has room for 4"):  # can never be: no point in trying again
            server.client().chat.completions.create(**CHAT, n=5)
        assert httpx.post(server.url + PATH, json={**CHAT, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize(
    "error, status", [(QueueFull("full"), 429), (EngineClosed("closed"), 503), (RuntimeError("x"), 500)]
)
def test_what_the_engine_refuses(error: Exception, status: int) -> None:
    class Refusing(FakeEngine):
        def submit(self, request: Any) -> Any:
            raise error

    served = tiny_served()
    direct = Direct(Refusing(served.chat, vocab_size=served.vocab_size))
    for streamed in (False, True):
        reply = direct.post(PATH, {**CHAT, "stream": streamed})
        assert reply.status_code == status and reply.json()["error"]["code"]
        assert ("retry-after" in reply.headers) == (status in (429, 503))
    direct.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_has_its_time(streamed: bool) -> None:
    engine = tiny_engine(step_seconds=0.05)
    with running(engine, ApiConfig(request_seconds=0.3)) as server:
        reply = httpx.post(server.url + PATH, json={**CHAT, "max_tokens": 200, "stream": streamed})
        assert reply.status_code == (200 if streamed else 504)
        if streamed:
            assert json.loads(reply.text.split("data: ")[-1])["error"]["code"] == "timeout"
            with pytest.raises(openai.APIError, match="longer than"):
                list(server.client().chat.completions.create(**CHAT, max_tokens=200, stream=True))
        else:
            assert reply.json()["error"]["code"] == "timeout" and reply.headers["x-should-retry"] == "false"
        eventually(lambda: not engine.running)
        eventually(lambda: outcomes(server)["timeout"] == 1 + streamed)


def test_stopping_finishes_what_is_under_way() -> None:
    engine = tiny_engine(step_seconds=0.02)
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=20) as kept:
        assert kept.get("/health").status_code == 200
        replies: list[httpx.Response] = []

        def ask(streamed: bool) -> None:
            body = {**CHAT, "max_tokens": 60, "stream": streamed}
            replies.append(httpx.post(server.url + PATH, json=body, timeout=20))

        threads = [threading.Thread(target=ask, args=(streamed,)) for streamed in (False, True)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(engine.running) == 2)
        live = threading.Thread(target=lambda: replies.append(httpx.get(server.url + "/live/events", timeout=20)))
        live.start()
        eventually(lambda: server.service.live.watchers == 1)
        server.stop()
        eventually(lambda: server.service.stopping.is_set())
        with pytest.raises(httpx.TransportError):
            httpx.post(server.url + PATH, json=CHAT, timeout=5)
        for thread in (*threads, live):
            thread.join(10)
        server.join()
        texts = [reply.text for reply in replies]
        assert [reply.status_code for reply in replies] == [200] * 3
        assert sum("event: bye" in text for text in texts) == 1 and sum("[DONE]" in text for text in texts) == 1
        assert engine.finished == {"length": 2}


def test_a_request_that_comes_during_the_stop_is_refused() -> None:
    direct = Direct()

    async def stop() -> None:
        direct.service.begin_stop()

    direct.run(stop())
    reply = direct.post(PATH, CHAT)
    assert (
        reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down" and reply.headers["retry-after"]
    )
    assert direct.get("/health").status_code == 503
    direct.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_after_the_deadline_what_is_left_gets_an_error(streamed: bool) -> None:
    engine = tiny_engine(step_seconds=0.05)
    with running(engine, ApiConfig(drain_seconds=0.2)) as server:
        replies: list[httpx.Response] = []
        body = {**CHAT, "max_tokens": 200, "stream": streamed}
        thread = threading.Thread(target=lambda: replies.append(httpx.post(server.url + PATH, json=body, timeout=20)))
        thread.start()
        eventually(lambda: engine.running)
        server.stop()
        thread.join(10)
        server.join()
        (reply,) = replies
        last = json.loads(reply.text.split("data: ")[-1]) if streamed else reply.json()
        assert reply.status_code == (200 if streamed else 503) and last["error"]["code"] == "shutting_down"
        assert engine.finished == {"cancelled": 1}


def _serve(port: int, told: Any, step_seconds: float) -> None:
    config, engine = ApiConfig(drain_seconds=5.0), tiny_engine(step_seconds=step_seconds)
    server = make_server(lambda: make_app(engine, tiny_served(), config), config, port=port, listening=told.send)
    server.run()
    os._exit(0 if not server.interrupted else 130)


def _start(port: int, step_seconds: float) -> tuple[Any, int]:
    """A server in a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_serve, args=(port, theirs, step_seconds), daemon=True)
    process.start()
    assert ours.poll(20)
    return process, ours.recv()


def test_a_killed_server_hangs_nobody_and_comes_back() -> None:
    tiny_engine()  # loaded here, inherited there
    process, port = _start(0, 0.05)
    url = f"http://127.0.0.1:{port}"
    errors: list[Exception] = []

    def ask(streamed: bool) -> None:
        try:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=20)
            reply = client.chat.completions.create(**CHAT, max_tokens=200, stream=streamed)
            if streamed:
                list(reply)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(streamed,)) for streamed in (False, True, False, True)]
    for thread in threads:
        thread.start()
    eventually(lambda: "dspark_requests_running 4.0" in httpx.get(f"{url}/metrics").text)
    os.kill(process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4 and all(isinstance(e, openai.APIConnectionError | httpx.TransportError) for e in errors), (
        errors
    )
    process.join(10)
    again, port = _start(port, 0.0)  # at once, at the same port
    assert httpx.post(url + PATH, json={**CHAT, "max_tokens": 5}).status_code == 200
    os.kill(again.pid, signal.SIGTERM)
    again.join(10)
    assert again.exitcode == 0


def test_an_interrupt_ends_with_130() -> None:
    tiny_engine()
    process, port = _start(0, 0.0)
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    os.kill(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 130


def messages_of(text: str) -> list[tuple[str, Any]]:
    """Server-sent events as (event, data)."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((lines["event"], json.loads(lines["data"])))
    return found


@pytest.mark.parametrize("shows_text", [False, True])
def test_the_live_stream(shows_text: bool) -> None:
    config = ApiConfig(live_text=shows_text, max_live_clients=2)
    with running(tiny_engine(step_seconds=0.02), config) as server:
        streams: list[str] = []
        watch = threading.Thread(target=lambda: streams.append(httpx.get(server.url + "/live/events", timeout=20).text))
        watch.start()
        eventually(lambda: server.service.live.watchers == 1)
        reply = httpx.post(server.url + PATH, json={**CHAT, "max_tokens": 30, "n": 2}).json()
        time.sleep(0.25)
        server.stop()
        watch.join(10)
        messages = messages_of(streams[0])
        kinds = [kind for kind, _ in messages]
        assert kinds[0] == "hello" and kinds[-1] == "bye" and "stats" in kinds
        assert messages[0][1]["text"] == shows_text and messages[0][1]["model"] == "tiny"
        entries = [entry for kind, data in messages if kind == "batch" for entry in data["entries"]]
        steps = [entry for entry in entries if entry[0] == "step"]
        assert sum(entry[5] for entry in steps) == 60
        assert sum(entry[4] for entry in steps) == reply["usage"]["drafts"]["accepted"]
        assert sum(entry[0] == "start" for entry in entries) == 2
        assert [entry[2:4] for entry in entries if entry[0] == "end"] == [["length", 30]] * 2
        texts = {choice["message"]["content"] for choice in reply["choices"]}
        if shows_text:
            by_run: dict[int, str] = {}
            for entry in steps:
                by_run[entry[1]] = by_run.get(entry[1], "") + "".join(entry[6])
            assert set(by_run.values()) == texts
        else:
            assert {len(entry) for entry in steps} == {6} and not any(text[:9] in streams[0] for text in texts)


def test_watchers_are_few_and_a_slow_one_loses_what_is_old() -> None:
    direct = Direct(config=ApiConfig(max_live_clients=0))
    assert direct.get("/live/events").status_code == 429
    hub = direct.service.live

    async def lag() -> list[str]:
        stop = asyncio.Event()
        watching = hub.watch(stop)
        found = [await anext(watching), await anext(watching)]  # hello and the first figures
        for _ in range(3000):
            hub.end(hub.start("chat", prompt_tokens=1, most=1), "length")
        found.append(await anext(watching))
        await watching.aclose()
        return found

    (_, batch) = messages_of("".join(direct.run(lag())))[-1]
    assert len(batch["entries"]) == 4096 and batch["dropped"] == 6000 - 4096 and hub.watchers == 0
    direct.close()
