"""Features online: the target runs beside the trainer, and what it said about a sample stays in memory while there is
room.

For every sample the trainer needs two things of the frozen target: the tapped states of all positions (the drafter's
context) and the next-token distribution at every position that a slot can be trained on. The second is kept as its
``top`` largest probabilities within the draft vocabulary, computed once per position instead of once per slot.

Samples pass through the target one at a time, so that a sample's features never depend on its neighbours: a resumed run
recomputes bit for bit what the killed one had in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.maths.losses import SparseTarget
from dspark.models.target import Target


@dataclass(frozen=True)
class Sample:
    """One conversation ready for training."""

    id: str
    domain: str
    token_ids: Int[Tensor, "tokens"]
    loss_mask: Bool[Tensor, "tokens"]


@dataclass(frozen=True)
class SampleFeatures:
    """What the target says about one sample. Row i of ``top_*`` belongs to position ``start`` + i and predicts the
    next token; where a drafter played the sample, rows are named by its blocks instead."""

    features: Float[Tensor, "tokens features"]  # of every position before the last anchor, at least
    start: int
    top_ids: Int[Tensor, "rows top"]  # draft ids, int32
    top_probs: Float[Tensor, "rows top"]
    states: Float[Tensor, "positions hidden"]  # after the final norm: what the head reads

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.features, self.top_ids, self.top_probs, self.states))

    def sparse_target(self, rows: Int[Tensor, "*rows"]) -> SparseTarget:
        """The distributions of ``rows``, flattened."""
        rows = rows.flatten().to(self.top_ids.device)
        return SparseTarget(self.top_ids[rows].long(), self.top_probs[rows].float())


@dataclass(frozen=True)
class TargetStates:
    """The states of one sample, as the target's pass leaves them."""

    features: Float[Tensor, "tokens features"]  # tapped layers in id order
    final: Float[Tensor, "tokens hidden"]  # after the final norm


@torch.no_grad()
def target_states(target: Target, sample: Sample, taps: tuple[int, ...]) -> TargetStates:
    """One pass of the target over a sample. ``taps`` must not be empty."""
    memory = target.new_memory(rows=1, max_len=sample.token_ids.shape[0])
    output = target.forward(sample.token_ids.to(target.info.device), memory, taps=taps, want_logits=False)
    assert output.features is not None
    return TargetStates(output.features, output.final)


@torch.no_grad()
def summarise(
    target: Target, sample: Sample, states: TargetStates, draft_ids: Int[Tensor, "draft_vocab"], *, top: int
) -> SampleFeatures:
    """What training keeps of a pass: all tapped states, and of the positions from the first supervised one on the
    ``top`` largest probabilities within ``draft_ids`` and the final state."""
    tokens = sample.token_ids.shape[0]
    start = int(sample.loss_mask.nonzero()[0]) if bool(sample.loss_mask.any()) else 0
    ids, probs = [], []
    for part in states.final[start : tokens - 1].split(128):
        kept = largest_probs(target.logits(part), draft_ids, top=top)
        ids.append(kept.ids.int())
        probs.append(kept.probs.to(states.final.dtype))
    final = states.final[start : tokens - 1].clone()
    return SampleFeatures(states.features.clone(), start, torch.cat(ids), torch.cat(probs), final)


def largest_probs(
    logits: Float[Tensor, "rows vocab"], draft_ids: Int[Tensor, "draft_vocab"], *, top: int
) -> SparseTarget:
    """The ``top`` largest probabilities at temperature 1 within ``draft_ids``, normalised over the whole vocabulary;
    fp32, under their draft ids."""
    norm = torch.logsumexp(logits.float(), -1, keepdim=True)
    values, picked = logits.index_select(1, draft_ids).topk(top, -1)
    return SparseTarget(picked, (values.float() - norm).exp())


@runtime_checkable
class Features(Protocol):
    """Where steps get what the target says about their samples."""

    def get(self, sample: Sample) -> SampleFeatures:
        """Features of ``sample``."""
        ...


class FeatureSource:
    """Computes and keeps :class:`SampleFeatures`; the least recently used go first once ``memory_bytes`` are full."""

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        draft_ids: Int[Tensor, "draft_vocab"],
        *,
        top: int = 64,
        memory_bytes: int = 8 << 30,
    ) -> None:
        """``draft_ids`` lists the target ids of the draft vocabulary; ``top`` entries are kept per position."""
        self.target, self.taps, self.draft_ids = target, taps, draft_ids.to(target.info.device)
        self.top, self.memory_bytes, self.used_bytes = min(top, draft_ids.shape[0]), memory_bytes, 0
        self.computed = 0  # target passes so far
        self._kept: OrderedDict[str, SampleFeatures] = OrderedDict()

    def get(self, sample: Sample) -> SampleFeatures:
        """Features of ``sample``, from memory or from a target pass."""
        if (found := self._kept.get(sample.id)) is not None:
            self._kept.move_to_end(sample.id)
            return found
        made = self._compute(sample)
        self._kept[sample.id] = made
        self.used_bytes += made.nbytes
        while self.used_bytes > self.memory_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.used_bytes -= dropped.nbytes
        return made

    def _compute(self, sample: Sample) -> SampleFeatures:
        self.computed += 1
        states = target_states(self.target, sample, self.taps)
        return summarise(self.target, sample, states, self.draft_ids, top=self.top)
