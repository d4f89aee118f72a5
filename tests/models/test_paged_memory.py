"""Paged memory holds what contiguous rows hold: any pages, shared beginnings, ragged mixes, rollback across borders."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor

from dspark.errors import ConfigError, RequestError
from dspark.models.decoder_config import from_transformers
from dspark.models.lean import LeanTarget
from dspark.models.paged_memory import NO_PAGE, PagedMemory, PageTables
from dspark.models.target import KVMemory, PagedTarget

SEATS, SHARED = 5, 2  # seats, and whole pages that seats 0 and 1 share
TAPS = tuple(range(-1, LAYERS - 1))


@functools.cache
def lean(name: str, *, native: bool, dtype: torch.dtype = torch.float32) -> LeanTarget:
    model = tiny_model(name, head_dim=32)  # which the compiled operations take
    config = from_transformers(model.config)
    return LeanTarget(config, dict(model.state_dict()), name=name, dtype=dtype, native=native)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


class Twins:
    """The same requests over pages handed out at random, and over contiguous rows."""

    def __init__(self, target: LeanTarget, *, page_size: int, max_len: int = 150, seed: int = 0) -> None:
        self.target, self.random = target, random.Random(seed)
        per_seat = -(-max_len // page_size)
        self.tables = PageTables(seats=SEATS, pages_per_seat=per_seat, page_size=page_size)
        pages = SEATS * per_seat + 3
        self.free = self.random.sample(range(pages), pages)
        self.paged = target.new_paged_memory(self.tables, pages=pages)
        self.rows = target.new_memory(rows=SEATS, max_len=per_seat * page_size)
        self.owned: list[list[int]] = [[] for _ in range(SEATS)]
        self.floor = [0] * SEATS
        self.share(page_size)

    def share(self, page_size: int) -> None:
        """Seats 0 and 1 begin with the same tokens; seat 1 takes the pages of seat 0 instead of running them."""
        length, ids = SHARED * page_size, tokens(SHARED * page_size, 99)
        self.grow(0, length)
        self.paged_forward([0], [length], ids)
        self.owned[1] = self.owned[0][:SHARED]
        self.tables.assign(1, self.owned[1])
        self.paged.lengths[1] = length
        self.target.forward(torch.cat((ids, ids)), self.rows, rows=[0, 1], counts=[length, length])
        self.floor[:2] = [length, length]

    def grow(self, seat: int, length: int) -> None:
        owned = self.owned[seat]
        new = [self.free.pop() for _ in range(self.tables.pages_for(length) - len(owned))]
        self.tables.assign(seat, new, start=len(owned))
        owned += new

    def paged_forward(self, seats: list[int], counts: list[int], ids: Tensor) -> list[Tensor | None]:
        out = self.target.forward(ids, self.paged, rows=seats, counts=counts, taps=TAPS)
        return [out.logits, out.features, out.final]

    def step(self, seats: list[int], counts: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
        """One pass over both memories: pairs of results, of pages and of rows."""
        ids = tokens(sum(counts), seed)
        for seat, count in zip(seats, counts, strict=True):
            self.grow(seat, self.paged.lengths[seat] + count)
        mine = self.paged_forward(seats, counts, ids)
        out = self.target.forward(ids, self.rows, rows=seats, counts=counts, taps=TAPS)
        assert self.paged.lengths == self.rows.lengths
        return [(a, b) for a, b in zip(mine, (out.logits, out.features, out.final), strict=True) if b is not None]

    def roll_back(self) -> None:
        """Some seats lose tokens; pages that are then unused go back, to be given to whoever comes next."""
        for seat in self.random.sample(range(SEATS), 3):
            length = self.random.randint(self.floor[seat], max(self.floor[seat], self.paged.lengths[seat]))
            if length > self.paged.lengths[seat]:
                continue
            for memory in (self.paged, self.rows):
                memory.rollback(seat, length)
            kept = self.tables.pages_for(length)
            self.free += self.owned[seat][kept:]
            del self.owned[seat][kept:]
            self.tables.clear(seat, start=kept)
            self.random.shuffle(self.free)

    def wander(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Random passes: blocks, single tokens and prefill chunks of any seats in any order, with rollbacks."""
        pairs = []
        for i in range(steps):
            seats = self.random.sample(range(SEATS), self.random.randint(1, SEATS))
            counts = [self.random.choice((1, 1, 2, 5, 8, 8, 34 if i % 2 else 3)) for _ in seats]
            fits = [self.rows.lengths[s] + c <= self.rows.max_len for s, c in zip(seats, counts, strict=True)]
            seats, counts = ([x for x, fit in zip(xs, fits, strict=True) if fit] for xs in (seats, counts))
            if seats:
                pairs += self.step(seats, counts, i)
            self.roll_back()
        return pairs


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("name", ["llama3-rope", "qwen3", "gemma2", "gemma3"])
def test_pages_equal_rows_in_plain_pytorch(name: str, page_size: int) -> None:
    for mine, theirs in Twins(lean(name, native=False), page_size=page_size, seed=page_size).wander(8):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("name", ["llama3-rope", "qwen3", "gemma2", "gemma3"])
def test_pages_equal_rows_bit_for_bit(name: str, page_size: int, dtype: torch.dtype) -> None:
    target = lean(name, native=True, dtype=dtype)
    if not target.native:
        pytest.skip("no C compiler")
    for mine, theirs in Twins(target, page_size=page_size, seed=page_size).wander(8):
        assert torch.equal(mine, theirs)


