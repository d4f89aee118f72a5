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
    next token."""

    features: Float[Tensor, "tokens features"]
    start: int
    top_ids: Int[Tensor, "positions top"]  # draft ids, int32
    top_probs: Float[Tensor, "positions top"]
    states: Float[Tensor, "positions hidden"]  # after the final norm: what the head reads

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.features, self.top_ids, self.top_probs, self.states))

    def sparse_target(self, positions: Int[Tensor, "*rows"]) -> SparseTarget:
        """The distributions at ``positions`` (each at least ``start``), flattened."""
        rows = (positions - self.start).flatten().to(self.top_ids.device)
        return SparseTarget(self.top_ids[rows].long(), self.top_probs[rows].float())


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
        self.computed += 1
        self._kept[sample.id] = made
        self.used_bytes += made.nbytes
        while self.used_bytes > self.memory_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.used_bytes -= dropped.nbytes
        return made

    @torch.no_grad()
    def _compute(self, sample: Sample) -> SampleFeatures:
        tokens = sample.token_ids.shape[0]
        memory = self.target.new_memory(rows=1, max_len=tokens)
        output = self.target.forward(
            sample.token_ids.to(self.target.info.device), memory, taps=self.taps, want_logits=False
        )
        assert output.features is not None
        start = int(sample.loss_mask.nonzero()[0]) if bool(sample.loss_mask.any()) else 0
        ids, probs = [], []
        for part in output.final[start : tokens - 1].split(128):
            logits = self.target.logits(part)
            norm = torch.logsumexp(logits.float(), -1, keepdim=True)
            values, picked = logits.index_select(1, self.draft_ids).topk(self.top, -1)
            ids.append(picked.int())
            probs.append((values.float() - norm).exp().to(output.final.dtype))
        features = output.features.clone()
        states = output.final[start : tokens - 1].clone()
        return SampleFeatures(features, start, torch.cat(ids), torch.cat(probs), states)
