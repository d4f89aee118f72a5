"""Does `dspark simulate` predict the engine? The same closed loops on both, side by side.

    python recipes/validate_simulator.py --users 1,4,16 --steps 150 [--model M --drafter D] [--out FILE]

Three parts, all of one run: rounds of the drafter are played and recorded at full length; the engine runs every
scheduler at every number of users; and the simulator runs the same with those rounds, with the costs that the engine
measured of itself, and with what an undrafted step takes beside the target as its host time. Drafts, verify lengths
and everything that schedulers do to throughput are then predictions. Printed are ratios, simulated over measured.

Needs a quiet machine: what runs beside it changes the measured side only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.artifacts import atomic_write_text, provenance
from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.evaluate.recorder import PlayedRounds, play
from dspark.serve.building import build_engine
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig
from dspark.simulate.acceptance import RecordedRounds
from dspark.simulate.costs import TableCosts
from dspark.simulate.loop import EngineShape
from dspark.simulate.sweep import Scene, closed_loop
from dspark.simulate.validation import Measured, compare, measure
from dspark.simulate.ways import read_way
from dspark.simulate.workload import Lengths

# the engine's names and settings for the simulator's ways
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"scheduler": "none"},
    "fixed": {"scheduler": "fixed"},
    "lagged": {"scheduler": "lagged", "draft_gate": False},
    "gate:greedy": {"scheduler": "greedy"},
    "gate:lagged": {"scheduler": "lagged"},
}


def recorded(played: PlayedRounds) -> RecordedRounds:
    """Played rounds as the simulator replays them, a prompt being one request."""
    proposed = played.outcomes.lengths
    return RecordedRounds(
        confidence=np.where(
            np.arange(played.outcomes.confidence.shape[1]) < proposed[:, None], played.outcomes.confidence, 0
        ),
        proposed=proposed,
        accepted=played.outcomes.accepted,
        starts=np.flatnonzero(np.diff(played.prompt, prepend=-1)),
        description={"folder": "played in this run"},
    )


def requests(prompts: Sequence[Sequence[int]], *, users: int, tokens: int) -> Callable[[int], GenerationRequest]:
    """Answers of ``tokens`` tokens, the first ``users`` of them shorter, so that they end one after the other."""

    def make(i: int) -> GenerationRequest:
        length = max(2, tokens * (i + 1) // users) if i < users else tokens
        ids = tuple(prompts[i % len(prompts)])
        return GenerationRequest(request_id=str(i), prompt_ids=ids, max_new_tokens=length)

    return make


def run_engine(
    bundle: Bundle, name: str, users: int, args: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> tuple[Measured, Any]:
    """What the engine does, and the costs it goes by."""
    config = EngineConfig(seats=users, prefill_tokens=args.prefill_tokens, prefix_sharing=False, **ENGINES[name])
    engine = build_engine(bundle, config)
    make = requests(prompts, users=users, tokens=args.tokens)
    try:
        return measure(engine, make, users=users, steps=args.steps, warm_up=args.steps // 5), engine.planner.costs
    finally:
        engine.close()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--users", default="1,4,16")
    parser.add_argument("--ways", default=",".join(ENGINES))
    parser.add_argument("--tokens", type=int, default=96, help="of every answer")
    parser.add_argument("--steps", type=int, default=150, help="measured, of every engine")
    parser.add_argument("--prefill-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=12, help="of the built-in ones")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = options()
    bundle = Bundle.load(args.model, args.drafter, threads=args.threads)
    texts = [text for together in zip(*PROMPTS.values(), strict=True) for text in together]  # a domain after the other
    prompts = [bundle.prompt_ids(text) for text in texts[: args.prompts]]
    played = play(bundle.target, bundle.drafter, prompts, sampling=SamplingParams(), max_new_tokens=args.tokens)
    acceptance = recorded(played)
    scene = Scene(
        costs=TableCosts(table=run_engine(bundle, "lagged", 1, args, prompts)[1]),
        acceptance=acceptance,
        lengths=Lengths(
            prompt_tokens=float(np.mean([len(ids) for ids in prompts])), output_tokens=float(args.tokens), variety=0.0
        ),
        shape=EngineShape(prefill_tokens=args.prefill_tokens),
        steps=4000,
    )
    rows = []
    print(f"{'way':12} {'users':>5}  {'tokens/s':>9} {'simulated':>9}  ratios: throughput, checked, committed, step")
    for users in map(int, args.users.split(",")):
        table = run_engine(bundle, "lagged", users, args, prompts)[1]
        host = 0.0
        for name in dict.fromkeys(("none", *args.ways.split(","))):
            measured, _ = run_engine(bundle, name, users, args, prompts)
            if name == "none":
                host = measured.host_seconds
            here = replace(scene, costs=TableCosts(table=table, host_seconds=host))
            point = closed_loop(here, read_way(name), users)
            ratios = compare(point, measured)
            rows.append({"measured": asdict(measured), "simulated": asdict(point), "ratios": asdict(ratios)})
            print(
                f"{name:12} {users:5}  {measured.throughput:9.1f} {point.throughput:9.1f}  {ratios.throughput:.2f}, "
                f"{ratios.verify_tokens:.2f}, {ratios.acceptance_length:.2f}, {ratios.step_seconds:.2f}",
                flush=True,
            )
    if args.out is not None:
        content = {"rows": rows, "options": {k: str(v) for k, v in vars(args).items()}, "provenance": provenance()}
        atomic_write_text(args.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
