"""The answers verb: a file that `train` reads, the same one whether or not the run was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_chat import MAX_LEN, save_chat_model
from typer.testing import CliRunner, Result

import dspark.answers_cli as answers_cli
from dspark.answers_cli import AnswersConfig, progress_text, run_remote
from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.cli import app
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile
from dspark.data.samples import read_prompts, read_samples
from dspark.errors import ConfigError


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
        if file.answers == 2:
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


def test_further_turns_follow_and_a_file_may_be_extended_by_them(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert run(model, prompts, out, "--max-new-tokens", "40").exit_code == 0
    first = rows_of(out)
    done = run(model, prompts, out, "--max-new-tokens", "40", "--turns", "3")
    assert done.exit_code == 0, (done.output, done.exception)
    rows = rows_of(out)
    assert [row for row in rows if "turn" not in row] == first
    later = [row for row in rows if row.get("turn")]
    assert {row["turn"] for row in later} <= {1} and "turn 2: " in done.stderr
    assert {row["id"] for row in later} == {row["id"] for row in first if row["finish_reason"] == "stop"}
    refused = run(model, prompts, out, "--max-new-tokens", "40", "--turns", "2")
    assert refused.exit_code == 2 and "turns is 2, but" in refused.stderr


def test_template_options_are_settings_of_the_file(model: Path, prompts: Path, tmp_path: Path) -> None:
    from dspark.answers_cli import template_options

    assert template_options(["a=1", "b=x y", 'c="z"'], False) == {
        "enable_thinking": False,
        "a": 1,
        "b": "x y",
        "c": "z",
    }
    assert template_options([], None) == {}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="template option"):
            template_options(wrong, None)
    done = run(model, prompts, tmp_path / "answers.jsonl", "--no-thinking")
    assert done.exit_code == 2 and "'enable_thinking', which the model's chat template does not read" in done.stderr


# --- servers ---------------------------------------------------------------------------------------------------------


def run_server(
    model: Path, prompts: Path, out: Path, handler: Callable[[dict], httpx.Response], **changes: Any
) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "served"}]})
        return handler(json.loads(request.content))

    config = AnswersConfig(
        prompts=(prompts,), out=out, model=str(model), sampling=SamplingParams(temperature=1.0), **changes
    )
    run_remote(config, url="http://there", name=None, concurrency=2, transport=httpx.MockTransport(handle))


def completion(text: str, reason: str = "stop") -> httpx.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return httpx.Response(200, json={"choices": [choice]})


def test_a_server_answers_turn_by_turn(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, chat = tmp_path / "answers.jsonl", ChatFormat.from_folder(model)

    def handler(body: dict) -> httpx.Response:
        assert body["model"] == "served"
        words = body["messages"][-1]["content"]
        if words.startswith("xxx"):
            return httpx.Response(400, text="too long")
        return completion(f"about {words}", "length" if words == "number 4" else "stop")

    run_server(model, prompts, out, handler, turns=2)
    rows = {(row["id"], row.get("turn", 0)): row for row in read_jsonl(out)}
    assert set(rows) == {(f"p{i}", turn) for i in range(6) for turn in (0, 1)} - {("p4", 1)}
    assert rows["p1", 1]["answer"] == "about and then?" and rows["p4", 0]["finish_reason"] == "length"
    said = capsys.readouterr()
    assert "1 prompts refused by the server: long (status 400: too long)" in said.err
    assert "11 answers, 11 of them new" in said.err and "11 answers came as text" in said.err
    fields = json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())["fields"]
    assert (fields["drawn_by"], fields["turns"], fields["template_options"]) == ("served", 2, {})
    samples = read_samples([out], read_prompts([prompts]), chat, max_tokens=999)
    ids = {sample.id: sample for sample in samples}
    text = chat.decode(ids["p1#0.1"].token_ids.tolist(), skip_special_tokens=False)
    assert "about number 1<|im_end|>" in text and text.endswith("about and then?<|im_end|>")
    run_server(model, prompts, out, lambda body: httpx.Response(400, text="only the long one is asked"), turns=2)
    assert len(list(read_jsonl(out))) == 11


def test_a_servers_file_is_not_ours(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    run_server(model, prompts, out, lambda body: completion("x"), limit=1, max_new_tokens=7)
    done = run(model, prompts, out)
    assert done.exit_code == 2 and "drawn_by is 'dspark'" in done.stderr


def test_the_command_asks_the_server(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(answers_cli, "run_remote", lambda config, **options: asked.append((config, options)))
    done = run(model, prompts, tmp_path / "a.jsonl", "--server", "http://there", "--concurrency", "5")
    assert done.exit_code == 0, (done.output, done.exception)
    (config, options), *_ = asked
    assert config.sampling.seed == 4 and config.max_new_tokens == 7 and options["concurrency"] == 5
    assert options["url"] == "http://there" and options["name"] is None
    monkeypatch.undo()
    failed = run(model, prompts, tmp_path / "a.jsonl", "--server", "there:80", "--served-model", "m")
    assert failed.exit_code == 2 and "must begin with http" in failed.stderr


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
    assert "odd.jsonl:2: a prompt needs `turns`" in complaint(prompts=tmp_path / "odd.jsonl")
    assert not out.exists()
    assert run(model, prompts, out, "--limit", "1").exit_code == 0
    assert "min_p is 0.1" in complaint("--min-p", "0.1")
    (tmp_path / "answers.jsonl.manifest.json").unlink()
    assert "choose another file" in complaint()


def test_progress_lines_come_now_and_then_without_a_terminal(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.pace.REPORT_SECONDS", 0.0)
    done = run(model, prompts, tmp_path / "answers.jsonl")
    assert [f"{i}/6 answers" in done.stderr for i in range(8)] == [False, *[True] * 6, False]


def test_time_left_counts_the_answers_under_way() -> None:
    # two answers of 100 tokens ended, eight are to come, and 150 tokens of them are there: 650 more at 2 a second
    assert progress_text(2, 10, tokens=350, answered=200, seconds=175.0) == "2/10 answers, 2 tokens/s, 0:05:25 left"
    assert progress_text(10, 10, tokens=900, answered=900, seconds=450.0).endswith("0:00:00 left")
