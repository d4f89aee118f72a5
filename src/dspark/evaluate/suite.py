"""The evaluation's prompts: the nine sets of the paper, any other set, and the order in which they are asked.

Conversations are asked in rounds over the sets, the first of each set before the second of any, so that a run that is
cut short has seen all sets alike, and a slow hour of the machine touches all of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.errors import DataError

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WRITE_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """One of the paper's sets: its domain, where the Hub has it, and how one of its rows asks."""

    domain: str  # of the paper's tables: math, code or chat
    hub: str  # owner/name or owner/name:config
    split: str
    column: str = ""  # the row's text; empty: a shape that `dspark prompts` reads
    asks: str = "{}"  # the text in its wording
    cap: int = 500  # conversations that the reference evaluates at most


KNOWN_SETS: dict[str, KnownSet] = {
    "gsm8k": KnownSet(
        domain="math", hub="openai/gsm8k:main", split="test", column="question", asks="{}" + STEP_BY_STEP
    ),
    "math500": KnownSet(
        domain="math", hub="HuggingFaceH4/MATH-500", split="test", column="problem", asks="{}" + STEP_BY_STEP
    ),
    "aime25": KnownSet(
        domain="math", hub="math-ai/aime25", split="test", column="problem", asks="{}" + STEP_BY_STEP, cap=30
    ),
    "mbpp": KnownSet(
        domain="code", hub="google-research-datasets/mbpp:sanitized", split="test", column="prompt", cap=256
    ),
    "humaneval": KnownSet(
        domain="code", hub="openai/openai_humaneval", split="test", column="prompt", asks=WRITE_CODE, cap=164
    ),
    "livecodebench": KnownSet(
        domain="code", hub="livecodebench/code_generation_lite", split="test", column="question_content"
    ),
    "mt-bench": KnownSet(domain="chat", hub="HuggingFaceH4/mt_bench_prompts", split="train", column="prompt", cap=80),
    "alpaca": KnownSet(domain="chat", hub="tatsu-lab/alpaca", split="train"),
    "arena-hard-v2": KnownSet(domain="chat", hub="lmarena-ai/arena-hard-auto", split="train", column="prompt"),
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What one prompt asks, turn by turn."""

    set_name: str
    domain: str
    id: str
    turns: tuple[str, ...]  # of the user, not empty
    system: str | None = None

    @property
    def asked(self) -> str:
        """Sixteen hex digits of what is asked: a record made for other words under the same id is told by it."""
        text = json.dumps([list(self.turns), self.system], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def key(self) -> tuple[str, str]:
        return self.set_name, self.id


def domain_of(set_name: str, row: Mapping[str, Any]) -> str:
    """The domain a conversation counts towards: the paper's for its nine sets, else the row's own, else the set."""
    known = KNOWN_SETS.get(set_name)
    return known.domain if known else str(row.get("domain") or set_name)


def hub_row(known: KnownSet, row: Mapping[str, Any]) -> dict[str, Any]:
    """A Hub row of one of the nine sets in a shape that `dspark prompts` reads, asked in the set's wording.

    Raises :class:`DataError` if the set's column is missing or holds no text.
    """
    if not known.column:
        return dict(row)
    texts = row.get(known.column)
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"a row of {known.hub} has no text in {known.column!r}; the data set has changed, give a file")
    return {"turns": [known.asks.replace("{}", text, 1) for text in texts]}


def chosen(conversations: Sequence[Conversation], *, limit: int | None, seed: int) -> list[Conversation]:
    """At most ``limit`` conversations of one set, shuffled by ``seed``; None takes all.

    A larger limit keeps those of a smaller one and adds to them, so that a run can be extended.
    """
    order = list(conversations)
    random.Random(f"{seed} {order[0].set_name if order else ''}").shuffle(order)
    return order[:limit]


def in_rounds(sets: Iterable[Sequence[Conversation]]) -> list[Conversation]:
    """Conversations of all sets, the first of each before the second of any."""
    rows = [list(each) for each in sets]
    longest = max((len(each) for each in rows), default=0)
    return [each[i] for i in range(longest) for each in rows if i < len(each)]


def answer_seed(seed: int, conversation: Conversation, turn: int) -> int:
    """Seed of one answer's streams, 63 bits of a hash: the same for every drafter, so that comparisons are paired."""
    text = f"{seed}\n{conversation.set_name}\n{turn}\n{conversation.id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
