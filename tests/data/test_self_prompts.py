"""A model writes its own prompts: drafts by number, kept in their order, the same after any interruption."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from strikes import killed_until_done, kills
from tiny_chat import save_chat_model

from dspark.chat import ChatFormat
from dspark.data.answers import Answer, Job
from dspark.data.near_duplicates import OverlapFilter
from dspark.data.self_prompts import (
    Draft,
    DraftFile,
    Selection,
    SelfPromptConfig,
    draft_settings,
    read_draft,
    select,
    write_drafts,
)
from dspark.errors import ConfigError, DataError
from dspark.models.loading import load_target
from dspark.models.target import Target, TargetOutput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return ChatFormat.from_folder(folder)


def ascii_target(folder: Path, chat: ChatFormat) -> Target:
    """The random model, confined to letters and spaces, of which it writes short turns that are texts."""
    target = load_target(str(folder), dtype="float32", device="cpu")
    letters = chat.tokenizer("abcdefgh ABCDEFGH", add_special_tokens=False)["input_ids"]
    kept = torch.zeros(target.info.vocab_size, dtype=torch.bool)
    kept[[*letters, *chat.user_turn().end_token_ids]] = True
    forward = target.forward

    def confined(*arguments: Any, **options: Any) -> TargetOutput:
        output = forward(*arguments, **options)
        assert output.logits is not None
        logits = output.logits.masked_fill(~kept, float("-inf"))
        logits[:, list(chat.stop_token_ids)] = logits.amax(1, keepdim=True) - 1.0
        return TargetOutput(logits, output.features, output.final)

    target.forward = confined  # type: ignore[method-assign]
    return target


def draft(index: int, text: str, flaw: str | None = None) -> Draft:
    return Draft(index=index, text=text, flaw=flaw)


CONFIG = SelfPromptConfig(count=3)


def test_drafts_are_kept_in_the_order_of_their_numbers() -> None:
    texts = [
        "tell me a story",
        "hm",
        "Tell me a story!",
        "no no no no no no",
        "why is the sky blue",
        "a b c d",
        "e f g h",
    ]
    drafts = [draft(i, text) for i, text in enumerate(texts)] + [draft(7, "fine but long one", "too long")]
    exam = OverlapFilter({"exam": ["why is the sky blue"]})
    for order in (drafts, drafts[::-1]):
        chosen = select(order, CONFIG)
        assert [p["id"] for p in chosen.prompts] == ["self-0-0", "self-0-4", "self-0-5"]
        assert chosen.prompts[0] == {"id": "self-0-0", "turns": ["tell me a story"], "domain": "self"}
        assert chosen.refused == {"too short": 1, "near-duplicate": 1, "repetitive": 1}
        strict = select(order, CONFIG, overlap=exam)
        assert strict.overlaps == {"self-0-4": "exam"} and strict.refused["in an evaluation set"] == 1
        assert [p["id"] for p in strict.prompts] == ["self-0-0", "self-0-5", "self-0-6"]


def test_a_turns_flaws_show_in_its_tokens(chat: ChatFormat) -> None:
    turn = chat.user_turn()
    ids = chat.tokenizer(" tell me \n", add_special_tokens=False)["input_ids"]
    (start,) = chat.tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
    job, stop = Job(id="self", sample=8, domain="self", prompt_ids=(1,)), chat.stop_token_ids[0]
    for drawn, reason, flaw in (
        ([*ids, stop], "stop", None),
        (ids, "length", "too long"),
        ([*ids, start, stop], "stop", "special tokens"),
        ([*chat.tokenizer("é", add_special_tokens=False)["input_ids"][:1], stop], "stop", "broken characters"),
    ):
        made = read_draft(Answer(job=job, token_ids=tuple(drawn), finish_reason=reason), chat, turn)
        assert (made.index, made.flaw) == (8, flaw)
        assert made.text == ("\ufffd" if flaw == "broken characters" else "tell me")


def write(
    path: Path, target: Target, chat: ChatFormat, config: SelfPromptConfig, *, rows: int, most: int | None = None
) -> Selection:
    """Draft until the end, or until ``most`` new drafts are on disk, as if killed then."""
    file = DraftFile(path, draft_settings("tiny", chat, config))
    add, left = file.add, [most]

    def counted(draft: Draft) -> None:
        if left[0] is not None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        add(draft)

    file.add = counted  # type: ignore[method-assign]
    return list(write_drafts(target, chat, file, config, rows=rows))[-1]


def test_prompts_do_not_depend_on_rows_or_interruptions(folder: Path, chat: ChatFormat, tmp_path: Path) -> None:
    target = ascii_target(folder, chat)
    config = SelfPromptConfig(count=12, seed=3, max_new_tokens=24, least_words=1, most_repetition=1.0)
    whole = write(tmp_path / "a.jsonl", target, chat, config, rows=8)
    assert len({p["turns"][0] for p in whole.prompts}) == len(whole.prompts) == 12
    assert sum(whole.refused.values()) > 0, "the filters had nothing to do"
    for most in (0, 3, 5):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "b.jsonl", target, chat, config, rows=3, most=most)
    assert len((tmp_path / "b.jsonl.drafts.jsonl").read_text().splitlines()) == 8
    assert write(tmp_path / "b.jsonl", target, chat, config, rows=5) == whole
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl.drafts.jsonl").read_text().split("\n") if line]
    assert sorted(row["index"] for row in rows) == list(range(len(rows))), "a draft twice, or missing"
    other = SelfPromptConfig(**{**config.__dict__, "seed": 4})
    with pytest.raises(ConfigError, match=r"seed is 4, but .*begun with 3"):
        write(tmp_path / "b.jsonl", target, chat, other, rows=5)
    fewer = SelfPromptConfig(**{**config.__dict__, "count": 2})
    assert write(tmp_path / "b.jsonl", target, chat, fewer, rows=5).prompts == whole.prompts[:2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_prompts_survive_kills(folder: Path, chat: ChatFormat, tmp_path: Path) -> None:
    """SIGKILL at random moments: no draft on the disk is lost, and the prompts are those of an undisturbed run."""
    target, times = ascii_target(folder, chat), kills(5)
    config = SelfPromptConfig(count=3 * times, seed=3, max_new_tokens=12, least_words=1, most_repetition=1.0)
    whole = write(tmp_path / "whole.jsonl", target, chat, config, rows=6)
    torn, drafts = tmp_path / "torn.jsonl", tmp_path / "torn.jsonl.drafts.jsonl"
    struck = killed_until_done(
        drafts, lambda: write(torn, target, chat, config, rows=4), kills=times, source=random.Random(4)
    )
    assert struck == times
    assert write(torn, target, chat, config, rows=6) == whole
    indexes = [json.loads(line)["index"] for line in drafts.read_text().splitlines()]
    assert sorted(indexes) == list(range(len(indexes))), "a draft twice, or missing"


def test_a_model_that_writes_nothing_usable_is_given_up(
    target: Target, chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SelfPromptConfig(count=1, max_new_tokens=1, least_words=9)
    with pytest.raises(DataError, match="of 120 turns that the model wrote 0 are usable"):
        write(tmp_path / "c.jsonl", target, chat, config, rows=64)


@pytest.mark.parametrize(
    "field, value", [("count", 0), ("least_words", 0), ("most_repetition", 1.5), ("similarity", 0.0)]
)
def test_impossible_settings(field: str, value: float) -> None:
    with pytest.raises(ConfigError):
        SelfPromptConfig(**{"count": 1, field: value})
