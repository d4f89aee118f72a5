"""The shipped drafter's training run, as a function and as a command that may be stopped and called again.

    python recipes/train_default.py --answers answers.jsonl --prompts prompts.jsonl --out runs/default [--minutes 55]

Prompts and answers are what `dspark answers` reads and writes. The fields are those that won the short comparisons of
`recipes/ablate_training.py` on two cores (docs/log.md). ``--minutes`` ends a call early with its state saved; the same
command goes on from there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from dspark.train.config import TrainConfig
from dspark.train.run import train
from dspark.train_cli import decode_held_out


def default_config(
    answers: Sequence[str], prompts: Sequence[str], out: str, *, steps: int = 2350, model: str = "smollm2"
) -> TrainConfig:
    """SmolLM2-135M-Instruct's drafter: two layers, three taps, block 7, Markov rank 128, 12,288 draft tokens."""
    return TrainConfig(
        model=model,
        answers=tuple(answers),
        prompts=tuple(prompts),
        out=out,
        steps=steps,
        draft_vocab=12288,
        state_steps=200,  # the backbone learns the target's final states first, at eight times the blocks a second
        curriculum=((0.354, 3), (1.0, 0)),  # then short blocks
        soft_until=0.2,
        schedule="trapezoid",
        decay=0.48,
        learning_rate=1.2e-3,
        warmup=0.027,
        evaluate_every=300,
        save_seconds=300.0,
        feature_gigabytes=11.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--out", default="runs/default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=2350)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    config = default_config(args.answers, args.prompts, args.out, steps=args.steps, model=args.model)
    print(
        train(
            config,
            evaluate=decode_held_out,
            on_step=lambda line: print(line, flush=True),
            stop=lambda: time.monotonic() > end,
        )
    )


if __name__ == "__main__":
    main()
