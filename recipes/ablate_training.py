"""Short equal-time training runs that differ in one field each: which lever or shape pays on this machine?

    python recipes/ablate_training.py --answers FILE --prompts FILE [--seconds 150] [--only NAME,NAME] > table.jsonl
    python recipes/ablate_training.py ... --only base,layers-1,layers-3 --decode 4 > shapes.jsonl

All variants share the target, the samples and their features, and get the same seconds of training steps, counted as
processor time over threads, so that a neighbour on the machine does not decide (target passes are not counted: they
cost the same for all). Every line of the output is a variant with its steps, blocks and held-out analytic acceptance
length per domain. ``--decode N`` then answers the first N built-in prompts of each domain with every variant and
without drafts, prompt by prompt in turn, and prints what each shape is worth end to end: median speedup, acceptance
length, milliseconds of a round and of its draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import torch
from torch import Tensor

from dspark.core import SamplingParams
from dspark.data.features import FeatureSource
from dspark.decode import generate
from dspark.evaluate.bench import prompts_of
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.evaluate.figures import acceptance_length
from dspark.models.drafter import Drafter, NoDrafter
from dspark.train.config import TrainConfig, drafter_defaults
from dspark.train.loop import held_out_numbers, step_parts, train_step
from dspark.train.methods import run_taps
from dspark.train.optim import learning_rate
from dspark.train.run import Corpus, load_corpus, start

VARIANTS: dict[str, dict] = {
    "base": {"state_steps": -1},  # a third of the time on states, then blocks
    "no-states": {"state_steps": 0},
    "states-half": {"state_steps": -2},
    "states-kept": {"alpha_state": 0.5},
    "short-blocks-first": {"curriculum": ((0.3, 1), (0.6, 3), (1.0, 0))},
    "half-steps": {"slots_per_step": 896, "sequences_per_step": 4},
    "rate-x2.5": {"learning_rate": 3e-3},
    "rate-x0.4": {"learning_rate": 5e-4},
    "soft-only": {"soft_until": 1e9},
    "paper-loss": {"soft_until": 0.0},
    "fresh": {"initialise": "fresh"},
    "no-bigram": {"bigram_passes": 0.0},
    "fresh-no-bigram": {"initialise": "fresh", "bigram_passes": 0.0},
    "confidence-attached": {"confidence_detach": False},  # as the reference's: into backbone and W1
    "layers-1": {"layers": 1},
    "layers-3": {"layers": 3},
    "rank-0": {"markov_rank": 0, "bigram_passes": 0.0},
    "rank-64": {"markov_rank": 64},
    "rank-256": {"markov_rank": 256},
    "taps-1": {"num_taps": 1},
    "taps-5": {"num_taps": 5},
    "block-4": {"block_size": 4},
    "block-10": {"block_size": 10},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "dflash": {"drafter": "dflash"},
    "dflash-l1": {"drafter": "dflash", "alpha_ce": 0.1, "alpha_l1": 0.9, "soft_until": 0.5},  # DSpark's losses
    "eagle3": {"drafter": "eagle3"},
    "mtp": {"drafter": "mtp"},
    **{
        f"{name}-15": {**fields, "block_size": 15}
        for name, fields in {
            "dspark": {},
            "gated": {"markov_head": "gated"},
            "rnn": {"markov_head": "rnn"},
            "dflash": {"drafter": "dflash"},
            "eagle3": {"drafter": "eagle3"},
        }.items()
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--pool", type=int, default=240, help="training samples that the variants share")
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--decode", type=int, default=0, help="built-in prompts per domain to answer at the end")
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
    features: dict[tuple[int, ...], FeatureSource] = {}  # by taps
    bigrams: dict[int, dict[str, Tensor]] = {}  # by rank: fitted once, the same for all
    trained: dict[str, Drafter] = {}
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            fields = {"state_steps": -1, **VARIANTS[name]}
            fields = {**drafter_defaults(fields.get("drafter", "dspark")), **fields}
            config = replace(base, **fields, out=folder)
            taps = run_taps(config, corpus.target.info.num_layers)
            wanted = config.bigram_passes > 0 and config.markov_rank > 0
            known = bigrams.get(config.markov_rank)
            if wanted and known is not None:
                config = replace(config, bigram_passes=0.0)
            run = start(config, corpus, features=features.get(taps))
            if wanted and known is not None:
                run.model.markov_head.load_state_dict(known, strict=False)  # a gate or recurrence keeps its start
            elif wanted:
                tables = run.model.markov_head.state_dict().items()
                bigrams[config.markov_rank] = {k: v.clone() for k, v in tables if k.startswith("markov_w")}
            features[taps] = run.features
            for sample in pool:
                run.features.get(sample)
            print(json.dumps({"variant": name, **one(run, pool, args.seconds)}), flush=True)
            trained[name] = run.method.drafter()
    if args.decode:
        for line in decoded(corpus, trained, args.decode):
            print(json.dumps(line), flush=True)


def decoded(corpus: Corpus, drafters: dict[str, Drafter], limit: int) -> list[dict]:
    """Every variant's speed on the built-in prompts; all variants and no drafts answer a prompt before the next one."""
    prompts = prompts_of(PROMPTS, limit=limit)
    answers: dict[str, list] = {name: [] for name in ("undrafted", *drafters)}
    for i, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: a warm-up
        ids = corpus.chat.prompt_ids([{"role": "user", "content": prompt.text}])
        for name in answers:
            drafter = drafters.get(name, NoDrafter())
            done = generate(
                corpus.target,
                drafter,
                ids,
                sampling=SamplingParams(),
                max_new_tokens=96,
                stop_token_ids=corpus.chat.stop_token_ids,
            )
            if i:
                answers[name].append(done)
    lines = []
    for name in drafters:
        ratios = [
            a.tokens_per_second / u.tokens_per_second for a, u in zip(answers[name], answers["undrafted"], strict=True)
        ]
        rounds = [r for a in answers[name] for r in a.rounds]
        whole = [r.draft_seconds + r.verify_seconds + r.host_seconds for r in rounds]
        lines.append(
            {
                "variant": name,
                "speedup": round(statistics.median(ratios), 3),
                "acceptance_length": round(acceptance_length(rounds), 3),
                "round_ms": round(1e3 * statistics.median(whole), 1),
                "draft_ms": round(1e3 * statistics.median(r.draft_seconds for r in rounds), 2),
            }
        )
    return lines


def one(run, pool, seconds: float) -> dict:  # type: ignore[no-untyped-def]
    """Train for ``seconds`` of processor time. The schedule follows the time spent, so every variant runs its whole
    course."""
    config, spent, blocks, step, phase = run.config, 0.0, 0, 0, 0.0
    if config.state_steps < 0:
        phase, config = seconds * {-1: 1 / 3, -2: 1 / 2}[config.state_steps], replace(config, state_steps=1 << 30)
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
        numbers, _ = train_step(run.method, run.optimizer, parts, config, step=at, rate=rate)
        spent += (time.process_time() - begin) / torch.get_num_threads()
        blocks, step = blocks + numbers.blocks, step + 1
        if step % 10 == 0:
            print(step, round(spent), float(numbers.loss.detach()), numbers.acceptance_length, file=sys.stderr)
    held = held_out_numbers(run.method, run.features, run.corpus.held_out, run.config)
    return {"steps": step, "seconds": round(spent), "blocks": blocks, **{k: round(v, 3) for k, v in held.items()}}


if __name__ == "__main__":
    main()
