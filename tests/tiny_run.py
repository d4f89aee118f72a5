"""A training run that takes a second: a tiny chat model, twelve answers to learn, and processes to run it in."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tiny_chat import save_chat_model

from dspark.train.config import TrainConfig, drafter_defaults
from dspark.train.ranks import Ranks, joined


def tiny_config(folder: Path) -> TrainConfig:
    """Twelve answers that count upwards in one of two directions: easy to learn, not trivial."""
    model = save_chat_model(folder / "model")
    with open(folder / "prompts.jsonl", "w") as prompts, open(folder / "answers.jsonl", "w") as answers:
        for i in range(12):
            prompts.write(json.dumps({"id": f"p{i}", "turns": [f"count {i}"], "domain": "ab"[i % 2]}) + "\n")
            ids = [40 + (i + (1 if i % 2 else -1) * k) % 9 for k in range(40)]
            answers.write(json.dumps({"id": f"p{i}", "sample": 0, "answer_ids": ids}) + "\n")
    return TrainConfig(
        model=str(model),
        answers=(str(folder / "answers.jsonl"),),
        prompts=(str(folder / "prompts.jsonl"),),
        out=str(folder / "run"),
        layers=1,
        block_size=3,
        markov_rank=4,
        taps=(0, 2),
        draft_vocab=60,
        mask_token_id=3,
        held_out=4,
        steps=12,
        sequences_per_step=3,
        slots_per_step=36,
        dtype="float32",
        log_every=1,
        evaluate_every=5,
        save_seconds=0.0,
    )


def of_method(base: TrainConfig, drafter: str, **changes: object) -> TrainConfig:
    """``base`` for another method, on the same taps."""
    heads = {} if drafter == "dspark" else {"markov_rank": 0, "confidence": False}
    return replace(base, drafter=drafter, **{**heads, **drafter_defaults(drafter), **changes})


def lines(folder: Path) -> dict[tuple[int, str], dict]:
    """Logged lines by step and kind, without what depends on the clock; a step logged twice must be the same twice."""
    found: dict[tuple[int, str], dict] = {}
    for text in (folder / "log.jsonl").read_text().splitlines():
        line = {k: v for k, v in json.loads(text).items() if "second" not in k and k != "target_passes"}
        key = (line.get("step", 0), "held" if "held_out_analytic" in line else "step")
        assert found.setdefault(key, line) == line
    return found


def fork(work: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    """Start ``work`` in a process of its own, which inherits what is loaded here."""
    child = multiprocessing.get_context("fork").Process(target=_alone, args=(work, *arguments), daemon=True)
    child.start()
    return child


def _alone(work: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)
    work(*arguments)


def run_ranks(size: int, work: Callable[..., None], *arguments: object, join: bool = True) -> list[int | None]:
    """Call ``work(ranks, *arguments)`` in ``size`` processes as `torchrun` would; returns their exit codes.

    ``join`` False leaves joining the others to ``work``.
    """
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    children = [fork(_as_rank, rank, size, port, join, work, arguments) for rank in range(size)]
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def _as_rank(
    rank: int, size: int, port: int, join: bool, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if not join:
        work(Ranks(rank, size), *arguments)
        return
    with joined() as ranks:
        work(ranks, *arguments)
