"""A drafter that takes committed tokens in when somebody wants to know, or when many have gathered.

Where drafting does not pay, a step that drafts for nobody should cost what plain decoding costs; but the drafter's
context must keep up for the next probe. Taking in one token reads the same weights as taking in sixteen, so they are
kept until a proposal is asked for, or until enough of them make it cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.forwarding_batch import ForwardingBatch

MOST_STEPS = 16  # whose tokens are kept
MOST_TOKENS = 512


class LazyDrafter(ForwardingBatch):
    """``inner``, fed late. Which tokens it has taken in decides which pages may be shared: :meth:`behind`."""

    def __init__(self, inner: BatchDrafter) -> None:
        super().__init__(inner)
        self._kept: list[
            tuple[Int[np.ndarray, "tokens"], Tensor, Tensor | None]
        ] = []  # seat of each token, ids, states
        self._behind: Counter[int] = Counter()  # tokens by seat

    def behind(self, seat: int) -> int:
        """Committed tokens of ``seat`` that the drafter has not taken in yet."""
        return self._behind[seat]

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """Keep the tokens, or take them in with all that are kept."""
        self._kept.append((np.repeat(np.asarray(seats, dtype=np.int64), counts), token_ids, features))
        for seat, count in zip(seats, counts, strict=True):
            self._behind[seat] += count
        if len(self._kept) >= MOST_STEPS or self._behind.total() >= MOST_TOKENS:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in what is kept: one call, each seat's tokens in their order."""
        kept, self._kept = self._kept, []
        behind, self._behind = self._behind, Counter()
        if not kept:
            return
        owners = np.concatenate([seats for seats, _, _ in kept])
        token_ids = torch.cat([ids for _, ids, _ in kept])
        features = None if kept[0][2] is None else torch.cat([states for _, _, states in kept if states is not None])
        there = np.flatnonzero(owners >= 0)
        order = there[np.argsort(owners[there], kind="stable")]
        if len(kept) > 1 or len(there) < len(owners):
            places = torch.from_numpy(order).to(token_ids.device)
            token_ids = token_ids[places]
            features = None if features is None else features[places]
            seats = sorted(seat for seat, count in behind.items() if count)
        else:
            seats = list(behind)  # as they came
        if seats:
            super().extend(seats, [behind[seat] for seat in seats], token_ids, features)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """The inner drafter's proposals, after all that was kept."""
        self.catch_up()
        return super().propose(asks)

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`; what is kept of the seat is dropped."""
        if self._behind.pop(seat, 0):
            for owners, _, _ in self._kept:
                owners[owners == seat] = -1
        super().close(seat)
