"""The whole road on two tiny models that write words: from a name to a folder that decodes, through kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from strikes import kills
from tiny_writers import save_writer
from typer.testing import CliRunner, Result

import dspark.road.walk as walk
from dspark.artifacts import read_jsonl
from dspark.cli import app
from dspark.errors import ConfigError, DataError, ModelError
from dspark.road.probe import Probe
from dspark.road.road import Progress, Road, RoadConfig
from dspark.road.walk import STAGES, accelerate

PROBE = Probe(
    pass_seconds=((1, 0.004), (4, 0.004), (6, 0.004), (8, 0.0042)),
    rows=64,
    sampling_seconds=0.016,
    sample_tokens=255,
    sample_seconds=0.004,
    target_parameters=60_000,
    memory_free=8 << 30,
    disk_free=8 << 30,
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_writer(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_writer(tmp_path_factory.mktemp("models") / "tiny-gemma", "gemma"))


def road_config(model: str, out: Path, **changes: object) -> RoadConfig:
    """Few answers and steps, fixed in number, so that the clock decides nothing."""
    config = RoadConfig(
        model=model, out=str(out), budget=20.0, answers=24, steps=24, max_new_tokens=48, dtype="float32"
    )
    return replace(config, **changes)


def collected() -> tuple[Progress, list[str]]:
    lines: list[str] = []
    return Progress(say=lines.append), lines


def files(folder: Path) -> dict[str, bytes]:
    """What a road's result is made of, without what the clock decides."""
    names = ["model.safetensors", "config.json", *(f"road/{n}.jsonl" for n in ("training", "calibration", "answers"))]
    return {name: (folder / name).read_bytes() for name in names}


def figures(folder: Path) -> dict[str, object]:
    """The figures of a road that do not depend on the clock."""
    report = json.loads((folder / "report.json").read_text())
    fitted = json.loads((folder / "calibration.json").read_text())["fields"]
    fixed = report["stages"]["compare"]["reports"]["fixed"]["domains"]
    domains = {
        name: {k: found[k] for k in ("prompts", "acceptance_length", "prefix_acceptance", "identical")}
        for name, found in fixed.items()
    }
    temperatures = [fitted[k] for k in ("sts_temperatures", "fitted_rounds", "held_out_rounds", "drafter_fingerprint")]
    return {"compare": domains, "calibration": temperatures, "held_out": report["stages"]["train"]["held_out"]}


