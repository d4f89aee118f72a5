"""The load bench against a small server of its own kind, over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from dspark.errors import ConfigError
from dspark.loadbench.client import LoadRequest, Reply, Way
from dspark.loadbench.figures import figures_of, merged, read_metrics
from dspark.loadbench.measure import LoadConfig, measure, run
from dspark.loadbench.pattern import Pattern, play
from dspark.loadbench.servers import Served, free_port, model_name, started, wait_ready
from dspark.loadbench.ways import ratios, read_levels, read_peer, read_ways


class Handler(BaseHTTPRequestHandler):
    """Three words a reply, 10 ms apart; full beyond ``seats``; counts what is under way."""

    seats: ClassVar[int] = 100
    under_way: ClassVar[int] = 0
    most: ClassVar[int] = 0
    steps: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()
    asked: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        pages = {
            "/health": b"ok",
            "/v1/models": json.dumps({"data": [{"id": "tiny"}]}).encode(),
            "/metrics": f"# HELP\ndspark_steps_total {self.steps}\ndspark_verified_tokens_total {2 * self.steps}\n"
            f'dspark_stage_seconds_total{{stage="draft"}} {0.5 * self.steps}\n'.encode(),
        }
        body = pages.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def do_POST(self) -> None:
        kind = type(self)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with kind.lock:
            kind.asked.append(request)
            kind.under_way += 1
            kind.most = max(kind.most, kind.under_way)
            full = kind.under_way > kind.seats
        try:
            self.send_response(429 if full else 200)
            self.end_headers()
            if full:
                return
            if "broken" in request["messages"][0]["content"]:
                self.event({"error": {"message": "it broke"}})
                return
            for word in ("one ", "two ", "three"):
                time.sleep(0.01)
                self.event({"choices": [{"delta": {"content": word}}]})
            self.event({"choices": [], "usage": {"completion_tokens": 3}})
            self.wfile.write(b"data: [DONE]\n\n")
        finally:
            with kind.lock:
                kind.under_way -= 1
                kind.steps += 1

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def serving(seats: int = 100) -> Iterator[tuple[str, type[Handler]]]:
    kind = type("Own", (Handler,), {"seats": seats, "asked": [], "lock": threading.Lock(), "steps": 0, "most": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()


def config(**given: Any) -> LoadConfig:
    given = {"patterns": (Pattern(kind="closed", level=2.0),), "texts": ("a", "b"), "least": 4, **given}
    return LoadConfig(max_tokens=8, per_user=2, **given)


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    with serving() as (url, kind):
        way = Way(name="ours", url=url, model="tiny")
        found = run(
            way, Pattern(kind="closed", level=3.0), config().requests(Pattern(kind="closed", level=3.0)), config()
        )
    assert (found.requests, found.ok, found.refused, found.failed, found.tokens) == (6, 6, 0, 0, 18)
    assert kind.most == 3
    assert sorted(request["messages"][0]["content"] for request in kind.asked) == ["a"] * 3 + ["b"] * 3
    assert found.first_token_p50 >= 0.01 and found.user_tokens_per_second < 2 / 0.02 + 1
    assert found.tokens_per_second == pytest.approx(18 / found.seconds)
    assert (found.verified_per_step, found.stage_seconds) == (2.0, {"draft": 3.0})
    assert math.isnan(found.accepted_per_step) and found.data()["accepted_per_step"] is None


def test_an_open_loop_does_not_wait_for_replies() -> None:
    begun: list[float] = []

    async def slow(request: LoadRequest) -> Reply:
        begun.append(time.monotonic())
        await asyncio.sleep(0.2)
        return Reply(outcome="ok", sent=0.0, first=0.1, ended=0.2, tokens=2, text=request.text)

    requests = [LoadRequest(text=str(i), max_tokens=2) for i in range(10)]
    replies = asyncio.run(play(Pattern(kind="open", level=200.0), requests, slow))
    assert [reply.text for reply in replies] == [str(i) for i in range(10)]
    assert begun[-1] - begun[0] < 0.2  # a closed loop of one would take 2 seconds


def test_the_rate_of_an_open_loop_is_the_one_asked_for() -> None:
    async def at_once(request: LoadRequest) -> Reply:
        return Reply(outcome="ok", sent=0.0, first=0.0, ended=0.0, tokens=2, text="")

    begin = time.monotonic()
    asyncio.run(play(Pattern(kind="open", level=400.0), [LoadRequest(text="", max_tokens=2)] * 100, at_once))
    assert 0.15 < time.monotonic() - begin < 0.6  # 0.25 s, give or take its own spread and a busy machine


def test_a_full_server_is_told_apart_from_a_broken_one() -> None:
    with serving(seats=1) as (url, _):
        way = Way(name="ours", url=url, model="tiny")
        four = Pattern(kind="closed", level=4.0)
        found = run(way, four, config().requests(four)[:4], config())
        assert found.ok >= 1 and found.refused == 4 - found.ok and found.failed == 0
        broken = run(way, Pattern(kind="closed", level=1.0), [LoadRequest(text="broken", max_tokens=2)], config())
        assert (broken.ok, broken.failed) == (0, 1)
    gone = run(way, Pattern(kind="closed", level=1.0), [LoadRequest(text="a", max_tokens=2)], config())
    assert (gone.ok, gone.failed) == (0, 1) and math.isnan(gone.user_tokens_per_second)


def test_every_way_gets_the_same_requests_in_turns() -> None:
    patterns = (Pattern(kind="closed", level=1.0), Pattern(kind="closed", level=2.0))
    with serving() as (url, first), serving() as (other, second):
        ways = [Served(Way(name=name, url=u, model="tiny")) for name, u in (("a", url), ("b", other))]
        told: list[str] = []
        found = list(measure(ways, config(patterns=patterns, repeats=2), told=told.append))
    assert [(row.way, row.level) for row in found] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert len(first.asked) == len(second.asked) == 2 + 2 * 4 + 2 * 4
    order = [text.split(":")[0] for text in told if "warming" not in text]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_the_median_run_stands_for_the_repeats() -> None:
    def at(seconds: float) -> Any:
        reply = Reply(outcome="ok", sent=0.0, first=0.0, ended=seconds, tokens=10, text="")
        return figures_of("a", "closed", 1.0, [reply], before={}, after={})

    assert merged([at(1.0), at(3.0), at(2.0)]).seconds == 2.0
    assert merged([at(1.0), at(3.0)]).seconds == 3.0  # the lower of two throughputs: no luck counted


def test_names_of_ways_peers_and_levels() -> None:
    assert read_ways("none, fixed:3,threshold:0.4,greedy") == [
        ("none", ["--drafter", "none"]),
        ("fixed:3", ["--scheduler", "fixed", "--verify-len", "3"]),
        ("threshold:0.4", ["--scheduler", "threshold", "--threshold", "0.4"]),
        ("greedy", ["--scheduler", "greedy"]),
    ]
    for wrong in ("best", "greedy:3", "threshold", "none,none"):
        with pytest.raises(ConfigError, match="way"):
            read_ways(wrong)
    with serving() as (url, _):
        assert read_peer(f"theirs={url}/v1").way == Way(name="theirs", url=url, model="tiny")
        assert model_name(url) == "tiny"
    assert read_peer("theirs=http://x:1#m").way.model == "m"
    for wrong in ("http://x", "=http://x", "a=ftp://x", f"a=http://127.0.0.1:{free_port()}"):
        with pytest.raises(ConfigError):
            read_peer(wrong)
    assert read_levels("1, 4,16", name="levels") == [1, 4, 16]
    with pytest.raises(ConfigError, match="levels is '1;2'"):
        read_levels("1;2", name="levels")
    with pytest.raises(ConfigError, match=r"level is 1\.5"):
        Pattern(kind="closed", level=1.5)
    assert ratios([("none", 2.0), ("greedy", 3.0)], "none") == {"none": 1.0, "greedy": 1.5}
    assert ratios([("greedy", 3.0)], "none") == {}


def test_metrics_pages_are_read_with_their_labels() -> None:
    page = '# TYPE x counter\nx{a="1"} 2.5\ny 3\nz nothing\n'
    assert read_metrics(page) == {'x{a="1"}': 2.5, "y": 3.0}


def test_a_server_that_dies_is_reported_with_its_last_words() -> None:
    with pytest.raises(ConfigError, match=r"server none at .* is not ready: \S"), started("none", ["no-such-model"]):
        pass
    with serving() as (url, _):
        wait_ready(Served(Way(name="up", url=url, model="tiny")), seconds=5.0)
