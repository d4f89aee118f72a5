"""A drafter that takes committed tokens in when somebody wants drafts of their request, and not before.

Where drafting does not pay, a step that drafts for nobody should cost what plain decoding costs. But what the drafter
knows of a text comes from the target's states over it, which are there once, when the text passes through the target.
So the states are kept, in the pages of the text, and the drafter takes them in when its request is drafted for: those
of one probed request in one call, and those of most requests on a busy machine never.

    | slot of a page       | kept states             | drafter's own context                                           |
    |----------------------|-------------------------|-----------------------------------------------------------------|
    | of a committed token | there                   | there if *taken*: written when a request on it was drafted for  |
    | others               | what a former text left | likewise                                                        |

A page that requests share is shared with what is kept of it, taken or not: the first of them to be drafted for writes
the drafter's context, and those that follow find it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models import huge_pages
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.forwarding_batch import ForwardingBatch
from dspark.models.paged_memory import PageTables

MOST_STEPS = 8  # whose states wait to be stored: the work around each is paid once for all of them


class LazyDrafter(ForwardingBatch):
    """``inner``, fed late. With ``postpones`` False it is fed at once, and nothing is kept: for engines that draft for
    everybody at every step."""

    def __init__(self, inner: BatchDrafter, *, postpones: bool = True) -> None:
        super().__init__(inner)
        self._postpones = postpones and inner.block_size > 0

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :class:`BatchDrafter`. States are kept in the target's dtype, as many as the pages hold; the room for
        them is taken when the first come."""
        super().attach(tables, pages=pages, max_len=max_len)
        self._table, self._page_size, self._slots = tables.ids.numpy(), tables.page_size, pages * tables.page_size
        self._lengths = np.zeros(tables.seats, dtype=np.int64)  # committed tokens that the target has run, by seat
        self._fed = np.zeros(tables.seats, dtype=np.int64)  # of them, taken in for the seat
        self._taken = np.zeros(self._slots if self._postpones else 0, dtype=np.bool_)
        self._new: list[tuple[Int[np.ndarray, "tokens"], Tensor, Tensor | None]] = []  # slots, ids, states; not stored
        self._ids: Int[Tensor, "slots"] | None = None
        self._states: Float[Tensor, "slots features"] | None = None

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :class:`BatchDrafter`; what the other request's drafter did not take in of them, this one's will."""
        if self._postpones:
            self._lengths[seat] = len(token_ids)
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
        if not self._postpones:
            super().extend(seats, counts, token_ids, features)
            return
        rows, sizes = np.asarray(seats, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        slots = self._slots_of(rows, self._lengths[rows], sizes)
        assert len(slots) and slots.min() >= 0, "a seat without pages for its tokens"
        self._lengths[rows] += sizes
        self._new.append((slots, token_ids, features))
        if len(self._new) >= MOST_STEPS:
            self._store()

    def _store(self) -> None:
        """Write what came of late to where it is kept, in the order it came: a page may have changed hands since."""
        new, self._new = self._new, []
        for slots, token_ids, features in new:
            where = torch.from_numpy(slots).to(token_ids.device)
            if self._ids is None:
                self._ids = token_ids.new_empty(self._slots)
                self._states = None if features is None else self._room(features)
            self._ids.index_copy_(0, where, token_ids)
            self._taken[slots] = False
            if self._states is None or features is None:
                continue
            if features.device.type == "cpu":  # whole rows at once, in half of index_copy_'s time
                _bytes(self._states)[slots] = _bytes(features)
            else:
                self._states.index_copy_(0, where, features)

    def _room(self, features: Float[Tensor, "tokens features"]) -> Float[Tensor, "slots features"]:
        room = features.new_empty(self._slots, features.shape[1])
        if room.device.type == "cpu":
            huge_pages.before_use(room.data_ptr(), room.nbytes)
        return room

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :class:`BatchDrafter`."""
        if self._postpones:
            self.catch_up([ask.seat for ask in asks])
        return super().propose(asks)

    def close(self, seat: int) -> None:
        """See :class:`BatchDrafter`."""
        self._lengths[seat] = self._fed[seat] = 0
        super().close(seat)

    def behind(self, seat: int) -> int:
        """Committed tokens of ``seat`` that are not taken in for it."""
        return int(self._lengths[seat] - self._fed[seat])

    def catch_up(self, seats: Sequence[int]) -> None:
        """Take in what is kept of ``seats``: one call, and one for each seat whose pages another of them shares."""
        self._store()
        rows = np.array([seat for seat in seats if self._fed[seat] < self._lengths[seat]], dtype=np.int64)
        alone = self._sharing(rows)
        for seat in rows[alone].tolist():
            self._take_in(np.array([seat]))
        if not alone.all():
            self._take_in(rows[~alone])

    def _take_in(self, rows: Int[np.ndarray, "some"]) -> None:
        for seat in rows[self._fed[rows] == 0].tolist():
            self._resume(seat)
        rows = rows[self._fed[rows] < self._lengths[rows]]
        if not len(rows):
            return
        counts = self._lengths[rows] - self._fed[rows]
        slots = self._slots_of(rows, self._fed[rows], counts)
        assert self._ids is not None
        where = torch.from_numpy(slots).to(self._ids.device)
        states = None if self._states is None else self._states[where]
        super().extend(rows.tolist(), counts.tolist(), self._ids[where], states)
        self._taken[slots] = True
        self._fed[rows] = self._lengths[rows]

    def _resume(self, seat: int) -> None:
        """Begin a seat behind what is taken of its first tokens already, by requests that shared their pages."""
        slots = self._slots_of(np.array([seat]), np.zeros(1, dtype=np.int64), self._lengths[[seat]])
        missing = np.flatnonzero(~self._taken[slots])
        count = int(missing[0]) if len(missing) else len(slots)
        if count:
            assert self._ids is not None
            where = torch.from_numpy(slots[:count]).to(self._ids.device)
            super().resume(seat, self._ids[where].tolist())
            self._fed[seat] = count

    def _sharing(self, rows: Int[np.ndarray, "some"]) -> np.ndarray:
        """Which of ``rows`` have a page in use that another of them uses as well."""
        if len(rows) < 2:
            return np.ones(len(rows), dtype=np.bool_)
        stretches = -(-self._lengths[rows] // self._page_size)
        pages = self._table[rows, : stretches.max()]
        used = np.arange(pages.shape[1]) < stretches[:, None]
        holders = np.bincount(pages[used], minlength=1)
        return (used & (holders[np.where(used, pages, 0)] > 1)).any(1)

    def _slots_of(
        self, rows: Int[np.ndarray, "some"], starts: Int[np.ndarray, "some"], counts: Int[np.ndarray, "some"]
    ) -> Int[np.ndarray, "tokens"]:
        """Where tokens of seats lie, all pages one after the other: ``counts`` of each from ``starts`` on."""
        owners = np.repeat(rows, counts)
        positions = np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(len(owners))
        return self._table[owners, positions // self._page_size] * self._page_size + positions % self._page_size


def _bytes(states: Float[Tensor, "rows features"]) -> np.ndarray:
    """Rows of a tensor on the CPU, each as one opaque item; they share its memory."""
    flat = states.contiguous().view(torch.uint8).numpy()
    return flat.view(f"V{flat.shape[1]}")[:, 0]
