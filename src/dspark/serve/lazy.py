"""A drafter that takes committed tokens in when somebody wants drafts of their request, and not before.

Where drafting does not pay, a step that drafts for nobody should cost what plain decoding costs. But what the drafter
knows of a text comes from the target's states over it, which are there once, when the text passes through the target.
So the states are kept, in the pages of the text (:mod:`dspark.models.kept_states`), and the drafter takes them in when
its request is drafted for: those of a probed request in one call, and those of most requests on a busy machine never.

Of a page that requests share, the first of them to be drafted for writes the drafter's context, and those that follow
find it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.forwarding_batch import ForwardingBatch
from dspark.models.kept_states import KeptStates, first_of_each
from dspark.models.paged_memory import PageTables


class LazyDrafter(ForwardingBatch):
    """``inner``, fed late. With ``postpones`` False it is fed at once, and nothing is kept: for engines that draft for
    everybody at every step."""

    def __init__(self, inner: BatchDrafter, *, postpones: bool = True) -> None:
        super().__init__(inner)
        self._postpones = postpones and inner.block_size > 0

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :class:`BatchDrafter`."""
        super().attach(tables, pages=pages, max_len=max_len)
        self._kept = KeptStates(tables, pages=pages if self._postpones else 0)
        self._fed = [0] * tables.seats  # of the kept tokens of each seat, taken in for it

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :class:`BatchDrafter`; what the other request's drafter did not take in of them, this one's will."""
        if self._postpones:
            self._kept.lengths[seat] = len(token_ids)
        else:
            super().resume(seat, token_ids)

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """Keep the tokens for whoever is asked about."""
        self.keep(seats, counts, counts, token_ids, features)

    def keep(
        self,
        seats: Sequence[int],
        ran: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """:meth:`extend` by what stands of a pass: of the ``ran[i]`` tokens of each seat the first ``counts[i]``."""
        if self._postpones:
            self._kept.append(seats, ran, counts, token_ids, features)
            return
        if sum(counts) < sum(ran):
            places = first_of_each(ran, counts).to(token_ids.device)
            token_ids, features = token_ids[places], None if features is None else features[places]
        super().extend(seats, counts, token_ids, features)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :class:`BatchDrafter`."""
        if self._postpones:
            self.catch_up([ask.seat for ask in asks])
        return super().propose(asks)

    def close(self, seat: int) -> None:
        """See :class:`BatchDrafter`."""
        self._kept.lengths[seat], self._fed[seat] = 0, 0
        super().close(seat)

    def behind(self, seat: int) -> int:
        """Committed tokens of ``seat`` that are not taken in for it."""
        return int(self._kept.lengths[seat]) - self._fed[seat]

    def catch_up(self, seats: Sequence[int]) -> None:
        """Take in what is kept of ``seats``: one call, and one for each seat whose pages another of them shares."""
        together = [seat for seat in seats if self.behind(seat)]
        if len(together) > 1:
            sharing = self._kept.sharing(np.array(together, dtype=np.int64)).tolist()
            for seat, shares in zip(together, sharing, strict=True):
                if shares:
                    self._take_in([seat])
            together = [seat for seat, shares in zip(together, sharing, strict=True) if not shares]
        self._take_in(together)

    def _take_in(self, seats: list[int]) -> None:
        for seat in seats:
            if self._fed[seat] == 0:
                self._resume(seat)
        seats = [seat for seat in seats if self.behind(seat)]
        if not seats:
            return
        counts = [self.behind(seat) for seat in seats]
        slots, ids, states = self._kept.recall(seats, [self._fed[seat] for seat in seats], counts)
        super().extend(seats, counts, ids, states)
        self._kept.taken[slots] = True
        for seat, count in zip(seats, counts, strict=True):
            self._fed[seat] += count

    def _resume(self, seat: int) -> None:
        """Begin a seat behind what is taken of its first tokens already, by requests that shared their pages."""
        kept = self._kept
        slots = kept.slots(np.array([seat]), np.zeros(1, dtype=np.int64), kept.lengths[[seat]])
        missing = np.flatnonzero(~kept.taken[slots])
        count = int(missing[0]) if len(missing) else len(slots)
        if count:
            super().resume(seat, kept.of(slots[:count])[0].tolist())
            self._fed[seat] = count
