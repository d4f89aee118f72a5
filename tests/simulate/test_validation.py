"""The comparison with a running engine: on a fake whose figures are known, and on the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from simulation_scenes import CERTAIN, flat_costs, scene
from tiny_models import tiny_model

from dspark.errors import DataError
from dspark.simulate.sweep import closed_loop
from dspark.simulate.validation import RunningEngine, compare, measure
from dspark.simulate.ways import read_way
from dspark.simulate.workload import Lengths


@dataclass
class Told:
    finish_reason: str | None = None


@dataclass
class Totals:
    steps: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    verified_at: tuple[int, ...] = (0, 0, 0)
    accepted_at: tuple[int, ...] = (0, 0, 0)
    stage_seconds: dict[str, float] = field(default_factory=dict)


class FakeEngine:
    """Every step takes 10 ms and brings every request a certain block of three drafts and a token of the target's."""

    def __init__(self, *, ends: str = "length") -> None:
        self.left: list[int] = []
        self.now, self.steps, self.rounds, self.tokens, self.checked, self.ends = 0.0, 0, 0, 0, 0, ends

    def add(self, request: object) -> None:
        assert isinstance(request, int)
        self.left.append(request)

    def step(self) -> list[Told]:
        self.now += 0.010
        self.steps += 1
        events = []
        for i, left in enumerate(self.left):
            new = min(4, left)
            self.left[i], self.tokens, self.rounds = left - new, self.tokens + new, self.rounds + 1
            self.checked += new - 1
            events.append(Told(self.ends if left == new else None))
        self.left = [left for left in self.left if left]
        return events

    def stats(self) -> Totals:
        at = (self.checked, 0, 0)
        stages = {"target": 0.008 * self.steps, "draft": 0.001 * self.steps}
        return Totals(self.steps, self.tokens, self.rounds, at, at, stages)


def test_a_known_engine_is_measured_and_predicted() -> None:
    fake = FakeEngine()
    lengths = [10, 20, 30, 40]
    measured = measure(
        fake, lambda i: lengths[i] if i < 4 else 40, users=4, steps=200, warm_up=20, clock=lambda: fake.now
    )
    assert measured.step_seconds == pytest.approx(0.010) and measured.host_seconds == pytest.approx(0.001)
    assert measured.throughput == pytest.approx(4 * 400) and measured.verify_tokens == pytest.approx(4.0)
    same = scene(costs=flat_costs(), acceptance=CERTAIN, lengths=Lengths(output_tokens=40.0, variety=0.0))
    ratios = compare(closed_loop(same, read_way("fixed"), 4), measured)
    assert (ratios.scheduler, ratios.users) == ("fixed", 4)
    for name in ("throughput", "verify_tokens", "acceptance_length", "step_seconds"):
        assert getattr(ratios, name) == pytest.approx(1.0, rel=0.02), name


def test_a_slower_engine_shows() -> None:
    fake = FakeEngine()
    measured = measure(fake, lambda i: 40, users=2, steps=50, warm_up=5, clock=lambda: fake.now)
    twice = scene(costs=flat_costs(floor_ms=20.0), acceptance=CERTAIN, lengths=Lengths(output_tokens=40.0, variety=0.0))
    ratios = compare(closed_loop(twice, read_way("fixed"), 2), measured)
    assert ratios.step_seconds == pytest.approx(2.0) and ratios.throughput == pytest.approx(0.5, rel=0.03)


def test_answers_of_unknown_length_are_refused() -> None:
    fake = FakeEngine(ends="stop")
    with pytest.raises(DataError, match="ended by 'stop'; measure with answers of a fixed length"):
        measure(fake, lambda i: 12, users=1, steps=20, warm_up=0, clock=lambda: fake.now)
    with pytest.raises(DataError, match="no round was committed"):
        measure(FakeEngine(), lambda i: 4, users=0, steps=1, warm_up=0)


def test_the_real_engine_is_driven_and_told_of() -> None:
    """Undrafted, so every count is known: a token per request and step."""
    from dspark.models.decoder_config import from_transformers
    from dspark.models.drafter import NoDrafter
    from dspark.models.lean import LeanTarget
    from dspark.serve.engine import Engine
    from dspark.serve.request import GenerationRequest
    from dspark.serve.settings import EngineConfig

    model = tiny_model("llama")
    tensors = dict(model.state_dict())
    target = LeanTarget(from_transformers(model.config), tensors, name="tiny", dtype=torch.float32)
    engine: Any = Engine(target, NoDrafter(), config=EngineConfig(seats=3, max_len=64, scheduler="none"))
    assert isinstance(engine, RunningEngine)

    def request(i: int) -> GenerationRequest:
        tokens = 10 * (i + 1) if i < 3 else 30
        return GenerationRequest(request_id=str(i), prompt_ids=(1, 2, 3, 4 + i % 5), max_new_tokens=tokens)

    measured = measure(engine, request, users=3, steps=40, warm_up=5)
    assert measured.verify_tokens == measured.acceptance_length == 1.0
    assert measured.throughput == pytest.approx(3 / measured.step_seconds, rel=0.1)
    assert 0 < measured.stage_seconds["target"] < measured.step_seconds and measured.host_seconds > 0
    engine.close()
