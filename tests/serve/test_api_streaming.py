"""The short ways of a stream: the same bytes as the long ones, and only where the connection allows them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from api_run import Direct, Running, running, tiny_engine, tiny_served
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from dspark.serve.api import answering
from dspark.serve.api.replies import Choice, Delta, Shape, as_json
from dspark.serve.api.requests import make_plan
from dspark.serve.api.schemas import CompletionRequest, read_body
from dspark.serve.api.streaming import EXTENSION, offer, short_cut
from dspark.serve.events import StepEvent

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": 'say "é"\n'}]}
TEXT: dict[str, Any] = {"prompt": "abc"}
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 14, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    made = Direct(tiny_engine())
    yield made
    made.close()


@pytest.mark.parametrize("asked", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "stream_options": {"include_usage": True}},
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_options": {"include_drafts": True}},
        {"logit_bias": {"200": 9.0, "201": 9.0}, "temperature": 2.0, "stop": ["z"]},  # parts of characters, held text
    ],
    ids=["plain", "three", "logprobs", "ids", "drafts", "bytes"],
)
def test_a_chunk_is_the_same_whichever_way_it_is_built(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    short, compared = Shape.told, []

    def told(self: Shape, choice: Choice, event: StepEvent, delta: Delta) -> str | None:
        found, chunk = short(self, choice, event, delta), self.chunk(choice, event, delta)
        assert found == (None if chunk is None else as_json(chunk))
        compared.append(found)
        return found

    monkeypatch.setattr(Shape, "told", told)
    if "logprobs" in options and asked is TEXT:
        options = {"logprobs": 2}
    path = "/v1/chat/completions" if asked is CHAT else "/v1/completions"
    reply = direct.post(path, {**COMMON, **asked, **options})
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    assert sum(one is not None for one in compared) > 2
    sent = [line.removeprefix("data: ") for line in reply.text.split("\n\n")]
    assert {one for one in compared if one} <= set(sent)


@pytest.mark.parametrize("text", ['"\\\b\f\n\r\t\x00\x1f\x7f', "é 漢 😀 \u2028", "</script>", "\0text\0"])
def test_any_text_is_escaped_as_json_has_it(direct: Direct, text: str) -> None:
    body = read_body(CompletionRequest, {"model": "tiny", **TEXT})
    plan, model = make_plan(body, tiny_served(), direct.config, None), tiny_served(name='a "\0text\0" b')
    shape, choice = Shape(plan, model, created=1), Choice(plan, 0, model, direct.service.names)
    event, delta = StepEvent(request_id="a", text=text), Delta(text=text)
    found = shape.told(choice, event, delta)
    assert found == as_json(shape.chunk(choice, event, delta))
    assert found is not None and json.loads(found)["choices"][0]["text"] == text
    assert shape.told(choice, event, Delta(text="")) is None


def talk(server: Running, version: str, *, more: str = "") -> bytes:
    """All that a connection brings after a streamed request, up to its end."""
    body = json.dumps({**COMMON, **CHAT}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while part := peer.recv(65536):
            found += part
    return found


def test_pieces_are_chunks_where_http_has_them_and_bare_where_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bytes] = []

    def watched(scope: Any) -> Any:
        write = short_cut(scope)

        def spy(data: bytes) -> bool:
            assert write is not None
            done = write(data)
            taken.extend([data] * done)
            return done

        return None if write is None else spy

    monkeypatch.setattr(answering, "short_cut", watched)
    head, _, framed = talk(server, "1.1", more="Connection: close\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    pieces = []
    while framed != b"0\r\n\r\n":
        size, _, framed = framed.partition(b"\r\n")
        pieces.append(framed[: int(size, 16)])
        assert framed[int(size, 16) :][:2] == b"\r\n"
        framed = framed[int(size, 16) + 2 :]
    assert taken == pieces and len(pieces) > 4 and pieces[-1] == b"data: [DONE]\n\n"

    taken.clear()
    head, _, bare = talk(server, "1.0").partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and not taken
    said = [json.loads(line[6:])["choices"][0]["delta"] for line in bare.split(b"\n\n")[:-2]]
    assert said == [json.loads(piece[6:])["choices"][0]["delta"] for piece in pieces[:-1]]
    assert bare.endswith(b"data: [DONE]\n\n")


def test_the_short_cut_stands_back_where_the_connection_is_not_ready() -> None:
    written: list[bytes] = []
    cycle = object.__new__(RequestResponseCycle)
    cycle.flow = SimpleNamespace(write_paused=False)  # type: ignore[assignment]
    cycle.transport = SimpleNamespace(write=written.append)  # type: ignore[assignment]
    cycle.disconnected, cycle.response_started, cycle.response_complete = False, True, False
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST"}
    offer(scope, cycle.send)
    write = scope["extensions"][EXTENSION]
    assert write(b"hello") and write(b"") and written == [b"5\r\nhello\r\n"]
    for name, value in (("disconnected", True), ("response_complete", True), ("response_started", False)):
        before = getattr(cycle, name)
        setattr(cycle, name, value)
        assert not write(b"x")
        setattr(cycle, name, before)
    cycle.flow.write_paused = True
    assert not write(b"x") and len(written) == 1

    async def send(message: Any) -> None:
        raise AssertionError

    for sender, changed in ((cycle.send, {"http_version": "1.0"}), (cycle.send, {"method": "HEAD"}), (send, {})):
        other: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", **changed}
        offer(other, sender)
        assert short_cut(other) is None
