"""The training stage: a configuration from the plan, and a schedule that ends when the time does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.artifacts import atomic_write_bytes, read_json, tuples, write_json
from dspark.data.features import Sample
from dspark.data.prompts import read_prompts
from dspark.data.sample_cache import load_samples
from dspark.errors import DataError
from dspark.models.draft_files import CONFIG_NAME, TENSORS_NAME
from dspark.models.drafter import Drafter
from dspark.road.budget import Pace
from dspark.road.data import answers_path, part_path
from dspark.road.ledger import Facts
from dspark.road.plan import EVALUATIONS, SLOTS
from dspark.road.road import Road
from dspark.road.shape import draft_start, mask_token
from dspark.train.config import TrainConfig
from dspark.train.run import Corpus, load_corpus, train
from dspark.train_cli import decode_held_out, states_text

MAX_TOKENS = 512  # of a training sample
SEQUENCES = 6  # of a step
WIDE = 2048  # hidden size from which on a step is cut into passes
SAVE_SHARE, LEAST_SAVE, MOST_SAVE = 0.02, 5.0, 120.0  # of the training time between two saved states, in seconds


def train_fields(road: Road, *, mask_token_id: int, held_out: int) -> dict[str, Any]:
    """Fields of :class:`TrainConfig` for this road: the recipe that made the shipped drafter, scaled to the plan.

    First the anchor's slot learns the target's final states, then come short blocks, then whole ones; the state loss
    stays in the sum (docs/log.md).
    """
    shape, steps = road.shape, road.plan.steps
    largest = max(block for block in (1, 3) if block <= shape.block_size)
    return {
        "model": road.config.model,
        "answers": (str(answers_path(road)),),
        "prompts": (str(part_path(road, "training")),),
        "out": str(road.work / "train"),
        "max_tokens": min(MAX_TOKENS, road.target.info.max_len),
        "held_out": held_out,
        "layers": shape.num_hidden_layers,
        "block_size": shape.block_size,
        "markov_rank": shape.markov_rank,
        "taps": shape.target_layer_ids,
        "draft_vocab": shape.draft_vocab_size or 0,
        "mask_token_id": mask_token_id,
        "initialise": draft_start(shape, road.target_config, road.place),
        "alpha_state": 0.3,
        "soft_until": 0.2,
        "steps": steps,
        "state_steps": steps // 6,
        "sequences_per_step": SEQUENCES,
        "slots_per_step": SLOTS,
        "curriculum": ((0.4, largest), (1.0, 0)),
        "schedule": "trapezoid",
        "decay": 0.5,
        "learning_rate": 1.2e-3,
        "warmup": 0.02,
        "dtype": str(road.target.info.dtype).removeprefix("torch."),
        "feature_gigabytes": road.plan.feature_bytes / 2**30,
        "blocks_per_pass": 64 if road.target.info.hidden_size >= WIDE else 0,
        "log_every": max(1, min(20, steps // 20)),
        "evaluate_every": max(1, steps // EVALUATIONS),
        "evaluate_prompts": max(1, road.plan.evaluate_prompts),
        "save_seconds": max(LEAST_SAVE, min(MOST_SAVE, SAVE_SHARE * road.plan.seconds["train"])),
        "seed": 42 + road.config.seed,
    }


def check_fields(road: Road) -> None:
    """Raise :class:`ConfigError` for fields of the user's that no training can be made of; before hours are spent."""
    fields = train_fields(road, mask_token_id=0, held_out=2)
    TrainConfig(**{**fields, "answers": (), "prompts": (), **road.config.fields})


