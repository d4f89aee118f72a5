"""Drafters for the audit's tests: a table behind the drafter protocol, and one that lies about it."""

from __future__ import annotations

from dataclasses import replace

import torch
from fakes import TableDrafter
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.models.drafter import EMPTY


class FromTable:
    """A :class:`TableDrafter` behind the drafter protocol."""

    name, has_confidence = "table", True
    taps: tuple[int, ...] = ()

    def __init__(self, table: TableDrafter) -> None:
        self.table, self.block_size = table, table.block

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        state.extend(token_ids.tolist())

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        if limit < 1:
            return EMPTY
        return replace(self.table, block=min(limit, self.block_size)).propose([*state, anchor], generator)


def liar(honest: FromTable) -> FromTable:
    """The same drafts, said to come from a flatter distribution."""

    class Liar(FromTable):
        def propose(
            self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
        ) -> Proposal:
            proposal = super().propose(state, anchor, sampling=sampling, generator=generator, limit=limit)
            if proposal.distribution is None:
                return proposal
            flat = proposal.distribution.probs.sqrt()
            said = DraftDistribution(flat / flat.sum(1, keepdim=True), proposal.distribution.token_ids)
            return replace(proposal, distribution=said)

    return Liar(honest.table)
