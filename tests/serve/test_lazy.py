"""A drafter fed late is told the same, each seat in order, nothing twice that is shared, and never what nobody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.models.batch_drafter import BatchProposal, DraftAsk
from dspark.models.paged_memory import PageTables
from dspark.serve.lazy import LazyDrafter

SEATS, PAGE, PAGES = 4, 2, 64


class Notebook:
    """Writes down what it is told, by seat and by slot, and holds its caller to the rules of the real one."""

    name, block_size, taps, has_confidence = "notebook", 2, (0,), False

    def __init__(self) -> None:
        self.told: dict[int, list[int]] = {}
        self.slots: dict[int, int] = {}  # token whose context lies in each
        self.calls = self.rows = 0

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        self.tables, self.pages = tables, pages

    def open(self, seat: int, *, shaper: Any) -> None:
        assert seat not in self.told
        self.told[seat] = []

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        assert not self.told[seat]
        self.told[seat] += token_ids
        self.check(seat)

    def extend(
        self, seats: Sequence[int], counts: Sequence[int], token_ids: torch.Tensor, features: torch.Tensor | None
    ) -> None:
        self.calls, self.rows = self.calls + 1, self.rows + len(token_ids)
        assert len(set(seats)) == len(seats) and sum(counts) == len(token_ids)
        assert features is not None and features[:, 0].tolist() == token_ids.tolist()
        lengths = [len(self.told[seat]) for seat in seats]
        self.tables.check(seats, lengths, counts, pages=self.pages)
        for seat, part in zip(seats, token_ids.split(list(counts)), strict=True):
            for token in part.tolist():
                self.slots[self.slot(seat, len(self.told[seat]))] = token
                self.told[seat].append(token)
            self.check(seat)

    def slot(self, seat: int, position: int) -> int:
        return int(self.tables.ids[seat, position // PAGE]) * PAGE + position % PAGE

    def check(self, seat: int) -> None:
        assert [self.slots.get(self.slot(seat, i)) for i in range(len(self.told[seat]))] == self.told[seat]

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        for ask in asks:
            self.check(ask.seat)
        return BatchProposal(
            draft_tokens=torch.zeros(len(asks), 2, dtype=torch.long),
            proposed=np.zeros(len(asks), dtype=np.int64),
            certain=np.ones(len(asks), dtype=np.bool_),
        )

    def close(self, seat: int) -> None:
        del self.told[seat]


class House:
    """Seats and pages over a lazy drafter; pages go from hand to hand, and whole ones are shared."""

    def __init__(self, *, postpones: bool = True) -> None:
        self.inner = Notebook()
        self.drafter = LazyDrafter(self.inner, postpones=postpones)
        self.tables = PageTables(seats=SEATS, pages_per_seat=16, page_size=PAGE)
        self.drafter.attach(self.tables, pages=PAGES, max_len=32)
        self.texts: dict[int, list[int]] = {}
        self.holders = [0] * PAGES
        self.next_token = 0

    def open(self, seat: int, source: int | None = None) -> None:
        """Seat a request; on the whole pages of what sits on ``source``, if anything does."""
        self.drafter.open(seat, shaper=None)
        text = [] if source is None else self.texts[source][: len(self.texts[source]) // PAGE * PAGE]
        self.texts[seat] = list(text)
        for i in range(len(text) // PAGE):
            assert source is not None
            self.hold(seat, i, int(self.tables.ids[source, i]))
        if text:
            self.drafter.resume(seat, text)

    def hold(self, seat: int, stretch: int, page: int) -> None:
        self.tables.assign(seat, [page], start=stretch)
        self.holders[page] += 1

    def write(self, seats: Sequence[int], counts: Sequence[int]) -> None:
        for seat, count in zip(seats, counts, strict=True):
            held = -(-len(self.texts[seat]) // PAGE)
            for stretch in range(held, -(-(len(self.texts[seat]) + count) // PAGE)):
                self.hold(seat, stretch, self.holders.index(0))
        ids = torch.arange(self.next_token, self.next_token + sum(counts))
        self.next_token += sum(counts)
        self.drafter.extend(seats, counts, ids, ids[:, None].float())
        for seat, part in zip(seats, ids.split(list(counts)), strict=True):
            self.texts[seat] += part.tolist()

    def ask(self, seats: Sequence[int]) -> None:
        sampling, generator = SamplingParams(), torch.Generator()
        asks = [DraftAsk(seat=seat, anchor=1, sampling=sampling, generator=generator, limit=1) for seat in seats]
        self.drafter.propose(asks)
        for seat in seats:
            assert self.inner.told[seat] == self.texts[seat] and self.drafter.behind(seat) == 0

    def close(self, seat: int) -> None:
        self.drafter.close(seat)
        for page in self.tables.ids[seat].tolist():
            if page >= 0:
                self.holders[page] -= 1
        self.tables.clear(seat)
        del self.texts[seat]


doing = st.tuples(
    st.integers(0, 5), st.lists(st.integers(0, SEATS - 1), min_size=1, max_size=SEATS, unique=True), st.integers(0, 3)
)


@settings(max_examples=80, deadline=None)
@given(st.lists(doing, max_size=40))
def test_whoever_is_asked_about_was_told_all_of_its_own_in_order(doings: list[tuple[int, list[int], int]]) -> None:
    house = House()
    for what, seats, number in doings:
        open_seats = [seat for seat in seats if seat in house.texts]
        if what == 0 and open_seats:
            house.ask(open_seats)
        elif what == 1 and open_seats:
            house.close(open_seats[0])
        elif what == 2:
            for seat in seats:
                if seat not in house.texts:
                    house.open(seat, number if house.texts.get(number) else None)
        elif open_seats:
            room = [seat for seat in open_seats if len(house.texts[seat]) < 28]
            if room:
                house.write(room, [1 + (seat + what) % 3 for seat in room])
    for seat, text in house.texts.items():
        told = house.inner.told[seat]
        assert told == text[: len(told)] and len(text) - len(told) == house.drafter.behind(seat)
    if house.texts:
        house.ask(list(house.texts))


def test_nothing_is_taken_in_for_a_request_that_nobody_drafts_for() -> None:
    house = House()
    for seat in range(3):
        house.open(seat)
    for _ in range(9):
        house.write([0, 1, 2], [1, 2, 1])
    house.close(1)
    house.ask([2])
    assert house.inner.calls == 1 and house.inner.rows == 9
    house.ask([2])
    assert house.inner.calls == 1
    house.write([0, 2], [1, 1])
    house.ask([0, 2])
    assert house.inner.calls == 2 and house.inner.rows == 9 + 10 + 1


def test_of_shared_pages_each_token_is_taken_in_once() -> None:
    house = House()
    house.open(0)
    house.write([0], [7])  # three whole pages
    house.open(1, 0)
    house.close(0)  # nobody drafted for it
    house.write([1], [1])
    house.open(2, 1)
    house.open(3, 1)
    house.ask([2, 3])
    assert house.inner.rows == 6, "the second found what the first had left"
    house.write([1, 2, 3], [1, 1, 1])
    house.ask([1, 2, 3])
    assert house.inner.rows == 6 + 2 + 1 + 1  # of the first, what was written behind the shared pages


@pytest.mark.parametrize("postpones", [False, True])
def test_at_once_where_everybody_is_drafted_for(postpones: bool) -> None:
    house = House(postpones=postpones)
    house.open(0)
    house.write([0], [3])
    assert house.inner.told[0] == ([] if postpones else [0, 1, 2])
