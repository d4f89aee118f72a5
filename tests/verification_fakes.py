"""Random steps of an engine for the verification of batches, and a way to give it the uniforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.core import SamplingParams
from dspark.maths.batch_verification import BatchVerdict, drafts_of, judge_rows
from dspark.maths.sampling import RequestStreams
from dspark.models import native_verification

KINDS = ("dense", "support", "certain", "mixed")
SAMPLINGS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "joint": SamplingParams(temperature=0.8, rule="block"),
    "cold": SamplingParams(temperature=0.1),
    "cold_joint": SamplingParams(temperature=0.07, rule="block"),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k": SamplingParams(temperature=1.0, top_k=5, rule="block"),
    "top_k_1": SamplingParams(temperature=1.0, top_k=1),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "all": SamplingParams(temperature=1.2, top_k=40, top_p=0.8, min_p=0.02),
    "wide": SamplingParams(temperature=1.3, top_k=250, top_p=0.95, rule="block"),
}


@dataclass(frozen=True)
class Drafts:
    """A proposal, as far as verification looks at it."""

    draft_tokens: Tensor
    certain: np.ndarray
    probs: Tensor | None = None
    support_ids: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """Arguments of ``verify_batch``; ``streams`` are made anew at each call."""

    logits: Tensor
    verify_lens: list[int]
    drafts: Drafts
    sampling: list[SamplingParams]
    seed: int

    def streams(self) -> list[RequestStreams]:
        return [RequestStreams.from_seed(self.seed * 1000 + i) for i in range(len(self.verify_lens))]

    def arguments(self) -> tuple[Any, ...]:
        return self.logits, self.verify_lens, self.drafts, self.sampling, self.streams()


def random_step(
    seed: int, *, vocab: int, requests: int, block: int, dtype: torch.dtype, kind: str, masked: float = 0.02
) -> Step:
    """Requests of 0..block drafts drawn from something like the target's rows; a share ``masked`` of logits is -inf."""
    random = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, block + 1, (requests,), generator=random).tolist()
    logits = (torch.randn(sum(lens) + requests, vocab, generator=random) * 3).to(dtype)
    logits[torch.rand(logits.shape, generator=random) < masked] = float("-inf")
    logits[:, vocab // 2] = 0.5  # no row is empty
    support = vocab if kind == "dense" else min(8, vocab)
    probs = torch.zeros(requests, block, support)
    ids = torch.zeros(requests, block, support, dtype=torch.long)
    tokens = torch.zeros(requests, block, dtype=torch.long)
    row = 0
    for i, length in enumerate(lens):
        for k in range(length):
            liking = logits[row + k].float().nan_to_num(neginf=-20.0) + torch.randn(vocab, generator=random)
            ids[i, k] = torch.arange(vocab) if kind == "dense" else liking.topk(support).indices
            probs[i, k] = liking[ids[i, k]].softmax(0)
            drawn = torch.multinomial(probs[i, k], 1, generator=random)
            tokens[i, k] = ids[i, k, probs[i, k].argmax() if kind == "certain" else drawn]
        row += length + 1
    certain = np.full(requests, kind == "certain")
    if kind == "mixed":
        certain[::3] = True
    named = None if kind in ("dense", "certain") else ids
    drafts = Drafts(tokens, certain, None if kind == "certain" else probs, named)
    choices = list(SAMPLINGS.values())
    return Step(logits, lens, drafts, [choices[(i + seed) % len(choices)] for i in range(requests)], seed)


def verdicts_at(step: Step, coins: Tensor, closing: Tensor, library: Any) -> BatchVerdict:
    """Verdicts of the compiled form with uniforms given: all coins one after the other, and one closing each."""
    native = native_verification._Step(step.logits, step.verify_lens, step.drafts, step.sampling, None)
    native.throw([RequestStreams.from_seed(0)] * len(step.verify_lens))  # drawn over below
    native.coins[: len(coins)] = coins
    native.closing[:] = closing
    native.requests["closing"] = closing.numpy()
    library.verify_requests(native.requests.ctypes.data, len(native.requests), step.logits.shape[1])
    return native.verdict()


def plain_verdicts_at(step: Step, coins: Tensor, closing: Tensor) -> list[tuple[int, int]]:
    """The same, request by request, by the plain form."""
    found, row, first = [], 0, 0
    for i, length in enumerate(step.verify_lens):
        tokens, distribution = drafts_of(step.drafts, i, length)
        rows = step.logits[row : row + length + 1]
        verdict = judge_rows(
            rows, tokens, distribution, step.sampling[i], coins[first : first + length], closing[i : i + 1]
        )
        found.append((verdict.accepted, verdict.next_token))
        row, first = row + length + 1, first + length
    return found
