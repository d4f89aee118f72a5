"""Prompt lookup by hand and against a search by brute force."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.models.ngram import NgramDrafter


def proposed(drafter: NgramDrafter, tokens: list[int], limit: int = 99) -> list[int]:
    state = drafter.open(max_len=100)
    drafter.extend(state, torch.tensor(tokens[:-1], dtype=torch.long), None)
    random = torch.Generator()
    return drafter.propose(
        state, tokens[-1], sampling=SamplingParams(), generator=random, limit=limit
    ).draft_tokens.tolist()


def test_it_proposes_what_followed_the_latest_occurrence() -> None:
    drafter = NgramDrafter(block_size=3)
    assert proposed(drafter, [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]) == [4, 8, 1]


def test_a_longer_match_wins_over_a_later_one() -> None:
    drafter = NgramDrafter(block_size=2)
    assert proposed(drafter, [5, 1, 2, 7, 7, 1, 2, 8, 8, 5, 1, 2]) == [7, 7]


def test_a_loop_feeds_on_itself() -> None:
    assert proposed(NgramDrafter(block_size=5), [1, 2, 1, 2]) == [1, 2, 1, 2, 1]


def test_nothing_known_nothing_proposed() -> None:
    assert proposed(NgramDrafter(), [1, 2, 3, 4]) == []
    assert proposed(NgramDrafter(), [1, 2, 1, 2], limit=0) == []


def by_search(tokens: list[int], drafter: NgramDrafter) -> list[int]:
    for n in range(drafter.max_match, drafter.min_match - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                grown = list(tokens)
                for i in range(drafter.block_size):
                    grown.append(grown[end + i])
                return grown[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_equals_a_search_by_brute_force(tokens: list[int]) -> None:
    drafter = NgramDrafter(block_size=4, min_match=1, max_match=3)
    assert proposed(drafter, tokens) == by_search(tokens, drafter)