def test_lean_targets_are_paged_targets() -> None:
    target = lean("smollm2", native=True)
    assert isinstance(target, PagedTarget)
    memory = target.new_paged_memory(PageTables(seats=2, pages_per_seat=4, page_size=5), pages=3)
    assert (memory.rows, memory.max_len, memory.pages) == (2, 20, 3)
    assert memory.both.shape == (LAYERS, 2, 3, 1, 5, 32)
    assert memory.nbytes == memory.both.nbytes
    assert target.new_paged_memory(PageTables(seats=1, pages_per_seat=99, page_size=5), pages=1).max_len == 256


def test_a_copied_page_is_another_seats_own() -> None:
    """Copy on write: both seats go on from the same tokens, within the page that they shared."""
    target = lean("qwen3", native=False)
    tables = PageTables(seats=2, pages_per_seat=4, page_size=8)
    memory = target.new_paged_memory(tables, pages=4)
    tables.assign(0, [2])
    target.forward(tokens(5), memory)
    memory.copy_page(2, 0)
    tables.assign(1, [0])
    memory.lengths[1] = 5
    out = target.forward(torch.cat((tokens(2, 1), tokens(2, 2))), memory, rows=[0, 1], counts=[2, 2]).final
    for row, seed in ((0, 1), (1, 2)):
        whole = target.forward(torch.cat((tokens(5), tokens(2, seed))), target.new_memory(rows=1, max_len=8)).final
        torch.testing.assert_close(out[2 * row : 2 * row + 2], whole[5:], rtol=0, atol=1e-4)


def three_seats() -> tuple[LeanTarget, PageTables, PagedMemory]:
    target = lean("smollm2", native=False)
    tables = PageTables(seats=3, pages_per_seat=3, page_size=4)
    return target, tables, target.new_paged_memory(tables, pages=5)


@pytest.mark.parametrize(
    ("ids", "lengths", "counts", "words"),
    [
        ([[0], [1]], [0, 0], [5, 4], "seat 0 needs 2 pages for 0 tokens and 5 more, and stretch 1 lies in page -1"),
        ([[0], [5]], [0, 0], [4, 4], "seat 1 needs 1 pages .* page 5; give it one of the pages 0..4"),
        ([[0], [-3]], [0, 0], [4, 1], "page -3"),
        ([[0, 1], [0, 1]], [4, 4], [2, 3], "seat 0 is about to write into page 1, which another stretch"),
        ([[0, 1], [1, 2]], [4, 4], [1, 1], "seat 0 is about to write into page 1"),
        ([[0, 0]], [0], [8], "seat 0 is about to write into page 0"),
        ([[0, 1, 0]], [8], [1], "seat 0 is about to write into page 0"),
        ([[0, 1, 2]], [9], [4], "seat|row 0 holds 9 tokens and 4 more exceed max_len 12"),
    ],
)
def test_bad_tables_are_refused(ids: list[list[int]], lengths: list[int], counts: list[int], words: str) -> None:
    """Before anything is written."""
    target, tables, memory = three_seats()
    for seat, pages in enumerate(ids):
        tables.ids[seat, : len(pages)] = torch.tensor(pages)
    memory.lengths[: len(lengths)] = lengths
    before = list(memory.lengths)
    with pytest.raises(RequestError, match=words):
        target.forward(tokens(sum(counts)), memory, rows=list(range(len(counts))), counts=counts)
    assert memory.lengths == before and not memory.both.any()


def test_the_quick_word_for_one_seat_is_the_thorough_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets nothing through that the whole check refuses; what it does not vouch for, that check still sees."""
    rng, found = np.random.default_rng(0), set[bool]()
    for _ in range(400):
        tables = PageTables(seats=1, pages_per_seat=4, page_size=2)
        tables.assign(0, rng.integers(-1, 9, 4).tolist() if rng.random() < 0.5 else rng.permutation(8)[:4].tolist())
        arguments = [0], [int(rng.integers(0, 5))], [int(rng.integers(1, 4))]

        def refused(tables: PageTables = tables, arguments: tuple[list[int], ...] = arguments) -> str:
            try:
                tables.check(*arguments, pages=8)
            except RequestError as error:
                return str(error)
            return ""

        quick = refused()
        with monkeypatch.context() as patch:
            patch.setattr(PageTables, "_sound", lambda *_, **__: False)
            assert quick == refused()
        found.add(tables._sound(0, arguments[1][0] + arguments[2][0], pages=8))
    assert found == {True, False}


def test_whole_pages_may_be_read_by_many() -> None:
    target, tables, memory = three_seats()
    for seat in range(3):
        tables.assign(seat, [4, seat])
        memory.lengths[seat] = 4
    target.forward(tokens(3), memory, rows=[2, 0, 1], counts=[1, 1, 1])
    assert memory.lengths == [5, 5, 5]


def test_impossible_sizes_and_assignments_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size 0"):
        PageTables(seats=1, pages_per_seat=1, page_size=0)
    target, tables, _ = three_seats()
    with pytest.raises(ConfigError, match="pages is 0"):
        target.new_paged_memory(tables, pages=0)
    with pytest.raises(RequestError, match="seat is 3"):
        tables.assign(3, [0])
    with pytest.raises(RequestError, match="cannot take 2 pages from stretch 2 on"):
        tables.assign(0, [0, 1], start=2)
    tables.assign(0, [3, 4], start=1)
    assert tables.ids[0].tolist() == [NO_PAGE, 3, 4]
    tables.clear(0, start=2)
    assert tables.ids[0].tolist() == [NO_PAGE, 3, NO_PAGE]


def test_rollback_is_that_of_any_memory() -> None:
    target, tables, memory = three_seats()
    tables.assign(0, [1, 3])
    target.forward(tokens(7), memory)
    with pytest.raises(RequestError, match="cannot roll row 0 back to 8"):
        memory.rollback(0, 8)
    memory.rollback(0, 2)
    assert isinstance(memory, KVMemory) and memory.lengths[0] == 2
