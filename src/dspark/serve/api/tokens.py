"""Single tokens as text and as bytes, and where in an answer's text each of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from dspark.chat import REPLACEMENT, ChatFormat

Payload = TypeVar("Payload")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenNames:
    """What a token is called in replies: its text, or ``bytes:\\xNN...`` where it is part of a character."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._known: dict[int, tuple[str, list[int] | None]] = {}  # grows to the vocabulary's size at most

    def text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens included."""
        return self._of(token_id)[0]

    def bytes(self, token_id: int) -> list[int] | None:
        """Its bytes; None where the tokenizer does not tell them."""
        return self._of(token_id)[1]

    def _of(self, token_id: int) -> tuple[str, list[int] | None]:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        text = self._chat.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text, list(text.encode("utf-8"))
        name = self._chat.tokenizer.convert_ids_to_tokens(token_id)
        raw = _raw_bytes(name) if isinstance(name, str) else None
        if raw is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _raw_bytes(name: str) -> list[int] | None:
    """Bytes behind a token's name in a vocabulary, byte-level (``Ã``) or with byte fallback (``<0xC3>``)."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return [int(name[3:5], 16)]
    table = _byte_of_character()
    raw = [table.get(character) for character in name]
    return None if None in raw else [byte for byte in raw if byte is not None]


@dataclass(frozen=True)
class Placed(Generic[Payload]):
    """A token with its place in the answer's text: the text of [start, end) came with it."""

    token_id: int
    start: int
    end: int
    payload: Payload


class Alignment(Generic[Payload]):
    """Lets tokens out as far as their text is out, so that what is said of tokens and the text go together.

    The engine holds text back (an unfinished character, the beginning of a stop string), and cuts what lies behind a
    stop string. A token whose text is held back waits; one whose text is cut is never let out.
    """

    def __init__(self, chat: ChatFormat, *, skip_special_tokens: bool = True) -> None:
        self._stream = chat.stream(skip_special_tokens=skip_special_tokens)
        self._waiting: list[Placed[Payload]] = []
        self._length = 0  # characters of all tokens so far
        self._out = 0  # characters that are out

    def push(self, token_ids: Sequence[int], payloads: Sequence[Payload]) -> None:
        """New tokens, each with what is said of it."""
        for token_id, payload in zip(token_ids, payloads, strict=True):
            start = self._length
            self._length += len(self._stream.push(token_id))
            self._waiting.append(Placed(token_id, start, self._length, payload))

    def pieces(self, new_text: str) -> list[tuple[Payload, str]]:
        """The text that is let out next, cut where its tokens meet; call it before the release."""
        found = []
        for token in self._waiting:
            piece = new_text[max(0, token.start - self._out) : max(0, token.end - self._out)]
            if piece:
                found.append((token.payload, piece))
        return found

    def release(self, new_text: str) -> list[Placed[Payload]]:
        """Tokens whose text is out now that ``new_text`` is."""
        self._out += len(new_text)
        count = 0
        while count < len(self._waiting) and self._waiting[count].end <= self._out:
            count += 1
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return released

    def finish(self, new_text: str, *, cut: bool, stop_token: bool) -> list[Placed[Payload]]:
        """The rest, at an answer's end. ``cut``: a stop string took the text behind it. ``stop_token``: the last token
        ended the answer and is not part of it."""
        if stop_token and self._waiting:
            self._waiting.pop()
        released = self.release(new_text)
        rest = [token for token in self._waiting if not cut or token.start < self._out]
        self._waiting = []
        return [*released, *rest]
