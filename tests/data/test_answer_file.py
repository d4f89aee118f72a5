"""An answers file loses nothing to a kill, repeats nothing, and holds answers of one setting only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import TableTarget
from tiny_chat import save_chat_model

from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings
from dspark.data.answers import Answer, Job, make_jobs, sample_answers
from dspark.errors import ConfigError, DataError

PROMPTS = {f"p{i}": {"id": f"p{i}", "turns": [f"say {i} \u2028 é"], "domain": "chat"} for i in range(4)}
SAMPLING = SamplingParams(temperature=1.0, seed=2)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def target() -> TableTarget:
    return TableTarget(vocab_size=260, order=1, max_len=128)


def settings(chat: ChatFormat, **changed: object) -> dict:
    return answer_settings("tiny", chat, SAMPLING, max_new_tokens=5) | changed


def answer_all(path: Path, target: TableTarget, chat: ChatFormat, prompts: dict = PROMPTS) -> int:
    """Begin or go on; returns the number of new answers."""
    file = AnswerFile(path, settings(chat), prompts)
    jobs = make_jobs(prompts, chat, samples=2, max_len=target.info.max_len, history=file.history).jobs
    options = {"sampling": SAMPLING, "max_new_tokens": 5, "stop_token_ids": chat.stop_token_ids, "rows": 3}
    for answer in sample_answers(target, jobs, **options):
        file.add(answer, chat)
    return len(jobs)


def rows_of(path: Path) -> list[dict]:
    return sorted(read_jsonl(path), key=lambda row: (row["id"], row["sample"]))


def test_a_file_cut_at_any_byte_of_its_last_line_is_completed(
    target: TableTarget, chat: ChatFormat, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    assert answer_all(path, target, chat) == 8
    whole, expected = path.read_bytes(), rows_of(path)
    assert [(row["id"], row["sample"]) for row in expected] == [(f"p{i}", s) for i in range(4) for s in (0, 1)]
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    assert len(whole) - last > 60
    for size in range(last, len(whole) + 1):
        path.write_bytes(whole[:size])
        assert answer_all(path, target, chat) == (1 if size < len(whole) - 1 else 0)  # only its newline may lack
        assert rows_of(path) == expected, size


def test_lines_in_another_order_or_missing_from_the_middle(
    target: TableTarget, chat: ChatFormat, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    answer_all(path, target, chat)
    expected, lines = rows_of(path), path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[::-1][:3] + lines[:2]))
    assert answer_all(path, target, chat) == 3 and rows_of(path) == expected
    path.unlink()
    assert answer_all(path, target, chat) == 8 and rows_of(path) == expected


def test_the_manifest_says_how_the_answers_were_drawn(chat: ChatFormat, tmp_path: Path) -> None:
    AnswerFile(tmp_path / "answers.jsonl", settings(chat), PROMPTS)
    manifest = json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())
    fields = manifest["fields"]
    assert manifest["kind"] == "answers" and manifest["provenance"]["libraries"]["torch"]
    assert fields["model"] == "tiny" and fields["temperature"] == 1.0 and fields["seed"] == 2
    assert fields["max_new_tokens"] == 5 and fields["stop_token_ids"] == list(chat.stop_token_ids)
    assert len(fields["template_sha256"]) == 64 and fields["prompts"]["count"] == 4


@pytest.mark.parametrize(
    "name, value",
    [
        ("model", "other"),
        ("temperature", 0.8),
        ("top_k", 5),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("seed", 3),
        ("max_new_tokens", 6),
        ("template_sha256", "0" * 64),
        ("stop_token_ids", [1]),
    ],
)
def test_other_parameters_are_refused_by_name(
    target: TableTarget, chat: ChatFormat, tmp_path: Path, name: str, value: object
) -> None:
    path = tmp_path / "answers.jsonl"
    answer_all(path, target, chat)
    before = path.read_bytes(), (tmp_path / "answers.jsonl.manifest.json").read_bytes()
    assert name in settings(chat)
    with pytest.raises(ConfigError, match=f"^{name} is .*answers.jsonl was begun with"):
        AnswerFile(path, settings(chat, **{name: value}), PROMPTS)
    assert (path.read_bytes(), (tmp_path / "answers.jsonl.manifest.json").read_bytes()) == before


def test_a_template_is_known_by_its_hash(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings(chat)
    assert settings(chat) == before
    monkeypatch.setattr(chat.tokenizer, "chat_template", chat.tokenizer.chat_template + " ")
    assert {name for name, value in settings(chat).items() if value != before[name]} == {"template_sha256"}


def test_before_the_first_answer_parameters_may_change(chat: ChatFormat, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, settings(chat), PROMPTS)
    AnswerFile(path, settings(chat, seed=9), {})
    assert json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())["fields"]["seed"] == 9


def test_prompts_may_grow_at_the_end_and_not_change(target: TableTarget, chat: ChatFormat, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer_all(path, target, chat)
    more = {**PROMPTS, "q": {"id": "q", "turns": ["new"]}}
    assert answer_all(path, target, chat, more) == 2
    manifest = json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())
    assert manifest["fields"]["prompts"]["count"] == 5
    for others, words in (
        (PROMPTS, "prompts are 4"),
        ({**more, "p0": {"id": "p0", "turns": ["something else"]}}, "first 5 are not"),
        ({"q": more["q"], **more}, "first 5 are not"),
    ):
        with pytest.raises(ConfigError, match=words):
            AnswerFile(path, settings(chat), others)
    AnswerFile(path, settings(chat), {key: {**row, "domain": "math"} for key, row in more.items()})  # is not asked


def test_a_file_of_an_older_version_goes_on(target: TableTarget, chat: ChatFormat, tmp_path: Path) -> None:
    path, manifest = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.manifest.json"
    answer_all(path, target, chat)
    content = json.loads(manifest.read_text())
    for name in ("drawn_by", "turns", "template_options"):
        del content["fields"][name]
    manifest.write_text(json.dumps(content))
    assert answer_all(path, target, chat) == 0
    assert json.loads(manifest.read_text())["fields"]["drawn_by"] == "dspark"


def test_turns_follow_each_other(target: TableTarget, chat: ChatFormat, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer_all(path, target, chat)
    more = {key: {**row, "turns": [*row["turns"], "and then?"]} for key, row in PROMPTS.items()}
    file = AnswerFile(path, settings(chat, turns=2), more)
    assert file.answers == 8 and {len(turns) for turns in file.history.values()} == {1}
    job = Job(id="p0", sample=0, domain="chat", prompt_ids=(1,), turn=1)
    with pytest.raises(DataError, match=r"turn 1 of 'p0' is answered, but it has 0 turns"):
        file.add(Answer(job=replace(job, sample=7), token_ids=(5,), finish_reason="stop"), chat)
    file.add(Answer(job=job, token_ids=(5,), finish_reason="stop"), chat)
    assert [past.finished for past in AnswerFile(path, settings(chat, turns=2), more).history["p0", 0]][1]
    with pytest.raises(ConfigError, match=r"^turns is 1"):
        AnswerFile(path, settings(chat), more)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(DataError, match="answered twice"):
        AnswerFile(path, settings(chat, turns=2), more)
    path.write_text("".join(line for line in lines if '"turn": 1' in line))
    with pytest.raises(DataError, match=r"answers to the turns \[1\] and not"):
        AnswerFile(path, settings(chat, turns=2), more)


def test_files_that_are_not_ours_are_left_alone(chat: ChatFormat, tmp_path: Path) -> None:
    path, manifest = tmp_path / "notes.txt", tmp_path / "notes.txt.manifest.json"
    path.write_text("no line end")
    with pytest.raises(ConfigError, match=r"exists without notes\.txt\.manifest\.json"):
        AnswerFile(path, settings(chat), PROMPTS)
    for content, words in (
        ("{", "unreadable"),
        ("[]", "no JSON object"),
        ('{"kind": "answers", "version": 99}', "not the manifest"),
        ('{"kind": "answers", "version": 1, "fields": {"prompts": 3}}', "lacks its fields"),
    ):
        manifest.write_text(content)
        with pytest.raises(DataError, match=words):
            AnswerFile(path, settings(chat), PROMPTS)
    assert path.read_text() == "no line end"


@pytest.mark.parametrize(
    "line, words", [('{"id": "p0"}', ":9: an answer needs"), ('{"id": 1, "sample": 0}', ":9:"), ("{", ":9: not JSON")]
)
def test_a_line_that_is_no_answer_is_named(
    target: TableTarget, chat: ChatFormat, tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "answers.jsonl"
    answer_all(path, target, chat)
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=words):
        AnswerFile(path, settings(chat), PROMPTS)
