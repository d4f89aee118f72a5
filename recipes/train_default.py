"""The shipped drafter's three training runs, as functions and as a command that may be stopped and called again.

    python recipes/train_default.py --answers answers.jsonl --prompts prompts.jsonl --out runs/first [--minutes 55]
    python recipes/train_default.py ... --out runs/second --after runs/first/best
    python recipes/train_default.py --answers sampled.jsonl greedy.jsonl --prompts prompts.jsonl --out runs/third \
        --after runs/second/best --third

Prompts and answers are what `dspark answers` reads and writes. The fields of the first run are those that won the short
comparisons of `recipes/ablate_training.py` on two cores (docs/log.md). ``--minutes`` ends a call early with its state
saved; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

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


def second_config(
    answers: Sequence[str], prompts: Sequence[str], out: str, after: str, *, steps: int = 1900, model: str = "smollm2"
) -> TrainConfig:
    """The second run: from the first one's drafter back to the target's states, then blocks that keep them.

    The first run's blocks undid much of what its steps on states had taught (docs/log.md), so here the state loss
    stays in the sum.
    """
    return replace(
        default_config(answers, prompts, out, steps=steps, model=model),
        initialise=after,
        bigram_passes=0.0,
        state_steps=500,
        alpha_state=0.3,
        soft_until=0.0,
        curriculum=((0.4, 3), (1.0, 0)),
        learning_rate=1.5e-3,
        warmup=0.01,
        decay=0.6,
        sequences_per_step=6,
        slots_per_step=1344,
        evaluate_every=400,
        save_seconds=240.0,
        feature_gigabytes=12.0,
    )


def third_config(
    answers: Sequence[str], prompts: Sequence[str], out: str, after: str, *, steps: int = 3600, model: str = "smollm2"
) -> TrainConfig:
    """The third run: from the second one's drafter, blocks of two, of four and at last of seven.

    No more than three drafts are worth checking for one user, and the first counts most, so most blocks are short.
    Among the answers are greedy ones, whose texts are less varied than what sampling writes.
    """
    return replace(
        second_config(answers, prompts, out, after, steps=steps, model=model),
        state_steps=0,
        curriculum=((0.5, 2), (0.85, 4), (1.0, 0)),
        learning_rate=1.2e-3,
        decay=0.55,
        evaluate_every=1000,
        save_seconds=300.0,
        seed=43,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--out", default="runs/default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--after", help="the first run's drafter: make the second run")
    parser.add_argument(
        "--third", action="store_true", help="with --after: make the third run, after the second's drafter"
    )
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    options = {"model": args.model} | ({} if args.steps is None else {"steps": args.steps})
    if args.third and not args.after:
        parser.error("--third goes on from a drafter; name it with --after")
    if args.after:
        config = (third_config if args.third else second_config)(
            args.answers, args.prompts, args.out, args.after, **options
        )
    else:
        config = default_config(args.answers, args.prompts, args.out, **options)
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
