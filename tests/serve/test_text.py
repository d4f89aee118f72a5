"""Stop strings across tokens: nothing of one is ever let out, and nothing before it is kept back for good."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.chat import TextStream
from dspark.serve.text import AnswerText


class Bytes:
    """A chat format of bytes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        stream: Any = TextStream.__new__(TextStream)
        stream._chat, stream._skip, stream._window, stream._context = self, skip_special_tokens, [], 0
        return stream


def answer(stop: tuple[str, ...]) -> AnswerText:
    text: Any = AnswerText.__new__(AnswerText)
    text._stream, text._stop, text._held, text.stopped = Bytes().stream(), stop, "", None
    return text


def feed(text: AnswerText, content: bytes, sizes: list[int]) -> tuple[list[str], bool]:
    """Push ``content`` in pieces until a stop string comes up; the pieces that came out."""
    out, i = [], 0
    for size in [*sizes, *([1] * len(content))]:
        if i >= len(content) or text.stopped:
            break
        out.append(text.push(*content[i : i + size]))
        i += size
    if text.stopped is None:
        out.append(text.finish())
    return out, text.stopped is not None


@given(st.text("abé\n", max_size=24), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_first_stop_string_however_it_arrives(
    content: str, stop: list[str], data: st.DataObject
) -> None:
    text = answer(tuple(stop))
    out, stopped = feed(text, content.encode(), data.draw(st.lists(st.integers(1, 1), max_size=8)))
    ends = [(content.find(s) + len(s), content.find(s)) for s in stop if s in content]
    if not ends:
        assert "".join(out) == content and not stopped
        return
    first_end = min(end for end, _ in ends)  # byte by byte, the string that is complete first
    assert stopped and "".join(out) == content[: min(at for end, at in ends if end == first_end)]


def test_what_might_begin_a_stop_string_is_held_back_and_let_out_when_it_does_not() -> None:
    text = answer(("STOP",))
    assert text.push(*b"one ST") == "one " and text.push(*b"A") == "STA" and text.push(*b" S") == " "
    assert text.finish() == "S" and text.stopped is None


def test_a_stop_string_across_three_tokens_is_cut_exactly() -> None:
    text = answer(("</end>",))
    pieces = [text.push(*piece) for piece in (b"yes<", b"/en", b"d> more")]
    assert pieces == ["yes", "", ""] and text.stopped == "</end>"


def test_of_two_at_once_the_earlier_and_then_the_longer_counts() -> None:
    text = answer(("b", "abc", "ab"))
    assert text.push(*b"xabc") == "x" and text.stopped == "abc"


def test_text_that_came_too_early_to_count_is_not_searched_again() -> None:
    text = answer(("ab",))
    assert text.push_unwatched(*b"xab") == "xab" and text.push(*b"b") == "b" and text.stopped is None


def test_a_stop_string_that_only_the_flush_shows_counts() -> None:
    text = answer(("\ufffd",))
    assert text.push(0xC3) == "" and text.finish() == "" and text.stopped == "\ufffd"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_nothing_is_lost_without_a_hit(stop: tuple[str, ...]) -> None:
    text = answer(stop)
    assert "".join([*(text.push(b) for b in "naïve café z".encode()), text.finish()]) == "naïve café z"
