"""`dspark calibrate` and `dspark profile` on a tiny chat model, and decoding with what they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_chat import BLOCK, save_chat_model, save_random_drafter
from typer.testing import CliRunner

from dspark.cli import app
from dspark.errors import ConfigError
from dspark.profile_cli import read_numbers
from dspark.schedule_files import Calibration, Profile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, drafters with and without a head, and prompts."""
    folder = tmp_path_factory.mktemp("calibrate")
    save_chat_model(folder / "model")
    save_random_drafter(folder / "head")
    save_random_drafter(folder / "bare", confidence=False)
    prompts = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(12))
    (folder / "prompts.jsonl").write_text(prompts)
    return folder


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def calibrated(folder: Path, drafter: str, *more: object) -> Path:
    out = folder / f"{drafter}.json"
    if not out.is_file():
        run(
            *("calibrate", "--model", folder / "model", "--drafter", _spec(folder, drafter), "--dtype", "float32"),
            *("--prompts", folder / "prompts.jsonl", "--max-new-tokens", 96, "--out", out, *more),
        )
    return out


def _spec(folder: Path, drafter: str) -> str:
    return drafter if drafter == "ngram" else str(folder / drafter)


def generate(folder: Path, drafter: str, *more: object, code: int = 0) -> str:
    return run(
        *("generate", "hello", "--model", folder / "model", "--drafter", _spec(folder, drafter), "--dtype", "float32"),
        *("--temperature", 1, "--max-new-tokens", 20, "--json", *more),
        code=code,
    )


def test_a_head_is_calibrated_and_obeyed(folder: Path) -> None:
    out = calibrated(folder, "head", "--sglang", folder / "sts.json", "--method", "sts", "--max-new-tokens", 48)
    found = Calibration.read(out)
    assert found.method == "sts" and found.biases == ()
    assert found.block_size == BLOCK == len(found.sts_temperatures) and found.estimator is None
    assert found.fitted_rounds >= 100 and found.held_out_rounds >= 100
    assert json.loads((folder / "sts.json").read_text())["temperatures"] == list(found.sts_temperatures)
    answer = json.loads(generate(folder, "head", "--scheduler", "threshold", "--threshold", 0.5, "--calibration", out))
    assert answer["text"] or answer["token_ids"]


def test_records_are_calibrated_without_playing_anything(folder: Path) -> None:
    """The rounds of `dspark eval`: by Platt's scaling unless told otherwise, and never those of another pair."""
    pair = ("--model", folder / "model", "--drafter", folder / "head")
    run(
        *("eval", *pair, "--dtype", "float32", "--prompts", folder / "prompts.jsonl", "--out", folder / "records"),
        *("--temperature", 1, "--max-new-tokens", 40, "--rows", 6, "--no-undrafted"),
    )
    out, records = folder / "recorded.json", ("--records", folder / "records")
    shown = run("calibrate", *pair, "--temperature", 1, *records, "--out", out)
    found = Calibration.read(out)
    assert found.method == "platt" and len(found.biases) == BLOCK and "bias" in shown and "floor" in shown
    assert found.before[0]["floor"] > 0 and found.prompts == (str(folder / "prompts.jsonl"),)
    threshold = ("--scheduler", "threshold", "--threshold", 0.5)
    generate(folder, "head", *threshold, "--calibration", out)
    for more, said in (
        (("--sglang", folder / "no.json"), "temperatures alone"),
        (("--temperature", 0), "holds 0 drafters"),
        (("--prompts", folder / "prompts.jsonl"), "leave one of them out"),
        (("--drafter", folder / "bare"), "drafter_fingerprint"),
    ):
        assert said in run("calibrate", *pair, *records, "--out", folder / "x.json", *more, code=2)
    assert not (folder / "x.json").exists()


def test_a_drafter_without_a_head_gets_an_estimator_and_can_be_scheduled(folder: Path) -> None:
    threshold = ("--scheduler", "threshold", "--threshold", 0.5)
    assert "gives none" in generate(folder, "bare", *threshold, code=2)
    out = calibrated(folder, "bare")
    assert len(Calibration.read(out).estimator or ()) == BLOCK
    generate(folder, "bare", *threshold, "--calibration", out)
    run(
        *("calibrate", "--model", folder / "model", "--drafter", folder / "bare", "--dtype", "float32"),
        *("--prompts", folder / "prompts.jsonl", "--out", folder / "again.json"),
        *("--sglang", folder / "no.json", "--method", "sts"),
        code=2,
    )
    assert not (folder / "no.json").exists()


def test_a_calibration_of_something_else_is_refused(folder: Path) -> None:
    out = calibrated(folder, "head")
    greedy = generate(folder, "head", "--scheduler", "greedy", "--calibration", out, "--temperature", 0, code=2)
    assert "greedy and sampled drafts survive differently" in greedy
    other = generate(folder, "bare", "--scheduler", "greedy", "--calibration", out, code=2)
    assert "drafter_fingerprint" in other
    assert "fixed scheduler would not read" in generate(folder, "head", "--calibration", out, code=2)
    assert "proposes nothing" in run(
        *("calibrate", "--model", folder / "model", "--drafter", "none", "--out", folder / "x.json", "--limit", 1),
        code=2,
    )


def test_a_profile_is_measured_read_and_refused(folder: Path) -> None:
    out, model = folder / "profile.json", ("--model", folder / "model", "--dtype", "float32")
    shown = run(
        *("profile", *model, "--drafter", folder / "head", "--out", out, "--repeats", 1, "--max-tokens", 7),
        *("--contexts", "8,32", "--requests", "1,2", "--threads", 1, "--sglang", folder / "sps.json"),
    )
    found = Profile.read(out)
    assert found.contexts == (8, 32) and found.max_tokens == 7 and found.tokens_per_request == BLOCK + 1
    assert found.draft_requests == (1, 2) and found.setting.threads == 1
    assert "behind 32" in shown and "drafting for 2" in shown
    assert json.loads((folder / "sps.json").read_text())["max_batch_tokens"] == 7
    generate(folder, "head", "--scheduler", "greedy", "--profile", out, "--threads", 1)
    both = ("--scheduler", "greedy", "--profile", out, "--calibration", calibrated(folder, "head"))
    generate(folder, "head", *both, "--threads", 1)
    wrong = generate(
        folder, "head", "--scheduler", "greedy", "--profile", out, "--implementation", "transformers", code=2
    )
    assert "made for implementation LeanTarget and this run has TransformersTarget" in wrong
    threshold = ("--scheduler", "threshold", "--threshold", 0.5, "--profile", out)
    assert "only greedy and skip read" in generate(folder, "head", *threshold, code=2)


def test_a_profile_without_drafts(folder: Path) -> None:
    run(
        *("profile", "--model", folder / "model", "--drafter", "none", "--out", folder / "none.json", "--repeats", 1),
        *("--max-tokens", 2, "--contexts", 8),
    )
    assert Profile.read(folder / "none.json").draft_seconds == ()


def test_numbers() -> None:
    assert read_numbers("1, 8,64", name="contexts") == (1, 8, 64)
    for text in ("", "0,1", "8,1", "1,1", "x"):
        with pytest.raises(ConfigError, match="contexts is"):
            read_numbers(text, name="contexts")
