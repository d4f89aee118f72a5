"""Short equal-time training runs that differ in one field each: which lever pays on this machine?

    python recipes/ablate_training.py --answers FILE --prompts FILE [--seconds 150] [--only NAME,NAME] > table.jsonl

All variants share the target, the samples and their features, and get the same seconds of training steps, counted as
processor time over threads, so that a neighbour on the machine does not decide (target passes are not counted: they
cost the same for all). Every line of the output is a variant with its steps, blocks and held-out analytic acceptance
length per domain.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace

import torch

from dspark.train.config import TrainConfig
from dspark.train.loop import held_out_numbers, step_parts, train_step
from dspark.train.optim import learning_rate
from dspark.train.run import load_corpus, start

VARIANTS: dict[str, dict] = {
    "base": {},
    "half-steps": {"slots_per_step": 896, "sequences_per_step": 4},
    "rate-x2.5": {"learning_rate": 3e-3},
    "rate-x0.4": {"learning_rate": 5e-4},
    "soft-only": {"soft_until": 1e9},
    "paper-loss": {"soft_until": 0.0},
    "curriculum": {"curriculum": ((0.2, 1), (0.5, 3), (1.0, 0))},
    "fresh": {"initialise": "fresh"},
    "no-bigram": {"bigram_passes": 0.0},
    "decay-8": {"loss_decay": 8.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--pool", type=int, default=240, help="training samples that the variants share")
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--set", default="{}", help="JSON of TrainConfig fields that all variants share")
    args = parser.parse_args()
    shared = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(args.set).items()}
    base = TrainConfig(
        answers=(args.answers,), prompts=(args.prompts,), held_out=24, draft_vocab=12288, bigram_passes=0.5, **shared
    )
    corpus = load_corpus(base)
    del corpus.training[args.pool :]
    features = None
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            run = start(replace(base, out=folder, **VARIANTS[name]), corpus, features=features)
            features = run.features
            for sample in corpus.training:
                features.get(sample)
            print(json.dumps({"variant": name, **one(run, args.seconds)}), flush=True)


def one(run, seconds: float) -> dict:  # type: ignore[no-untyped-def]
    """Train for ``seconds`` of steps; the number of steps is fixed after three of them, so that schedules fit."""
    config, spent, blocks, step = run.config, 0.0, 0, 0
    pool = run.corpus.training
    while step < config.steps:
        first = step * config.sequences_per_step
        chosen = [pool[(first + i) % len(pool)] for i in range(config.sequences_per_step)]
        begin = time.process_time()
        parts = step_parts(chosen, run.features, config, step)
        rate = learning_rate(step, config.steps, config.learning_rate, schedule=config.schedule)
        numbers, _ = train_step(run.model, run.optimizer, run.shared, parts, config, step=step, rate=rate)
        spent, blocks, step = (
            spent + (time.process_time() - begin) / torch.get_num_threads(),
            blocks + numbers.blocks,
            step + 1,
        )
        if step % 10 == 0:
            print(
                json.dumps({"step": step, "acceptance_length": numbers.acceptance_length, "l1": numbers.l1}),
                file=sys.stderr,
            )
        if step == 3:
            config = replace(config, steps=max(6, int(seconds / (spent / 3))))
    held = held_out_numbers(run.model, run.shared, run.features, run.corpus.held_out, run.config)
    return {"steps": step, "seconds": round(spent), "blocks": blocks, **{k: round(v, 3) for k, v in held.items()}}


if __name__ == "__main__":
    main()
