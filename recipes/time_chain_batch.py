"""What a batched Eagle3 or MTP drafter saves over asking request by request: random weights of a real target's shape.

    python recipes/time_chain_batch.py [--drafter eagle3|mtp] [--model smollm2] [--requests 1,4,16] [--block 7] \
        [--draft-vocab 12288] [--candidates 64] [--context 200] [--repeats 15] [--threads 1] \
        [--dtype auto]

Per number of requests, both forms in one process and in turn, medians over ``--repeats`` in milliseconds: a proposal of
whole blocks for all requests, half of them greedy and half sampled, and taking in a round's outcome (two tokens a
request). Drafts are random and so is what is committed; neither changes the time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from dspark.core import SamplingParams
from dspark.models.batch_drafter import BatchDrafter, DraftAsk, LoopingDrafter, batched
from dspark.models.chain import ChainModel
from dspark.models.chain_drafter import ChainDrafter
from dspark.models.draft_recipes import for_target
from dspark.models.eagle3 import Eagle3Config, Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.loading import load_target
from dspark.models.mtp import MTPConfig, MTPModel
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.paged_memory import PageTables
from dspark.models.target import Target
from dspark.models.weights import read_config, resolve_model

PAGE_SIZE, NEW = 16, 2  # tokens of a page; committed tokens of a round
SHARED = (  # fields that all drafters' shapes have in common
    "vocab_size",
    "hidden_size",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "draft_vocab_size",
    "block_size",
)


def random_drafter(kind: str, target: Target, model: str, options: argparse.Namespace) -> ChainDrafter:
    """A drafter in the shape that the method gets for the target, with small random weights."""
    shape = for_target(
        read_config(resolve_model(model)),
        mask_token_id=0,
        num_taps=3,
        block_size=options.block,
        draft_vocab_size=options.draft_vocab or None,
    )
    fields = {name: getattr(shape, name) for name in SHARED}
    torch.manual_seed(0)
    made: ChainModel
    if kind == "mtp":
        made = MTPModel(MTPConfig(**fields))
    else:
        made = Eagle3Model(Eagle3Config(**fields, target_layer_ids=shape.target_layer_ids))
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.02 + (1.0 if parameter.dim() == 1 else 0.0)
    if isinstance(made, MTPModel):
        return MTPDrafter(made, target, candidates=options.candidates)
    assert isinstance(made, Eagle3Model)
    return Eagle3Drafter(made, target, candidates=options.candidates)


class Form:
    """One form of the drafter with requests behind ``context`` tokens each."""

    def __init__(self, batch: BatchDrafter, target: Target, *, requests: int, context: int, room: int) -> None:
        self.batch, self.seats = batch, list(range(requests))
        stretches = -(-room // PAGE_SIZE)
        tables = PageTables(seats=requests, pages_per_seat=stretches, page_size=PAGE_SIZE)
        for seat in self.seats:
            tables.assign(seat, range(seat * stretches, (seat + 1) * stretches))
        batch.attach(tables, pages=requests * stretches, max_len=room - batch.block_size - 1)
        self._width = len(batch.taps) * target.info.hidden_size
        self._target = target
        self.generators = [torch.Generator().manual_seed(seat) for seat in self.seats]
        for seat in self.seats:
            batch.open(seat, shaper=None)
        self.extend(context)

    def extend(self, count: int) -> None:
        tokens, info = count * len(self.seats), self._target.info
        ids, features = torch.arange(tokens) % info.vocab_size, torch.randn(tokens, self._width).to(info.dtype)
        begin = time.perf_counter()
        self.batch.extend(self.seats, [count] * len(self.seats), ids, features)
        self.seconds = time.perf_counter() - begin

    def propose(self) -> None:
        asks = [
            DraftAsk(
                seat=seat,
                anchor=3,
                sampling=SamplingParams(temperature=0.8 * (seat % 2)),
                generator=self.generators[seat],
                limit=self.batch.block_size,
            )
            for seat in self.seats
        ]
        begin = time.perf_counter()
        self.batch.propose(asks)
        self.seconds = time.perf_counter() - begin


def compared(drafter: ChainDrafter, target: Target, requests: int, options: argparse.Namespace) -> str:
    """A line: milliseconds of both forms, and their ratio, for a proposal and for what follows it."""
    room = options.context + NEW * (options.repeats + 2) + drafter.block_size + 1
    size = {"requests": requests, "context": options.context, "room": room}
    forms = [Form(batch, target, **size) for batch in (LoopingDrafter(drafter, target), batched(drafter, target))]
    words = f"{requests:>8}"
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(options.repeats + 1):
        for i, form in enumerate(forms):
            for what, act in (("propose", form.propose), ("extend", lambda form=form: form.extend(NEW))):
                act()
                if repeat:  # the first one warms up
                    times.setdefault((what, i), []).append(1e3 * form.seconds)
    for what in ("propose", "extend"):
        loop, batch = (statistics.median(times[what, i]) for i in range(2))
        words += f"  {what} {loop:8.2f} {batch:8.2f} {loop / batch:6.2f}x"
    return words


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafter", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", default="1,4,16")
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=12288, help="0: the target's")
    parser.add_argument("--candidates", type=int, default=64, help="0: the whole draft vocabulary")
    parser.add_argument("--context", type=int, default=200, help="committed tokens of each request")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.model, dtype=options.dtype)
    drafter = random_drafter(options.drafter, target, options.model, options)
    print(f"{options.drafter}, {target.info.dtype}, block {drafter.block_size}; milliseconds: loop, batch, ratio")
    for requests in map(int, options.requests.split(",")):
        print(compared(drafter, target, requests, options), flush=True)


if __name__ == "__main__":
    main()
