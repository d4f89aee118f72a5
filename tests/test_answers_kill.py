"""SIGKILL at random moments, again and again: only what was in flight is lost, and nothing comes twice.

The runs are forked children of the test, which saves them the imports; so each dies as a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from strikes import forked, killed_until_done, kills
from tiny_chat import save_chat_model

import dspark.answers_cli as answers_cli
from dspark.answers_cli import AnswersConfig
from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.remote_answers import Server

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

KILLS = kills(6)
PROMPTS, SAMPLES = max(10, 2 * KILLS - 2), 2  # lines enough for all kills
CONCURRENCY = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> AnswersConfig:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "turns": [f"say {i}", "and then?"], "domain": "all"} for i in range(PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return AnswersConfig(
        prompts=(prompts,),
        out=tmp_path / "answers.jsonl",
        model=str(model),
        sampling=SamplingParams(temperature=1.0, seed=6),
        max_new_tokens=12,
        samples=SAMPLES,
        turns=2,
    )


def keys_of(path: Path) -> list[tuple[str, int, int]]:
    return [(row["id"], row["sample"], row.get("turn", 0)) for row in read_jsonl(path)]


def test_our_own_answers_survive_kills(config: AnswersConfig, model: Path, tmp_path: Path) -> None:
    chat = ChatFormat.from_folder(model)
    place = {"dtype": "float32", "device": "cpu", "implementation": "auto", "threads": 1}

    def work(out: Path) -> None:
        # half of the vocabulary stops, so that answers end at all times and conversations go on
        stops = tuple(range(2, 130))
        answers_cli.ChatFormat.from_folder = lambda *_, **__: StoppingChat(chat.tokenizer, eos_token_ids=stops)
        answers_cli.run(AnswersConfig(**{**config.__dict__, "out": out}), rows=4, **place)

    reference = tmp_path / "whole.jsonl"
    assert killed_until_done(reference, lambda: work(reference), kills=0, source=random.Random(0)) == 0
    struck = killed_until_done(config.out, lambda: work(config.out), kills=KILLS, source=random.Random(1))
    assert struck == KILLS
    rows = [{key: row for key, row in zip(keys_of(p), read_jsonl(p), strict=True)} for p in (reference, config.out)]
    assert len(keys_of(config.out)) == len(rows[1]), "an answer twice"
    assert rows[0] == rows[1], "other answers than an undisturbed run gives"
    assert {key for key in rows[1] if key[2] == 0} == {(f"p{i}", s, 0) for i in range(PROMPTS) for s in range(SAMPLES)}
    assert any(turn == 1 for _, _, turn in rows[1])


class StoppingChat(ChatFormat):
    """A chat format with a name of its own, made in the child."""


class Moody(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that fails, stalls, truncates and disconnects; the same prompt gets the same text."""

    protocol_version = "HTTP/1.1"
    log: Path  # a line per reply that was sent whole
    stall = 0.2  # seconds
    source = random.Random(9)

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mood = self.source.choice(["good"] * 6 + ["error", "stall", "truncate", "hang up"])
        text = hashlib.sha256(json.dumps([body["messages"], body["seed"]]).encode()).hexdigest()[:12]
        reason = "length" if text[0] in "01" else "stop"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
        reply = json.dumps({"choices": [choice]}).encode()
        if mood == "stall":
            time.sleep(self.stall)
        if mood == "hang up":
            self.close_connection = True
            return
        if mood in ("good", "stall"):
            with open(self.log, "a") as file:
                file.write(text + "\n")
        self.send_response(500 if mood == "error" else 200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply[: len(reply) // 2] if mood == "truncate" else reply)
        self.close_connection = mood == "truncate"


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that were killed close their connections: nothing to report."""


def serve() -> tuple[str, int]:
    """Start the server as a process; its address and process id."""
    server = Quiet(("127.0.0.1", 0), Moody)
    serving = forked(server.serve_forever)
    server.server_close()
    return f"http://127.0.0.1:{server.server_address[1]}", serving


def stop(serving: int) -> None:
    os.kill(serving, signal.SIGKILL)
    os.waitpid(serving, 0)


def test_answers_of_a_server_survive_kills_and_moods(
    config: AnswersConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moody, "log", tmp_path / "served.txt", raising=False)
    url, serving = serve()

    def work() -> None:
        patient = functools.partial(Server, first_pause=0.01, longest_pause=0.05, timeout=60.0, attempts=40)
        answers_cli.Server = patient  # type: ignore[misc]
        answers_cli.run_remote(config, url=url, name="tiny", concurrency=CONCURRENCY)

    try:
        struck = killed_until_done(config.out, work, kills=KILLS, source=random.Random(2))
    finally:
        stop(serving)
    assert struck == KILLS
    keys, rows = keys_of(config.out), list(read_jsonl(config.out))
    assert len(set(keys)) == len(keys), "an answer twice"
    assert {key for key in keys if key[2] == 0} == {(f"p{i}", s, 0) for i in range(PROMPTS) for s in range(SAMPLES)}
    finished = {(row["id"], row["sample"]) for row in rows if not row.get("turn") and row["finish_reason"] == "stop"}
    assert {key[:2] for key in keys if key[2] == 1} == finished, "cut conversations end, the others go on"
    chat = ChatFormat.from_folder(config.model)
    for row in rows:
        assert (row["answer_ids"][-1] in chat.stop_token_ids) == (row["finish_reason"] == "stop")
    served = Moody.log.read_text().split()
    assert len(rows) <= len(served) <= len(rows) + KILLS * CONCURRENCY


def test_silence_is_broken_off_and_asked_again(
    config: AnswersConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Moody, "log", tmp_path / "served.txt", raising=False)
    monkeypatch.setattr(Moody, "stall", 30.0)
    url, serving = serve()
    patient = functools.partial(Server, first_pause=0.01, longest_pause=0.05, timeout=0.5, attempts=40)
    monkeypatch.setattr(answers_cli, "Server", patient)
    try:
        answers_cli.run_remote(
            AnswersConfig(**{**config.__dict__, "turns": 1}), url=url, name="tiny", concurrency=CONCURRENCY
        )
    finally:
        stop(serving)
    assert len(keys_of(config.out)) == len(set(keys_of(config.out))) == PROMPTS * SAMPLES
    assert "requests were tried again" in capsys.readouterr().err
