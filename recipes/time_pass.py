"""What a pass of the target takes on this machine, by tokens, and how fast it reads the weights.

    python recipes/time_pass.py [--model smollm2] [--context 200] [--tokens 1,2,4,6,8,16,32,64] [--repeats 20] [--json]

One request whose memory holds ``--context`` tokens. Per number of tokens: medians of wall-clock milliseconds without
the head's product and with it, the numbers taken in turns in one process; and the gigabytes a second at which the
weights of the pass with logits were read, if each was read once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from dspark.artifacts import provenance
from dspark.models.lean import LeanTarget
from dspark.models.loading import load_target


def milliseconds(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def measure(target: LeanTarget, context: int, sizes: list[int], repeats: int) -> list[dict[str, float]]:
    """One line per number of tokens."""
    ids = torch.randint(0, target.info.vocab_size, (context + max(sizes),), generator=torch.Generator().manual_seed(0))
    memory = target.new_memory(rows=1, max_len=len(ids))
    target.forward(ids[:context], memory, want_logits=False)
    weight_bytes = sum(product.place()[1] for product in target.products)
    times: dict[tuple[int, bool], list[float]] = {(size, head): [] for size in sizes for head in (False, True)}
    for turn in range(repeats + 1):  # the first warms up
        for (size, head), taken in times.items():
            memory.rollback(0, context)
            part = ids[context : context + size]
            found = milliseconds(lambda part=part, head=head: target.forward(part, memory, want_logits=head))  # type: ignore[misc]
            if turn:
                taken.append(found)
    lines = []
    for size in sizes:
        without, whole = (statistics.median(times[size, head]) for head in (False, True))
        lines.append({"tokens": size, "without": without, "whole": whole, "GB/s": weight_bytes / whole / 1e6})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=200, help="tokens that the memory holds before the pass")
    parser.add_argument("--tokens", default="1,2,4,6,8,16,32,64")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    target = load_target(args.model)
    if not isinstance(target, LeanTarget):
        parser.error(f"{args.model} runs in transformers' own code; choose a model of the lean target's families")
    sizes = [int(size) for size in args.tokens.split(",")]
    lines = measure(target, args.context, sizes, args.repeats)
    if args.json:
        print(json.dumps({"lines": lines, "threads": torch.get_num_threads(), "provenance": provenance()}))
        return
    print(f"{'tokens':>6} {'without head':>13} {'with logits':>12} {'GB/s':>6}")
    for line in lines:
        print(f"{line['tokens']:>6} {line['without']:>13.2f} {line['whole']:>12.2f} {line['GB/s']:>6.1f}")


if __name__ == "__main__":
    main()
