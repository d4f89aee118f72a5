"""What one user gets through HTTP, beside what the engine gives in its own thread: one process, prompts in turns.

    python recipes/time_one_user.py [--drafter none --scheduler none] [--prompts 6] [--tokens 96] [--pin]

Decoding alone is compared, from an answer's first token to its last; prompts are cached for both. The client is the
load bench's, in a process of its own. ``--pin`` keeps the engine's thread and its OpenMP threads to a core each, for a
machine that others use as well: their work on a core may otherwise push two of them onto another. Prints a line per
prompt, and the medians with the median ratio. It sets GOMP_SPINCOUNT as the command ``dspark`` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # before torch

from dspark.bundle import Bundle
from dspark.evaluate.bench import prompts_of
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.loadbench.client import LoadRequest, Way, ask
from dspark.loadbench.wire import Wire
from dspark.serve.api.app import make_app
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.server import make_server
from dspark.serve.async_engine import AsyncEngine
from dspark.serve.building import build_engine
from dspark.serve.engine import Engine
from dspark.serve.events import StepEvent
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import SCHEDULERS, EngineConfig

NAME = "one-user"
Early = Callable[[list[StepEvent]], None] | None


@dataclass
class Alone:
    """An engine's step that, while ``on``, goes on until nothing is left and hands out the last events only."""

    engine: Engine
    plain: Callable[[Early], list[StepEvent]]
    on: bool = False
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def __call__(self, early: Early = None) -> list[StepEvent]:
        events = self._stamped(self.plain(early))
        while self.on and self.engine.has_work:
            events = self._stamped(self.plain(early))
        return events

    def _stamped(self, events: list[StepEvent]) -> list[StepEvent]:
        self.last = time.monotonic()
        for event in events:
            self.first = self.last if self.first is None and event.token_ids else self.first
            self.tokens = event.completion_tokens
        return events

    async def speed(self, engine: AsyncEngine, request: GenerationRequest) -> float:
        """Tokens a second after the first."""
        self.on, self.first = True, None
        async for _ in engine.submit(request):
            pass
        self.on = False
        assert self.first is not None
        return (self.tokens - 1) / (self.last - self.first)


async def client() -> None:
    """Answers each line of JSON (url, text, tokens) with the speed that its user saw."""
    wire = Wire(seconds=60.0)
    while line := await asyncio.to_thread(sys.stdin.readline):
        url, text, tokens = json.loads(line)
        heard = await ask(wire, Way(name=NAME, url=url, model=NAME), LoadRequest(text=text, max_tokens=tokens))
        print(heard.read(begin=0.0).tokens_per_second, flush=True)


def over_http(child: subprocess.Popen[str], url: str, text: str, tokens: int) -> float:
    """The client's word for one answer."""
    into, out = child.stdin, child.stdout
    assert into is not None and out is not None
    print(json.dumps([url, text, tokens]), file=into, flush=True)
    return float(out.readline())


def busiest(before: dict[str, int], after: dict[str, int], count: int) -> list[int]:
    """Threads that have run longest in between."""
    ranked = sorted(after, key=lambda thread: after[thread] - before.get(thread, 0), reverse=True)
    return [int(thread) for thread in ranked[:count]]


def clocks() -> dict[str, int]:
    """Nanoseconds that each thread of this process has run; Linux."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            found[thread] = int(file.read().split()[0])
    return found


def served(bundle: Bundle, engine: AsyncEngine) -> ServedModel:
    info = engine.info
    return ServedModel(
        name=NAME,
        chat=bundle.chat,
        max_len=info.max_len,
        vocab_size=info.vocab_size,
        drafter=info.drafter,
        scheduler=info.scheduler,
        block_size=info.block_size,
    )


def compare(options: argparse.Namespace, bundle: Bundle, engine: AsyncEngine, loop: Any, url: str) -> None:
    """Both ways for every prompt, after a run of each that does not count."""
    alone = Alone(engine.engine, engine.engine.step)
    engine.engine.step = alone  # type: ignore[method-assign]
    child = subprocess.Popen(
        [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    rows: list[tuple[float, float]] = []
    texts = [prompt.text for prompt in prompts_of(PROMPTS)][: options.prompts]
    for number, text in enumerate([texts[0], *texts]):

        def inside(text: str = text, number: int = number) -> float:
            ids = bundle.chat.prompt_ids([{"role": "user", "content": text}])
            stops = bundle.chat.stop_token_ids
            request = GenerationRequest(
                request_id=f"{number}-{time.monotonic_ns()}",
                prompt_ids=tuple(ids),
                max_new_tokens=options.tokens,
                stop_token_ids=tuple(stops),
            )
            return float(asyncio.run_coroutine_threadsafe(alone.speed(engine, request), loop).result())

        before = clocks() if options.pin else {}
        inside()  # the prompt is cached from here on
        if options.pin and number == 0:
            cores = sorted(os.sched_getaffinity(0))
            for core, thread in zip(cores, busiest(before, clocks(), len(cores)), strict=True):
                os.sched_setaffinity(thread, {core})
        pair = {}
        for way in ("engine", "http") if number % 2 else ("http", "engine"):
            pair[way] = inside() if way == "engine" else over_http(child, url, text, options.tokens)
        if number:
            rows.append((pair["engine"], pair["http"]))
            print(
                f"engine {pair['engine']:7.1f}  http {pair['http']:7.1f}  {pair['http'] / pair['engine']:.3f}",
                flush=True,
            )
    child.communicate()
    inner, outer = median(row[0] for row in rows), median(row[1] for row in rows)
    ratio = median(row[1] / row[0] for row in rows)
    print(f"median tokens/s: engine {inner:.1f}, http {outer:.1f}; median ratio {ratio:.3f}", flush=True)


def main(options: argparse.Namespace) -> None:
    bundle = Bundle.load(options.model, options.drafter)
    engine = AsyncEngine(build_engine(bundle, EngineConfig(scheduler=options.scheduler)))
    config, model = ApiConfig(), served(bundle, engine)
    failed: list[BaseException] = []

    def listening(port: int) -> None:
        def work(loop: Any) -> None:
            try:
                compare(options, bundle, engine, loop, f"http://127.0.0.1:{port}")
            except BaseException as error:
                failed.append(error)
            finally:
                server.should_exit = True

        threading.Thread(target=work, args=(asyncio.get_running_loop(),), daemon=True).start()

    server = make_server(lambda: make_app(engine, model, config), config, port=0, listening=listening)
    server.run()
    asyncio.run(engine.shutdown(drain=False))
    if failed:
        raise failed[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--scheduler", default="greedy", choices=SCHEDULERS)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client())
    else:
        main(given)
