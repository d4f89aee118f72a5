"""Eagle3, MTP-1, DFlash and DSpark with each of its heads, trained for equal seconds and compared on the paper's sets.

    python recipes/compare_drafters.py --answers FILE --prompts FILE --sets FOLDER --out runs/compare [--minutes 120]

One command for the paper's Table 1 and its figures 2 to 6 at the scale of this machine: every method at block 7 and 15,
DSpark with one, two and three layers and DFlash with five, all with the same target, answers and seconds of training;
then all of them, and plain decoding, on the same prompts of every set at temperature 1 and 0; then the report. It may
be stopped at any time, and ``--minutes`` stops it by itself: the same command goes on (a drafter half trained is
trained anew, an answer half given is given anew).

Seconds of training are processor time over threads, so that a neighbour on the machine does not decide; what comes
before the first step is counted (the fit of a Markov head to bigrams), target passes are not: they are made once and
shared. A short budget says who starts fastest, not who ends highest: say the seconds beside the figures.

As it stands, on two quiet cores with SmolLM2: about 70 minutes of training (fifteen times 240 s, and the target's
passes) and 100 of answering. ``--limit 2`` halves the latter, ``--rows 8`` makes a third of it and measures no speeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ablate_training import one

from dspark.artifacts import append_jsonl, atomic_write_text, provenance
from dspark.core import SamplingParams
from dspark.data.features import FeatureSource
from dspark.errors import ConfigError
from dspark.eval_cli import run as evaluate
from dspark.eval_cli import show
from dspark.eval_plays import EvalConfig
from dspark.models.checkpoint import save_drafter
from dspark.models.draft_recipes import default_taps
from dspark.models.target import FINAL
from dspark.report.write import read_sources, write_report
from dspark.train.config import TrainConfig, drafter_defaults
from dspark.train.run import Corpus, load_corpus, start

METHODS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark-gated": {"markov_head": "gated"},
    "dspark-rnn": {"markov_head": "rnn"},
    "dflash": {"drafter": "dflash"},
    "eagle3": {"drafter": "eagle3"},
    "mtp": {"drafter": "mtp"},
}
BLOCKS = (7, 15)
DEPTHS: dict[str, dict[str, Any]] = {
    "dspark-1-layer": {"layers": 1},
    "dspark-3-layers": {"layers": 3},
    "dflash-5-layers": {"drafter": "dflash", "layers": 5},
}
VARIANTS = {
    **{f"{name}-{block}": {**fields, "block_size": block} for block in BLOCKS for name, fields in METHODS.items()},
    **{f"{name}-7": {**fields, "block_size": 7} for name, fields in DEPTHS.items()},
}
SLACK = 1.6  # clock of a training over its processor seconds, where none has been seen yet


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the drafters have in common; a run folder holds one plan."""

    model: str
    answers: tuple[str, ...]
    prompts: tuple[str, ...]
    seconds: float  # of training, for each drafter
    pool: int  # samples that all are trained on
    fields: Mapping[str, Any]  # of TrainConfig, over the recipe's own

    def config(self, name: str, folder: Path) -> TrainConfig:
        """The training of one variant."""
        chosen = VARIANTS[name]
        defaults = drafter_defaults(chosen.get("drafter", "dspark"))
        shared = {"held_out": 24, "draft_vocab": 12288, "bigram_passes": 0.1, "state_steps": -1, **self.fields}
        without = {key: shared[key] for key in shared if key not in defaults}  # what a method wants otherwise stays
        return TrainConfig(
            model=self.model,
            answers=self.answers,
            prompts=self.prompts,
            out=str(folder),
            **{**without, **defaults, **chosen},
        )


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    out, end = Path(args.out), time.time() + 60 * args.minutes
    names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigError(f"only is {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(args.set).items()}
    plan = Plan(
        model=args.model,
        answers=tuple(args.answers),
        prompts=tuple(args.prompts),
        seconds=args.seconds,
        pool=args.pool,
        fields=fields,
    )
    keep_plan(out, plan)
    if not train_all(plan, names, out, end=end):
        print("time is up before all drafters were trained; the same command goes on", flush=True)
        return
    config = EvalConfig(
        prompts=tuple(args.sets),
        out=out / "records",
        model=args.model,
        drafters=tuple(f"{name}={out / 'drafters' / name}" for name in names),
        temperatures=(1.0, 0.0),
        sampling=SamplingParams(seed=args.seed),
        max_new_tokens=args.max_new_tokens,
        limit=args.limit,
        minutes=max(1e-3, (end - time.time()) / 60) if args.minutes < float("inf") else None,
        rows=args.rows,
        processes=args.processes,
        place={"threads": args.threads, "dtype": args.dtype},
    )
    result = evaluate(config)
    show(result, config.out)
    write_report(out / "report", read_sources([config.out]))
    print(out / "report" / "index.html")
    if not result.finished:
        print("time is up before all prompts were answered; the same command goes on", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", nargs="+", required=True, help="JSONL of `dspark answers`")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL of their prompts")
    parser.add_argument("--sets", nargs="+", required=True, help="what `dspark eval --prompts` takes")
    parser.add_argument("--out", default="runs/compare")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training, for each drafter")
    parser.add_argument("--pool", type=int, default=480, help="training samples that the drafters share")
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--set", default="{}", help="JSON of TrainConfig fields that all drafters share")
    parser.add_argument("--limit", type=int, default=4, help="conversations of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="conversations in one target pass; more give no speeds")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def keep_plan(out: Path, plan: Plan) -> None:
    """Write the plan, or raise :class:`ConfigError` if the folder was begun with another."""
    path, wanted = out / "plan.json", json.loads(json.dumps(plan.__dict__))
    if not path.is_file():
        content = {"kind": "comparison", "version": 1, "fields": wanted, "provenance": provenance()}
        atomic_write_text(path, json.dumps(content, indent=1) + "\n")
        return
    known = json.loads(path.read_text())["fields"]
    different = [name for name in wanted if known.get(name) != wanted[name]]
    if different:
        shown = "; ".join(f"{name} {known.get(name)!r}, not {wanted[name]!r}" for name in different)
        raise ConfigError(f"{out} was begun with {shown}: name another --out, or give what it was begun with")


def train_all(plan: Plan, names: Sequence[str], out: Path, *, end: float) -> bool:
    """Train what is not there yet, a line of ``training.jsonl`` each; returns whether all are there.

    A training is not begun if it would end behind ``end``, going by the longest so far.
    """
    missing = [name for name in names if not (out / "drafters" / name / "config.json").is_file()]
    if not missing:
        return True
    corpus = load_corpus(plan.config(missing[0], out / "work"))
    order = torch.randperm(len(corpus.training), generator=torch.Generator().manual_seed(0))
    pool = [corpus.training[int(i)] for i in order[: plan.pool]]
    features: dict[tuple[int, ...], FeatureSource] = {}  # by taps
    longest = SLACK * plan.seconds
    for name in missing:
        begin = time.time()
        if begin + longest > end:
            return False
        line = train_one(plan, name, out, corpus, pool, features)
        longest = max(longest, time.time() - begin)
        append_jsonl(out / "training.jsonl", [line])
        print(json.dumps(line), flush=True)
    return True


def train_one(
    plan: Plan, name: str, out: Path, corpus: Corpus, pool: list, features: dict[tuple[int, ...], FeatureSource]
) -> dict[str, Any]:
    """Train one variant for its seconds and save it; returns what is told of it."""
    config = plan.config(name, out / "work" / name)
    taps = (FINAL,) if config.drafter == "mtp" else config.taps
    taps = taps or default_taps(corpus.target.info.num_layers, config.num_taps)
    begin = time.process_time()
    run = start(config, corpus, features=features.get(taps))
    spent = (time.process_time() - begin) / torch.get_num_threads()
    features[taps] = run.features
    for sample in pool:
        run.features.get(sample)
    if spent >= plan.seconds:
        raise ConfigError(f"seconds is {plan.seconds:g}; {name} takes {spent:.0f} s before its first step, give more")
    numbers = one(run, pool, plan.seconds - spent)
    save_drafter(out / "drafters" / name, run.method.model)
    return {"variant": name, "before_first_step": round(spent, 1), **numbers}


if __name__ == "__main__":
    main()
