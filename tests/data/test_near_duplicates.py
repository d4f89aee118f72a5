"""Near-duplicates are found, others are not, and evaluation texts are recognised by thirteen words."""

from __future__ import annotations

import random

import pytest

from dspark.data.near_duplicates import NearDuplicates, OverlapFilter, repetition, words_of
from dspark.errors import ConfigError

WORDS = [f"w{i}" for i in range(3000)]


def some_text(source: random.Random, count: int) -> list[str]:
    return source.choices(WORDS, k=count)


def test_words_lose_case_punctuation_and_form() -> None:
    assert words_of("Hello,  WORLD! ﬁne_day 3.5 Straße") == ["hello", "world", "fine", "day", "3", "5", "strasse"]
    assert words_of("你好 world です") == ["你", "好", "world", "で", "す"]
    assert words_of("... \u2028 !") == []


def test_changed_words_leave_a_near_duplicate_and_other_texts_none() -> None:
    source = random.Random(0)
    found, texts = NearDuplicates(0.7), [some_text(source, 60) for _ in range(200)]
    for i, text in enumerate(texts):
        assert found.find(" ".join(text)) is None
        found.add(f"t{i}", " ".join(text))
    for i, text in enumerate(texts):
        changed = list(text)
        changed[source.randrange(60)] = "new"
        assert found.find(" ".join(changed).upper() + "!") == f"t{i}"  # about 55 of 61 runs in common
        half = text[:30] + some_text(source, 30)
        assert found.find(" ".join(half)) is None  # a third in common


def test_the_threshold_is_kept_exactly() -> None:
    one, other = "a b c d e f", "a b c d e g"  # three of five runs in common
    for threshold, expected in ((0.6, "x"), (0.61, None)):
        found = NearDuplicates(threshold)
        found.add("x", one)
        assert found.find(other) == expected
        assert found.find(one) == "x"
    assert NearDuplicates().find("nothing yet") is None


def test_the_earliest_is_named_and_empty_texts_are_nobodys() -> None:
    found = NearDuplicates()
    for key in ("first", "second"):
        found.add(key, "the same words in this text")
        found.add(key, "?!")
    assert found.find("The same words, in this text.") == "first"
    assert found.find("?!") is None and found.find("") is None


@pytest.mark.parametrize("threshold", [0.0, 1.1, float("nan")])
def test_impossible_thresholds(threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        NearDuplicates(threshold)


def test_repetition_is_the_share_said_before() -> None:
    assert repetition("one two three four five") == 0.0
    assert repetition("no no no no no") == pytest.approx(2 / 3)
    assert repetition("a b c a b c a b c") == pytest.approx(4 / 7)
    assert repetition("") == repetition("a b") == 0.0


def test_thirteen_words_in_common_are_an_overlap() -> None:
    source = random.Random(1)
    test = some_text(source, 40)
    filter_ = OverlapFilter({"exam": [" ".join(test)], "short": ["What is 2 + 2?"]})
    lead, tail = some_text(source, 30), some_text(source, 30)
    assert filter_.find(" ".join([*lead, *test[5:18], *tail])) == "exam"
    assert filter_.find(", ".join([*lead, *test[5:18]]).upper()) == "exam"
    assert filter_.find(" ".join([*lead, *test[5:17], *tail])) is None  # twelve
    assert filter_.find("what is 2 2") == "short"
    assert filter_.find("So what is 2 + 2?") is None
    assert filter_.find("") is None and OverlapFilter({}).find("what is 2 2") is None
