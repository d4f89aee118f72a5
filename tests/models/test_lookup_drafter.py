"""A drafter behind a look into the text: who is asked when, what each is told, and what schedulers make of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from fakes import TableTarget
from torch import Tensor

from dspark.core import Proposal, RoundRecord, SamplingParams
from dspark.decode import stream
from dspark.maths.calibrated_scheduling import CalibratedScheduler, EstimatingScheduler, OnlineScheduler
from dspark.maths.estimator import FEATURES, Estimator
from dspark.maths.outcomes import outcomes_of
from dspark.maths.scheduling import FixedScheduler, Scheduler, ThresholdScheduler
from dspark.models.lookup_drafter import LookupContext, LookupDrafter

GREEDY = SamplingParams()
NOBODY = torch.Generator()
PASSAGE = [5, 6, 7, 8, 9, 1, 2, 3]


class Told:
    """Notes what it is told, and proposes token 4."""

    name, taps, has_confidence, block_size = "told", (0,), True, 4

    def open(self, *, max_len: int) -> list[list[int]]:
        return []

    def extend(self, state: list[list[int]], token_ids: Tensor, features: Tensor | None) -> None:
        assert features is not None and len(features) == len(token_ids)
        state.append(token_ids.tolist())

    def propose(
        self, state: list[list[int]], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        return Proposal(torch.full((limit,), 4), confidence=torch.full((limit,), 0.5))


def fed(drafter: LookupDrafter, state: LookupContext, tokens: list[int]) -> None:
    drafter.extend(state, torch.tensor(tokens), torch.zeros(len(tokens), 2))


def ask(drafter: LookupDrafter, state: LookupContext, anchor: int, limit: int = 4) -> Proposal:
    return drafter.propose(state, anchor, sampling=GREEDY, generator=NOBODY, limit=limit)


def test_the_text_is_asked_first_and_the_drafter_hears_of_every_token() -> None:
    drafter = LookupDrafter(Told())
    state = drafter.open(max_len=99)
    fed(drafter, state, [*PASSAGE, 0, *PASSAGE[:2]])
    proposal = ask(drafter, state, PASSAGE[2])
    assert proposal.looked_up and proposal.distribution is None
    assert proposal.draft_tokens.tolist() == PASSAGE[3:7]
    assert proposal.confidence is not None and len(proposal.confidence) == 4
    fed(drafter, state, PASSAGE[2:5])  # the anchor and two drafts
    again = ask(drafter, state, 0)
    assert not again.looked_up and again.draft_tokens.tolist() == [4] * 4
    fed(drafter, state, [0])
    assert state.inner == [[*PASSAGE, 0, *PASSAGE[:2]], PASSAGE[2:5], [0]]
    assert state.text == [*PASSAGE, 0, *PASSAGE[:5], 0]


def test_asking_twice_changes_nothing() -> None:
    drafter = LookupDrafter(Told())
    state = drafter.open(max_len=99)
    fed(drafter, state, [*PASSAGE, 0, *PASSAGE[:3]])
    first, second = ask(drafter, state, PASSAGE[3]), ask(drafter, state, PASSAGE[3])
    assert first.draft_tokens.tolist() == second.draft_tokens.tolist() == PASSAGE[4:8]
    assert torch.equal(torch.as_tensor(first.confidence), torch.as_tensor(second.confidence))
    assert ask(drafter, state, PASSAGE[3], limit=2).block == 2
    assert ask(drafter, state, PASSAGE[3], limit=0).block == 0


def test_rounds_say_whose_drafts_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.maths.lookup.SHORTEST", 1)
    monkeypatch.setattr("dspark.maths.lookup.TRUSTED", 0.0)
    target = TableTarget(vocab_size=4, seed=2)
    records = list(stream(target, LookupDrafter(Told()), (1, 2), sampling=GREEDY, max_new_tokens=20))
    drafted = [record for record in records if record.draft_tokens]
    assert {record.looked_up for record in drafted} == {True, False}
    assert all(set(record.draft_tokens) == {4} or record.looked_up for record in drafted)


def looked_up(count: int = 3) -> Proposal:
    return Proposal(torch.arange(count), confidence=torch.tensor([0.9, 0.8, 0.7][:count]), looked_up=True)


TEMPERATURES = np.array([5.0, 5.0, 5.0])
WRAPPED: list[Callable[[Scheduler], Scheduler]] = [
    lambda inner: CalibratedScheduler(inner, TEMPERATURES),
    lambda inner: EstimatingScheduler(inner, Estimator(np.zeros((3, len(FEATURES)))), TEMPERATURES),
    lambda inner: OnlineScheduler(inner, sts_temperatures=TEMPERATURES, explore_every=1),
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_no_calibration_changes_the_chances_of_a_copy(wrap: Callable[[Scheduler], Scheduler]) -> None:
    for threshold, wanted in ((0.95, 0), (0.85, 1), (0.75, 2), (0.5, 3)):
        assert wrap(ThresholdScheduler(threshold)).choose(looked_up(), 10) == wanted


def test_copies_teach_no_calibration() -> None:
    def record(*, copied: bool) -> RoundRecord:
        return RoundRecord(
            draft_tokens=(1, 2, 3),
            confidence=(0.9, 0.8, 0.7),
            verify_len=3,
            accepted=1,
            committed=(1, 5),
            draft_seconds=0.0,
            sequential_seconds=0.0,
            verify_seconds=0.0,
            host_seconds=0.0,
            looked_up=copied,
        )

    records = [record(copied=True), record(copied=False)]
    assert len(outcomes_of(records, block=3).lengths) == 1
    online = OnlineScheduler(FixedScheduler(), sts_temperatures=TEMPERATURES, explore_every=1)
    online.choose(looked_up(), 10)
    online.observe(records[0])
    assert len(online.outcomes.lengths) == 0
