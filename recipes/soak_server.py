"""Minutes of mixed load on `dspark serve`: what must hold at the end, and what must never happen on the way.

    python recipes/soak_server.py [--minutes 10] [--model smollm2] [--drafter default] [--serve overlap ...] [--json F]

Starts a server of its own and sends, all at once and at random: streamed and whole chats, completions with several
prompts and answers, schemas and expressions, clients that leave in the middle, bodies that are wrong in every way,
prompts that are too long, and floods of more requests than there is room for. Checks that

- every accepted request is answered exactly once: one reply, or one stream with one end per answer and one [DONE];
- every other is refused with the right code, and no reply is a 500;
- nobody waits for longer than a request may take;
- the server's counts agree with what was received;
- afterwards nothing runs or waits, no page is held, and memory is flat: its median over the last third of the time is
  no more than 5 % and 64 MiB above that of the third before it.

torch keeps a compiled product of every shape on a CPU, 0.6 MB each; products run over rounded numbers of rows
(`dspark.models.linear.filled_rows`), so that a server has soon met all of its shapes.

Prints one JSON object; exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from dspark.artifacts import provenance
from dspark.loadbench.servers import Served, started

WORDS = ("the sea,", "a ship of iron,", "seven gulls,", "an old song", "and the long way home", "under a pale moon.")
REQUEST_SECONDS = 60.0
GROWTH, SLACK_MIB = 1.05, 64.0
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
WRONG: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b'{"model": "MODEL", "messages": []}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "a"}], "temperature": "hot"}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "a"}], "no_such": 1}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "a"}], "n": 9999}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "(("}}', 400),
    (b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}', 404),
    (b"[" * 50_000, 400),
    (b" " * 3_000_000, 413),
]


class Soak:
    """The clients and what they have seen."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, seed: int, room: int, most: int, context: int) -> None:
        self.client, self.model, self.room, self.most = client, model, room, most
        self.context = context
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.longest = 0.0

    def fault(self, text: str) -> None:
        if text in self.faults or len(self.faults) < 40:
            self.faults[text] += 1

    def body(self, **more: Any) -> dict[str, Any]:
        draw = self.random
        room = min(1500, self.context - self.most - 60) // 2  # characters: fits whatever the tokenizer makes of them
        words = " ".join(draw.choices(WORDS, k=40))[: draw.randint(1, room)]
        shared = ("Always the same beginning. " * 40)[: draw.choice((0, 0, room))]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": shared + words}],
            "max_tokens": draw.randint(1, self.most),
            "temperature": draw.choice((0, 0, 0.7, 1.0)),
            "n": draw.choice((1, 1, 1, 2)),
        }
        if draw.random() < 0.2:
            body |= {"top_p": 0.9, "presence_penalty": 0.5}
        if draw.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        if draw.random() < 0.2:
            body["stop"] = ["e", "the end"]
        return body | more

    async def whole(self) -> None:
        body = self.body()
        reply = await self.client.post("/v1/chat/completions", json=body)
        self.judge(reply, {200, 429})
        if reply.status_code == 200:
            self.check_answer(reply.json(), body["n"])

    async def completions(self) -> None:
        prompts = [" ".join(self.random.choices(WORDS, k=3)) for _ in range(self.random.randint(1, 3))]
        body = {"model": self.model, "prompt": prompts, "max_tokens": self.random.randint(1, self.most), "n": 2}
        if self.random.random() < 0.3:
            body |= {"echo": True, "logprobs": 1}
        reply = await self.client.post("/v1/completions", json=body)
        self.judge(reply, {200, 429, 400} if 2 * len(prompts) > self.room else {200, 429})
        if reply.status_code == 200:
            self.check_answer(reply.json(), 2 * len(prompts))

    async def structured(self) -> None:
        regex, schema = {"regex": "(red|green)-[0-9]{2}"}, {"json": SCHEMA}
        chosen = self.random.choice((regex, schema))
        body = self.body(n=1, max_tokens=self.most, structured_outputs=chosen, logprobs=False, stop=None)
        reply = await self.client.post(
            "/v1/chat/completions", json={k: v for k, v in body.items() if k != "top_logprobs"}
        )
        self.judge(reply, {200, 429})
        if reply.status_code == 200:
            self.check_answer(reply.json(), 1)
            choice = reply.json()["choices"][0]
            text = choice["message"]["content"]
            if choice["finish_reason"] == "stop" and chosen is schema and json.loads(text)["n"] not in (1, 2, 3):
                self.fault(f"not by the schema: {text!r}")

    def check_answer(self, reply: dict[str, Any], choices: int) -> None:
        reasons = [choice["finish_reason"] for choice in reply["choices"]]
        if len(reasons) != choices or not set(reasons) <= {"stop", "length"}:
            self.fault(f"{choices} answers were asked for and {reasons} came")
        self.seen["answered"] += 1

    async def streamed(self) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True, "include_drafts": True})
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                self.judge(reply, {429})
                return
            self.judge(reply, {200})
            ends: Counter[int] = Counter()
            done = 0
            async for line in reply.aiter_lines():
                if not line:
                    continue
                done += line == "data: [DONE]"
                if line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        self.fault(f"a stream broke off: {chunk}")
                        return
                    for choice in chunk["choices"]:
                        ends[choice["index"]] += choice["finish_reason"] is not None
            if done != 1 or ends != {i: 1 for i in range(body["n"])}:
                self.fault(f"a stream ended {done} times, its answers {dict(ends)}")
            self.seen["answered"] += 1

    async def leaving(self) -> None:
        """Go away in the middle, or before anything has come."""
        body = self.body(max_tokens=self.most, stream=self.random.random() < 0.7)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.random.uniform(0.01, 1.0)):
                async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    await reply.aread()
                    self.judge(reply, {200, 429})
                    self.seen["answered" if reply.status_code == 200 else "refused"] += 1
                    self.seen["answered_to_leavers"] += reply.status_code == 200
                    return
        self.seen["left"] += 1

    async def wrong(self) -> None:
        raw, code = self.random.choice(WRONG)
        raw = raw.replace(b"MODEL", self.model.encode())
        reply = await self.client.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        # a schema is compiled once there is room for its request
        self.judge(reply, {code, 429} if b"regex" in raw else {code})

    async def too_long(self) -> None:
        words = self.random.choice((10_000, 50_000, 300_000))
        body = self.body(messages=[{"role": "user", "content": "word " * words}])
        self.judge(await self.client.post("/v1/chat/completions", json=body), {400, 429})

    async def flood(self) -> None:
        """More than there is room for, all at once; with the others at work, some get in."""
        bodies = [self.body(n=1, max_tokens=8) for _ in range(2 * self.room)]
        replies = await asyncio.gather(*(self.client.post("/v1/chat/completions", json=body) for body in bodies))
        for reply in replies:
            self.judge(reply, {200, 429})
            if reply.status_code == 200:
                self.check_answer(reply.json(), 1)

    def judge(self, reply: httpx.Response, codes: set[int]) -> None:
        self.seen[f"status_{reply.status_code}"] += 1
        if reply.status_code not in codes:
            self.fault(f"status {reply.status_code} where {sorted(codes)} was due: {reply.text[:200]}")
        if reply.status_code >= 400 and set(reply.json().get("error", {})) != {"message", "type", "param", "code"}:
            self.fault(f"an error of another shape: {reply.text[:200]}")
        if reply.status_code == 429 and "retry-after" not in reply.headers:
            self.fault("429 without Retry-After")

    async def work(self, deadline: float) -> None:
        ways: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.whole, 5),
            (self.streamed, 5),
            (self.completions, 2),
            (self.structured, 2),
            (self.leaving, 4),
            (self.wrong, 3),
            (self.too_long, 0.3),
            (self.flood, 0.3),
        ]
        while time.monotonic() < deadline:
            (way,) = self.random.choices([way for way, _ in ways], [weight for _, weight in ways])
            began = time.monotonic()
            try:
                await way()
            except Exception as error:
                self.fault(f"{way.__name__}: {type(error).__name__} {error}")
            self.longest = max(self.longest, time.monotonic() - began)
            self.seen[way.__name__] += 1


