"""A drafter fed late is told the same, each seat in order, and nothing of a seat that was left meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.models.batch_drafter import BatchProposal, DraftAsk
from dspark.models.paged_memory import PageTables
from dspark.serve import lazy as module
from dspark.serve.lazy import LazyDrafter


class Notebook:
    """Writes down what it is told, by seat."""

    name, block_size, taps, has_confidence = "notebook", 2, (0,), False

    def __init__(self) -> None:
        self.told: dict[int, list[int]] = {}
        self.calls = 0

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        self.attached = pages

    def open(self, seat: int, *, shaper: Any) -> None:
        assert seat not in self.told
        self.told[seat] = []

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        self.told[seat] += token_ids

    def extend(
        self, seats: Sequence[int], counts: Sequence[int], token_ids: torch.Tensor, features: torch.Tensor | None
    ) -> None:
        self.calls += 1
        assert len(set(seats)) == len(seats) and sum(counts) == len(token_ids)
        assert features is not None and features[:, 0].tolist() == token_ids.tolist()
        for seat, part in zip(seats, token_ids.split(list(counts)), strict=True):
            self.told[seat] += part.tolist()

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        raise LookupError(len(asks))

    def close(self, seat: int) -> None:
        del self.told[seat]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=30))
def test_every_seat_is_told_its_own_tokens_in_order_in_the_end(doings: list[tuple[int, list[int]]]) -> None:
    inner = Notebook()
    drafter, wanted, next_token = LazyDrafter(inner), dict[int, list[int]](), 0
    for what, numbers in doings:
        seats = list(dict.fromkeys(numbers))
        if what == 0:
            drafter.catch_up()
            assert inner.told == wanted
        elif what == 1 and seats[0] in wanted:
            drafter.close(seats[0])
            del wanted[seats[0]]
        else:
            for seat in seats:
                if seat not in wanted:
                    drafter.open(seat, shaper=None)
                    wanted[seat] = []
            counts = [1 + (seat + what) % 3 for seat in seats]
            ids = torch.arange(next_token, next_token + sum(counts))
            next_token += sum(counts)
            drafter.extend(seats, counts, ids, ids[:, None].float())
            for seat, part in zip(seats, ids.split(counts), strict=True):
                wanted[seat] += part.tolist()
        for seat, tokens in wanted.items():
            assert inner.told[seat] == tokens[: len(tokens) - drafter.behind(seat)]
    drafter.catch_up()
    assert inner.told == wanted and not any(drafter.behind(seat) for seat in wanted)


def test_tokens_gather_until_they_are_asked_for_or_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 3)
    inner = Notebook()
    drafter = LazyDrafter(inner)
    drafter.open(0, shaper=None)
    one = torch.tensor([7])
    for calls in (0, 0, 1, 1):
        drafter.extend([0], [1], one, one[:, None].float())
        assert inner.calls == calls
    ask = DraftAsk(seat=0, anchor=1, sampling=SamplingParams(), generator=torch.Generator(), limit=1)
    with pytest.raises(LookupError):
        drafter.propose([ask])
    assert inner.told == {0: [7, 7, 7, 7]} and inner.calls == 2
