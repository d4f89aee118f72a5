"""Who finds drafts in his own text, and when nobody looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_rig import eager_lookup, run
from history_rig import HistoryDrafter, HistoryTarget

from dspark.maths.step_costs import StepCosts
from dspark.models.lookup_drafter import LookupDrafter
from dspark.serve.copies import PAUSE, CopyFinder
from dspark.serve.curves import Curves
from dspark.serve.engine import Engine
from dspark.serve.flight import Flight, open_flight
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

TARGET = HistoryTarget(vocab_size=64, max_len=200)
PASSAGE = tuple(range(10, 30))
REPEATS, FRESH = (*PASSAGE, 1, *PASSAGE[:12]), PASSAGE
BLOCK = 4


def flight(prompt: tuple[int, ...], number: int = 0, **fields: Any) -> Flight:
    request = GenerationRequest(**{"request_id": "r", "prompt_ids": prompt, "max_new_tokens": 50, **fields})
    one = open_flight(request, info=TARGET.info, max_len=200, page_size=4, chat=None)
    one.number = number
    return one


def curves(slope: float) -> Curves:
    passes = 1.0 + slope * np.arange(60)
    costs = StepCosts(contexts=(100,), passes=passes[None], drafts=np.zeros((5, BLOCK + 1)))
    return Curves(costs, block=BLOCK, convex=True)


def test_those_whose_texts_repeat_have_drafts_within_the_block_and_their_room() -> None:
    finder = CopyFinder(block=BLOCK, curves=None)
    short = flight(REPEATS, max_new_tokens=3)
    found = finder.find([flight(FRESH), flight(REPEATS), short], other_tokens=0, context=30.0)
    assert set(found) == {1, 2}
    assert found[1][0] == list(PASSAGE[12:16]) and len(found[1][1]) == BLOCK
    assert found[2][0] == list(PASSAGE[12:14])


@pytest.mark.parametrize(("slope", "pays"), [(0.01, True), (5.0, False)])
def test_where_checking_does_not_pay_nobody_looks_for_some_steps(slope: float, pays: bool) -> None:
    finder = CopyFinder(block=BLOCK, curves=curves(slope))
    fleet = [flight(FRESH), flight(REPEATS, 1)]
    assert bool(finder.find(fleet, other_tokens=0, context=30.0)) == pays
    looked = []
    fleet[1].lookup.drafts = lambda limit: looked.append(limit) or ([1], [0.9])  # type: ignore[method-assign,func-returns-value]
    for _ in range(PAUSE + 1):
        finder.find(fleet, other_tokens=0, context=30.0)
    assert len(looked) == (PAUSE + 1 if pays else 1)


def test_prompts_in_the_step_do_not_make_copies_look_cheap() -> None:
    """A pass has room for more tokens at no cost; where prompts have filled it, copies cost what any token does."""
    passes = np.concatenate((np.ones(9), 1.0 + 2.0 * np.arange(1, 60)))
    made = Curves(
        StepCosts(contexts=(100,), passes=passes[None], drafts=np.zeros((5, BLOCK + 1))), block=BLOCK, convex=True
    )
    fleet = [flight(REPEATS)]
    assert CopyFinder(block=BLOCK, curves=made).find(fleet, other_tokens=0, context=30.0)
    assert not CopyFinder(block=BLOCK, curves=made).find(fleet, other_tokens=20, context=30.0)


def test_an_engine_looks_up_ahead_of_the_drafter_it_was_given() -> None:
    drafter = HistoryDrafter(TARGET, block_size=BLOCK, blur=1.0)
    for given, scheduler, name, finds in (
        (LookupDrafter(drafter), "fixed", "history with lookup", True),
        (drafter, "fixed", "history", False),
        (LookupDrafter(drafter), "none", "none", False),
    ):
        made = Engine(TARGET, given, config=EngineConfig(seats=1, scheduler=scheduler, page_size=4, pages=60))
        with eager_lookup():
            run(made, [GenerationRequest(request_id="r", prompt_ids=REPEATS, max_new_tokens=20)])
        assert made.drafter_name == name and bool(made.stats().lookup_rounds) == finds
        assert made.drafter.name == name.removesuffix(" with lookup")
