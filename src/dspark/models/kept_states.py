"""The target's states over committed tokens, kept by the slots of the pages that the tokens lie in.

    | slot of a page       | id and states           | taken                                                   |
    |----------------------|-------------------------|---------------------------------------------------------|
    | of a committed token | there                   | whether a drafter has its own context of it in the page |
    | others               | what a former text left | likewise                                                |

So pages that requests share are shared with what is kept of them, and nothing need be freed: who writes a page again
writes over it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.models import huge_pages
from dspark.models.native import compiled, native_wanted
from dspark.models.paged_memory import PageTables

SOURCE = Path(__file__).with_suffix(".c")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Kept(ctypes.Structure):
    """``struct kept`` of kept_states.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("table", "lengths", "ids", "taken", "states")),
        *((name, _int64) for name in ("pages_per_seat", "page_size", "slots", "row_bytes")),
    )


def first_of_each(ran: Sequence[int], counts: Sequence[int]) -> Int[Tensor, "kept"]:
    """Places of the first ``counts[i]`` of ``ran[i]`` tokens, all requests one after the other."""
    starts = [0, *accumulate(ran)]
    places = [at for start, count in zip(starts, counts, strict=False) for at in range(start, start + count)]
    return torch.from_numpy(np.array(places, dtype=np.int64))


class Recalled(NamedTuple):
    """Tokens that were kept: where they lie, and what is kept of them."""

    slots: Int[np.ndarray, "tokens"]
    ids: Int[Tensor, "tokens"]
    states: Float[Tensor, "tokens features"] | None


class KeptStates:
    """Tokens and states of all seats of ``tables``, in the first tokens' dtype and device; room is taken when they
    come. ``native`` False keeps to numpy and PyTorch."""

    def __init__(self, tables: PageTables, *, pages: int, native: bool = True) -> None:
        self._table, self._page_size, self._slots = tables.ids.numpy(), tables.page_size, pages * tables.page_size
        self.lengths: Int[np.ndarray, "seats"] = np.zeros(tables.seats, dtype=np.int64)  # tokens of each
        self.taken: Bool[np.ndarray, "slots"] = np.zeros(self._slots, dtype=np.bool_)
        self._ids: Int[Tensor, "slots"] | None = None
        self._states: Float[Tensor, "slots features"] | None = None
        self._library = _library() if native and native_wanted() else None
        self._kept: _Kept | None = None

    def append(
        self,
        seats: Sequence[int],
        ran: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        states: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """Keep more tokens of ``seats``, not taken yet: of the ``ran[i]`` of seat ``seats[i]``, all seats one after the
        other, the first ``counts[i]``."""
        if self._ids is None:
            self._make_room(token_ids, states)
        if self._kept is not None and self._library is not None:
            token_ids, states = token_ids.contiguous(), None if states is None else states.contiguous()
            numbers, from_states = _int64 * len(seats), 0 if states is None else states.data_ptr()
            done = self._library.keep(
                *(ctypes.byref(self._kept), numbers(*seats), numbers(*ran), numbers(*counts), len(seats)),
                *(token_ids.data_ptr(), from_states),
            )
            assert done == token_ids.shape[0], "a seat without pages for its tokens"
            return
        rows, sizes = np.array((seats, counts), dtype=np.int64)
        slots = self.slots(rows, self.lengths[rows], sizes)
        assert slots.min(initial=0) >= 0, "a seat without pages for its tokens"
        at, standing = self._index(slots), first_of_each(ran, counts).to(token_ids.device)
        assert self._ids is not None
        self._ids.index_copy_(0, at, token_ids[standing])
        if self._states is not None and states is not None:
            self._states.index_copy_(0, at, states[standing])
        self.taken[slots] = False
        self.lengths[rows] += sizes

    def of(
        self, slots: Int[np.ndarray, "tokens"]
    ) -> tuple[Int[Tensor, "tokens"], Float[Tensor, "tokens features"] | None]:
        """Ids and states of tokens that were kept."""
        assert self._ids is not None
        at = self._index(slots)
        return self._ids[at], None if self._states is None else self._states[at]

    def recall(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Recalled:
        """``counts[i]`` kept tokens of seat ``seats[i]`` from position ``starts[i]`` on, all seats one after the other;
        :meth:`slots` and :meth:`of` in one call where there is compiled code."""
        if self._kept is None or self._library is None:
            slots = self.slots(*np.array((seats, starts, counts), dtype=np.int64))
            return Recalled(slots, *self.of(slots))
        assert self._ids is not None
        tokens, numbers = sum(counts), _int64 * len(seats)
        slots, ids = np.empty(tokens, dtype=np.int64), torch.empty(tokens, dtype=torch.long)
        states = None if self._states is None else self._states.new_empty(tokens, self._states.shape[1])
        into = 0 if states is None else states.data_ptr()
        done = self._library.recall(
            *(ctypes.byref(self._kept), numbers(*seats), numbers(*starts), numbers(*counts), len(seats)),
            *(_address(slots), ids.data_ptr(), into),
        )
        assert done == tokens, "a seat without pages for its tokens"
        return Recalled(slots, ids, states)

    def slots(
        self, rows: Int[np.ndarray, "some"], starts: Int[np.ndarray, "some"], counts: Int[np.ndarray, "some"]
    ) -> Int[np.ndarray, "tokens"]:
        """Where tokens of seats lie, all pages one after the other: ``counts`` of each from ``starts`` on."""
        owners = np.repeat(rows, counts)
        positions = np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(len(owners))
        return self._table[owners, positions // self._page_size] * self._page_size + positions % self._page_size

    def sharing(self, rows: Int[np.ndarray, "some"]) -> Bool[np.ndarray, "some"]:
        """Which of the seats ``rows`` have a page in use that another of them uses as well."""
        stretches = -(-self.lengths[rows] // self._page_size)
        pages = self._table[rows, : stretches.max(initial=0)]
        used = np.arange(pages.shape[1]) < stretches[:, None]
        holders = np.bincount(pages[used], minlength=1)
        return (used & (holders[np.where(used, pages, 0)] > 1)).any(1)

    def _index(self, slots: Int[np.ndarray, "tokens"]) -> Int[Tensor, "tokens"]:
        assert self._ids is not None
        return torch.from_numpy(slots).to(self._ids.device)

    def _make_room(self, token_ids: Tensor, states: Tensor | None) -> None:
        self._ids = token_ids.new_empty(self._slots, dtype=torch.long)
        if states is not None:
            self._states = states.new_empty(self._slots, states.shape[1])
        if self._ids.device.type != "cpu" or self._library is None:
            return
        self._kept = _Kept(
            _address(self._table),
            _address(self.lengths),
            self._ids.data_ptr(),
            _address(self.taken),
            None if self._states is None else self._states.data_ptr(),
            self._table.shape[1],
            self._page_size,
            self._slots,
            0 if self._states is None else self._states.shape[1] * self._states.element_size(),
        )
        if self._states is not None:
            huge_pages.before_use(self._states.data_ptr(), self._states.nbytes)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """kept_states.c; None without a working compiler."""
    library = compiled(SOURCE, ())
    if library is not None:
        library.keep.argtypes = [ctypes.POINTER(_Kept), *[_pointer] * 3, _int64, _pointer, _pointer]
        library.recall.argtypes = [ctypes.POINTER(_Kept), *[_pointer] * 3, _int64, *[_pointer] * 3]
        library.keep.restype = library.recall.restype = _int64
    return library


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
