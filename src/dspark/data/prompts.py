"""Prompts in the shapes that data sets come in, as one: {"id", "turns", "domain"?, "system"?}.

| shape                              | what becomes of it                                                              |
|------------------------------------|---------------------------------------------------------------------------------|
| `turns`: [text, ...]               | taken as it is                                                                  |
| `messages`, `conversations`,       | the user's turns and the system's text; answers in it are dropped, the target   |
| or a `prompt` that is a list       | gives its own; roles of OpenAI (role, content) or ShareGPT (from, value)        |
| `prompt`: text                     | one turn                                                                        |
| `instruction` and `input`          | one turn, with a blank line between the two (Alpaca)                            |

A row without id gets one from the hash of what is asked, so that it is the same tomorrow and in another file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.artifacts import read_jsonl
from dspark.chat import Message
from dspark.errors import ConfigError, DataError

Prompt = dict[str, Any]  # Any: whatever else the row held stays in it

USER_ROLES = frozenset({"user", "human"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "model"})
MESSAGE_SHAPES = ("messages", "conversations", "prompt")
HUB_REMEDY = "install it with: pip install 'dspark[datasets]'"


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """A row of any shape as {"id", "turns", ...}; other keys (domain, source) stay, the conversation's do not.

    Raises :class:`DataError` saying what the row lacks.
    """
    turns, system = _asked(row)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError("a prompt needs at least one turn, and every turn a text that is not blank")
    if system is not None and not isinstance(system, str):
        raise DataError("`system` must be a text")
    if any("\ud800" <= c <= "\udfff" for text in (*turns, system or "") for c in text):
        raise DataError("a turn holds half a surrogate pair, which is no character; mend the file's encoding")
    domain = row.get("domain")
    if domain is not None and not isinstance(domain, str):
        raise DataError(f"`domain` is {domain!r}; it must be a text")
    kept = {k: v for k, v in row.items() if k not in (*MESSAGE_SHAPES, "instruction", "input", "output", "system")}
    kept |= {"id": _id_of(row, turns, system), "turns": list(turns)}
    return kept | ({"system": system} if system else {})


def read_prompts(paths: Iterable[str | Path]) -> dict[str, Prompt]:
    """Prompts by id, in the order of the files. A prompt given twice under one id counts once.

    Raises :class:`DataError` naming file and line for a row that is no prompt, and for an id given to two.
    """
    prompts: dict[str, Prompt] = {}
    for path in paths:
        for number, row in enumerate(read_jsonl(Path(path)), 1):
            try:
                add_prompt(prompts, prompt_of(row))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
    return prompts


def add_prompt(prompts: dict[str, Prompt], prompt: Prompt) -> None:
    """Add to ``prompts``, unless it is there; raise :class:`DataError` if its id asks for something else there."""
    before = prompts.get(prompt["id"])
    if before is not None and (before["turns"], before.get("system")) != (prompt["turns"], prompt.get("system")):
        raise DataError(f"id {prompt['id']!r} was given before with other turns; give every prompt an id of its own")
    prompts.setdefault(prompt["id"], prompt)


def read_hub(name: str, *, split: str = "train", limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a Hub data set, ``owner/name`` or ``owner/name:config``, read as a stream.

    Raises :class:`ConfigError` if the library is missing, and if the data set or the split cannot be had.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"hub is {name!r}, but the library `datasets` is not installed; {HUB_REMEDY}") from None
    repository, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split, streaming=True)
        for number, row in enumerate(rows):
            if limit is not None and number >= limit:
                return
            yield dict(row)
    except Exception as error:  # the library raises errors of a dozen packages for one cause: it is not to be had
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"hub is {name!r}, split {split!r}, which cannot be read ({type(error).__name__}: {reason}); check the "
            "name, its config (owner/name:config), the split and the network"
        ) from None


def prompt_messages(prompt: Mapping[str, Any], answers: Sequence[str] = ()) -> list[Message]:
    """The conversation up to the user's turn number ``len(answers)``, 0-based, whose answer comes next.

    ``answers`` are the target's own to the turns before. The one place where a prompt becomes messages: for answers of
    either kind, and for training.
    """
    system = prompt.get("system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn, answer in zip(prompt["turns"], answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": prompt["turns"][len(answers)]}]


def _asked(row: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The user's turns and the system's text of a row, by its shape."""
    if "turns" in row:
        if not isinstance(row["turns"], list):
            raise DataError("`turns` must be a list of texts")
        return row["turns"], row.get("system")
    for key in MESSAGE_SHAPES:
        if isinstance(row.get(key), list):
            turns, system = _turns_of(key, row[key])
            return turns, system or row.get("system")
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]], row.get("system")
    if isinstance(row.get("instruction"), str):
        added = row.get("input")
        if added is not None and not isinstance(added, str):
            raise DataError("`input` must be a text")
        return ["\n\n".join(part for part in (row["instruction"], added) if part and part.strip())], row.get("system")
    raise DataError(
        "a prompt needs `turns` (a list of texts), `messages` or `conversations`, `prompt`, or `instruction`"
    )


def _turns_of(key: str, messages: Sequence[Any]) -> tuple[list[str], str | None]:
    """User turns and system text of a conversation; answers are passed over."""
    turns: list[str] = []
    system: str | None = None
    asked = False  # whether the message before was the user's
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"`{key}`: message {i} is no object with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role in ASSISTANT_ROLES:
            if not turns:
                raise DataError(f"`{key}` begins with the assistant; the user must speak first")
            asked = False
            continue
        text = _text_of(key, i, content)
        if role == "system" and not turns and system is None:
            system = text
        elif role in USER_ROLES:
            if asked:
                raise DataError(f"`{key}`: message {i} is the user's, like the one before; the roles must alternate")
            turns.append(text)
            asked = True
        else:
            raise DataError(f"`{key}`: message {i} has role {role!r} here; system (first), user and assistant are read")
    return turns, system


def _text_of(key: str, i: int, content: Any) -> str:
    """A message's text; OpenAI's list of parts is joined if all are texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise DataError(f"`{key}`: message {i} has no text; other contents (images, tool calls) are not read")


def _id_of(row: Mapping[str, Any], turns: Sequence[str], system: str | None) -> str:
    given = row.get("id")
    if isinstance(given, str) and given:
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if given is not None:
        raise DataError(f"`id` is {given!r}; it must be a text or a whole number, or be left out")
    asked = json.dumps([list(turns), system or None], ensure_ascii=False)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]
