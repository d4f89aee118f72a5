"""The answers verb: a file that `train` reads, the same one whether or not the run was interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_chat import MAX_LEN, save_chat_model
from typer.testing import CliRunner, Result

import dspark.answers_cli as answers_cli
from dspark.answers_cli import progress_text
from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.cli import app
from dspark.data.answer_file import AnswerFile
from dspark.data.samples import read_prompts, read_samples


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": f"p{i}", "turns": [f"number {i}", "and then?"], "domain": "ab"[i % 2]} for i in range(6)]
    rows.insert(2, {"id": "long", "turns": ["x" * MAX_LEN]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Path, prompts: Path, out: Path, *extra: str) -> Result:
    options = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "7", "--rows", "3", "--seed", "4")
    command = ["answers", "--prompts", str(prompts), "--out", str(out), "--model", str(model), *options, *extra]
    return CliRunner().invoke(app, command)


def rows_of(path: Path) -> list[dict]:
    return sorted(read_jsonl(path), key=lambda row: (row["id"], row["sample"]))


def test_answers_are_what_training_reads(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    done = run(model, prompts, out, "--samples", "2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout.strip() == str(out)
    assert "12/12 answers" in done.stderr and "tokens/s" in done.stderr and "12 answers, 12 of them new" in done.stderr
    assert f"1 prompts skipped: over the context limit of {MAX_LEN} tokens" in done.stderr
    rows = rows_of(out)
    assert [(row["id"], row["sample"]) for row in rows] == [(f"p{i}", s) for i in range(6) for s in (0, 1)]
    chat = ChatFormat.from_folder(model)
    for row in rows:
        assert set(row) == {"id", "sample", "domain", "answer", "answer_ids", "finish_reason"}
        assert row["domain"] == "ab"[int(row["id"][1]) % 2]
        stopped = row["answer_ids"][-1] in chat.stop_token_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["answer_ids"]) == 7
        assert row["answer"] == chat.decode(row["answer_ids"][:-1] if stopped else row["answer_ids"])
    assert len({tuple(row["answer_ids"]) for row in rows}) == 12, "every sample has its own stream"
    samples = read_samples([out], read_prompts([prompts]), chat, max_tokens=MAX_LEN)
    assert len(samples) == sum(len(row["answer_ids"]) >= 2 for row in rows)


def test_an_interrupted_run_goes_on_to_the_same_answers(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(model, prompts, tmp_path / "whole.jsonl").exit_code == 0
    out, add = tmp_path / "answers.jsonl", AnswerFile.add

    def interrupted_at_the_third(file: AnswerFile, *arguments: object) -> None:
        if len(file.done) == 2:
            raise KeyboardInterrupt
        add(file, *arguments)

    monkeypatch.setattr(AnswerFile, "add", interrupted_at_the_third)
    first = run(model, prompts, out)
    assert first.exit_code == 130 and "2 new answers are saved" in first.stderr, (first.output, first.exception)
    monkeypatch.undo()
    second = run(model, prompts, out, "--rows", "2")
    assert second.exit_code == 0 and "6 answers, 4 of them new" in second.stderr
    assert rows_of(out) == rows_of(tmp_path / "whole.jsonl")
    third = run(model, prompts, out)
    assert third.exit_code == 0 and "6 answers, 0 of them new" in third.stderr and "1 prompts skipped" in third.stderr


def test_a_limit_takes_the_first_prompts_and_more_may_follow(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert run(model, prompts, out, "--limit", "2").exit_code == 0
    assert [row["id"] for row in rows_of(out)] == ["p0", "p1"]
    assert run(model, prompts, out, "--limit", "4", "--samples", "2").exit_code == 0
    assert [(row["id"], row["sample"]) for row in rows_of(out)] == [(f"p{i}", s) for i in range(3) for s in (0, 1)]


def test_mistakes_end_in_one_line(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"

    def complaint(*extra: str, prompts: Path = prompts) -> str:
        failed = run(model, prompts, out, *extra)
        assert failed.exit_code == 2 and failed.stderr.count("\n") == 1, (failed.output, failed.exception)
        return failed.stderr

    assert "samples is 2 at temperature 0" in complaint("--temperature", "0", "--samples", "2")
    assert "temperature is -1" in complaint("--temperature", "-1")
    assert "--rows" in complaint("--rows", "0")
    assert "nowhere.jsonl" in complaint(prompts=tmp_path / "nowhere.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"id": "a", "turns": ["x"]}\n{"id": "b"}\n')
    assert "odd.jsonl:2: a prompt needs" in complaint(prompts=tmp_path / "odd.jsonl")
    assert not out.exists()
    assert run(model, prompts, out, "--limit", "1").exit_code == 0
    assert "min_p is 0.1" in complaint("--min-p", "0.1")
    (tmp_path / "answers.jsonl.manifest.json").unlink()
    assert "choose another file" in complaint()


def test_progress_lines_come_now_and_then_without_a_terminal(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_cli, "REPORT_SECONDS", 0.0)
    done = run(model, prompts, tmp_path / "answers.jsonl")
    assert [f"{i}/6 answers" in done.stderr for i in range(8)] == [False, *[True] * 6, False]


def test_time_left_counts_the_answers_under_way() -> None:
    # two answers of 100 tokens ended, eight are to come, and 150 tokens of them are there: 650 more at 2 a second
    assert progress_text(2, 10, tokens=350, answered=200, seconds=175.0) == "2/10 answers, 2 tokens/s, 0:05:25 left"
    assert progress_text(10, 10, tokens=900, answered=900, seconds=450.0).endswith("0:00:00 left")
