"""The trainer against the reference's formulation: sequences a second and peak memory, interleaved.

    python recipes/time_formulations.py --answers FILE --prompts FILE [--steps 8] [--anchors 512] > table.jsonl

Three ways to learn from the same sequences, each in a process of its own that does a step whenever it is told to, so
that they take turns on the machine and their memory is their own:

    reference   DeepSpec's formulation (:mod:`dspark.train.reference`): whole vocabulary, dense logits of draft and
                target for every slot, autograd through L1
    ours-whole  our losses over the same vocabulary: the target's distribution once per position, gradients chunk by
                chunk
    ours        as we train: the draft vocabulary of the shipped drafter as well

Model: the shipped drafter's shape for SmolLM2-135M (random weights; two layers, block 7, Markov rank 128). A step is
one sequence with up to ``--anchors`` anchors, its tapped and final states in memory as a cache on disk would give them,
and goes up to the optimizer's update; ours includes what it makes of the target's states first. Speed is in sequences
per second of processor time over threads, medians over steps; memory is the most that the process held during the
steps, and how far that lies above what it held before them. The first line tells the sequences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from train_default import default_config

from dspark.artifacts import provenance
from dspark.data.anchors import make_blocks, sample_anchors
from dspark.data.features import Sample, TargetStates, summarise, target_states
from dspark.maths.losses import LossAlphas
from dspark.models.backbone import DraftModel
from dspark.train.blocks import Shared, run_blocks
from dspark.train.config import TrainConfig
from dspark.train.loop import step_generator, update
from dspark.train.methods import BlockMethod
from dspark.train.reference import dense_loss
from dspark.train.run import load_corpus, start

WAYS = ("reference", "ours-whole", "ours")
ALPHAS = LossAlphas()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=8, help="of each way, after two that are not counted")
    parser.add_argument("--anchors", type=int, default=512, help="most of a sequence; DeepSpec's default")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    workers = {
        way: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in WAYS
    }
    print(json.dumps({"sequences": asked(workers["ours"], "sequences"), "provenance": provenance()}), flush=True)
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(args.steps + 2):
        for way, worker in workers.items():
            done = asked(worker, f"step {number}")
            steps[way] += [done] if number >= 2 else []
    memory = {way: asked(worker, "memory") for way, worker in workers.items()}
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()
    for line in table(steps, memory):
        print(json.dumps(line), flush=True)


def asked(worker: subprocess.Popen[str], question: str) -> dict[str, float]:
    """One answer of a worker; ends the program if it has died."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"a process ended at {question!r}; its own message says why")
    return dict(json.loads(answer))


def table(steps: dict[str, list[dict[str, float]]], memory: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """A line per way, with its ratios to the reference."""
    rates = {way: statistics.median(1 / step["seconds"] for step in done) for way, done in steps.items()}
    lines: list[dict[str, object]] = []
    for way, done in steps.items():
        lines.append(
            {
                "way": way,
                "sequences_per_second": round(rates[way], 3),
                "times_the_reference": round(rates[way] / rates["reference"], 2),
                "slots_per_step": round(statistics.mean(step["slots"] for step in done)),
                "loss": round(statistics.mean(step["loss"] for step in done), 4),
                "peak_mib": round(memory[way]["peak"]),
                "above_before_mib": round(memory[way]["above"]),
                "share_of_the_reference_above": round(memory[way]["above"] / memory["reference"]["above"], 3),
            }
        )
    return lines


def work(args: argparse.Namespace) -> None:
    """Set one way up, then answer questions until there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            default_config([args.answers], [args.prompts], folder, model=args.model),
            bigram_passes=0.0,
            max_tokens=args.max_tokens,
            blocks_per_pass=0,
            **({} if args.worker == "ours" else {"draft_vocab": 0}),
        )
        corpus = load_corpus(config)
        run = start(config, corpus)
    method = run.method
    assert isinstance(method, BlockMethod)
    count = args.steps + 2
    pool = corpus.training[:: max(1, len(corpus.training) // count)][:count]
    states = [target_states(corpus.target, sample, method.taps) for sample in pool]
    before, trainer = resident("VmRSS"), Trainer(args.worker, config, run.optimizer, method, args.anchors)
    reset_peak()
    for question in sys.stdin:
        what, _, number = question.strip().partition(" ")
        if what == "step":
            answer = trainer.step(pool[int(number)], states[int(number)], int(number))
        elif what == "sequences":
            tokens = [sample.token_ids.shape[0] for sample in pool]
            answer = {"count": len(pool), "mean_tokens": round(statistics.mean(tokens)), "most_tokens": max(tokens)}
        else:
            peak = resident("VmHWM")
            answer = {"peak": peak, "above": peak - before}
        print(json.dumps(answer), flush=True)


class Trainer:
    """Steps of one way."""

    def __init__(
        self, way: str, config: TrainConfig, optimizer: torch.optim.Optimizer, method: BlockMethod, anchors: int
    ) -> None:
        self.way, self.config, self.optimizer, self.method, self.anchors = way, config, optimizer, method, anchors

    def step(self, sample: Sample, states: TargetStates, number: int) -> dict[str, float]:
        """One sequence: its loss, gradients and update."""
        generator = step_generator(self.config.seed, number, 3)
        anchors = sample_anchors(sample.loss_mask, self.anchors, generator)
        blocks = make_blocks(sample.token_ids, sample.loss_mask, anchors, self.config.block_size)
        model, shared = self.method.model, self.method.shared
        assert isinstance(model, DraftModel) and isinstance(shared, Shared)
        begin = time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        if self.way == "reference":
            loss = dense_loss(model, shared, [(sample, states, blocks)], self.config, alphas=ALPHAS)
        else:
            ids = model.draft_token_ids().to(shared.head.device)
            features = summarise(shared.target, sample, states, ids, top=self.config.target_top)
            parts = [(sample, features, blocks)]
            size = self.config.block_size
            loss = run_blocks(model, shared, parts, self.config, block_size=size, alphas=ALPHAS).loss
        loss.backward()
        update(self.method, self.optimizer, self.config, 1e-4)
        seconds = (time.process_time() - begin) / torch.get_num_threads()
        return {"seconds": seconds, "slots": blocks.labels.numel(), "loss": float(loss.detach())}


def resident(name: str) -> float:
    """MiB of this process's memory, as Linux counts it: VmRSS now, VmHWM at most since :func:`reset_peak`."""
    lines = Path("/proc/self/status").read_text().split("\n")
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def reset_peak() -> None:
    """Let VmHWM begin anew; where the system refuses, the peak includes loading."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak includes loading: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
