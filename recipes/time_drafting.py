"""What drafting for many requests at once costs beside a target pass, and where the time goes.

    python recipes/time_drafting.py [--drafter FOLDER] [--requests 1,2,4,...] [--candidates 64,256] [--limits 7,3] \
        [--context 200] [--repeats 9] [--json]

Per number of requests, all in one process and interleaved, medians over ``--repeats``: the target's pass over one token
a request, and the drafter's batched proposal with at most ``limit`` drafts each, split into the parallel stage, the
head's product, the sequential stage and what is left (bookkeeping, confidences); then taking in a round's outcome (two
tokens a request). Times are processor time over threads, so that a neighbour on the machine does not decide. Half of
the requests are greedy, half sampled.
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


def clock() -> float:
    """Processor seconds of this process, a thread's share."""
    return time.process_time() / torch.get_num_threads()


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

    def __init__(self, target: LeanTarget, drafters: dict[int, DsparkDrafter], *, seats: int, context: int) -> None:
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
        for candidates, drafter in drafters.items():
            form = self.forms[candidates] = batched(drafter, target)
            stages = self.stages[candidates] = Stages()
            stages.watch(drafter, "backbone", "parallel")
            stages.watch(drafter, "base_logits", "head")
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

    def draft(self, candidates: int, requests: int, limit: int) -> dict[str, float]:
        """Seconds of a proposal by stage, "draft" in all."""
        asks = [
            DraftAsk(
                seat=seat, anchor=5 + seat, sampling=self.samplings[seat], generator=self.generators[seat], limit=limit
            )
            for seat in range(requests)
        ]
        stages = self.stages[candidates]
        stages.seconds.clear()
        begin = clock()
        self.forms[candidates].propose(asks)
        found = {"draft": clock() - begin, **stages.seconds}
        return {**found, "rest": found["draft"] - sum(stages.seconds.values())}

    def extend(self, candidates: int, requests: int) -> float:
        """Seconds to take in two tokens of each request."""
        features = self.features[:2].repeat(requests, 1)
        begin = clock()
        self.forms[candidates].extend(range(requests), [2] * requests, self.ids[:2].repeat(requests), features)
        return clock() - begin


def measured(bench: Bench, requests: int, candidates: list[int], limits: list[int], repeats: int) -> dict[str, Any]:
    """Medians in milliseconds."""
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds * 1000)

    for repeat in range(repeats + 1):
        if repeat == 1:
            times.clear()  # the first round warms up
        note("pass", bench.target_pass(requests))
        for m in candidates:
            for limit in limits:
                for stage, seconds in bench.draft(m, requests, limit).items():
                    note(f"{m}/{limit}/{stage}", seconds)
            if repeat % 4 == 1:  # room is limited
                note(f"{m}/extend", bench.extend(m, requests))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--requests", default="1,2,4,8,16,32,64")
    parser.add_argument("--candidates", default="64")
    parser.add_argument("--limits", default="7,3")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    counts, candidates, limits = (
        [int(part) for part in text.split(",")] for text in (options.requests, options.candidates, options.limits)
    )
    target = load_target(options.model)
    assert isinstance(target, LeanTarget)
    drafters: dict[int, DsparkDrafter] = {}
    for m in candidates:
        drafter = load_drafter(options.drafter, target, candidates=m)
        assert isinstance(drafter, DsparkDrafter)
        drafters[m] = drafter
    bench = Bench(target, drafters, seats=max(counts), context=options.context)
    for requests in counts:
        found = measured(bench, requests, candidates, limits, options.repeats)
        if options.json:
            print(json.dumps({"requests": requests, **found}), flush=True)
            continue
        print(f"{requests} requests: pass {found['pass']:.1f} ms", flush=True)
        for m in candidates:
            for limit in limits:
                part = {s: found[f"{m}/{limit}/{s}"] for s in ("draft", "parallel", "head", "sequential", "rest")}
                share = part["draft"] / found["pass"]
                stages = ", ".join(f"{name} {ms:.2f}" for name, ms in part.items() if name != "draft")
                print(f"  {m} candidates, {limit} drafts: {part['draft']:.2f} ms = {share:.0%} of a pass ({stages})")
            print(f"  {m} candidates: taking in two tokens each {found[f'{m}/extend']:.2f} ms")


if __name__ == "__main__":
    main()
