"""What is timed, and how tokens are dealt to requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import TableTarget
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.evaluate.profile import draft_depth_shares, draft_seconds, step_seconds
from dspark.models.drafter import NoDrafter


class Watched(TableTarget):
    """Notes the counts of every timed pass and turns a clock by a jagged time for it: 4 s more from 5 tokens on."""

    def __init__(self) -> None:
        super().__init__(max_len=64)
        self.now = 0.0
        self.steps: list[list[int]] = []
        self.taps: set[tuple[int, ...]] = set()

    def forward(self, token_ids: Tensor, *rest: Any, counts: Sequence[int] | None = None, **options: Any) -> Any:
        if counts is not None:
            self.steps.append(list(counts))
            self.taps.add(tuple(options["taps"]))
            self.now += 1.0 + 4.0 * (len(token_ids) >= 5)
        return super().forward(token_ids, *rest, counts=counts, **options)


def test_steps_of_every_size_are_timed_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Watched()
    monkeypatch.setattr("dspark.evaluate.profile.time.perf_counter", lambda: target.now)
    seconds = step_seconds(target, max_tokens=7, tokens_per_request=3, context=10, repeats=2, taps=(0, 2))
    one_round = [[1], [2], [3], [2, 2], [3, 2], [3, 3], [3, 2, 2]]
    assert target.steps == one_round * 3  # the first warms up
    assert target.taps == {(0, 2)}
    assert list(seconds) == [1.0] * 4 + [5.0] * 3  # the jump stays where it is


def test_requests_keep_their_contexts() -> None:
    """A pass that rolled a row back too far, or not at all, would run out of room or shorten it."""
    target = TableTarget(max_len=20)
    assert len(step_seconds(target, max_tokens=9, tokens_per_request=3, context=17, repeats=3)) == 9


@pytest.mark.parametrize("field", ["max_tokens", "tokens_per_request", "repeats"])
def test_counts_under_one_are_refused(field: str) -> None:
    settings: dict[str, Any] = {"max_tokens": 2, "tokens_per_request": 2, "context": 4, "repeats": 1, field: 0}
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        step_seconds(TableTarget(), **settings)


def test_no_room_is_refused() -> None:
    with pytest.raises(RequestError, match="no room to profile 4 tokens behind a context of 61"):
        step_seconds(TableTarget(max_len=64), max_tokens=8, tokens_per_request=4, context=61, repeats=1)
    with pytest.raises(RequestError, match="no room to profile drafting"):
        draft_seconds(TableTarget(max_len=64), Slow(), requests=[1], context=63, repeats=1)
    with pytest.raises(ConfigError, match=r"requests is \[0\]"):
        draft_seconds(TableTarget(), Slow(), requests=[0], context=5, repeats=1)


class Slow:
    """Takes two milliseconds a proposal; counts what it takes in."""

    name, block_size, has_confidence = "slow", 3, False
    taps: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        self.proposals = 0

    def open(self, *, max_len: int) -> list[int]:
        return [max_len]

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        assert features is not None and len(features) == len(token_ids)
        state.append(len(token_ids))
        assert sum(state[1:]) + self.block_size <= state[0]

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        assert limit == self.block_size
        self.proposals += 1
        time.sleep(2e-3)
        return Proposal(torch.zeros(3, dtype=torch.long))


def test_drafting_is_timed_by_number_of_requests() -> None:
    drafter = Slow()
    one, four = draft_seconds(TableTarget(max_len=64), drafter, requests=[1, 4], context=20, repeats=2)
    assert drafter.proposals == 3 * (1 + 4)
    assert one >= 2e-3 and four >= 8e-3


def test_drafting_is_timed_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the drafter turns: one second, and one more for each draft."""
    now = [0.0]
    monkeypatch.setattr("dspark.evaluate.profile.time.perf_counter", lambda: now[0])

    class Deep(Slow):
        def propose(self, state: list[int], anchor: int, *, limit: int, **options: Any) -> Proposal:  # type: ignore[override]
            now[0] += 1.0 + limit
            return Proposal(torch.zeros(limit, dtype=torch.long))

    assert draft_depth_shares(TableTarget(max_len=64), Deep(), requests=2, context=20, repeats=2) == (0.5, 0.75, 1.0)
    assert draft_depth_shares(TableTarget(max_len=64), NoDrafter(), requests=1, context=20, repeats=1) == ()
