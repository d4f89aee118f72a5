"""The load bench's own HTTP: every framing, cut anywhere, kept and lost connections, and what is no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from dspark.loadbench.client import Heard, LoadRequest, Way, ask, events
from dspark.loadbench.wire import Part, Received, Wire, WireError

EVENTS = [
    b'data: {"a": 1}\n\n',
    b": a comment\n\n",
    b'data: {"b": "\xc3\xa9\\n"}\r\n\r\n',
    b"data: [DONE]\n\n",
    b"data: x\n\n",
]
BODY = b"".join(EVENTS)


def chunked(parts: Sequence[bytes], trailers: bytes = b"") -> bytes:
    framed = b"".join(b"%X;note=1\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n" + framed + b"0\r\n" + trailers + b"\r\n"


def sized(body: bytes, status: str = "200 OK", more: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n".encode() + more + b"\r\n" + body


@contextmanager
def answering(*replies: Sequence[bytes], pause: float = 0.0) -> Iterator[tuple[str, list[int]]]:
    """A server whose every connection gives ``replies`` in turn, each in pieces, and then hangs up; counts requests by
    connection."""
    door = socket.create_server(("127.0.0.1", 0))
    served: list[int] = []

    def talk(peer: socket.socket, number: int) -> None:
        with peer:
            for pieces in replies:
                got = b""
                while b"\r\n\r\n" not in got:
                    more = peer.recv(65536)
                    if not more:
                        return
                    got += more
                served[number] += 1
                for piece in pieces:
                    peer.sendall(piece)
                    time.sleep(pause)

    def listen() -> None:
        while True:
            try:
                peer, _ = door.accept()
            except OSError:
                return
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            served.append(0)
            threading.Thread(target=talk, args=(peer, len(served) - 1), daemon=True).start()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}", served
    finally:
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        thread.join(5)


def get(url: str, times: int = 1, *, seconds: float = 5.0) -> list[Received]:
    async def all_of_them() -> list[Received]:
        wire = Wire(seconds=seconds)
        try:
            return [await wire.send("GET", f"{url}/x?y=1") for _ in range(times)]
        finally:
            wire.close()

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("whole", "closes"),
    [
        (chunked(EVENTS), False),
        (chunked([BODY], b"a: b\r\nc: d\r\n"), False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(BODY), False),
        (b"HTTP/1.0 200 OK\r\n\r\n" + BODY, True),
    ],
    ids=["chunks", "trailers", "length", "closing"],
)
def test_every_framing_gives_the_same_body_wherever_it_is_cut(whole: bytes, closes: bool) -> None:
    for cuts in ([], range(1, len(whole)), *([at] for at in range(1, len(whole), 7))):
        at = [0, *cuts, len(whole)]
        with answering([whole[a:b] for a, b in itertools.pairwise(at)]) as (url, _):
            (found,) = get(url)
        assert (found.status, found.body) == (200, BODY)
        assert [event for _, event in events(found.parts)] == [{"a": 1}, {"b": "é\n"}]


def test_parts_are_stamped_as_they_come() -> None:
    whole = chunked(EVENTS)
    head = whole.index(b"\r\n\r\n") + 4
    pieces = [whole[:head], *(b"%X\r\n%b\r\n" % (len(part), part) for part in EVENTS), b"0\r\n\r\n"]
    begun = time.monotonic()
    with answering(pieces, pause=0.01) as (url, _):
        (found,) = get(url)
    stamps = [part.at for part in found.parts]
    assert [part.data for part in found.parts] == EVENTS
    assert begun < stamps[0] and all(b - a > 0.005 for a, b in zip(stamps, [*stamps[1:], found.ended], strict=True))


def test_a_connection_is_kept_where_it_may_be() -> None:
    with answering([chunked(EVENTS)], [sized(b"")], [sized(b"x", "204 No Content")[:-1]], [sized(BODY)]) as (
        url,
        served,
    ):
        assert [len(found.body) for found in get(url, 4)] == [len(BODY), 0, 0, len(BODY)]
        assert served == [4]
    with answering([sized(b"a", more=b"Connection: close\r\n")], [sized(b"b")]) as (url, served):
        assert [found.body for found in get(url, 2)] == [b"a", b"a"]
        assert served == [1, 1]
    with answering([sized(b"a")]) as (url, served):  # hangs up after one, without a word
        assert [found.body for found in get(url, 3)] == [b"a"] * 3
        assert served == [1, 1, 1]


@pytest.mark.parametrize(
    ("whole", "why"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "closed the connection"),
        (chunked(EVENTS)[:-4], "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nabc", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 twohundred\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000, "head does not end"),
    ],
)
def test_what_is_no_whole_reply_is_an_error(whole: bytes, why: str) -> None:
    with answering([whole]) as (url, _), pytest.raises(WireError, match=why):
        get(url)


def test_a_silent_server_is_not_waited_for() -> None:
    with answering([b"HTTP/1.1 200 OK\r\n"], pause=3.0) as (url, _):
        begun = time.monotonic()
        with pytest.raises(WireError, match=r"no byte came for 0\.1 seconds"):
            get(url, seconds=0.1)
        assert time.monotonic() - begun < 2.0
    slow = [b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n", *[b"x"] * 8]
    with answering(slow, pause=0.05) as (url, _):  # slower than that as a whole, and never silent for so long
        assert get(url, seconds=0.3)[0].body == b"x" * 8


def heard(body: bytes, status: int = 200) -> Heard:
    return Heard(sent=10.0, ended=13.0, received=Received(status=status, parts=[Part(11.0, body)], ended=13.0))


def test_a_reply_is_read_when_all_is_over() -> None:
    def stream(*told: object) -> bytes:
        return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in told) + b"data: [DONE]\n\n"

    def word(text: str) -> dict[str, object]:
        return {"choices": [{"delta": {"content": text}}]}

    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    parts = [
        Part(at, stream(one)[: -len(b"data: [DONE]\n\n")])
        for at, one in ((11.0, role), (11.5, word("é")), (12.0, usage))
    ]
    received = Received(status=200, parts=parts, ended=13.0)
    found = Heard(sent=10.0, ended=13.0, received=received).read(begin=10.0)
    assert (found.outcome, found.sent, found.first, found.ended, found.tokens, found.text) == ("ok", 0, 1.5, 3, 5, "é")
    assert found.tokens_per_second == pytest.approx(4 / 1.5)
    cases: list[tuple[Heard, str, str]] = [
        (heard(stream(word("a"), {"error": {"message": "broke"}}, usage)), "failed", "broke"),
        (heard(stream(word("a"))), "failed", "without usage"),
        (heard(b"data: {\n\n"), "failed", "JSONDecodeError"),
        (heard(stream([1])), "failed", "Error"),
        (heard(b"full", 429), "refused", "status 429: full"),
        (heard(b"gone", 404), "failed", "status 404: gone"),
        (Heard(sent=1.0, ended=2.0, received=None, error="no"), "failed", "no"),
    ]
    for one, outcome, why in cases:
        reply = one.read(begin=0.0)
        assert reply.outcome == outcome and why in reply.error


def test_what_is_asked_reaches_the_server() -> None:
    got: list[bytes] = []
    door = socket.create_server(("127.0.0.1", 0))

    def once() -> None:
        peer, _ = door.accept()
        with peer:
            text = b""
            while not text.endswith(b"}}"):
                text += peer.recv(65536)
            got.append(text)
            peer.sendall(sized(b"busy", "503 Busy"))

    thread = threading.Thread(target=once, daemon=True)
    thread.start()
    port = door.getsockname()[1]
    way = Way(name="a", url=f"http://127.0.0.1:{port}/base/", model="m", api_key="secret")
    request = LoadRequest(text="hé", max_tokens=4)

    async def send() -> Heard:
        wire = Wire(seconds=5.0)
        try:
            return await ask(wire, way, request)
        finally:
            wire.close()

    assert asyncio.run(send()).read(begin=0.0).outcome == "refused"
    thread.join(5)
    door.close()
    head, _, body = got[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/v1/chat/completions HTTP/1.1"
    assert {f"Host: 127.0.0.1:{port}", "Authorization: Bearer secret", f"Content-Length: {len(body)}"} <= set(lines)
    assert json.loads(body) == request.body("m")
