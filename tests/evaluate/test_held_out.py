"""Held-out acceptance is that of the rounds, every domain counting alike."""

from __future__ import annotations

import pytest
from fakes import TableTarget

from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import DataError
from dspark.evaluate.held_out import decoded_acceptance
from dspark.models.drafter import NoDrafter
from dspark.models.ngram import NgramDrafter

PROMPTS = [("a", [0, 1, 2, 3, 0, 1]), ("b", [3, 3, 1]), ("a", [2, 0])]


def test_domains_count_alike() -> None:
    target, drafter = TableTarget(), NgramDrafter()
    found = decoded_acceptance(target, drafter, PROMPTS, max_new_tokens=20, stop_token_ids=())
    runs = [generate(target, drafter, ids, sampling=SamplingParams(), max_new_tokens=20) for _, ids in PROMPTS]
    committed = [19, 19, 19]
    first = (committed[0] + committed[2]) / (len(runs[0].rounds) + len(runs[2].rounds))
    second = committed[1] / len(runs[1].rounds)
    assert found == pytest.approx({"acceptance_length": (first + second) / 2, "a": first, "b": second})
    assert found["acceptance_length"] > 1


def test_without_drafts_every_round_commits_one() -> None:
    found = decoded_acceptance(TableTarget(), NoDrafter(), PROMPTS, max_new_tokens=5, stop_token_ids=())
    assert found == {"acceptance_length": 1.0, "a": 1.0, "b": 1.0}


def test_answers_without_rounds_say_nothing() -> None:
    with pytest.raises(DataError, match="3 held-out prompts"):
        decoded_acceptance(TableTarget(), NoDrafter(), PROMPTS, max_new_tokens=1, stop_token_ids=())
