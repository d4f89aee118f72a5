"""Prompts from nothing: an instruct model writes user turns, because its chat template says where a user speaks.

What stands before a user's text is given to the model, which then continues it as a user would, at temperature 1, up to
the token that ends a turn (the idea is Magpie's, Xu et al. 2024). Draft number i depends on the seed and on i alone,
so a run goes on by index; what is kept of the drafts is decided in the order of their numbers, so that it does not
depend on which of them ended first, nor on kills.

| file                         | holds                                                                      |
|------------------------------|----------------------------------------------------------------------------|
| prompts.jsonl                | the prompts that were kept, in one step at the end                         |
| prompts.jsonl.drafts.jsonl   | a line {index, text, flaw} per draft, in the order in which they ended     |
| prompts.jsonl.manifest.json  | model, template, seed and filters, and the provenance                      |
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.artifacts import append_jsonl, provenance, read_jsonl, write_json
from dspark.chat import REPLACEMENT, ChatFormat, UserTurn
from dspark.core import SamplingParams
from dspark.data.answers import Answer, Job, sample_answers
from dspark.data.near_duplicates import NearDuplicates, OverlapFilter, repetition, words_of
from dspark.errors import ConfigError, DataError
from dspark.models.target import Target

KIND, VERSION = "self-prompts", 1
JOB_ID = "self"  # of all drafts; their number is the sample's
MOST_DRAFTS_PER_PROMPT = 20  # a model of whose turns fewer are usable writes none worth having


@dataclass(frozen=True, kw_only=True)
class SelfPromptConfig:
    """What is drafted, and what is kept of it."""

    count: int  # prompts to keep; >= 1
    seed: int = 0
    max_new_tokens: int = 256  # of a user's turn; a longer one is not kept; >= 1
    least_words: int = 3  # of a prompt; >= 1
    most_repetition: float = 0.3  # share of three-word runs said before; [0, 1]
    similarity: float = 0.7  # Jaccard similarity from which on a prompt repeats an earlier one; (0, 1]

    def __post_init__(self) -> None:
        for name in ("count", "max_new_tokens", "least_words"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0.0 <= self.most_repetition <= 1.0:
            raise ConfigError(f"most_repetition is {self.most_repetition}; it is a share, in [0, 1]")
        NearDuplicates(self.similarity)  # checks it


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A user's turn as the model wrote it."""

    index: int
    text: str
    flaw: str | None  # what is wrong with it by itself; None: nothing


@dataclass(kw_only=True)
class Selection:
    """What is kept of drafts, and why the others are not."""

    prompts: list[dict[str, Any]] = field(default_factory=list)  # Any: whatever JSON holds
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    overlaps: dict[str, str] = field(default_factory=dict)  # id -> the evaluation set it is in