def resident_mib(pid: int) -> float:
    """Memory of a process, of what Linux tells."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


async def samples(client: httpx.AsyncClient, name: str = "") -> dict[str, float]:
    """The server's counts."""
    text = (await client.get("/metrics", timeout=30.0)).text
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {key: float(value) for key, _, value in rows if key.startswith(name)}


async def watch_memory(pid: int, deadline: float, found: list[float]) -> None:
    while time.monotonic() < deadline:
        found.append(resident_mib(pid))
        await asyncio.sleep(1.0)


async def soak(served: Served, args: argparse.Namespace, room: int) -> dict[str, Any]:
    assert served.process is not None
    limits = httpx.Limits(max_connections=8 * room + args.clients)
    timeout = httpx.Timeout(REQUEST_SECONDS + 15.0)
    async with httpx.AsyncClient(base_url=served.way.url, timeout=timeout, limits=limits) as client:
        context = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        run = Soak(client, served.way.model, seed=args.seed, room=room, most=args.most, context=context)
        deadline = time.monotonic() + 60 * args.minutes
        memory: list[float] = []
        watching = asyncio.create_task(watch_memory(served.process.pid, deadline, memory))
        await asyncio.gather(*(run.work(deadline) for _ in range(args.clients)))
        await watching
        for _ in range(50):  # clients that left are noticed with the next step
            end = await samples(client)
            if not (
                end["dspark_answers_in_flight"] or end["dspark_requests_running"] or end["dspark_requests_waiting"]
            ):
                break
            await asyncio.sleep(0.2)
        check_end(run, end, memory)
        return {
            "minutes": args.minutes,
            "seen": dict(sorted(run.seen.items())),
            "faults": [f"{count} times: {text}" for text, count in run.faults.items()],
            "longest_seconds": round(run.longest, 2),
            "memory_mib": [round(value, 1) for value in memory[:: max(1, len(memory) // 30)]],
            "server": {
                key: value
                for key, value in end.items()
                if key.startswith(("dspark_requests", "dspark_pages")) and "created" not in key
            },
            "output_tokens": end["dspark_output_tokens_total"],
            "provenance": provenance(),
        }


def check_end(run: Soak, end: dict[str, float], memory: list[float]) -> None:
    """What must hold when all is over."""
    for name in ("dspark_answers_in_flight", "dspark_requests_running", "dspark_requests_waiting", "dspark_pages_used"):
        if end[name] != 0:
            run.fault(f"{name} is {end[name]:g} when nothing is under way")
    told: Counter[str] = Counter()
    for key, value in end.items():
        if key.startswith("dspark_requests_total"):
            told[key.rpartition('outcome="')[2].rstrip('"}')] += int(value)
    # a client may leave while the last bytes are on their way: the server then counts an answer that nobody read
    if not run.seen["answered"] <= told["answered"] <= run.seen["answered"] + run.seen["left"]:
        run.fault(f"{run.seen['answered']} answers were received, {told['answered']} sent")
    if told["answered"] + told["disconnected"] + told["overloaded"] < run.seen["answered"] + run.seen["status_429"]:
        run.fault(f"the server's outcomes {dict(told)} are fewer than what was received")
    if told["failed"] or told["timeout"]:
        run.fault(f"{told['failed']} requests failed and {told['timeout']} took too long")
    if run.longest > REQUEST_SECONDS + 10.0:
        run.fault(f"somebody waited {run.longest:.1f} seconds")
    third = len(memory) // 3
    if third >= 10:
        before, after = statistics.median(memory[third : 2 * third]), statistics.median(memory[2 * third :])
        if after > max(before * GROWTH, before + SLACK_MIB):
            run.fault(f"memory grew from {before:.0f} to {after:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--scheduler", default="greedy")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--most", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--waiting", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="append", default=[], help="further option of `dspark serve`, as threads=1")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    args = parser.parse_args()
    options = [args.model, "--drafter", args.drafter, "--scheduler", args.scheduler, "--timeout", str(REQUEST_SECONDS)]
    options += ["--seats", str(args.seats), "--waiting", str(args.waiting)]
    for option in args.serve:
        name, equals, value = option.partition("=")
        options += [f"--{name}", value] if equals else [f"--{name}"]
    with started("soak", options) as served:
        report = asyncio.run(soak(served, args, args.seats + args.waiting))
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
