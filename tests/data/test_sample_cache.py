"""Cached samples are what the plain form gives, never stale, never damaged, never too many."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_chat import save_chat_model

import dspark.data.sample_cache as cache
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings, template_options_of
from dspark.data.features import Sample
from dspark.data.sample_cache import load_samples
from dspark.data.samples import read_prompts, read_samples
from dspark.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "samples"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    answers, prompts = tmp_path / "answers.jsonl", tmp_path / "prompts.jsonl"
    rows = [{"id": f"é{i}", "turns": [f"say {i}", "more"], "domain": "ab"[i % 2]} for i in range(5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"id": row["id"], "sample": 0, "turn": turn, "answer": f"t{turn}", "answer_ids": [40 + i, 41, 2]}
        for i, row in enumerate(rows)
        for turn in (0, 1)
    ]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return answers, prompts


def alike(one: list[Sample], other: list[Sample]) -> bool:
    return [(s.id, s.domain) for s in one] == [(s.id, s.domain) for s in other] and all(
        torch.equal(a.token_ids, b.token_ids)
        and torch.equal(a.loss_mask, b.loss_mask)
        and a.token_ids.dtype == b.token_ids.dtype
        and a.loss_mask.dtype == b.loss_mask.dtype
        for a, b in zip(one, other, strict=True)
    )


def plain(files: tuple[Path, Path], chat: ChatFormat, max_tokens: int = 99) -> list[Sample]:
    return read_samples([files[0]], read_prompts([files[1]]), chat, max_tokens=max_tokens)


def test_the_second_start_reads_what_the_first_made(
    files: tuple[Path, Path], chat: ChatFormat, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(files, chat)
    assert len(expected) == 10 and expected[1].id == "é0#0.1"
    assert alike(load_samples([files[0]], [files[1]], chat, max_tokens=99), expected)
    monkeypatch.setattr(cache, "read_samples", None)  # would fail if it were called
    again = load_samples([files[0]], [files[1]], chat, max_tokens=99)
    assert alike(again, expected) and len(list(home.iterdir())) == 1
    assert again[0].token_ids.untyped_storage().nbytes() == again[0].token_ids.nbytes


def test_anything_that_counts_makes_another_file(files: tuple[Path, Path], chat: ChatFormat, home: Path) -> None:
    answers, prompts = files

    def load(max_tokens: int = 99) -> list[Sample]:
        return load_samples([answers], [prompts], chat, max_tokens=max_tokens)

    load()
    assert alike(load(26), plain(files, chat, 26)) and len(list(home.iterdir())) == 2
    prompts.write_text(prompts.read_text().replace("say 3", "sing 3"))
    assert alike(load(), plain(files, chat)) and len(list(home.iterdir())) == 3
    answers.write_text(answers.read_text().replace("[43, 41, 2]", "[99, 41, 2]"))
    assert alike(load(), plain(files, chat)) and len(list(home.iterdir())) == 4
    other = ChatFormat(chat.tokenizer, eos_token_ids=[7])
    assert alike(load_samples([answers], [prompts], other, max_tokens=99), plain(files, chat))
    assert len(list(home.iterdir())) == 5


def test_a_later_turn_stands_behind_the_targets_own_words(files: tuple[Path, Path], chat: ChatFormat) -> None:
    sample = plain(files, chat)[1]
    assert chat.decode(sample.token_ids.tolist()[:-3], skip_special_tokens=False) == (
        "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\nt0<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.loss_mask.sum() == 3 and bool(sample.loss_mask[-3:].all())


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99, None])
def test_a_damaged_file_is_made_again(
    files: tuple[Path, Path], chat: ChatFormat, home: Path, place: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_samples([files[0]], [files[1]], chat, max_tokens=99)
    (path,) = home.iterdir()
    whole = bytearray(path.read_bytes())
    damaged = bytes(whole[: len(whole) // 2])
    if place is not None:
        whole[int(place * len(whole))] ^= 0x41
        damaged = bytes(whole)
    path.write_bytes(damaged)
    assert alike(load_samples([files[0]], [files[1]], chat, max_tokens=99), expected)
    assert "damaged" in caplog.text and path.read_bytes() != damaged


def test_the_least_recently_used_files_go(files: tuple[Path, Path], chat: ChatFormat, home: Path) -> None:
    def load(max_tokens: int, most_bytes: int) -> None:
        load_samples([files[0]], [files[1]], chat, max_tokens=max_tokens, most_bytes=most_bytes)

    made = []
    for age, max_tokens in ((300, 40), (200, 41), (100, 42)):
        load(max_tokens, 1 << 30)
        (new,) = set(home.iterdir()) - set(made)
        made.append(new)
        os.utime(new, (new.stat().st_atime - age,) * 2)
    size = max(path.stat().st_size for path in made)
    load(40, 1 << 30)  # used: now the newest
    load(43, 3 * size)
    left = set(home.iterdir())
    assert made[0] in left and made[1] not in left and len(left) <= 3
    load(44, 1)
    assert len(list(home.iterdir())) == 1, "the newest stays whatever its size"


def test_a_home_that_cannot_be_written_costs_time_only(
    files: tuple[Path, Path], chat: ChatFormat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file")
    assert alike(load_samples([files[0]], [files[1]], chat, max_tokens=99), plain(files, chat))
    assert "cannot be kept" in caplog.text


def test_answers_of_another_template_are_refused(files: tuple[Path, Path], chat: ChatFormat) -> None:
    answers, prompts = files
    answers.rename(kept := answers.with_name("kept"))
    settings = answer_settings("tiny", chat, SamplingParams(), max_new_tokens=5)
    AnswerFile(answers, settings, read_prompts([prompts]))
    kept.rename(answers)
    assert len(load_samples([answers], [prompts], chat, max_tokens=99)) == 10
    assert template_options_of([answers]) == {}
    manifest = answers.with_name("answers.jsonl.manifest.json")
    before = manifest.read_text()
    for name, value in (
        ("template_sha256", "0" * 64),
        ("template_options", {"enable_thinking": False}),
        ("stop_token_ids", [1]),
    ):
        content = json.loads(before)
        content["fields"][name] = value
        manifest.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"^{name} is .* were made with"):
            load_samples([answers], [prompts], chat, max_tokens=99)
    content = json.loads(before)
    del content["fields"]["template_options"]  # as older versions wrote it
    manifest.write_text(json.dumps(content))
    assert len(load_samples([answers], [prompts], chat, max_tokens=99)) == 10
    content["fields"]["template_options"] = {"enable_thinking": True}
    manifest.write_text(json.dumps(content))
    assert template_options_of([answers]) == {"enable_thinking": True}


def test_missing_files_are_named(files: tuple[Path, Path], chat: ChatFormat, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone\.jsonl"):
        load_samples([tmp_path / "gone.jsonl"], [files[1]], chat, max_tokens=99)
