"""`dspark serve` as it is typed: what it resolves, what it prints, how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_chat import save_chat_model, save_random_drafter

from dspark.cli import app
from dspark.errors import DataError
from dspark.serve.api.serving import Wanted, resolve


def test_a_name_is_taken_as_it_is() -> None:
    assert resolve("smollm2") == Wanted(model="smollm2", drafter="default", scheduler="greedy")
    assert resolve("m", drafter="ngram", scheduler="fixed") == Wanted(model="m", drafter="ngram", scheduler="fixed")


def test_an_accelerated_folder_brings_model_drafter_and_scheduler(tmp_path: Path) -> None:
    report = {"kind": "accelerate", "model": "some/model", "stages": {"compare": {"scheduler": "threshold"}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    folder = str(tmp_path)
    assert resolve(folder) == Wanted(model="some/model", drafter=folder, scheduler="threshold")
    assert resolve(folder, scheduler="fixed").scheduler == "fixed"
    assert resolve(folder, drafter="ngram") == Wanted(model="some/model", drafter="ngram", scheduler="greedy")
    (tmp_path / "report.json").write_text(json.dumps({**report, "stages": {}}))
    with pytest.raises(DataError, match="names no model"):
        resolve(folder)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        resolve(folder)
    (tmp_path / "report.json").write_text('{"kind": "evaluation"}')
    assert resolve(folder).model == folder


def _type(arguments: list[str], out: str) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(out, "w", buffering=1)  # noqa: SIM115  # until the process ends
    code = app(arguments, standalone_mode=False)
    os._exit(code if isinstance(code, int) else 0)


def started(arguments: list[str], out: Path) -> Any:
    """The command in a process of its own, which inherits what is loaded here."""
    child = multiprocessing.get_context("fork").Process(
        target=_type, args=(["serve", *arguments], str(out)), daemon=True
    )
    child.start()
    return child


def test_it_serves_and_stops(tmp_path: Path) -> None:
    model, drafter = save_chat_model(tmp_path / "model"), save_random_drafter(tmp_path / "drafter")
    out = tmp_path / "out"
    arguments = [str(model), "--drafter", str(drafter), "--scheduler", "fixed", "--port", "0", "--seats", "3"]
    arguments += ["--waiting", "2", "--memory", "16", "--api-key", "k", "--served-name", "tiny", "--dtype", "float32"]
    child = started([*arguments, "--threads", "1", "--max-output", "20"], out)
    try:
        deadline = time.monotonic() + 60
        while not (
            found := re.search(r"serves tiny at (http://127\.0\.0\.1:\d+)", out.read_text() if out.exists() else "")
        ):
            assert time.monotonic() < deadline and child.is_alive(), out.read_text()
            time.sleep(0.05)
        url, headers = found[1], {"authorization": "Bearer k"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] <= 20
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        port = int(url.rpartition(":")[2])
        taken = started(
            [str(model), "--drafter", "none", "--scheduler", "none", "--port", str(port)], tmp_path / "second"
        )
        taken.join(60)
        assert taken.exitcode == 2 and f"port is {port}" in (tmp_path / "second").read_text()
        os.kill(child.pid, signal.SIGTERM)
        child.join(20)
        assert child.exitcode == 0
    finally:
        child.kill()
    lines = out.read_text().splitlines()
    text = "\n".join(lines)
    for word in ("3 answers at once, 2 waiting", "API key    needed", "scheduler fixed", "counts only"):
        assert word in text
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["event"] for event in events if event["event"] != "request"] == ["listening", "stopped"]
    assert sum(event["event"] == "request" for event in events) == 2 and '"hi"' not in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--scheduler", "fixed", "--threshold", "0.5"], "threshold is 0.5"),
        (["--port", "70000"], "port is 70000"),
        (["--timeout", "0"], "request_seconds is 0"),
        (["--api-key", ""], "api_keys"),
        (["--host", "256.1.1.1"], "host is '256.1.1.1'"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["serve", "no-such-model", *arguments], standalone_mode=False) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert app(["serve", "no-such-model", "--port", str(port)], standalone_mode=False) == 2
    assert f"port is {port}" in capsys.readouterr().err