@pytest.fixture(scope="module")
def whole(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A road walked without a kill, from nothing."""
    out = tmp_path_factory.mktemp("whole") / "tiny-qwen3-drafter"
    progress, lines = collected()
    result = accelerate(road_config(qwen3, out), progress=progress, probe=PROBE)
    assert result.finished and result.folder == out
    assert [line for line in lines if "M parameters" in line] and any("expected" in line for line in lines)
    return out


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + str(result.exception)
    return result


# --- from nothing, on a Qwen3-shaped model ---------------------------------------------------------------------------


def test_a_model_alone_becomes_a_folder_that_decodes(whole: Path, qwen3: str) -> None:
    prompts = list(read_jsonl(whole / "road" / "training.jsonl"))
    assert len(prompts) == 24 and all(prompt["domain"] == "self" for prompt in prompts)
    held = {row["id"] for name in ("calibration", "compare") for row in read_jsonl(whole / "road" / f"{name}.jsonl")}
    assert not held & {prompt["id"] for prompt in prompts}
    report = json.loads((whole / "report.json").read_text())
    stages = report["stages"]
    assert set(STAGES) <= set(stages) and stages["train"]["steps"] == 24 and stages["calibrate"]["calibrated"]
    fixed = stages["compare"]["reports"]["fixed"]["mean"]
    assert fixed["identical"]["count"] + fixed["identical"]["near_ties"] == fixed["identical"]["total"] > 0
    assert fixed["acceptance_length"] > 1.0
    card = (whole / "README.md").read_text()
    assert "| self |" in card and f"{fixed['acceptance_length']:.2f}" in card
    base = ["--model", qwen3, "--drafter", str(whole), "--dtype", "float32"]
    found = json.loads(run("generate", "ab cd", *base, "--max-new-tokens", "12", "--json").stdout)
    plain = ["--model", qwen3, "--drafter", "none", "--dtype", "float32"]
    assert (
        found["token_ids"]
        == json.loads(run("generate", "ab cd", *plain, "--max-new-tokens", "12", "--json").stdout)["token_ids"]
    )


def test_generate_and_bench_find_calibration_and_profile_in_the_folder(
    whole: Path, qwen3: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = ["--model", qwen3, "--drafter", str(whole), "--dtype", "float32", "--scheduler", "greedy", "--json"]
    file = str(whole / "road" / "compare.jsonl")
    data = json.loads(run("bench", "--prompts", file, "--limit", "1", "--max-new-tokens", "8", *base).stdout)
    assert "CalibratedScheduler" in data["scheduler"] and "ProfiledGreedyScheduler" in data["scheduler"]
    assert not caplog.records
    run("generate", "ab cd", "--temperature", "1", "--max-new-tokens", "4", *base)
    assert "own calibration is of another temperature than 1" in caplog.text  # it is of greedy rounds


def test_a_finished_road_is_not_walked_again(whole: Path, qwen3: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name not in ("ledger.jsonl", "lock")}
    progress, lines = collected()
    result = accelerate(road_config(qwen3, whole, budget=999.0), progress=progress, probe=PROBE)
    assert result.finished and lines == [f"{whole} is finished already"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_other_wishes_for_the_same_folder_are_refused(whole: Path, qwen3: str) -> None:
    with pytest.raises(ConfigError, match="steps is 25"):
        accelerate(road_config(qwen3, whole, steps=25), probe=PROBE)


# --- with prompts, on a Gemma-shaped model, by the command -----------------------------------------------------------


def given_prompts(path: Path, count: int) -> Path:
    words = ["red", "green", "blue", "round", "flat", "tall", "old", "new", "warm", "cold"]
    rng = random.Random(1)
    with open(path, "w") as file:
        for i in range(count):
            text = " ".join(rng.choice(words) for _ in range(6))
            file.write(json.dumps({"prompt": text, "domain": "ab"[i % 2]}) + "\n")
    return path


def test_the_command_with_prompts_of_the_user(gemma: str, tmp_path: Path) -> None:
    file, out = given_prompts(tmp_path / "prompts.jsonl", 120), tmp_path / "out"
    command = ["accelerate", gemma, "--prompts", str(file), "--out", str(out), "--budget", "20s", "--answers", "24"]
    command += ["--steps", "12", "--max-new-tokens", "48", "--dtype", "float32", "--set", "block_size=3"]
    result = run(*command)
    assert result.stdout.splitlines()[-1].endswith("out") and "times the speed" in result.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["block_size"] == 3 and config["architectures"] == ["Qwen3DSparkModel"]
    report = json.loads((out / "report.json").read_text())
    assert set(report["stages"]["compare"]["reports"]["fixed"]["domains"]) == {"a", "b"}
    assert report["stages"]["train"]["fields"]["initialise"] == "fresh"  # Gemma's norms are not the drafter's
    again = run(*command)
    assert "finished already" in again.stderr


# --- kills -----------------------------------------------------------------------------------------------------------


def walk_until_killed(config: RoadConfig, stage: str, ticks: int) -> None:
    """In a process of its own: die without a goodbye once the clock was read so often after ``stage`` began.

    What it says until then is added to the file ``said`` beside the road's folder.
    """
    torch.set_num_threads(1)
    left: Iterator[int] | None = None

    def clock() -> float:
        if left is not None and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    def begun(name: str) -> Callable[[Road], dict[str, object]]:
        def stage_of(road: Road) -> dict[str, object]:
            nonlocal left
            left = iter(range(ticks)) if name == stage else None
            return STAGES_BEFORE[name](road)

        return stage_of

    walk.STAGES.update({name: begun(name) for name in STAGES_BEFORE})
    with open(Path(config.out).with_name("said"), "a") as said:
        progress = Progress(say=lambda line: print(line, file=said, flush=True))
        accelerate(config, progress=progress, clock=clock, probe=PROBE)


def killed(config: RoadConfig, stage: str, ticks: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=walk_until_killed, args=(config, stage, ticks))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, f"{stage} ended before {ticks} readings of the clock"


STAGES_BEFORE = dict(STAGES)
TICKS = {"prompts": 60, "answers": 60, "train": 20, "calibrate": 20, "profile": 2, "compare": 6}  # all below a stage's


def test_kills_in_every_stage_leave_no_trace(qwen3: str, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    config = road_config(qwen3, tmp_path / whole.name, fields={"save_seconds": 0.0})
    times = kills(1)
    for stage, most in TICKS.items():
        for _ in range(times):
            killed(config, stage, rng.randint(1, max(1, most // times)))
    progress, lines = collected()
    accelerate(config, progress=progress, probe=PROBE)
    assert files(tmp_path / whole.name) == files(whole)
    assert figures(tmp_path / whole.name) == figures(whole)
    assert [line for line in lines if "done" in line] == [
        *(f"{name}: done before" for name in ("prompts", "answers", "train", "calibrate", "profile")),
        "compare: is done again",
    ]


def test_a_killed_training_says_what_is_done_again(qwen3: str, whole: Path, tmp_path: Path) -> None:
    config = road_config(qwen3, tmp_path / whole.name, fields={"save_seconds": 3600.0})  # however slow the machine is
    killed(config, "train", 12)
    killed(config, "calibrate", 1)
    said = [line for line in (tmp_path / "said").read_text().splitlines() if "training goes on" in line]
    logged = re.fullmatch(r"training goes on from step 0; (\d+) logged steps are done again", said[0])
    assert len(said) == 1 and logged and 5 <= int(logged[1]) <= 12
    files_before = {name: data for name, data in files(whole).items() if name.endswith((".safetensors", "config.json"))}
    assert files_before == {name: (tmp_path / whole.name / name).read_bytes() for name in files_before}


# --- time ------------------------------------------------------------------------------------------------------------


class CountingClock:
    """Every reading takes a twentieth of a second: passes and steps, between which it is read, cost fixed times."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.05
        return self.now


def test_a_budget_is_kept_on_a_fake_clock(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = given_prompts(tmp_path / "prompts.jsonl", 200)
    config = road_config(qwen3, tmp_path / "out", budget=60.0, answers=None, steps=None, prompts=str(prompts))

    def enough(road: Road) -> dict[str, object]:
        raise KeyboardInterrupt  # what follows the training is short, and takes the time that it was planned to take

    monkeypatch.setitem(walk.STAGES, "calibrate", enough)
    with pytest.raises(KeyboardInterrupt):
        accelerate(config, clock=CountingClock(), probe=PROBE)
    rows = list(read_jsonl(tmp_path / "out" / "road" / "ledger.jsonl"))
    done = {row["stage"]: row for row in rows if row["event"] == "done"}
    tail = sum(done["plan"]["facts"]["plan"]["seconds"][name] for name in ("calibrate", "profile", "compare"))
    assert abs(done["train"]["spent"] + tail - 60.0) < 6.0, (done["train"]["spent"], tail)
    logged = read_jsonl(tmp_path / "out" / "road" / "train" / "log.jsonl")
    rates = [line["learning_rate"] for line in logged if "learning_rate" in line]
    assert rates[-1] < 0.2 * max(rates)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused_before_any_work(qwen3: str, tmp_path: Path) -> None:
    base = str(save_writer(tmp_path / "base", "qwen3", template=False))
    with pytest.raises(ModelError, match=r"no chat template.*give prompts"):
        accelerate(road_config(base, tmp_path / "a"), probe=PROBE)
    with pytest.raises(ConfigError, match="too little for this model"):
        accelerate(road_config(qwen3, tmp_path / "b", budget=1.0, answers=None, steps=None), probe=PROBE)
    with pytest.raises(ConfigError, match="memory beside the model"):
        accelerate(road_config(qwen3, tmp_path / "c"), probe=replace(PROBE, memory_free=1 << 18))
    with pytest.raises(ConfigError, match="its disk has"):
        accelerate(road_config(qwen3, tmp_path / "d"), probe=replace(PROBE, disk_free=1 << 20))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        accelerate(road_config(qwen3, tmp_path / "full"), probe=PROBE)
    with pytest.raises(ConfigError, match="layers is 0"):
        accelerate(road_config(qwen3, tmp_path / "f", fields={"layers": 0}), probe=PROBE)
    with pytest.raises(ConfigError, match="--set out: the road chooses"):
        road_config(qwen3, tmp_path / "g", fields={"out": "elsewhere"})
    few = given_prompts(tmp_path / "few.jsonl", 6)
    with pytest.raises(DataError, match="prompts are"):
        accelerate(road_config(qwen3, tmp_path / "e", prompts=str(few)), probe=PROBE)


def test_a_model_without_template_takes_prompts_as_raw_text(tmp_path: Path) -> None:
    base = str(save_writer(tmp_path / "base", "qwen3", template=False))
    prompts = given_prompts(tmp_path / "prompts.jsonl", 60)
    config = road_config(base, tmp_path / "out", prompts=str(prompts), answers=12, steps=3, max_new_tokens=24)
    assert accelerate(config, probe=PROBE).finished