def train_drafter(road: Road) -> Facts:
    """Train, or go on, to the end of the plan's time; the best drafter's files then lie in the road's folder."""
    config = _config(road)
    corpus = load_corpus(config, target=road.target)
    reserve = road.planned("calibrate", "profile", "compare") + 0.01 * road.budget.seconds
    logged, saved = _logged_step(Path(config.out)), _saved_step(Path(config.out))
    if logged > 0:
        road.progress.say(f"training goes on from step {saved}; {max(0, logged - saved)} logged steps are done again")
    pace = Pace(lambda: road.budget.left - reserve, steps=config.steps, evaluate_every=config.evaluate_every)
    board = _Board(road, pace)
    best = train(
        config,
        corpus=corpus,
        evaluate=board.decode if road.plan.evaluate_prompts else None,
        on_step=board.take,
        stop=board.beat,
        steps=None if road.config.steps is not None else board.steps,
    )
    for name in (TENSORS_NAME, CONFIG_NAME):  # the config last: without it a folder is no drafter
        atomic_write_bytes(road.out / name, (best / name).read_bytes())
    return {
        "steps": board.step,
        "step_seconds": pace.step_seconds,
        "held_out": board.held_out,
        "training_samples": len(corpus.training),
        "held_out_samples": len(corpus.held_out),
        "kept": best.name,
        "fields": {name: getattr(config, name) for name in ("layers", "block_size", "markov_rank", "initialise")},
    }


class _Board:
    """Hears of a run's steps, and passes on what the road's progress, its ledger and its pace must know."""

    def __init__(self, road: Road, pace: Pace) -> None:
        self.road, self.pace = road, pace
        self.step = 0
        self.held_out: dict[str, float] = {}

    def take(self, line: dict[str, Any]) -> None:
        self.step = line["step"]
        if "held_out_analytic" in line:
            self.pace.evaluated()
            found = line.get("held_out_decoded") or line["held_out_analytic"]
            self.held_out = {name: round(value, 3) for name, value in found.items()}
            length = found.get("acceptance_length", found.get("mean"))
            self.road.progress.say(f"step {self.step}: {length:.2f} tokens a round on held-out prompts")
        else:
            length = line.get("acceptance_length")
            words = states_text(line) if length is None else f"{length:.2f} tokens a round"
            self.road.progress.show(
                f"step {self.step} of {self.pace.planned}, {words}", self.step / max(1, self.pace.planned)
            )

    def beat(self) -> bool:
        self.road.ledger.beat()
        return False

    def steps(self, step: int) -> int:
        planned = self.pace.steps(step)
        if abs(planned - self.road.ledger.note.get("steps", 0)) > 0.05 * planned:
            self.road.ledger.beat(steps=planned)  # what a resumed run begins with
        return planned

    def decode(
        self, corpus: Corpus, config: TrainConfig, drafter: Drafter, samples: Sequence[Sample]
    ) -> dict[str, float]:
        try:
            return decode_held_out(corpus, config, drafter, samples)
        except DataError:  # every answer ends at its first token: nothing was drafted, and nothing accepted
            return {"acceptance_length": 1.0}


def _config(road: Road) -> TrainConfig:
    """The run's config: from its folder where it has begun, since the data decided on some of its fields."""
    path = road.work / "train.json"
    if path.is_file():
        stored = read_json(path, remedy="choose another --out")
        fields = {name: tuples(value) for name, value in stored.items()}
    else:
        fields = _new_fields(road)
        write_json(path, fields)
    config = TrainConfig(**{**fields, **road.config.fields})
    planned = road.ledger.note.get("steps")
    return config if road.config.steps is not None or planned is None else replace(config, steps=planned)


def _new_fields(road: Road) -> dict[str, Any]:
    files = [str(answers_path(road))], [str(part_path(road, "training"))]
    samples = load_samples(*files, road.chat, max_tokens=min(MAX_TOKENS, road.target.info.max_len))
    seen = torch.zeros(road.target.info.vocab_size, dtype=torch.long)
    for sample in samples:
        seen += torch.bincount(sample.token_ids, minlength=seen.shape[0])
    mask = mask_token(road.chat.tokenizer, seen, never=road.chat.stop_token_ids)
    return train_fields(road, mask_token_id=mask, held_out=max(2, min(48, len(read_prompts(files[1])) // 6)))


def _saved_step(run: Path) -> int:
    """The step of the newest state; 0 where there is none."""
    states = sorted(run.glob("state-*"))
    return int(states[-1].name.removeprefix("state-")) if states else 0


def _logged_step(run: Path) -> int:
    """The last step that the log knows of; a line that a kill has torn counts for nothing."""
    found = 0
    path = run / "log.jsonl"
    for text in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found = max(found, line["step"])
    return found