class DraftFile:
    """Drafts on disk, to be added to by one process at a time. ``drafts`` holds them by index."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        """Begin beside ``out``, or go on with what was begun with the same ``settings``; :class:`ConfigError` names one
        that differs."""
        self.path = out.with_name(out.name + ".drafts.jsonl")
        self.manifest_path = out.with_name(out.name + ".manifest.json")
        self.drafts: dict[int, Draft] = {}
        if self.path.exists() and self.path.stat().st_size > 0:
            self._check(settings)
            for number, row in enumerate(read_jsonl(self.path, allow_torn_tail=True), 1):
                index, text = row.get("index"), row.get("text")
                if type(index) is not int or not isinstance(text, str):
                    raise DataError(f"{self.path}:{number}: a draft needs a whole number `index` and a `text`")
                self.drafts[index] = Draft(index=index, text=text, flaw=row.get("flaw"))
        content = {"kind": KIND, "version": VERSION, "fields": dict(settings), "provenance": provenance()}
        write_json(self.manifest_path, content)

    def add(self, draft: Draft) -> None:
        """Append one draft and flush it to the disk."""
        append_jsonl(self.path, [asdict(draft)])
        self.drafts[draft.index] = draft

    def _check(self, settings: Mapping[str, Any]) -> None:
        try:
            before = json.loads(self.manifest_path.read_text(encoding="utf-8"))["fields"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"out: {self.path} exists without a readable {self.manifest_path.name}; choose another file"
            ) from None
        for name, value in settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{name} is {value!r}, but {self.path} was begun with {before.get(name)!r}; give the same value, "
                    "or choose another file"
                )


def draft_settings(model: str, chat: ChatFormat, config: SelfPromptConfig) -> dict[str, Any]:
    """All that decides what draft number i is; filters and the number of prompts may change from call to call."""
    turn = chat.user_turn()
    return {
        "model": model,
        "seed": config.seed,
        "max_new_tokens": config.max_new_tokens,
        "prefix_sha256": hashlib.sha256(json.dumps(turn.prefix_ids).encode()).hexdigest(),
        "end_token_ids": list(turn.end_token_ids),
    }


def write_drafts(
    target: Target,
    chat: ChatFormat,
    file: DraftFile,
    config: SelfPromptConfig,
    *,
    rows: int,
    overlap: OverlapFilter | None = None,
    on_pass: Callable[[int], object] = lambda tokens: None,
) -> Iterator[Selection]:
    """Let the model write until ``config.count`` prompts can be kept; yields the selection after each wave of drafts.

    The last selection is the result. Raises :class:`DataError` when the model writes too few usable turns.
    """
    turn = chat.user_turn()
    most = MOST_DRAFTS_PER_PROMPT * config.count + 100
    sampling = SamplingParams(temperature=1.0, seed=config.seed)
    drafted = _complete(file)
    while True:
        chosen = select([file.drafts[i] for i in range(drafted)], config, overlap=overlap)
        yield chosen
        if len(chosen.prompts) >= config.count:
            return
        if drafted >= most:
            raise DataError(
                f"of {drafted} turns that the model wrote {len(chosen.prompts)} are usable ({dict(chosen.refused)}), "
                f"and {config.count} are wanted; take a smaller count, or give prompts"
            )
        drafted = min(most, drafted + _wave(chosen, drafted, config.count, rows))
        jobs = [
            Job(id=JOB_ID, sample=i, domain=JOB_ID, prompt_ids=turn.prefix_ids)
            for i in range(drafted)
            if i not in file.drafts
        ]
        for answer in sample_answers(
            target,
            jobs,
            sampling=sampling,
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=turn.end_token_ids,
            rows=rows,
            on_pass=on_pass,
        ):
            file.add(read_draft(answer, chat, turn))


def read_draft(answer: Answer, chat: ChatFormat, turn: UserTurn) -> Draft:
    """A drawn turn as text, with the flaw that shows in its tokens."""
    ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
    special = set(chat.tokenizer.all_special_ids) | set(turn.end_token_ids)
    text, flaw = chat.decode(ids).strip(), None
    if answer.finish_reason != "stop":
        flaw = "too long"
    elif any(token in special for token in ids):
        flaw = "special tokens"
    elif REPLACEMENT in text:
        flaw = "broken characters"
    return Draft(index=answer.job.sample, text=text, flaw=flaw)


def select(drafts: list[Draft], config: SelfPromptConfig, *, overlap: OverlapFilter | None = None) -> Selection:
    """The first ``config.count`` usable drafts in the order of their numbers, and why the others before are not."""
    chosen, seen = Selection(), NearDuplicates(config.similarity)
    for draft in sorted(drafts, key=lambda draft: draft.index):
        if len(chosen.prompts) == config.count:
            break
        key = f"{JOB_ID}-{config.seed}-{draft.index}"
        flaw = draft.flaw or _flaw(draft.text, config)
        if flaw is None and overlap is not None and (name := overlap.find(draft.text)) is not None:
            chosen.overlaps[key], flaw = name, "in an evaluation set"
        if flaw is None and seen.find(draft.text) is not None:
            flaw = "near-duplicate"
        if flaw is not None:
            chosen.refused[flaw] += 1
            continue
        seen.add(key, draft.text)
        chosen.prompts.append({"id": key, "turns": [draft.text], "domain": JOB_ID})
    return chosen


def _flaw(text: str, config: SelfPromptConfig) -> str | None:
    if len(words_of(text)) < config.least_words:
        return "too short"
    return "repetitive" if repetition(text) > config.most_repetition else None


def _complete(file: DraftFile) -> int:
    """Number of drafts without a gap from the first on."""
    return next(i for i in range(len(file.drafts) + 1) if i not in file.drafts)


def _wave(chosen: Selection, drafted: int, count: int, rows: int) -> int:
    """Drafts of the next wave: what the share kept so far lets expect to be enough, in whole batches."""
    share = max(len(chosen.prompts) / drafted, 0.1) if drafted else 0.8
    wanted = int((count - len(chosen.prompts)) / share) + 1
    return -(-wanted // rows) * rows
