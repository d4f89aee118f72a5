"""The road from its beginning to its end: refuse early, plan, and walk through the stages that are not done yet.

    prompts -> answers -> train -> calibrate -> profile -> compare

Each stage leaves files and a line in the ledger. A call that finds lines there goes on behind them; within a stage,
drafts, answers and training steps that are on the disk are kept, the three short stages at the end are done anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.chat import ChatFormat
from dspark.errors import ConfigError
from dspark.models.loading import choose_device, choose_dtype, load_target
from dspark.models.target import Target
from dspark.models.weights import read_config, resolve_model
from dspark.road.budget import Budget
from dspark.road.card import write_result
from dspark.road.data import make_answers, make_prompts
from dspark.road.judging import calibrate, compare, profile
from dspark.road.ledger import Facts, Ledger, locked
from dspark.road.plan import Plan, best_block, make_plan, plan_lines
from dspark.road.probe import Probe, check_fits, measure
from dspark.road.road import Progress, Road, RoadConfig
from dspark.road.shape import BLOCKS, draft_shape, parameters, tensor_shapes
from dspark.road.training import check_fields, train_drafter
from dspark.schedule_files import folder_fingerprint

STAGES: dict[str, Callable[[Road], Facts]] = {
    "prompts": make_prompts,
    "answers": make_answers,
    "train": train_drafter,
    "calibrate": calibrate,
    "profile": profile,
    "compare": compare,
}
PROMPT_ROOM = 256  # tokens before an answer, for sizing the sampler's memory


@dataclass(frozen=True, kw_only=True)
class Result:
    """Where a road has led."""

    folder: Path
    stages: dict[str, Facts]  # what each stage said of itself
    seconds: float  # worked, over all calls
    finished: bool  # False: only the plan was wanted


def accelerate(
    config: RoadConfig,
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    probe: Probe | None = None,
    plan_only: bool = False,
) -> Result:
    """Make the model that ``config`` names faster: walk the road, or what is left of it, within its budget.

    ``clock`` gives seconds; ``probe`` stands in for the measurement of the target. ``plan_only`` stops after the plan.
    Raises :class:`ConfigError`, :class:`ModelError` or :class:`DataError` for what cannot be done, before any stage
    begins where that can be known.
    """
    progress, out = progress or Progress(), Path(config.out)
    _check_out(out)
    with locked(out / "road"):
        budget = Budget(config.budget, clock=clock)
        place = resolve_model(config.model)
        ledger = Ledger(out / "road", config.settings(folder_fingerprint(place)), budget)
        if list(ledger.done) and set(STAGES) <= set(ledger.done):
            progress.say(f"{out} is finished already")
            return Result(folder=out, stages=ledger.done, seconds=budget.spent_before, finished=True)
        road = _prepare(config, place, ledger, progress, probe)
        for line in plan_lines(road.plan, road.probe, _facts(road)):
            progress.say(line)
        check_fields(road)
        if not plan_only:
            _walk(road)
        return Result(folder=out, stages=ledger.done, seconds=budget.spent, finished=not plan_only)


def _walk(road: Road) -> None:
    for name, stage in STAGES.items():
        if name in road.ledger.done:
            road.progress.say(f"{name}: done before")
            continue
        again = road.ledger.begin(name)
        if again:
            kept = name in ("prompts", "answers", "train")
            road.progress.say(f"{name}: {'goes on with what was done before' if kept else 'is done again'}")
        begin = road.budget.spent
        facts = stage(road)
        if name == "compare":
            write_result(road, facts)
        road.ledger.finish(name, {**facts, "seconds": round(road.budget.spent - begin, 2), "resumed": again})
        road.progress.say(f"{name}: {road.budget.spent - begin:.0f} s")


def _check_out(out: Path) -> None:
    """Refuse a folder that holds something else than a road."""
    if out.is_file():
        raise ConfigError(f"out is {out}, which is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "road").is_dir():
        raise ConfigError(f"out is {out}, which holds other files; name a new folder")


def _prepare(config: RoadConfig, place: Path, ledger: Ledger, progress: Progress, probe: Probe | None) -> Road:
    """Everything that can be refused is refused here; then the target is loaded, measured, and the plan made."""
    chat = ChatFormat.from_folder(place)
    if config.prompts is None and "prompts" not in ledger.done:
        chat.user_turn()  # says what to do where a model cannot write its own prompts
    target_config = read_config(place)
    device = choose_device(config.device)
    weights = sum(math.prod(shape) for shape in tensor_shapes(place).values())
    known = ledger.done.get("plan")
    dtype = known["dtype"] if known is not None else str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    check_fits(place, itemsize=getattr(torch, dtype).itemsize, parameters=weights, device=device)
    target = load_target(config.model, dtype=dtype, device=str(device), implementation=config.implementation)
    if known is None:
        progress.show("measuring the model", 0.0)
        length = config.max_new_tokens + PROMPT_ROOM
        probe = probe or measure(target, parameters=weights, out=Path(config.out), answer_tokens=length)
        known = _planned(config, target, target_config, ledger, probe) | {"dtype": dtype}
        ledger.finish("plan", known)
    return Road(
        config=config,
        place=place,
        target=target,
        chat=chat,
        target_config=target_config,
        ledger=ledger,
        progress=progress,
        probe=_probe(known["probe"]),
        shape=draft_shape(target_config, target.info, block_size=known["block_size"]),
        plan=Plan(**{**known["plan"], "gain": tuple(known["plan"]["gain"])}),
    )


def _planned(config: RoadConfig, target: Target, target_config: Any, ledger: Ledger, probe: Probe) -> Facts:
    """The plan and all that it is made from, for the ledger: a call that goes on must not plan otherwise."""
    block_size = best_block(probe, BLOCKS)
    shape = draft_shape(target_config, target.info, block_size=block_size)
    plan = make_plan(
        probe,
        shape,
        draft_parameters=parameters(shape),
        budget=config.budget,
        left=ledger.budget.left,
        max_new_tokens=min(config.max_new_tokens, target.info.max_len // 2),
        own_prompts=config.prompts is None,
        answers=config.answers,
        steps=config.steps,
    )
    return {"probe": asdict(probe), "plan": asdict(plan), "block_size": block_size}


def _probe(fields: Facts) -> Probe:
    passes = tuple((int(tokens), float(seconds)) for tokens, seconds in fields["pass_seconds"])
    return Probe(**{**fields, "pass_seconds": passes})


def _facts(road: Road) -> dict[str, str]:
    shape, info = road.shape, road.target.info
    taps = ", ".join(map(str, shape.target_layer_ids))
    return {
        "model": road.config.model,
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "drafter": f"{parameters(shape) / 1e6:.1f} M parameters, {shape.num_hidden_layers} layers behind the target's "
        f"layers {taps}, blocks of {shape.block_size}",
        "prompts": "that the model writes itself" if road.config.prompts is None else f"of {road.config.prompts}",
    }
