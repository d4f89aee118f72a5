"""Scenes that the tests of the simulator share."""

from __future__ import annotations

from typing import Any

from dspark.simulate.acceptance import AcceptanceModel
from dspark.simulate.costs import SyntheticCosts
from dspark.simulate.loop import EngineShape
from dspark.simulate.sweep import Scene
from dspark.simulate.workload import Lengths

CERTAIN = AcceptanceModel(conditional=(1 - 1e-12,) * 3, spread=0.0, sharpness=0.0)
NEVER = AcceptanceModel(conditional=(1e-12,) * 3, spread=0.0, sharpness=0.0)


def flat_costs(**changes: int | float) -> SyntheticCosts:
    """A step takes 10 ms whatever is in it, and drafting nothing."""
    free: dict[str, int | float] = {"us_per_token": 0.0, "tile": 1, "ns_per_context_token": 0.0, "host_ms": 0.0}
    drafting = {"draft_floor_ms": 0.0, "draft_us_per_slot": 0.0}
    return SyntheticCosts(**{"floor_ms": 10.0, **free, **drafting, **changes})


def scene(**changes: Any) -> Scene:
    """A small scene with prompts worked off elsewhere."""
    given = {
        "costs": SyntheticCosts(),
        "acceptance": AcceptanceModel(),
        "lengths": Lengths(prompt_tokens=64.0, output_tokens=48.0),
        "shape": EngineShape(seats=32, prefill_elsewhere=True),
        "steps": 300,
        "requests": 100,
    }
    return Scene(**{**given, **changes})
