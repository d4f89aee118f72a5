"""Drafts from the text itself: the longest match against a search by hand, the rule of trust, what it learns from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.maths import lookup as module
from dspark.maths.lookup import LONGEST, PLACES, SHORTEST, TRUSTED, Lookup, TextIndex, worth_checking

PASSAGE = list(range(10, 40))


def longest_by_hand(text: Sequence[int]) -> tuple[int, int]:
    """Every place compared, the latest first among those whose last ``SHORTEST`` tokens are the ending's."""
    end, best = len(text), (0, 0)
    places = [p for p in range(SHORTEST, end) if text[p - SHORTEST : p] == text[end - SHORTEST :]]
    for place in places[::-1][:PLACES]:
        alike = next((n for n in range(place) if text[place - n - 1] != text[end - n - 1]), place)
        if min(alike, LONGEST) > best[0]:
            best = min(alike, LONGEST), place
    return best


@given(st.lists(st.integers(0, 2), max_size=90))
def test_the_longest_match_is_the_one_found_by_hand_however_often_one_asks(tokens: list[int]) -> None:
    text: list[int] = []
    asked_often, asked_once = TextIndex(text), TextIndex(text)
    for token in tokens:
        text.append(token)
        assert asked_often.longest_match() == longest_by_hand(text)
    assert asked_once.longest_match() == longest_by_hand(text)


def test_matches_are_compared_up_to_the_longest_and_at_the_latest_places() -> None:
    text = PASSAGE * 5
    assert TextIndex(text).longest_match() == (LONGEST, 4 * len(PASSAGE))
    assert TextIndex([1] * 100).longest_match() == (LONGEST, 99)
    early = [
        7,
        *PASSAGE,
        *[0, *PASSAGE[-SHORTEST:]] * PLACES,
        7,
        *PASSAGE,
    ]  # one place too far back
    assert TextIndex(early).longest_match()[0] == SHORTEST


def test_drafts_are_what_followed_and_go_on_with_themselves_at_the_texts_end() -> None:
    text = [*PASSAGE, 1, 2, *PASSAGE[:8]]
    drafts, confidence = Lookup(text, temperature=0.0).drafts(5)
    assert drafts == PASSAGE[8:13]
    assert confidence == pytest.approx([n / (n + 1.8) for n in range(8, 13)])
    assert Lookup([*PASSAGE, 5, 6, 7, 5, 6, 7], temperature=0.0).drafts(7)[0] == [5, 6, 7, 5, 6, 7, 5]


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 3), (0.8, 4), (1.0, 5)])
def test_short_matches_are_not_trusted_the_less_the_warmer(temperature: float, least: int) -> None:
    for alike in range(2, 8):
        text = [*PASSAGE, 1, *PASSAGE[3 : 3 + alike]]
        drafts, confidence = Lookup(text, temperature=temperature).drafts(4)
        assert bool(drafts) == (alike >= least)
        assert all(TRUSTED <= chance < 1 for chance in confidence)
        assert confidence == sorted(confidence)


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3, 4, 5]])
def test_a_text_that_says_nothing_twice_has_no_drafts(text: list[int]) -> None:
    assert Lookup(text, temperature=0.0).drafts(7) == ([], [])
    assert Lookup([*PASSAGE, *PASSAGE], temperature=0.0).drafts(0) == ([], [])


def play(*, kept: int, rounds: int = 30) -> tuple[Lookup, list[int]]:
    """A text of passages that repeat the first one for 6 + ``kept`` tokens and then go elsewhere; drafts looked up
    after 6."""
    text = list(PASSAGE)
    lookup, found = Lookup(text, temperature=0.0), []
    for number in range(rounds):
        text += [100 + number, *PASSAGE[:6]]
        found.append(len(lookup.drafts(7)[0]))
        text += [*PASSAGE[6 : 6 + kept], 200 + number]
    return lookup, found


def test_a_text_that_breaks_its_promises_is_trusted_less_and_one_that_keeps_them_more() -> None:
    _, broken = play(kept=0)
    assert broken[0] == 7 and broken[-1] == 0
    lookup, kept = play(kept=7)
    assert set(kept) == {7}
    text = lookup._index.text
    assert isinstance(text, list)
    text += [99, *PASSAGE[:6]]
    assert lookup.drafts(1)[1][0] > 6 / 7.8 + 0.05


def test_what_is_learned_does_not_depend_on_how_many_drafts_were_asked_for_or_checked() -> None:
    """Only the text counts: two rounds of two tokens teach what one of four does, as far as the drafts reach."""
    chances = []
    for steps in ((4,), (2, 2), (1, 1, 1, 1)):
        text = [*PASSAGE, 1, *PASSAGE[:6]]
        lookup = Lookup(text, temperature=0.0)
        for step in steps:
            lookup.drafts(step)
            text += PASSAGE[len(text) - 31 : len(text) - 31 + step]
        chances.append(lookup.drafts(3)[1])
    for others in chances[1:]:
        assert others == pytest.approx(chances[0], rel=0.02)


def test_the_rule_of_trust_is_the_constant_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRUSTED", 0.9)
    assert Lookup([*PASSAGE, 1, *PASSAGE[:8]], temperature=0.0).drafts(5) == ([], [])


@given(
    st.lists(st.lists(st.floats(0.05, 0.99), min_size=1, max_size=4), min_size=1, max_size=4),
    st.floats(0.01, 1.0),
    st.floats(0.0, 2.0),
)
def test_copies_are_checked_where_the_likeliest_pay(rows: list[list[float]], slope: float, stair: float) -> None:
    """By hand: the count that is best by what the scheduler goes by, in what it really takes."""
    survivals = sorted((float(np.prod(row[: k + 1])) for row in rows for k in range(len(row))), reverse=True)
    judged = [1.0 + slope * drafts for drafts in range(len(survivals) + 1)]
    seconds = [each + stair * (drafts % 4 == 1) for drafts, each in enumerate(judged)]
    requests = len(rows)
    rates = [(requests + sum(survivals[:count])) / judged[count] for count in range(len(judged))]
    best = int(np.argmax(rates))
    drafted, plain = (requests + sum(survivals[:best])) / seconds[best], requests / seconds[0]
    for margin in (0.0, 0.08):
        told = worth_checking(rows, requests=requests, seconds=seconds, judged=judged, margin=margin)
        assert told == (drafted > (1 + margin) * plain) or drafted == pytest.approx((1 + margin) * plain, rel=1e-9)
