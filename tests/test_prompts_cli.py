"""The prompts verb: one clean file from files, the Hub or the model itself; nothing is dropped in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_chat import save_chat_model
from typer.testing import CliRunner, Result

from dspark.artifacts import read_jsonl
from dspark.cli import app
from dspark.data.prompts import read_prompts

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def run(out: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["prompts", "--out", str(out), *map(str, options)])


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_shapes_become_one_and_refusals_are_counted(tmp_path: Path) -> None:
    files = [
        write(
            tmp_path / "a.jsonl",
            {"id": "x", "prompt": "first \u2028 one"},
            {"messages": [{"role": "user", "content": f"And {LONG}!"}], "id": "leak"},
            {"id": "x", "prompt": "first \u2028 one"},
            {"id": "odd"},
            {"id": "x", "prompt": "another under its id"},
        ),
        write(
            tmp_path / "b.jsonl", {"id": "y", "instruction": "First, one."}, {"id": "z", "turns": ["last", "of all"]}
        ),
    ]
    exam = write(tmp_path / "exam.jsonl", {"question_id": 1, "turns": ["short", LONG.upper()]})
    sources = [part for file in files for part in ("--from", file)]
    out = tmp_path / "new" / "out.jsonl"
    done = run(out, *sources, "--not-in", exam, "--similarity", 0.7, "--domain", "mine")
    assert done.exit_code == 0, (done.output, done.exception)
    assert [(row["id"], row["turns"]) for row in read_jsonl(out)] == [
        ("x", ["first \u2028 one"]),
        ("z", ["last", "of all"]),
    ]
    assert all(prompt["domain"] == "mine" for prompt in read_prompts([out]).values())
    for words in (
        f"1 refused, in the evaluation set {exam}: leak",
        "1 refused, given before: x",
        "1 refused, a prompt needs `turns`",
        f"{files[0]}:4",
        "1 refused, id 'x' was given before with other turns",
        "1 refused, near-duplicates of earlier ones: y (x)",
        "2 prompts",
    ):
        assert words in done.stderr, (words, done.stderr)
    assert run(out, *sources, "--limit", 1).exit_code == 0 and len(list(read_jsonl(out))) == 1
    plain = run(out, *sources)
    assert len(list(read_jsonl(out))) == 4 and "near-duplicates" not in plain.stderr


def test_hub_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("datasets")
    rows = [
        {"conversations": [{"from": "human", "value": f"ask {i}"}, {"from": "gpt", "value": "a"}]} for i in range(5)
    ]
    fake.load_dataset = lambda *_, **__: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    done = run(tmp_path / "out.jsonl", "--hub", "some/set", "--limit", 3)
    assert done.exit_code == 0 and [r["turns"] for r in read_jsonl(tmp_path / "out.jsonl")] == [
        ["ask 0"],
        ["ask 1"],
        ["ask 2"],
    ]


def test_a_model_without_usable_turns_is_said(tmp_path: Path) -> None:
    """A random model writes no prompts: its drafts are kept, the refusal is one line, and no prompts file appears."""
    model = save_chat_model(tmp_path / "model")
    options = ("--model", model, "--limit", 1, "--max-new-tokens", 2, "--dtype", "float32", "--device", "cpu")
    done = run(tmp_path / "own.jsonl", *options)
    assert done.exit_code == 2 and "0 are usable" in done.stderr, (done.output, done.exception)
    assert not (tmp_path / "own.jsonl").exists()
    drafts = list(read_jsonl(tmp_path / "own.jsonl.drafts.jsonl"))
    assert sorted(row["index"] for row in drafts) == list(range(120)) and all(row["flaw"] for row in drafts)
    other = run(tmp_path / "own.jsonl", *options, "--seed", 1)
    assert other.exit_code == 2 and "seed is 1" in other.stderr


def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"nothing": 1})
    for options, words in (
        ((), "one source"),
        (("--from", path, "--hub", "x"), "one source"),
        (("--from", tmp_path / "gone.jsonl"), "gone.jsonl"),
        (("--from", path), "no prompts are left"),
        (("--model", "x", "--domain", "d"), "--domain is for prompts that are given"),
        (("--from", path, "--similarity", 2.0), "threshold is 2.0"),
    ):
        failed = run(tmp_path / "out.jsonl", *options)
        assert failed.exit_code == 2 and words in failed.stderr, (options, failed.output, failed.exception)
        assert not (tmp_path / "out.jsonl").exists()
