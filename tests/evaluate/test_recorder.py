"""Rounds as calibration gets them, recorded in the real loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TableDrafter, TableTarget
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.decode import generate
from dspark.errors import DataError
from dspark.evaluate.recorder import play
from dspark.maths.scheduling import FixedScheduler
from dspark.models.drafter import NoDrafter

SAMPLING = SamplingParams(temperature=1.0, seed=4)


class Tabled:
    """A :class:`TableDrafter` behind the loop's protocol: it needs its text alone."""

    name, block_size = "tabled", 2
    taps: tuple[int, ...] = ()

    def __init__(self, *, has_confidence: bool, kind: str = "dense") -> None:
        self.has_confidence = has_confidence
        self.table = TableDrafter(kind=kind)

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        state += token_ids.tolist()

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        found = self.table.propose([*state, anchor], generator)
        some: dict[str, Any] = {"draft_tokens": found.draft_tokens[:limit], "distribution": found.distribution}
        if self.has_confidence and found.confidence is not None:
            some["confidence"] = found.confidence[:limit]
        return Proposal(**some)


def test_what_is_recorded_is_what_happened() -> None:
    target, drafter = TableTarget(max_len=100), Tabled(has_confidence=True)
    played = play(target, drafter, [[0, 1], [2]], sampling=SAMPLING, max_new_tokens=30)
    records = [
        record
        for seed, ids in ((4, [0, 1]), (5, [2]))
        for record in generate(
            target,
            drafter,
            ids,
            sampling=SamplingParams(temperature=1.0, seed=seed),
            max_new_tokens=30,
            scheduler=FixedScheduler(),
        ).rounds
        if record.draft_tokens
    ]
    assert played.outcomes.accepted.tolist() == [r.accepted for r in records]
    assert played.outcomes.lengths.tolist() == [len(r.draft_tokens) for r in records]
    confidence = [[*r.confidence, 0.0][:2] for r in records]
    assert np.allclose(played.outcomes.confidence, confidence)
    assert sorted(set(played.prompt.tolist())) == [0, 1] and len(played.features) == len(records)
    assert (played.features[:, 0, 2] > 0).all()  # entropies of sampled drafts


def test_features_are_those_of_the_same_round() -> None:
    """With several requests in a pass, each row is its own proposal's."""
    target, drafter = TableTarget(max_len=100), Tabled(has_confidence=False)
    prompts = [[0, 1], [2], [1, 3]]
    played = play(target, drafter, prompts, sampling=SAMPLING, max_new_tokens=30, rows=2)
    assert (played.outcomes.confidence == 0).all()
    for number, ids in enumerate(prompts):
        alone = play(target, drafter, [ids], sampling=replace(SAMPLING, seed=4 + number), max_new_tokens=30)
        mine = played.take(played.prompt == number)
        assert (mine.features == alone.features).all() and len(mine.outcomes) == len(alone.outcomes)
        assert mine.outcomes.accepted.tolist() == alone.outcomes.accepted.tolist()
    seen: list[float] = []
    inner = drafter.propose

    def listening(*rest: Any, **options: Any) -> Proposal:
        found = inner(*rest, **options)
        if found.block:
            assert found.distribution is not None
            seen.append(float(torch.special.entr(found.distribution.probs[0]).sum()))
        return found

    drafter.propose = listening  # type: ignore[method-assign]
    generate(target, drafter, prompts[0], sampling=SAMPLING, max_new_tokens=30, scheduler=FixedScheduler())
    assert played.features[played.prompt == 0, 0, 2].tolist() == pytest.approx(seen, rel=1e-5)


def test_stop_tokens_end_a_rounds_slots() -> None:
    target, drafter = TableTarget(max_len=100), Tabled(has_confidence=True)
    ended = 0
    for seed in range(40):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 30, "stop_token_ids": [3]}
        answer = generate(target, drafter, [0, 1], scheduler=FixedScheduler(), **settings)
        if answer.finish_reason != "stop" or not answer.rounds:
            continue
        last, outcomes = answer.rounds[-1], play(target, drafter, [[0, 1]], **settings).outcomes
        if last.accepted == len(last.committed) == 1 and last.draft_tokens:
            ended += 1
            assert outcomes.lengths[-1] == outcomes.accepted[-1] == 1
    assert ended  # some answers did end on their first draft


def test_no_drafts_no_rounds() -> None:
    with pytest.raises(DataError, match="no round drafted anything"):
        play(TableTarget(), NoDrafter(), [[0, 1]], sampling=SAMPLING, max_new_tokens=5)
