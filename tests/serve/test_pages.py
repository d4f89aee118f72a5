"""Pages: who holds what, what is remembered, and what is forgotten first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import ConfigError
from dspark.serve.pages import PageManager, PrefixKeys


def keys_of(text: str, *, salt: str = "", page_size: int = 2) -> list[bytes]:
    ids = [ord(letter) for letter in text]
    return PrefixKeys(page_size=page_size, salt=salt).of(ids, len(ids) // page_size)


def test_a_page_is_known_by_all_that_stands_before_its_end() -> None:
    assert keys_of("abcd")[0] == keys_of("abxx")[0] != keys_of("xxcd")[0]
    assert keys_of("abcd")[1] not in (keys_of("xxcd")[1], keys_of("cd")[0])
    assert not set(keys_of("abcd")) & set(keys_of("abcd", salt="other tenant"))


def test_keys_grow_with_their_text() -> None:
    keys = PrefixKeys(page_size=2, salt="")
    first = keys.of([1, 2, 3], 1)
    assert keys.of([1, 2, 3, 4, 5], 2)[:1] == first and len(keys.of([1, 2, 3, 4, 5], 2)) == 2


def test_a_known_beginning_is_joined_and_outlives_its_first_holder() -> None:
    pages, keys = PageManager(pages=4, page_size=2), keys_of("abcd")
    mine = pages.take(3)
    assert mine == [0, 1, 2]
    pages.publish(0, keys[0])
    pages.publish(1, keys[1])
    assert pages.match(keys_of("abcdef")) == [0, 1] and pages.match(keys_of("abxx")) == [0]
    yours = pages.take(1, shared=[0, 1])
    assert yours == [0, 1, 3] and pages.available == 0 and pages.take(1) is None
    pages.give_back(mine)
    assert pages.used == 3 and pages.idle == 0
    pages.give_back(yours)
    assert pages.used == 0 and pages.idle == 2 and pages.available == 4
    assert pages.match(keys) == [0, 1]
    pages.check([])


def test_the_longest_unused_is_forgotten_first_and_of_a_text_its_end() -> None:
    pages = PageManager(pages=4, page_size=2)
    for text in ("abcd", "wxyz"):
        mine = pages.take(2)
        assert mine is not None
        for page, key in zip(mine, keys_of(text), strict=True):
            pages.publish(page, key)
        pages.give_back(mine)
    assert pages.take(1) == [1] and pages.match(keys_of("abcd")) == [0]
    assert pages.take(1) == [0] and pages.match(keys_of("abcd")) == []
    assert len(pages.match(keys_of("wxyz"))) == 2


def test_what_a_failed_request_wrote_is_forgotten_and_what_others_hold_is_not() -> None:
    pages, keys = PageManager(pages=3, page_size=2), keys_of("abcd")
    mine = pages.take(2)
    assert mine is not None
    pages.publish(0, keys[0])
    yours = pages.take(0, shared=[0])
    pages.publish(1, keys[1])
    pages.give_back(mine, forget=True)
    assert pages.match(keys) == [0] and pages.idle == 0 and yours == [0]
    pages.check([yours])


def test_a_second_page_of_the_same_text_stays_unknown() -> None:
    pages, (key,) = PageManager(pages=2, page_size=2), keys_of("ab")
    mine, yours = pages.take(1), pages.take(1)
    assert mine and yours
    pages.publish(mine[0], key)
    pages.publish(yours[0], key)
    pages.give_back(yours)
    assert pages.match([key]) == mine and pages.idle == 0
    pages.check([mine])


def test_no_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pages is 0"):
        PageManager(pages=0, page_size=1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.text("ab", min_size=1, max_size=8)), max_size=40))
def test_the_books_agree_whatever_happens(doings: list[tuple[int, str]]) -> None:
    pages, held = PageManager(pages=7, page_size=2), list[list[int]]()
    for what, text in doings:
        keys = keys_of(text)
        if what <= 2:
            shared = pages.match(keys)
            got = pages.take(len(keys) - len(shared) + 1, shared=shared)
            if got is not None:
                held.append(got)
                for page, key in zip(got, keys, strict=False):
                    pages.publish(page, key)
        elif held:
            pages.give_back(held.pop(len(text) % len(held)), forget=what == 4)
        pages.check(held)
        assert pages.used + pages.available == 7
