"""Paged KV memory: requests in flight share one pool of pages, and equal beginnings share the pages themselves.

A request sits on a *seat*, which is a row of the memory. Its table says which page holds each stretch of ``page_size``
positions:

    | range of a seat                          | owner                                                                |
    |------------------------------------------|----------------------------------------------------------------------|
    | whole pages of a shared beginning        | every seat whose table names them; nobody writes there               |
    | [shared, length)                         | the seat alone                                                       |
    | [length, pages given * page_size)        | scratch: drafts in flight, what an undone pass left; then free room  |

One table serves several pools: the target's memory and the context of its drafter, each with lengths of its own. So a
page number means the same tokens in both, and a cached beginning carries its drafter's context along.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dspark.errors import ConfigError, RequestError
from dspark.models.decoder_config import DecoderConfig
from dspark.models.lean_memory import LeanMemory
from dspark.models.ragged import Run
from dspark.models.target import KVMemory

NO_PAGE = -1


class PageTables:
    """Which page holds positions [i * page_size, (i + 1) * page_size) of a seat: ``ids`` [seats, pages_per_seat].

    Whoever hands out pages writes ``ids`` (:meth:`assign`, :meth:`clear`, or the tensor itself); memories read them
    at every pass and check what they are about to use. ``NO_PAGE`` marks stretches without a page.
    """

    def __init__(self, *, seats: int, pages_per_seat: int, page_size: int) -> None:
        if min(seats, pages_per_seat, page_size) < 1:
            raise ConfigError(
                f"seats is {seats}, pages_per_seat {pages_per_seat} and page_size {page_size}; all must be 1 or more"
            )
        self.seats, self.pages_per_seat, self.page_size = seats, pages_per_seat, page_size
        self._numbers = np.full((seats, pages_per_seat), NO_PAGE, dtype=np.int64)
        self.ids: Int[Tensor, "seats pages_per_seat"] = torch.from_numpy(self._numbers)  # the same numbers

    @property
    def max_len(self) -> int:
        """Tokens that a seat could hold."""
        return self.pages_per_seat * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def assign(self, seat: int, page_ids: Sequence[int], *, start: int = 0) -> None:
        """Let a seat's stretches from ``start`` on lie in these pages; raises :class:`RequestError` past its table."""
        if not 0 <= seat < self.seats:
            raise RequestError(f"seat is {seat}; seats are 0..{self.seats - 1}")
        if not 0 <= start <= self.pages_per_seat - len(page_ids):
            raise RequestError(
                f"seat {seat} has {self.pages_per_seat} stretches and cannot take {len(page_ids)} pages from "
                f"stretch {start} on; raise pages_per_seat"
            )
        self._numbers[seat, start : start + len(page_ids)] = page_ids

    def clear(self, seat: int, *, start: int = 0) -> None:
        """Take a seat's pages from stretch ``start`` on out of the table."""
        self._numbers[seat, start:] = NO_PAGE

    def check(self, seats: Sequence[int], lengths: Sequence[int], counts: Sequence[int], *, pages: int) -> None:
        """Raise :class:`RequestError` unless a pass that appends ``counts`` tokens to these seats may run.

        Every stretch in use needs a page in 0..``pages`` - 1, no seat may use a page twice, and a page about to be
        written must belong to one of these seats alone.
        """
        if len(seats) == 1 and self._sound(seats[0], lengths[0] + counts[0], pages=pages):
            return
        before, new = np.array(lengths), np.array(counts)
        needed = -(-(before + new) // self.page_size)
        stretch = np.arange(needed.max())
        used = stretch < needed[:, None]
        ids = self._numbers[np.array(seats), : len(stretch)]
        wrong = used & ((ids < 0) | (ids >= pages))
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            raise RequestError(
                f"seat {seats[i]} needs {needed[i]} pages for {before[i]} tokens and {new[i]} more, and stretch {j} "
                f"lies in page {ids[i, j]}; give it one of the pages 0..{pages - 1}"
            )
        holders = np.bincount(ids[used], minlength=pages)
        shared = used & (stretch >= (before // self.page_size)[:, None]) & (holders[np.where(used, ids, 0)] > 1)
        if shared.any():
            i, j = np.argwhere(shared)[0]
            raise RequestError(
                f"seat {seats[i]} is about to write into page {ids[i, j]}, which another stretch of these seats uses "
                "as well; copy the page first and share whole pages only"
            )

    def _sound(self, seat: int, tokens: int, *, pages: int) -> bool:
        """Whether so many tokens of a seat lie in pages that exist, each page once: the quick word for one request."""
        needed = self.pages_for(tokens)
        ids = self._numbers[seat, :needed].tolist()
        return len(set(ids)) == needed and min(ids, default=0) >= 0 and max(ids, default=0) < pages


class PagedMemory(LeanMemory):
    """KV memory whose rows are the seats of ``tables``, in a pool of ``pages`` pages."""

    scattered = True

    def __init__(
        self,
        config: DecoderConfig,
        tables: PageTables,
        *,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int | None = None,
    ) -> None:
        """``max_len``: most tokens of a seat, if the model's context is shorter than the table."""
        if pages < 1:
            raise ConfigError(f"pages is {pages}; it must be 1 or more")
        room = tables.max_len if max_len is None else min(max_len, tables.max_len)
        KVMemory.__init__(self, rows=tables.seats, max_len=room, shapes=(), dtype=dtype, device=device)
        self.tables = tables
        self._allocate(config, pages, tables.page_size, dtype, device)

    @property
    def table(self) -> Int[Tensor, "rows pages_per_row"]:
        return self.tables.ids

    def check_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Raise :class:`RequestError` if a seat cannot take its new tokens, or its table is wrong for them."""
        super().check_room(rows, counts)
        self.tables.check(rows, [self.lengths[row] for row in rows], counts, pages=self.pages)

    def copy_page(self, source: int, into: int) -> None:
        """Copy a page's keys and values of all layers, so that a seat may write where others read."""
        self.both[:, :, into] = self.both[:, :, source]

    def views(self, run: Run) -> _PageViews:
        """What a run reads and writes, of every layer; keys and values are gathered into one piece when read."""
        ids = self.tables.ids[list(run.rows)].clamp_min(0).to(self.both.device)  # masks hide what NO_PAGE stands for
        return _PageViews(self.both, self.page_size, run, ids, self.slots(*run.places()))


class _PageViews:
    """The pages of a run's seats."""

    def __init__(self, both: Tensor, page_size: int, run: Run, ids: Tensor, slots: tuple[Tensor, Tensor]) -> None:
        self._layers, self._page_size, self._slots = both.unbind(0), page_size, slots
        self._spans = {False: run.full, True: run.local}
        stops = {slides: -(-span.stop // page_size) for slides, span in self._spans.items()}
        self._ids = {slides: ids[:, span.start // page_size : stops[slides]] for slides, span in self._spans.items()}

    def write(self, i: int, new: Tensor) -> None:
        self._layers[i][:, self._slots[0], :, self._slots[1]] = new

    def read(self, i: int, slides: bool) -> tuple[Tensor, Tensor]:
        span, ids = self._spans[slides], self._ids[slides]
        pages = self._layers[i][:, ids].permute(0, 1, 3, 2, 4, 5).flatten(3, 4)  # [2, rows, kv_heads, keys, head_dim]
        first = span.start % self._page_size
        keys, values = pages[:, :, :, first : first + span.stop - span.start].unbind(0)
        return keys, values
