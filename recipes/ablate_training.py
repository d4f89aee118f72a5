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
    "states-first": {"state_steps": -1},  # a third of the time
    "short-blocks-first": {"curriculum": ((0.3, 1), (0.6, 3), (1.0, 0))},
    "half-steps": {"slots_per_step": 896, "sequences_per_step": 4},
    "rate-x2.5": {"learning_rate": 3e-3},
    "rate-x0.4": {"learning_rate": 5e-4},
    "soft-only": {"soft_until": 1e9},
    "paper-loss": {"soft_until": 0.0},
    "fresh": {"initialise": "fresh"},
    "no-bigram": {"bigram_passes": 0.0},
    "fresh-no-bigram": {"initialise": "fresh", "bigram_passes": 0.0},
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
        answers=(args.answers,),
        prompts=(args.prompts,),
        held_out=24,
        draft_vocab=12288,
        **{"bigram_passes": 0.5, **shared},
    )
    corpus = load_corpus(base)
    order = torch.randperm(len(corpus.training), generator=torch.Generator().manual_seed(0))
    pool = [corpus.training[int(i)] for i in order[: args.pool]]
    features, bigram = None, None
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            config = replace(base, out=folder, **VARIANTS[name])
            wanted = config.bigram_passes > 0
            if wanted and bigram is not None:  # the same fit for all, made once
                config = replace(config, bigram_passes=0.0)
            run = start(config, corpus, features=features)
            if wanted and bigram is None:
                bigram = {k: v.clone() for k, v in run.model.markov_head.state_dict().items()}
            elif wanted:
                run.model.markov_head.load_state_dict(bigram)
            features = run.features
            for sample in pool:
                features.get(sample)
            print(json.dumps({"variant": name, **one(run, pool, args.seconds)}), flush=True)


def one(run, pool, seconds: float) -> dict:  # type: ignore[no-untyped-def]
    """Train for ``seconds`` of processor time. The schedule follows the time spent, so every variant runs its whole
    course."""
    config, spent, blocks, step, phase = run.config, 0.0, 0, 0, 0.0
    if config.state_steps < 0:
        phase, config = seconds / 3, replace(config, state_steps=1 << 30)
    while spent < seconds:
        if phase and spent >= phase:
            phase, config = 0.0, replace(config, state_steps=0)
        first = step * config.sequences_per_step
        chosen = [pool[(first + i) % len(pool)] for i in range(config.sequences_per_step)]
        begin = time.process_time()
        at = min(config.steps - 1, int(config.steps * spent / seconds))
        parts = step_parts(chosen, run.features, replace(config, seed=config.seed + step), at)
        rate = learning_rate(
            at, config.steps, config.learning_rate, warmup=config.warmup, schedule=config.schedule, decay=config.decay
        )
        numbers, _ = train_step(run.model, run.optimizer, run.shared, parts, config, step=at, rate=rate)
        spent += (time.process_time() - begin) / torch.get_num_threads()
        blocks, step = blocks + numbers.blocks, step + 1
        if step % 10 == 0:
            print(step, round(spent), float(numbers.loss.detach()), numbers.acceptance_length, file=sys.stderr)
    held = held_out_numbers(run.model, run.shared, run.features, run.corpus.held_out, run.config)
    return {"steps": step, "seconds": round(spent), "blocks": blocks, **{k: round(v, 3) for k, v in held.items()}}


if __name__ == "__main__":
    main()
