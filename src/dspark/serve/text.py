"""An answer's text as its tokens come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.chat import ChatFormat, TextStream


class AnswerText:
    """Text of one answer: what is certain is given out, and it ends before the first stop string.

    Held back are bytes that are no character yet (:class:`dspark.chat.TextStream`) and the longest ending that could
    be the beginning of a stop string. ``stopped`` is the stop string that came up; of two that do so with the same
    token, the one that begins first, and of those the longest.
    """

    def __init__(self, chat: ChatFormat, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._stream: TextStream = chat.stream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped: str | None = None

    @property
    def watches(self) -> bool:
        """Whether there are stop strings to watch for, so that tokens must come one by one."""
        return bool(self._stop)

    def push(self, *token_ids: int) -> str:
        """Text that became certain with these ids."""
        return self._let_out(self._stream.push(*token_ids))

    def push_unwatched(self, *token_ids: int) -> str:
        """:meth:`push` while no stop string counts yet (min_tokens): all of it is let out, none of it looked at."""
        return self._stream.push(*token_ids)

    def finish(self) -> str:
        """What is still held back; a stop string may show up in it."""
        text = self._let_out(self._stream.flush())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _let_out(self, new: str) -> str:
        if not self._stop or not new:
            return new
        text = self._held + new
        hits = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:
            at, _, self.stopped = min(hits)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest ending of ``text`` that ``stop`` begins with, fewer than all of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
