"""The engine under random arrivals, cancellations, shared beginnings and short memory: every request that finishes is
token for token what the loop at batch size 1 writes, and the books agree after every step.

Three families of models, and a target without one whose numbers depend on the whole text in its pages, which takes the
most steps. DSPARK_MACHINE_TIMES multiplies the examples (once is for a CI run of seconds)."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from engine_rig import alone, eager_lookup, tiny_drafter, tiny_target, tokens_of
from history_rig import unchecked
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.serve.engine import Engine
from dspark.serve.errors import QueueFull
from dspark.serve.events import StepEvent
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

TIMES = int(os.environ.get("DSPARK_MACHINE_TIMES", "1"))
EXAMPLES = {"llama": 12, "qwen3": 12, "gemma2": 12, "history": 100}
BEGINNING = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)  # shared, so that prefixes are hit

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=6, rule="block"),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=4),
)


def some_request(i: int) -> GenerationRequest:
    """The ``i``-th of a fixed lot, so that what each is alone need be found once."""
    prompt = (*BEGINNING[: (3 * i) % 11], 43 + i, *(BEGINNING[:5] if i % 4 == 0 else ()))
    return GenerationRequest(
        request_id="any",
        prompt_ids=prompt,
        sampling=SAMPLINGS[i % len(SAMPLINGS)],
        max_new_tokens=(5, 11, 1, 16, 8)[i % 5],
        stop_token_ids=(60, 61) if i % 3 == 0 else (),
    )


REQUESTS = [some_request(i) for i in range(12)]
SEEN: Counter[str] = Counter()


class EngineMachine(RuleBasedStateMachine):
    """One engine and the requests in it. ``family`` is set by the test."""

    family = "llama"

    @initialize(
        seats=st.integers(1, 4),
        page_size=st.integers(2, 6),
        spare=st.integers(0, 6),
        prefill=st.integers(2, 20),
        drafter=st.integers(0, 4),
        verify_len=st.sampled_from((None, None, 1)),
        overlap=st.booleans(),
        sharing=st.sampled_from((True, True, True, False)),
    )
    def start(
        self,
        seats: int,
        page_size: int,
        spare: int,
        prefill: int,
        drafter: int,
        verify_len: int | None,
        overlap: bool,
        sharing: bool,
    ) -> None:
        drafters = (
            ("history", "history", "history+lookup", "ngram", "none")
            if self.family == "history"
            else ("dspark", "sharp", "dspark+lookup", "ngram", "none")
        )
        self.drafter, self.verify_len = drafters[drafter], verify_len
        longest = max(len(r.prompt_ids) + r.max_new_tokens for r in REQUESTS)
        config = EngineConfig(
            seats=seats,
            max_len=64,
            page_size=page_size,
            pages=-(-(longest + 4) // page_size) + spare,  # one request fits, a few more do not
            prefill_tokens=prefill,
            max_waiting=2,
            prefix_sharing=sharing,
            scheduler="fixed",
            verify_len=verify_len,
        )
        kind = OverlappedEngine if overlap else Engine
        self.engine = kind(tiny_target(self.family), tiny_drafter(self.family, self.drafter), config=config)
        self.asked: dict[str, GenerationRequest] = {}
        self.events: dict[str, list[StepEvent]] = {}
        self.cancelled: set[str] = set()

    @rule(lot=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=3))
    def arrive(self, lot: list[int]) -> None:
        for which in lot:
            name = f"r{len(self.asked)}"
            request = replace(REQUESTS[which], request_id=name)
            try:
                self.engine.add(request)
            except QueueFull:
                SEEN["full"] += 1
                return
            self.asked[name], self.events[name] = request, []

    @precondition(lambda self: self.engine.has_work)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        name = f"r{max(0, len(self.asked) - which - 1)}"
        if self.engine.cancel(name):
            SEEN["cancelled"] += 1
            self.cancelled.add(name)
            assert all(flight.request.request_id != name for flight in self.engine.roster)  # freed at once
        self.engine.roster.check()

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def refuse(self) -> None:
        for name in list(self.asked)[-1:]:
            if not self.ended(name):
                with pytest.raises(RequestError, match="in flight"):
                    self.engine.enter(self.engine.open(self.asked[name]))

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def ended(self, name: str) -> bool:
        return name in self.cancelled or any(event.finish_reason for event in self.events[name])

    def step(self) -> None:
        SEEN["steps"] += self.engine.has_work
        for event in self.engine.step():
            told = self.events[event.request_id]
            assert not told or told[-1].finish_reason is None, "an event after the last"
            told.append(event)
            if event.finish_reason is not None:
                self.judge(event.request_id)
        self.engine.roster.check()

    def judge(self, name: str) -> None:
        events, request = self.events[name], self.asked[name]
        request = replace(request, request_id="any")
        greedy = request.sampling.greedy  # then no drafter matters
        drafter, verify_len = ("none", None) if greedy else (self.drafter, self.verify_len)
        wanted = alone(self.family, drafter, verify_len, request)
        if events[-1].finish_reason == "cancelled":
            assert name in self.cancelled
            assert tokens_of(events) == list(wanted.token_ids[: len(tokens_of(events))])
            return
        SEEN["finished"] += 1
        assert tokens_of(events) == list(wanted.token_ids), f"{name} differs from the loop at batch size 1"
        assert events[-1].finish_reason == wanted.finish_reason
        assert events[-1].completion_tokens == len(wanted.token_ids)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        SEEN["preempted"] += stats.preemptions
        SEEN["cached"] += stats.cached_tokens
        SEEN["accepted"] += sum(stats.accepted_at)
        SEEN["looked up"] += stats.lookup_accepted
        assert stats.running == stats.waiting == stats.pages_used == 0
        assert all(self.ended(name) for name in self.asked), "a request was forgotten"
        assert sum(stats.finished.values()) == len(self.asked)
        self.engine.close()


@pytest.mark.parametrize("family", EXAMPLES)
def test_whatever_happens_a_finished_request_is_what_it_is_alone(family: str) -> None:
    SEEN.clear()
    examples = TIMES * EXAMPLES[family]
    with unchecked(), eager_lookup():
        run_state_machine_as_test(
            type("Machine", (EngineMachine,), {"family": family}),
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(dict(SEEN))
    assert SEEN["steps"] > 20 * examples and SEEN["finished"] > 3 * examples, SEEN
    if family == "history":
        for thing in ("preempted", "cached", "accepted", "looked up", "cancelled", "full"):
            assert SEEN[thing] > 0, f"no example had {thing}: {SEEN}"
