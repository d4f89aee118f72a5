"""Blocks a second of the trainer on this machine, with features in memory and with target passes beside it.

    python recipes/time_training.py --answers FILE --prompts FILE [--steps 10]

Prints one JSON object: medians over steps of the shipped drafter's shape, for steps on states, on blocks of 3 slots
and of 7.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace

from train_default import default_config

from dspark.train.loop import step_parts, train_step
from dspark.train.run import load_corpus, start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(default_config([args.answers], [args.prompts], folder), bigram_passes=0.0, steps=1000)
        run = start(config, load_corpus(config))
        pool, result = run.corpus.training[:: max(1, len(run.corpus.training) // 48)], {}
        passes = []
        for sample in pool:
            begin = time.perf_counter()
            run.features.get(sample)
            passes.append(time.perf_counter() - begin)
        for name, at in (("states", 0), ("slots_3", 300), ("slots_7", 900)):
            rates = []
            for i in range(args.steps + 2):
                chosen = [pool[(8 * i + k) % len(pool)] for k in range(config.sequences_per_step)]
                begin = time.perf_counter()
                parts = step_parts(chosen, run.features, config, at)
                numbers, _ = train_step(run.method, run.optimizer, parts, config, step=at, rate=1e-4)
                seconds = time.perf_counter() - begin
                rates.append((numbers.blocks / seconds, numbers.blocks / (seconds + statistics.median(passes))))
            features, whole = (statistics.median(r[k] for r in rates[2:]) for k in (0, 1))
            result[name] = {"features_in_memory": round(features), "with_one_target_pass_a_step": round(whole)}
        print(json.dumps({"blocks_per_second": result, "target_pass_ms": round(1e3 * statistics.median(passes))}))


if __name__ == "__main__":
    main()
