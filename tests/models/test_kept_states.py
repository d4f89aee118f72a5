"""What is kept by pages is what was given, compiled or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.models.kept_states import KeptStates
from dspark.models.paged_memory import PageTables

SEATS, PAGE, PAGES = 3, 4, 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_both_forms_keep_the_same_and_give_it_back(dtype: torch.dtype | None) -> None:
    tables = PageTables(seats=SEATS, pages_per_seat=6, page_size=PAGE)
    rng = np.random.default_rng(0)
    pages = rng.permutation(PAGES)[:18].reshape(SEATS, 6)
    for seat in range(SEATS):
        tables.assign(seat, pages[seat].tolist())
    forms = [KeptStates(tables, pages=PAGES, native=native) for native in (True, False)]
    texts: list[list[int]] = [[] for _ in range(SEATS)]
    for _ in range(7):
        seats = rng.permutation(SEATS)[: rng.integers(1, SEATS + 1)].tolist()
        ran = [int(rng.integers(1, 4)) for _ in seats]
        counts = [int(rng.integers(1, most + 1)) for most in ran]
        ids = torch.from_numpy(rng.integers(0, 99, sum(ran)))
        states = None if dtype is None else torch.stack([ids, ids + 100], 1).to(dtype)
        for form in forms:
            form.taken[:] = True
            form.append(seats, ran, counts, ids, states)
        for seat, part, count in zip(seats, ids.split(ran), counts, strict=True):
            texts[seat] += part[:count].tolist()
        assert (forms[0].taken == forms[1].taken).all() and (~forms[0].taken).sum() == sum(counts)
    for form in forms:
        assert form.lengths.tolist() == [len(text) for text in texts]
        slots = form.slots(np.arange(SEATS), np.zeros(SEATS, dtype=np.int64), form.lengths)
        ids, kept = form.of(slots)
        assert ids.tolist() == [token for text in texts for token in text]
        assert (kept is None) == (dtype is None)
        assert kept is None or kept[:, 1].tolist() == (ids + 100).tolist()
        seats, starts, counts = [2, 0], [1, 3], [len(texts[2]) - 1, len(texts[0]) - 4]
        again = form.recall(seats, starts, counts)
        assert again.ids.tolist() == [*texts[2][1:], *texts[0][3:-1]]
        expected = [form.slots(*(np.array([n]) for n in one)) for one in zip(seats, starts, counts, strict=True)]
        assert again.slots.tolist() == np.concatenate(expected).tolist()
        assert (again.states is None) == (dtype is None)
        assert again.states is None or again.states[:, 1].tolist() == (again.ids + 100).tolist()


@pytest.mark.parametrize("native", [True, False])
def test_a_seat_without_a_page_is_our_mistake(native: bool) -> None:
    kept = KeptStates(PageTables(seats=1, pages_per_seat=1, page_size=2), pages=1, native=native)
    with pytest.raises(AssertionError, match="without pages"):
        kept.append([0], [1], [1], torch.zeros(1, dtype=torch.long), torch.zeros(1, 2))


def test_who_shares_a_page_in_use() -> None:
    tables = PageTables(seats=3, pages_per_seat=2, page_size=2)
    for seat, pages in enumerate(([0, 1], [0, 2], [3, 0])):
        tables.assign(seat, pages)
    kept = KeptStates(tables, pages=4)
    kept.lengths[:] = 2
    assert kept.sharing(np.arange(3)).tolist() == [True, True, False]  # of the last, that page is not in use
    assert kept.sharing(np.array([2])).tolist() == [False]
