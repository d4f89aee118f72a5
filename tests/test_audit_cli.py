"""`dspark audit`: the page, the JSON, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import save_chat_model, save_random_drafter
from typer.testing import CliRunner, Result

from dspark.bundle import Bundle
from dspark.cli import app
from dspark.evaluate import audit_sampled
from dspark.evaluate.audit_flaws import FLAWS, broken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_drafter(tmp_path_factory.mktemp("drafter") / "random"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))


def run(model: str, drafter: str, *arguments: str) -> Result:
    command = ("audit", "--model", model, "--drafter", drafter, "--device", "cpu", "--limit", "1", *arguments)
    return CliRunner().invoke(app, list(command))


def test_greedy_parts_pass_and_write_their_report(model: str, drafter: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    parts = ("--part", "greedy", "--part", "low", "--part", "depth", "--depths", "150", "--max-new-tokens", "8")
    result = run(model, drafter, *parts, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "output unchanged" in result.stdout and "Greedy, bfloat16" in result.stdout
    data = json.loads(file.read_text())
    assert (data["kind"], data["version"], data["verdict"]) == ("dspark-audit", 1, "unchanged")
    assert data["greedy"]["dtype"] == "float32" and data["low"]["dtype"] == "bfloat16" and data["sampled"] is None
    assert data["depth"][0]["context_tokens"] >= 150
    assert set(data["drafter_sha256"]) >= {"config.json", "model.safetensors"}
    assert data["provenance"]["libraries"]["torch"] and data["faults"] == data["weaknesses"] == []


def test_sampled_part_has_every_case_and_control(
    model: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no time at all: every case runs its first trials, and the audit says that they are too few."""
    monkeypatch.setattr(audit_sampled, "FIRST_TRIALS", 3)
    monkeypatch.setattr(audit_sampled, "MIN_CHECKS", 1)
    file = tmp_path / "report.json"
    result = run(model, drafter, "--part", "sampled", "--minutes", "0.001", "--depths", "0,150", "--json", str(file))
    assert result.exit_code == 1, result.output
    assert "output too weak" in result.stdout and "NOT CAUGHT" in result.stdout
    sampled = json.loads(file.read_text())["sampled"]
    names = " ".join(case["name"] for case in sampled["cases"])
    wanted = "full vocabulary, lookup, threshold, load-aware, block, spoilt, deep, prefill, unfiltered"
    assert all(name in names for name in wanted.split(", "))
    assert all(case["mismatches"] == 0 < case["checks"] for case in sampled["cases"])
    assert [control["flaw"] for control in sampled["controls"]] == [flaw.name for flaw in FLAWS]


def test_a_changed_output_exits_with_one(model: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dspark.decode as loop

    honest = loop.verify_greedy

    def careless(draft_tokens: Any, target_argmax: Any) -> Any:
        return honest(target_argmax[: len(draft_tokens)] if len(draft_tokens) else draft_tokens, target_argmax)

    monkeypatch.setattr(loop, "verify_greedy", careless)  # every draft stands
    result = run(model, drafter, "--part", "greedy", "--max-new-tokens", "8")
    assert result.exit_code == 1 and "output changed" in result.stdout


def test_a_broken_loop_is_intact_again_after_an_error() -> None:
    import dspark.decode as loop

    before = loop.verify
    with pytest.raises(RuntimeError), broken(FLAWS[1]):
        assert loop.verify is not before
        raise RuntimeError
    assert loop.verify is before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--part", "fast"), "part is 'fast'"),
        (("--minutes", "0"), "minutes is 0"),
        (("--depths", "ten"), "depths is 'ten'"),
        (("--depths", "9000", "--part", "depth"), "depth 9000 does not fit"),
        (("--shift", "2"), "shift is 2"),
        (("--temperature", "0"), "temperature is 0"),
        (("--drafter", "none"), "drafter is none"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_two(model: str, arguments: tuple[str, ...], words: str) -> None:
    result = run(model, "ngram", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr.splitlines()[-1]


def test_a_context_ends_in_a_begun_answer(model: str) -> None:
    from dspark.audit_cli import ANSWER_BEGUN, behind_text, context_of

    bundle = Bundle.load(model, "ngram", dtype="float32", device="cpu")
    short, deep = behind_text(bundle, "tell me", 0), behind_text(bundle, "tell me", 120)
    assert short == bundle.prompt_ids("tell me") and 115 <= len(deep) <= 125
    assert len(context_of(bundle, "tell me", 120)) == len(deep) + ANSWER_BEGUN
