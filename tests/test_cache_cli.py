"""The cache verbs, from answers to a checked cache; every mistake is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_chat import save_chat_model, save_random_drafter
from typer.testing import CliRunner, Result

from dspark import cache_runs
from dspark.cache_cli import estimate_lines, loss_lines
from dspark.cache_runs import CacheLoss, Estimate, Forecast, spread_by_tokens
from dspark.cli import app
from dspark.data.cache_reader import FeatureCache


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_chat_model(folder / "model")
    save_random_drafter(folder / "drafter")
    with open(folder / "prompts.jsonl", "w") as prompts, open(folder / "answers.jsonl", "w") as answers:
        for i in range(8):
            prompts.write(json.dumps({"id": f"p{i}", "turns": [f"count {i}"], "domain": "ab"[i % 2]}) + "\n")
            ids = [40 + (i + k) % 9 for k in range(10 + 5 * i)]
            answers.write(json.dumps({"id": f"p{i}", "sample": 0, "answer_ids": ids}) + "\n")
    return folder


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["cache", *options])


def run_on(data: Path, verb: str, out: Path, *options: str) -> Result:
    given = ["--answers", f"{data}/answers.jsonl", "--prompts", f"{data}/prompts.jsonl", "--model", f"{data}/model"]
    given += ["--out", str(out), "--set", "taps=[0,2]", "--set", "dtype=float32", "--set", "held_out=2"]
    return run(verb, *given, *options)


def ok(result: Result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_an_estimate_is_what_the_build_takes_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    found = json.loads(ok(run_on(data, "estimate", tmp_path / "cache", "--measured", "2", "--json")))
    assert not list(tmp_path.iterdir())
    assert found["samples"] == 8 and found["measured_samples"] == 2 and found["left_out"] == []
    assert all(cast["seconds"] > 0 for cast in found["forecasts"])
    sizes = {(cast["form"], cast["encoding"]): cast["nbytes"] for cast in found["forecasts"]}
    for form, encoding in (("deepspec", "bfloat16"), ("small", "int8")):
        out = tmp_path / form
        assert ok(run_on(data, "build", out, "--form", form, "--encoding", encoding)).strip() == str(out)
        assert FeatureCache(out).nbytes == sizes[form, encoding]
    text = ok(run_on(data, "estimate", tmp_path / "deepspec", "--measured", "1"))
    assert "8 samples" in text and "deepspec  bfloat16" in text and "small     float8_e4m3" in text


def test_a_build_is_shared_goes_on_and_is_checked(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    first = run_on(data, "build", out, "--rank", "0", "--world", "2")  # the only shard is the other's
    assert first.exit_code == 0 and not first.stdout and "1 shards are left to the others" in first.stderr
    assert run("check", str(out)).exit_code == 2
    assert ok(run_on(data, "build", out, "--rank", "1", "--world", "2")).strip() == str(out)
    assert "0 of them to write here" in run_on(data, "build", out).stderr
    facts = json.loads(ok(run("check", str(out), "--json")))
    assert facts["taps"] == [0, 2] and facts["samples"] == 8 and facts["checksums"] and facts["loss"] is None
    wrong = run_on(data, "build", out, "--set", "max_tokens=48")
    assert wrong.exit_code == 2 and "the samples (answers, prompts, max_tokens" in wrong.stderr


def test_a_check_measures_what_an_encoding_costs_a_drafter(data: Path, tmp_path: Path) -> None:
    model, drafter = ("--model", f"{data}/model"), ("--drafter", f"{data}/drafter")
    losses = {}
    for encoding in ("float32", "bfloat16", "float8_e4m3", "int8"):
        out = tmp_path / encoding
        ok(run_on(data, "build", out, "--form", "small", "--encoding", encoding, "--set", "draft_vocab=0"))
        losses[encoding] = json.loads(ok(run("check", str(out), *model, *drafter, "--measure", "3", "--json")))["loss"]
    exact = losses["float32"]
    assert exact["feature_error"] == exact["state_error"] == 0.0
    assert exact["acceptance_length"] == exact["acceptance_length_cached"] > 1.0
    assert 0 < losses["bfloat16"]["feature_error"] < 2**-8 < losses["int8"]["feature_error"] < 0.02
    assert losses["int8"]["feature_error"] < losses["float8_e4m3"]["feature_error"] < 2**-4
    assert losses["float8_e4m3"]["feature_error"] <= losses["float8_e4m3"]["feature_error_max"] < 2**-4
    for loss in losses.values():
        assert loss["samples"] == 3 and loss["acceptance_length"] == exact["acceptance_length"]
        assert loss["acceptance_length_cached"] == pytest.approx(exact["acceptance_length"], abs=0.1)
    text = ok(run("check", str(tmp_path / "int8"), *model, *drafter))
    assert "features differ" in text and "analytic acceptance length" in text and "all good" in text


def test_damage_and_foreign_targets_end_in_one_line(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    ok(run_on(data, "build", out))
    shutil.copytree(data / "model", tmp_path / "tuned")
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    name = next(name for name in weights if name.endswith("gate_proj.weight"))
    weights[name][0, 0] += 1e-3
    save_file(weights, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    refused = run("check", str(out), "--model", f"{tmp_path}/tuned")
    assert refused.exit_code == 2 and "weights are others" in refused.stderr and refused.stderr.count("\n") == 1
    ok(run("check", str(out), "--model", f"{data}/model"))
    shard = bytearray((out / "shard-00000.bin").read_bytes())
    shard[len(shard) // 2] ^= 16
    (out / "shard-00000.bin").write_bytes(shard)
    damaged = run("check", str(out))
    assert damaged.exit_code == 2 and "1 shards are damaged" in damaged.stderr and "shard-00000.bin" in damaged.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--form", "tiny"), "form is 'tiny'"),
        (("--form", "deepspec", "--encoding", "int8"), "encoding is 'int8'"),
        (("--form", "small", "--encoding", "int4"), "encoding is 'int4'"),
        (("--rank", "2", "--world", "2"), "rank is 2 of 2"),
        (("--reserve-mib", str(1 << 40)), "kept free"),
        (("--set", "tap=[0]"), "no such field"),
    ],
)
def test_what_cannot_be_built_is_refused(data: Path, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    result = run_on(data, "build", tmp_path / "cache", *options)
    assert result.exit_code == 2 and words in result.stderr, result.output
    assert not (tmp_path / "cache").exists()


def test_measuring_needs_a_model(tmp_path: Path) -> None:
    result = run("check", str(tmp_path), "--measure", "2")
    assert result.exit_code == 2 and "--model is not given" in result.stderr


def test_measured_samples_stand_for_the_tokens_not_for_the_samples() -> None:
    lengths = [10] * 90 + [910]  # half of the tokens are in one sample
    assert spread_by_tokens(lengths, 1) == [90] and spread_by_tokens(lengths, 2) == [45, 90]
    assert spread_by_tokens([5], 8) == [0]


def test_a_begun_build_keeps_its_dtype(tmp_path: Path) -> None:
    assert cache_runs.begun_dtype(tmp_path) is None and cache_runs.begun_dtype(None) is None
    (tmp_path / "dspark").mkdir()
    (tmp_path / "dspark" / "build.json").write_text(json.dumps({"fields": {"dtype": "bfloat16"}}))
    assert cache_runs.begun_dtype(tmp_path) == "bfloat16"


def test_texts() -> None:
    cast = Forecast(form="deepspec", encoding="bfloat16", nbytes=3 << 30, seconds=3725.0)
    found = Estimate(
        forecasts=(cast,), samples=2, tokens=1 << 20, free_bytes=2 << 30, measured_samples=1, measured_tokens=9,
        left_out=("small: why",),
    )  # fmt: skip
    lines = estimate_lines(found)
    assert "3,072.0 MiB" in lines[1] and "3,072 bytes a token" in lines[1] and "1:02:05  DOES NOT FIT" in lines[1]
    assert lines[2] == "left out: small: why" and "free: 2,048.0 MiB" in lines[3]
    fields = {"samples": 2, "feature_error": 0.0125, "feature_error_max": 0.5, "state_error": 0.0}
    lines = loss_lines(CacheLoss(**fields, acceptance_length=3.0, acceptance_length_cached=2.875))
    assert "1.250%" in lines[0] and "(-0.1250)" in lines[1]
    assert len(loss_lines(CacheLoss(**fields, acceptance_length=None, acceptance_length_cached=None))) == 1
