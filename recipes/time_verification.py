"""What verifying a step's drafts costs on this machine, by requests, rows and sampling.

    python recipes/time_verification.py [--model smollm2] [--repeats 9] [--json]

Rows are the model's own logits along a text; drafts are drawn from 64 candidates of what an imperfect drafter would
think of each row. Per setting: milliseconds of processor time for one call of the compiled form (the smallest of the
repeats), the part of it that is Python, the same for the plain form (fewer repeats), rows that the verdicts read, and
the milliseconds that only reading the step's logits once takes. Processor time, so that other programs on the machine
disturb little; with several threads it is their sum.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.artifacts import provenance
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.maths.sampling import RequestStreams
from dspark.maths.shaping import Shaper
from dspark.models import native_verification
from dspark.models.loading import load_target
from dspark.models.native_logprobs import row_logprobs
from dspark.models.native_verification import verify_batch
from dspark.models.weights import resolve_model

TEXT = (
    "Janet sells 16 eggs a day. She eats three for breakfast and bakes muffins with four. She sells the remainder at "
    "the market for two dollars an egg, so she makes 9 * 2 = 18 dollars every day. def fibonacci(n): return n if n < 2 "
    "else fibonacci(n - 1) + fibonacci(n - 2). The capital of France is Paris, which lies on the river Seine."
)
CANDIDATES = 64
SETTINGS = {
    "greedy": SamplingParams(),
    "T=0.8": SamplingParams(temperature=0.8),
    "T=0.8, block rule": SamplingParams(temperature=0.8, rule="block"),
    "T=0.8, top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "T=0.8, top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "T=0.8, penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2),
}


@dataclass(frozen=True)
class Drafts:
    """A proposal for the requests of a step."""

    draft_tokens: Tensor
    certain: np.ndarray
    probs: Tensor
    support_ids: Tensor


def text_logits(model: str) -> Tensor:
    """[tokens, vocab]: the model's rows along the text."""
    target = load_target(model)
    chat = ChatFormat.from_folder(resolve_model(model))
    prompt = chat.prompt_ids([{"role": "user", "content": "Tell me something."}])
    ids = torch.tensor([*prompt, *chat.tokenizer(TEXT, add_special_tokens=False)["input_ids"]])
    logits = target.forward(ids, target.new_memory(rows=1, max_len=len(ids))).logits
    assert logits is not None
    return logits[len(prompt) - 1 :]


def step_of(logits: Tensor, requests: int, rows: int) -> tuple[Tensor, Drafts]:
    """Rows of ``requests`` requests at places of the text, and their drafts."""
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(logits) - rows + 1, (requests,), generator=random).tolist()
    block = max(rows - 1, 1)
    tokens = torch.zeros(requests, block, dtype=torch.long)
    probs, ids = torch.zeros(requests, block, CANDIDATES), torch.zeros(requests, block, CANDIDATES, dtype=torch.long)
    for i, start in enumerate(starts):
        for k in range(rows - 1):
            liking = logits[start + k].float()
            liking = (liking + 1.5 * torch.randn(len(liking), generator=random)).topk(CANDIDATES)
            probs[i, k], ids[i, k] = (liking.values / 0.8).softmax(0), liking.indices
            tokens[i, k] = ids[i, k, torch.multinomial(probs[i, k], 1, generator=random)]
    step = torch.cat([logits[start : start + rows] for start in starts]).contiguous()
    return step, Drafts(tokens, np.zeros(requests, dtype=bool), probs, ids)


def least(call: Callable[[], Any], repeats: int) -> float:
    """Smallest processor time of ``call`` in milliseconds."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return 1e3 * min(times)


def measure(step: Tensor, drafts: Drafts, params: SamplingParams, repeats: int) -> dict[str, float]:
    """One line of the table."""
    requests = len(drafts.draft_tokens)
    lens = [len(step) // requests - 1] * requests
    sampling, streams = [params] * requests, [RequestStreams.from_seed(i) for i in range(requests)]
    shapers = [Shaper(params, list(range(100, 300))) if params.shapes_logits else None for _ in range(requests)]
    read: list[float] = []

    def run(native: bool) -> None:
        verdict = verify_batch(step, lens, drafts, sampling, streams, shapers, native=native)
        read.append(float(verdict.accepted.sum()) + requests)

    def python_only() -> None:
        prepared = native_verification._Step(step, lens, drafts, sampling, None)
        prepared.throw(streams)
        prepared.shape(shapers)
        prepared.verdict()

    found = {"compiled": least(lambda: run(True), repeats), "python": least(python_only, repeats)}
    found["rows_read"] = sum(read) / len(read)
    found["plain"] = least(lambda: run(False), 1 + (repeats > 5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    logits = text_logits(args.model)
    lines: list[dict[str, Any]] = []
    for requests in (1, 8, 64):
        for rows in (1, 4, 8):
            step, drafts = step_of(logits, requests, rows)
            words = step.view(torch.int64) if step.shape[1] * step.element_size() % 8 == 0 else step
            reading = least(lambda words=words: words.sum(), args.repeats)  # type: ignore[misc]
            for name, params in SETTINGS.items():
                line = {"requests": requests, "rows": rows, "setting": name, "reading": reading}
                lines.append(line | measure(step, drafts, params, args.repeats))
    chosen = logits[:64]
    logprobs = {
        f"top {top}": least(lambda top=top: row_logprobs(chosen, [0] * len(chosen), top=top), args.repeats)
        / len(chosen)  # type: ignore[misc]
        for top in (0, 5)
    }
    if args.json:
        print(json.dumps({"lines": lines, "logprobs_ms_per_row": logprobs, "provenance": provenance()}))
        return
    names = ("compiled", "python", "plain", "rows_read", "reading")
    print(f"{'requests':>8} {'rows':>4}  {'setting':<18}" + "".join(f"{name:>10}" for name in names))
    for line in lines:
        figures = "".join(f"{line[name]:>10.2f}" for name in names)
        print(f"{line['requests']:>8} {line['rows']:>4}  {line['setting']:<18}{figures}")
    print("log-probabilities, ms a row: " + ", ".join(f"{name} {value:.3f}" for name, value in logprobs.items()))


if __name__ == "__main__":
    main()
