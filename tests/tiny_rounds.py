"""Rounds of a target and a drafter that are tables, played as training plays them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fakes import TableDrafter, TableTarget
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.data.features import Sample
from dspark.models.drafter import EMPTY
from dspark.train.rounds import PlayedText, play


class Tabled:
    """A table of drafts behind the drafter's protocol; its state is the text so far."""

    name, block_size, taps, has_confidence = "table", 3, (1, 2), False

    def __init__(self, kind: str, vocab_size: int) -> None:
        self.table = TableDrafter(vocab_size=vocab_size, block=3, kind=kind)

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        assert features is not None and features.shape[0] == token_ids.shape[0]
        state += token_ids.tolist()

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        if limit < 1:
            return EMPTY
        whole, probs = self.table.propose([*state, anchor], generator), None
        if whole.distribution is not None:
            probs = DraftDistribution(whole.distribution.probs[:limit])
        return Proposal(whole.draft_tokens[:limit], probs)


def played_texts(
    target: TableTarget,
    prompts: Sequence[Sample],
    *,
    temperature: float,
    draft_ids: Tensor | None = None,
    stops: tuple[int, ...] = (),
    tokens: int = 12,
) -> tuple[Tabled, list[PlayedText]]:
    """The drafter, and what it left of the ``prompts``; the playing's number is 7, its seed 3."""
    vocab = target.info.vocab_size
    drafter = Tabled("dense" if temperature else "certain", vocab)
    texts = play(
        target,
        drafter,
        prompts,
        draft_ids=torch.arange(vocab) if draft_ids is None else draft_ids,
        top=vocab if draft_ids is None else len(draft_ids),
        sampling=SamplingParams(temperature=temperature, seed=3),
        max_new_tokens=tokens,
        stop_token_ids=stops,
        number=7,
    )
    return drafter, texts
