"""What a step of a busy engine takes, and where: schedulers under the same closed loop, in one process.

    python recipes/time_engine_step.py [--users 64] [--ways none,greedy,lagged] [--steps 200] [--group 20] [--warm 60] \
        [--tokens 96,160] [--lookup] [--costs FILE] [--clock cpu|wall] [--threads 1] [--json]

Each way is an engine of its own over the same weights, made by `build_engine`, without a server in front; `+` behind a
scheduler's name makes its loop the overlapped one. Every user asks again as soon as he is answered: the built-in
prompts, the same in the same order for each way, with answers of ``--tokens`` tokens (least, most; drawn per request).
The ways take turns, ``--group`` steps at a time, so a slow minute of the machine meets all of them; of each the first
``--warm`` steps do not count. Costs are measured once, for all ways (``--costs`` keeps them in a file).

Told per way: tokens a second, and their ratio to the first way's, over all groups and as the median of groups that were
run one after the other; seconds to the first token in the same time; drafts and drafted steps; milliseconds a step of
the target, of the drafter (proposing and taking in), and of the host's work beside them; and, as medians, of
the plain steps, which drafted for nobody, ended nobody and read no prompt: what an engine that refuses all drafts adds
to one that knows of none. ``cpu`` is processor time, for one thread on a shared core.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark.bundle import Bundle
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.maths.step_costs import StepCosts
from dspark.serve import costs as costs_module
from dspark.serve.building import build_engine
from dspark.serve.engine import Engine
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


class Parts:
    """Seconds inside methods of some objects, by part."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, {"target": 0.0, "drafter": 0.0}

    def watch(self, owner: Any, method: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            begin = self.clock()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[part] += self.clock() - begin

        setattr(owner, method, timed)


@dataclass
class Step:
    """One step of a way; times in seconds."""

    seconds: float
    tokens: int
    target: float
    drafter: float
    plain: bool  # drafted for nobody, ended nobody, read no prompt

    @property
    def host(self) -> float:
        return self.seconds - self.target - self.drafter


@dataclass
class Loop:
    """An engine and its users, who ask again as soon as they are answered."""

    engine: Engine
    prompts: list[tuple[int, ...]]
    stop_ids: tuple[int, ...]
    lengths: tuple[int, int]
    clock: Callable[[], float]
    parts: Parts
    spent: float = 0.0  # this way's own seconds
    asked: int = 0
    asked_at: dict[str, float] = field(default_factory=dict)  # by request that has no token yet
    waits: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def ask(self) -> None:
        number, self.asked = self.asked, self.asked + 1
        length = random.Random(number).randint(*self.lengths)
        prompt = self.prompts[number % len(self.prompts)]
        request = GenerationRequest(
            request_id=f"r{number}", prompt_ids=prompt, max_new_tokens=length, stop_token_ids=self.stop_ids
        )
        self.engine.add(request)
        self.asked_at[request.request_id] = self.spent

    def step(self) -> None:
        read = self._read()
        before, drafted, counted = dict(self.parts.seconds), self.engine.counters.drafted_steps, self._tokens()
        begin = self.clock()
        events = self.engine.step()
        seconds = self.clock() - begin
        self.spent += seconds
        ended = 0
        for event in events:
            if event.token_ids and event.request_id in self.asked_at:
                self.waits.append(self.spent - self.asked_at.pop(event.request_id))
            ended += event.finish_reason is not None
        for _ in range(ended):
            self.ask()
        target, drafter = (self.parts.seconds[part] - before[part] for part in ("target", "drafter"))
        plain = self.engine.counters.drafted_steps == drafted and not ended and self._read() == read
        self.steps.append(Step(seconds, self._tokens() - counted, target, drafter, plain))

    def _read(self) -> int:
        return self.engine.counters.prompt_tokens

    def _tokens(self) -> int:
        return self.engine.counters.completion_tokens

    def forget(self) -> None:
        """What is behind does not count."""
        self.steps, self.waits = [], []
        self.counted = self.engine.stats()

    def figures(self) -> dict[str, float]:
        stats, steps = self.engine.stats(), self.steps
        seconds = sum(step.seconds for step in steps)
        proposed = sum(stats.proposed_at) - sum(self.counted.proposed_at)
        verified = sum(stats.verified_at) - sum(self.counted.verified_at)
        plain = [step for step in steps if step.plain]
        return {
            "tokens_per_second": sum(step.tokens for step in steps) / seconds,
            "first_token": _median(self.waits),
            "step_ms": 1e3 * seconds / len(steps),
            "target_ms": 1e3 * sum(step.target for step in steps) / len(steps),
            "drafter_ms": 1e3 * sum(step.drafter for step in steps) / len(steps),
            "host_ms": 1e3 * sum(step.host for step in steps) / len(steps),
            "plain_ms": 1e3 * _median([step.seconds for step in plain]),
            "plain_target_ms": 1e3 * _median([step.target for step in plain]),
            "host_median_ms": 1e3 * _median([step.host for step in plain]),
            "drafted_steps": (stats.drafted_steps - self.counted.drafted_steps) / len(steps),
            "proposed": proposed / len(steps),
            "verified": verified / len(steps),
            "tokens_per_step": sum(step.tokens for step in steps) / len(steps),
        }


def make_loop(bundle: Bundle, way: str, options: argparse.Namespace) -> Loop:
    config = EngineConfig(seats=options.users, scheduler=way.rstrip("+"), overlap=way.endswith("+"))
    engine, clock = build_engine(bundle, config), CLOCKS[options.clock]
    parts = Parts(clock)
    for method in ("propose", "extend"):
        parts.watch(engine.drafter.inner, method, "drafter")
    parts.watch(engine, "_run", "target")
    prompts = [tuple(bundle.prompt_ids(text)) for texts in PROMPTS.values() for text in texts]
    lengths = (options.tokens[0], options.tokens[-1])
    loop = Loop(engine, prompts, tuple(bundle.chat.stop_token_ids), lengths, clock, parts)
    for _ in range(options.users):
        loop.ask()
    return loop


def share_costs(path: Path | None) -> None:
    """Let engines measure their costs once, or not at all if a file has them."""
    measure = costs_module.measure_costs
    kept: list[StepCosts] = [pickle.loads(path.read_bytes())] if path is not None and path.exists() else []

    @functools.wraps(measure)
    def once(*args: Any, **settings: Any) -> StepCosts:
        if not kept:
            kept.append(measure(*args, **settings))
            if path is not None:
                path.write_bytes(pickle.dumps(kept[0]))
        return kept[0]

    costs_module.measure_costs = once


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    share_costs(options.costs)
    bundle = Bundle.load("smollm2", options.drafter, threads=options.threads, lookup=options.lookup)
    loops = {way: make_loop(bundle, way, options) for way in options.ways}
    for loop in loops.values():
        for _ in range(options.warm):
            loop.step()
        loop.forget()
    groups = options.steps // options.group
    for turn in range(groups):
        order = list(loops.values())
        for loop in order[turn % len(order) :] + order[: turn % len(order)]:
            for _ in range(options.group):
                loop.step()
    found = {way: loop.figures() for way, loop in loops.items()}
    first = next(iter(loops.values()))
    for way, loop in loops.items():
        ratios = [_rate(loop, i, options.group) / _rate(first, i, options.group) for i in range(groups)]
        found[way]["median_ratio"] = float(np.median(ratios))
        found[way]["ratio"] = found[way]["tokens_per_second"] / found[options.ways[0]]["tokens_per_second"]
    return found


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _rate(loop: Loop, i: int, group: int) -> float:
    part = loop.steps[i * group : (i + 1) * group]
    return sum(step.tokens for step in part) / sum(step.seconds for step in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["none", "greedy", "lagged"])
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--lookup", action="store_true", help="drafts from the text itself, ahead of the drafter")
    for name, default in (("steps", 200), ("group", 20), ("warm", 60), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[96, 160])
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    names = list(next(iter(found.values())))
    for name in names:
        print(f"{name:18}" + "".join(f"{found[way][name]:12.3f}" for way in found))
    print(f"{'':18}" + "".join(f"{way:>12}" for way in found))


if __name__ == "__main__":
    main()
