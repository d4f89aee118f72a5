"""`dspark eval` on a tiny chat model: sets, cells, resumption, refusals, and the same answers in any way of playing."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_chat import save_chat_model, save_random_drafter
from tiny_run import fork
from typer.testing import CliRunner

from dspark import eval_cli
from dspark.core import SamplingParams
from dspark.errors import ConfigError, DataError, ScheduleError
from dspark.eval_plays import EvalConfig
from dspark.evaluate.records import find_cells, read_answers
from dspark.verbs.evaluating import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    save_chat_model(folder / "model")
    save_random_drafter(folder / "head")
    (folder / "sets").mkdir()
    for name, turns, count in (("gsm8k", 1, 2), ("mt-bench", 2, 2), ("riddles", 1, 1)):
        rows = [{"id": f"{name}-{i}", "turns": [f"{name} {i}", "more"][:turns]} for i in range(count)]
        (folder / "sets" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(folder: Path, out: str, **changes: object) -> EvalConfig:
    base = EvalConfig(
        prompts=(str(folder / "sets"),),
        out=folder / out,
        model=str(folder / "model"),
        drafters=(str(folder / "head"), "ngram"),
        temperatures=(0.0, 1.0),
        max_new_tokens=8,
        place={"dtype": "float32", "device": "cpu"},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(folder: Path) -> eval_cli.Result:
    return eval_cli.run(config(folder, "whole"))


def test_every_drafter_answers_every_turn_at_every_temperature(folder: Path, whole: eval_cli.Result) -> None:
    names = {cell.folder.name for cell in whole.cells}
    assert names == {f"{label}-t{t}" for label in ("none", "head", "ngram") for t in (0, 1)} and whole.finished
    for cell in whole.cells:
        assert len(cell.answers) == 2 + 4 + 1
        assert {(a.set, a.domain) for a in cell.answers} == {
            ("gsm8k", "math"),
            ("mt-bench", "chat"),
            ("riddles", "riddles"),
        }
    greedy, sampled = whole.comparison.temperatures
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    assert [d.label for d in greedy.drafters] == ["none", "head", "ngram"]
    for drafter in greedy.drafters[1:]:
        assert drafter.identical == (5, 5) and drafter.mean.speedup is not None
        assert set(drafter.domains) == {"math", "chat", "riddles"} and drafter.left_out == 0
    assert sampled.drafters[1].identical is None
    assert (
        greedy.drafters[0].mean.acceptance_length.value == 1.0 == greedy.drafters[0].mean.committed_per_verified.value
    )


def test_greedy_drafts_do_not_change_an_answer_and_later_turns_follow_their_own(whole: eval_cli.Result) -> None:
    cells = {cell.folder.name: {a.key: a for a in cell.answers} for cell in whole.cells}
    for key, answer in cells["none-t0"].items():
        assert cells["head-t0"][key].token_ids == answer.token_ids == cells["ngram-t0"][key].token_ids
    # a second turn's prompt holds the first answer: its length tells
    for name in ("head-t1", "none-t1"):
        first, second = (cells[name]["mt-bench", "mt-bench-0", turn] for turn in (0, 1))
        assert second.prompt_tokens > first.prompt_tokens + len(first.token_ids) - 1
    assert any(cells["head-t1"][key].token_ids != cells["none-t1"][key].token_ids for key in cells["head-t1"])


def test_shared_passes_and_more_processes_give_the_same_answers(folder: Path, whole: eval_cli.Result) -> None:
    one = {cell.folder.name: {a.key: a for a in cell.answers} for cell in whole.cells}
    shared = config(folder, "shared", rows=2, processes=2, temperatures=(1.0,), drafters=(str(folder / "head"),))
    other = eval_cli.run(shared)
    assert len(list((folder / "shared" / "head-t1").glob("answers-*.jsonl"))) == 2
    for cell in other.cells:
        for answer in cell.answers:
            same = one[cell.folder.name][answer.key]
            assert (answer.token_ids, answer.seed) == (same.token_ids, same.seed)
            assert [(r.accepted, r.draft_tokens) for r in answer.rounds] == [
                (r.accepted, r.draft_tokens) for r in same.rounds
            ]
    assert other.comparison.temperatures[0].drafters[1].mean.speedup is None  # shared passes have no speeds


def test_a_kill_costs_the_answer_under_way(folder: Path, whole: eval_cli.Result) -> None:
    run = config(folder, "killed", undrafted=False, temperatures=(1.0,), drafters=(str(folder / "head"),))
    eval_cli.run(replace(run, limit=1))
    path = folder / "killed" / "head-t1" / "answers-0.jsonl"
    text = path.read_text()
    assert text.count("\n") == 4
    path.write_text(text[: len(text) - 40])  # torn in its last line
    assert len(read_answers(path.parent)) == 3
    eval_cli.run(run)
    kept = {a.key: a.token_ids for a in read_answers(path.parent).values()}
    assert kept == {a.key: a.token_ids for cell in whole.cells if cell.folder.name == "head-t1" for a in cell.answers}
    assert path.read_text().startswith(text[: text.index("\n")])  # what was there is kept


def test_a_killed_process_goes_on_with_the_same_command(folder: Path, whole: eval_cli.Result) -> None:
    run = config(folder, "shot", undrafted=False, temperatures=(1.0,), drafters=(str(folder / "head"),))
    child = fork(eval_cli.run, run)
    path = folder / "shot" / "head-t1" / "answers-0.jsonl"
    for _ in range(6000):
        if path.is_file() and path.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="another `dspark eval` is at work"):
        eval_cli.run(run)
    child.kill()  # nothing of ours runs any more
    child.join()
    there = read_answers(path.parent)
    assert 3 <= len(there)  # what had ended is on the disk
    eval_cli.run(run)
    wanted = {a.key: a.token_ids for cell in whole.cells if cell.folder.name == "head-t1" for a in cell.answers}
    found = read_answers(path.parent)
    assert {key: a.token_ids for key, a in found.items()} == wanted
    assert all(found[key].decode_seconds == a.decode_seconds for key, a in there.items())  # not played again


def test_records_of_something_else_are_refused(folder: Path, whole: eval_cli.Result) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens 8, not 13.*name another --out"):
        eval_cli.run(config(folder, "whole", max_new_tokens=13))
    with pytest.raises(ConfigError, match="seed"):
        eval_cli.run(config(folder, "whole", sampling=SamplingParams(seed=1)))
    changed = folder / "changed"
    changed.mkdir()
    text = (folder / "sets" / "gsm8k.jsonl").read_text()
    (changed / "gsm8k.jsonl").write_text(text.replace("gsm8k 1", "another"))
    with pytest.raises(ConfigError, match="other words of prompt 'gsm8k-1'"):
        eval_cli.run(config(folder, "whole", prompts=(str(changed),)))
    (folder / "foreign" / "head-t0").mkdir(parents=True)
    (folder / "foreign" / "head-t0" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="no evaluation's"):
        eval_cli.run(config(folder, "foreign", undrafted=False, drafters=(str(folder / "head"),)))


def test_minutes_end_a_run_that_goes_on_later(folder: Path) -> None:
    run = config(folder, "timed", drafters=("ngram",), temperatures=(0.0,), undrafted=False)
    cut = eval_cli.run(replace(run, minutes=1e-6))
    assert not cut.finished and len(cut.cells[0].answers) == 1  # one conversation is always begun
    assert eval_cli.run(run).finished and len(find_cells([run.out])[0].answers) == 7


def test_a_drafter_added_later_is_compared_with_those_there(folder: Path, whole: eval_cli.Result) -> None:
    one = config(folder, "whole", drafters=(f"again={folder / 'head'}",), temperatures=(0.0,))
    result = eval_cli.run(one, against="head")
    greedy = result.comparison.temperatures[0]
    (again,) = [d for d in greedy.differences if d.label == "again"]
    assert again.against == "head"
    assert again.acceptance_length["mean"].value == 0.0 and again.acceptance_ratio["math"].value == 1.0
    paired = again.acceptance_length["math"]
    assert paired.low == 0.0 == paired.high and again.acceptance_length["riddles"].low is None  # of one prompt


def test_the_command_prints_tables_markdown_and_json(folder: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(evaluate)
    base = ["--prompts", str(folder / "sets" / "gsm8k.jsonl"), "--out", str(folder / "printed"), "--dtype", "float32"]
    base += ["--model", str(folder / "model"), "-d", str(folder / "head"), "--max-new-tokens", "8", "--limit", "2"]

    def run(*more: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*base, *more], env={"COLUMNS": "160"})
        assert done.exit_code == code, done.output
        return done.stdout

    shown = run()
    assert "greedy: all sets" in shown and "gsm8k" in shown and "conditional acceptance by position" in shown
    table = run("--markdown")
    assert "| drafter | accepted | per verified |" in table and table == (folder / "printed/figures.md").read_text()
    assert "## greedy: confidences of head" in table and "100 are needed" in table  # too few rounds for STS
    data = json.loads(run("--json"))
    (confidence,) = data["fields"]["confidence"]
    assert len(confidence["quality"]) == 4 and confidence["calibrated"] is None and "math" in confidence["sweeps"]
    drafters = data["fields"]["temperatures"][0]["drafters"]
    assert drafters[1]["mean"]["acceptance_length"]["value"] >= 1.0 and data["provenance"]["command"]
    assert drafters[1]["sets"]["gsm8k"]["prompts"] == 2


def test_a_threshold_cuts_the_rounds_that_are_recorded(folder: Path, whole: eval_cli.Result) -> None:
    full = [a for cell in whole.cells if cell.folder.name == "head-t0" for a in cell.answers]
    threshold = statistics.median(c for a in full for r in a.rounds for c in r.confidence)
    scheduling = {"verify_len": None, "threshold": threshold, "calibration": None, "profile": None}
    run = config(folder, "cut", drafters=(str(folder / "head"),), undrafted=False, temperatures=(0.0,), limit=1)
    result = eval_cli.run(replace(run, scheduler="threshold", scheduling=scheduling))
    cut = [r for a in result.cells[0].answers for r in a.rounds]
    assert any(r.verify_len < len(r.draft_tokens) for r in cut)
    assert all(c >= threshold - 1e-6 for r in cut for c in r.confidence[: r.verify_len])
    one = {a.key: a.token_ids for a in full}
    assert all(one[a.key] == a.token_ids for a in result.cells[0].answers)  # and not the text
    with pytest.raises(ConfigError, match=r"scheduler \{'name': 'threshold'.*not \{'name': 'fixed'"):
        eval_cli.run(run)
    skip = {"verify_len": None, "threshold": None, "calibration": None, "profile": None}
    skipped = eval_cli.run(replace(run, out=folder / "skip", scheduler="skip", scheduling=skip)).cells[0]
    assert skipped.about["facts"]["kind"] == "dspark" and all(one[a.key] == a.token_ids for a in skipped.answers)
    assert any(not r.draft_tokens for a in skipped.answers for r in a.rounds)  # its drafts are bad: it pauses
    ngram = replace(run, out=folder / "none", drafters=("ngram",), scheduler="threshold", scheduling=scheduling)
    with pytest.raises(ScheduleError, match="ngram gives none"):
        eval_cli.run(ngram)


def test_settings_that_cannot_be_are_refused_before_the_model_is_loaded(folder: Path) -> None:
    for changes, words in (
        ({"drafters": ("a/x", "b/x")}, "two drafters are called 'x'"),
        ({"temperatures": (0.0, 0.0)}, "temperature is"),
        ({"rows": 0}, "rows is 0"),
        ({"minutes": 0.0}, "minutes is 0.0"),
        ({"scheduler": "threshold"}, "threshold is missing"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(folder, "never", **changes)
    assert not (folder / "never").exists()
