"""The memory that training takes beside well-known targets, without any of them: the tables of README and docs/log.md.

    python recipes/plan_memory.py [--drafter dspark,eagle3,mtp] [--layers 1,2] [--set '{"blocks_per_pass": 32}']

Prints a Markdown table, GiB of one process: what `dspark train --plan` says of a target's own configuration
(:mod:`dspark.train.memory`), for configurations written down here. bfloat16 products and fp32 masters; features come
from a cache on disk, of the target only embedding and head are loaded, and blocks of 7 go 32 a pass, in sequences of
1,024 tokens. ``--online`` loads the whole target and runs it beside the trainer instead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace

from transformers import PretrainedConfig, Qwen3Config

from dspark.train.config import CHAINS, TrainConfig, drafter_defaults
from dspark.train.memory import memory_plan

COLUMNS = {
    "target": "target",
    "masters and moments": "masters, moments",
    "a step: activations, logits, gradients": "step",
}


def qwen3(hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
    )


TARGETS: dict[str, PretrainedConfig] = {
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="dspark")
    parser.add_argument("--layers", default="1,2", help="of dspark and dflash; chains have one")
    parser.add_argument("--online", action="store_true")
    parser.add_argument("--set", default="{}", help="JSON of further TrainConfig fields")
    args = parser.parse_args()
    print(f"| target's shape | drafter | layers | {' | '.join(COLUMNS.values())} | together |")
    print("|" + "---|" * (len(COLUMNS) + 4))
    with tempfile.TemporaryDirectory() as cache:
        base = TrainConfig(
            dtype="bfloat16",
            feature_gigabytes=0.25,
            blocks_per_pass=32,
            chunk=128,
            max_tokens=1024,
            mask_token_id=151669,
            steps=10,
            **({} if args.online else {"cache": cache, "whole_target": False}),
        )
        for name, target in TARGETS.items():
            for drafter in args.drafter.split(","):
                for layers in [1] if drafter in CHAINS else [int(n) for n in args.layers.split(",")]:
                    fields = {**drafter_defaults(drafter), "drafter": drafter, "layers": layers}
                    plan = memory_plan(replace(base, **{**fields, **json.loads(args.set)}), target)
                    parts = {item.name: item.nbytes / 2**30 for item in plan.items}
                    cells = [f"{parts[column]:.2f}" for column in COLUMNS]
                    print(f"| {name} | {drafter} | {layers} | {' | '.join(cells)} | {plan.nbytes / 2**30:.2f} |")


if __name__ == "__main__":
    main()
