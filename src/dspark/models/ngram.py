"""Prompt lookup: draft what followed the last occurrence of the current ending. No model, no features.

Source: prompt lookup decoding (Saxena 2023). Of the tokens committed so far, the longest ending of at most
``max_match`` tokens that occurred before is looked up, and the tokens that followed its latest occurrence are
proposed with certainty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import ConfigError
from dspark.maths.lookup import continuation
from dspark.models.drafter import EMPTY


@dataclass
class NgramState:
    """Committed tokens, and for every n-gram the position after its latest occurrence but not the ending itself."""

    token_ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Proposes what stood after the latest earlier occurrence of the last ``min_match``..``max_match`` tokens."""

    name = "ngram"
    taps: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, *, block_size: int = 7, min_match: int = 2, max_match: int = 4) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; it must be 1 or more")
        if not 1 <= min_match <= max_match:
            raise ConfigError(
                f"min_match is {min_match} and max_match is {max_match}; they must be ordered and at least 1"
            )
        self.block_size, self.min_match, self.max_match = block_size, min_match, max_match

    def open(self, *, max_len: int) -> NgramState:
        return NgramState()

    def extend(
        self, state: NgramState, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        """Append committed tokens; each becomes the continuation of the n-grams that end before it."""
        for token in token_ids.tolist():
            self._index(state)
            state.token_ids.append(token)

    def propose(
        self, state: NgramState, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """Look the ending (anchor included) up; the proposal may run into the anchor and repeat from there, and ends
        before a banned token."""
        self._index(state)
        known = [*state.token_ids, anchor]
        for n in range(self.max_match, self.min_match - 1, -1):
            where = state.after.get(tuple(known[-n:])) if len(known) >= n else None
            if where is not None:
                drafts = continuation(known, where, min(limit, self.block_size))
                drafts = list(takewhile(lambda token: token not in sampling.banned_token_ids, drafts))
                return Proposal(torch.tensor(drafts, dtype=torch.long)) if drafts else EMPTY
        return EMPTY

    def _index(self, state: NgramState) -> None:
        """Note that whatever is appended next follows the n-grams that end here. Idempotent."""
        length = len(state.token_ids)
        for n in range(self.min_match, self.max_match + 1):
            if length >= n:
                state.after[tuple(state.token_ids[-n:])] = length
