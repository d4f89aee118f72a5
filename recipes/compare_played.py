"""Does learning from rounds that the drafter plays itself pay? Two continuations of one drafter, for the same time.

    python recipes/compare_played.py --answers FILE --prompts FILE --out FOLDER [--minutes 20] [--only plain,played]

Both begin with ``--drafter`` (the shipped one) and differ in nothing but `played_from`: "plain" goes on with blocks of
the answers, "played" with rounds that the drafter plays (:mod:`dspark.train.rounds`) at ``--temperature``. The time is
processor time over threads, so that a neighbour on the machine does not decide; whatever a variant needs counts, target
passes and playing included. Then all three drafters answer held-out prompts, prompt by prompt in turn, greedily and at
temperature 1. A line of JSON per drafter: steps, held-out analytic acceptance length, and tokens a round, with the
standard error over prompts of its difference from "plain" (from the start, for "plain" itself). A variant whose folder
holds a finished run is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from train_default import default_config

from dspark.artifacts import provenance
from dspark.core import SamplingParams
from dspark.data.features import Sample
from dspark.decode import generate
from dspark.models.checkpoint import read_draft_config
from dspark.models.draft_config import DraftConfig
from dspark.models.drafter import Drafter
from dspark.models.registry import load_drafter
from dspark.road.budget import Pace
from dspark.train.config import TrainConfig
from dspark.train.loop import held_out_numbers
from dspark.train.run import Corpus, load_corpus, start, train

VARIANTS: dict[str, dict[str, float]] = {"plain": {}, "played": {"played_from": 0.0}}
NEVER = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="models/smollm2-135m-instruct-dspark")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--temperature", type=float, default=0.0, help="at which rounds are played")
    parser.add_argument("--decode", type=int, default=24, help="held-out prompts to answer")
    parser.add_argument("--tokens", type=int, default=96, help="most of an answer")
    parser.add_argument("--set", default="{}", help="JSON of TrainConfig fields that both variants share")
    args = parser.parse_args()
    base = continuation(args)
    corpus = load_corpus(base)
    told = {"model": args.model, "drafter": args.drafter, "minutes": args.minutes, "temperature": args.temperature}
    print(json.dumps({**told, "answers": len(corpus.training), "provenance": provenance()}), flush=True)
    folders = {"start": Path(args.drafter)}
    for name in args.only.split(","):
        config = replace(base, out=f"{args.out}/{name}", **VARIANTS[name])
        folders[name] = trained(config, corpus, 60 * args.minutes)
    for line in judged(corpus, base, folders, prompts=args.decode, tokens=args.tokens):
        print(json.dumps(line), flush=True)


def continuation(args: argparse.Namespace) -> TrainConfig:
    """The shipped drafter's last blocks (recipes/train_default.py) gone on with, at a gentler rate."""
    shape = read_draft_config(Path(args.drafter))
    assert isinstance(shape, DraftConfig)
    shared = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(args.set).items()}
    config = default_config([args.answers], [args.prompts], args.out, model=args.model)
    fields = {
        "initialise": args.drafter,
        "bigram_passes": 0.0,
        "taps": shape.target_layer_ids,
        "layers": shape.num_hidden_layers,
        "block_size": shape.block_size,
        "markov_rank": shape.markov_rank,
        "draft_vocab": shape.draft_vocab_size or 0,
        "mask_token_id": shape.mask_token_id,
        "alpha_state": 0.3,
        "soft_until": 0.0,
        "state_steps": 0,
        "curriculum": ((1.0, 0),),
        "learning_rate": 6e-4,
        "warmup": 0.02,
        "decay": 0.6,
        "sequences_per_step": 6,
        "slots_per_step": 1344,
        "steps": 800,
        "log_every": 10,
        "evaluate_every": NEVER,
        "feature_gigabytes": 4.0,
        "played_temperature": args.temperature,
    }
    return replace(config, **{**fields, **shared})


def trained(config: TrainConfig, corpus: Corpus, seconds: float) -> Path:
    """Train for ``seconds`` of processor time; returns the folder of the last drafter."""
    last = Path(config.out) / "last"
    if not last.is_dir():
        begin = time.process_time()
        pace = Pace(
            lambda: seconds - (time.process_time() - begin) / torch.get_num_threads(),
            steps=config.steps,
            evaluate_every=NEVER,
        )
        train(config, corpus=corpus, on_step=partial(print, flush=True), steps=pace.steps)
    return last


def judged(
    corpus: Corpus, config: TrainConfig, folders: dict[str, Path], *, prompts: int, tokens: int
) -> list[dict[str, object]]:
    """The drafters' figures on held-out samples, all on the same ones."""
    held = corpus.held_out[:: max(1, len(corpus.held_out) // prompts)][:prompts]
    drafters = {name: load_drafter(str(folder), corpus.target) for name, folder in folders.items()}
    played = {t: rounds_of(corpus, drafters, held, temperature=t, tokens=tokens) for t in (0.0, 1.0)}
    lines, features = [], None
    for name, folder in folders.items():
        with tempfile.TemporaryDirectory() as place:
            run = start(replace(config, initialise=str(folder), out=place), corpus, features=features)
        features = run.features
        line: dict[str, object] = {"drafter": name}
        if (log := folder.parent / "log.jsonl").is_file():
            line["steps"] = json.loads(log.read_text().splitlines()[-1])["step"]
        analytic = held_out_numbers(run.method, run.features, corpus.held_out, run.config)
        line["analytic"] = {key: round(value, 3) for key, value in analytic.items()}
        against = "start" if name == "plain" or "plain" not in folders else "plain"
        for temperature, lengths in played.items():
            line[f"tokens_a_round_at_{temperature:g}"] = compared(lengths[name], lengths[against])
        lines.append(line)
    return lines


def rounds_of(
    corpus: Corpus, drafters: dict[str, Drafter], samples: Sequence[Sample], *, temperature: float, tokens: int
) -> dict[str, list[tuple[int, int]]]:
    """(tokens committed, rounds) of every prompt under each drafter; all answer a prompt before the next one."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in drafters}
    for i, sample in enumerate(samples):
        ids = sample.token_ids[: int(sample.loss_mask.nonzero()[0, 0])].tolist()
        for name, drafter in drafters.items():
            done = generate(
                corpus.target,
                drafter,
                ids,
                sampling=SamplingParams(temperature=temperature, seed=i),
                max_new_tokens=tokens,
                stop_token_ids=corpus.chat.stop_token_ids,
            )
            found[name].append((sum(len(r.committed) for r in done.rounds), len(done.rounds)))
    return found


def compared(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> dict[str, float]:
    """Tokens a round over all prompts, and how far from the others': a mean over prompts, with its standard error."""
    pairs = [(a / b, c / d) for (a, b), (c, d) in zip(ours, theirs, strict=True) if b and d]
    gaps = [a - c for a, c in pairs]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    whole = sum(a for a, _ in ours) / max(1, sum(b for _, b in ours))
    return {"mean": round(whole, 3), "gain": round(statistics.mean(gaps), 3), "error": round(error, 3)}


if __name__ == "__main__":
    main()
