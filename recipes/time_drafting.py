"""What drafting for many requests at once costs beside a target pass, and where the time goes.

    python recipes/time_drafting.py [--drafter FOLDER] [--requests 1,2,4,...] [--bits 8,16] [--candidates 64] \\
        [--limits 7,3] [--context 200] [--repeats 9] [--json]

Per number of requests, all in one process and interleaved, medians over ``--repeats``: the target's pass over one token
a request, and the drafter's batched proposal with at most ``limit`` drafts each, with weights of eight bits and of
sixteen, split into the parallel stage (layers and head), the sequential stage (with the confidences) and what is left;
then taking in a round's outcome (two tokens a request). Every measurement follows a pass of the target, as in decoding,
so that it begins with the caches the pass leaves. Half of the requests are greedy, half sampled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dspark.core import SamplingParams
from dspark.models.batch_drafter import DraftAsk, batched
from dspark.models.dspark import DsparkDrafter
from dspark.models.lean import LeanTarget
from dspark.models.loading import load_target
from dspark.models.paged_memory import PageTables
from dspark.models.registry import load_drafter

PAGE_SIZE = 16


Kind = tuple[int, int]  # bits of a weight, candidates
clock = time.perf_counter


class Stages:
    """Seconds spent inside methods of an object, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            begin = clock()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + clock() - begin

        setattr(owner, method, timed)


class Bench:
    """A target and drafters of it with ``seats`` requests behind ``context`` random tokens each."""

    def __init__(self, target: LeanTarget, drafters: dict[Kind, DsparkDrafter], *, seats: int, context: int) -> None:
        stretches = -(-(context + 400) // PAGE_SIZE)
        self.tables = PageTables(seats=seats, pages_per_seat=stretches, page_size=PAGE_SIZE)
        order = torch.randperm(seats * stretches, generator=torch.Generator().manual_seed(0)).view(seats, -1)
        for seat in range(seats):
            self.tables.assign(seat, order[seat].tolist())
        self.target, self.context, self.pages = target, context, seats * stretches
        self.memory = target.new_paged_memory(self.tables, pages=self.pages)
        taps = next(iter(drafters.values())).taps
        ids = torch.randint(target.info.vocab_size, (context,), generator=torch.Generator().manual_seed(1))
        self.ids = ids
        features = target.forward(ids, self.memory, rows=(0,), taps=taps, want_logits=False).features
        assert features is not None
        self.features = features
        for seat in range(1, seats):
            target.forward(ids, self.memory, rows=(seat,), want_logits=False)
        self.forms, self.stages = {}, {}
        for kind, drafter in drafters.items():
            form = self.forms[kind] = batched(drafter, target)
            stages = self.stages[kind] = Stages()
            stages.watch(drafter, "parallel", "parallel")
            stages.watch(drafter._stage, "draft", "sequential")
            form.attach(self.tables, pages=self.pages, max_len=context + 390)
            for seat in range(seats):
                form.open(seat, shaper=None)
                form.extend([seat], [context], ids, features)
        self.generators = [torch.Generator().manual_seed(seat) for seat in range(seats)]
        self.samplings = [SamplingParams(temperature=0.8 * (seat % 2)) for seat in range(seats)]

    def target_pass(self, requests: int) -> float:
        """Seconds of a pass over one token of each request, features tapped."""
        rows = range(requests)
        begin = clock()
        self.target.forward(self.ids[:requests], self.memory, rows=rows, counts=[1] * requests, taps=self.taps)
        seconds = clock() - begin
        for row in rows:
            self.memory.rollback(row, self.context)
        return seconds

    @property
    def taps(self) -> tuple[int, ...]:
        return next(iter(self.forms.values())).taps

    def draft(self, kind: Kind, requests: int, limit: int) -> dict[str, float]:
        """Seconds of a proposal by stage, "draft" in all."""
        asks = [
            DraftAsk(
                seat=seat, anchor=5 + seat, sampling=self.samplings[seat], generator=self.generators[seat], limit=limit
            )
            for seat in range(requests)
        ]
        stages = self.stages[kind]
        stages.seconds.clear()
        begin = clock()
        self.forms[kind].propose(asks)
        found = {"draft": clock() - begin, **stages.seconds}
        return {**found, "rest": found["draft"] - sum(stages.seconds.values())}

    def extend(self, kind: Kind, requests: int) -> float:
        """Seconds to take in two tokens of each request."""
        features = self.features[:2].repeat(requests, 1)
        begin = clock()
        self.forms[kind].extend(range(requests), [2] * requests, self.ids[:2].repeat(requests), features)
        return clock() - begin


def measured(bench: Bench, requests: int, kinds: list[Kind], limits: list[int], repeats: int) -> dict[str, Any]:
    """Medians in milliseconds."""
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds * 1000)

    for repeat in range(repeats + 1):
        if repeat == 1:
            times.clear()  # the first round warms up
        for kind in kinds:
            for limit in limits:
                note("pass", bench.target_pass(requests))
                for stage, seconds in bench.draft(kind, requests, limit).items():
                    note(f"{kind}/{limit}/{stage}", seconds)
            if repeat % 4 == 1:  # room is limited
                note("pass", bench.target_pass(requests))
                note(f"{kind}/extend", bench.extend(kind, requests))
    return {name: statistics.median(values) for name, values in times.items()}


def report(requests: int, found: dict[str, float], kinds: list[Kind], limits: list[int]) -> None:
    print(f"{requests} requests: pass {found['pass']:.1f} ms", flush=True)
    for kind in kinds:
        name = f"{kind[0]} bits, {kind[1]} candidates"
        for limit in limits:
            part = {s: found[f"{kind}/{limit}/{s}"] for s in ("draft", "parallel", "sequential", "rest")}
            stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in part.items() if stage != "draft")
            print(f"  {name}, {limit} drafts: {part['draft']:.2f} ms = {part['draft'] / found['pass']:.0%} ({stages})")
        print(f"  {name}: taking in two tokens each {found[f'{kind}/extend']:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--requests", default="1,2,4,8,16,32,64")
    parser.add_argument("--bits", default="8,16")
    parser.add_argument("--candidates", default="64")
    parser.add_argument("--limits", default="7,3")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    counts, bits, candidates, limits = (
        [int(part) for part in text.split(",")]
        for text in (options.requests, options.bits, options.candidates, options.limits)
    )
    target = load_target(options.model, dtype=options.dtype)
    assert isinstance(target, LeanTarget)
    drafters: dict[Kind, DsparkDrafter] = {}
    for kind in ((b, m) for b in bits for m in candidates):
        drafter = load_drafter(options.drafter, target, candidates=kind[1], weight_bits=kind[0])
        assert isinstance(drafter, DsparkDrafter)
        drafters[kind] = drafter
    bench = Bench(target, drafters, seats=max(counts), context=options.context)
    for requests in counts:
        found = measured(bench, requests, list(drafters), limits, options.repeats)
        if options.json:
            print(json.dumps({"requests": requests, **found}), flush=True)
        else:
            report(requests, found, list(drafters), limits)


if __name__ == "__main__":
    main()
