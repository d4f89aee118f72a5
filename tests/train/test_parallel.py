"""Several processes train one drafter: the same parameters as one process, whatever is shared and however often cut."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import lines, of_method, run_ranks, tiny_config

from dspark.errors import ConfigError, RunError
from dspark.train.config import TrainConfig
from dspark.train.ranks import ALONE, Ranks, joined
from dspark.train.run import train

STEPS = 50


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Fifty steps that learn states first and then blocks of growing size."""
    config = tiny_config(tmp_path_factory.mktemp("training"))
    return replace(
        config,
        steps=STEPS,
        state_steps=6,
        curriculum=((0.3, 2), (1.0, 0)),
        log_every=10,
        evaluate_every=25,
        save_seconds=99.0,
        learning_rate=3e-3,
    )


def train_here(ranks: Ranks, config: TrainConfig) -> None:
    train(config, ranks=ranks)


def state(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / f"state-{config.steps:08d}" / "state.safetensors")


def assert_same_run(ours: TrainConfig, theirs: TrainConfig) -> None:
    """Equal parameters, moments and figures, to what another order of sums may change."""
    a, b = state(ours), state(theirs)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4 if name.startswith("optim/") else 0)
    logged, expected = lines(Path(ours.out)), lines(Path(theirs.out))
    assert logged.keys() == expected.keys()
    for key, line in logged.items():
        for field, value in line.items():
            assert value == pytest.approx(expected[key][field], abs=2e-4, nan_ok=True), (key, field)


@pytest.fixture(scope="module")
def alone(base: TrainConfig) -> TrainConfig:
    config = replace(base, out=f"{base.out}-alone")
    train(config)
    return config


@pytest.mark.parametrize(
    "size, fields",
    [
        (2, {"parallel": "ddp", "blocks_per_pass": 2}),
        (4, {"parallel": "ddp"}),
        (2, {"parallel": "fsdp", "blocks_per_pass": 5}),
    ],
)
def test_several_processes_make_the_run_of_one(
    base: TrainConfig, alone: TrainConfig, tmp_path: Path, size: int, fields: dict
) -> None:
    config = replace(base, out=str(tmp_path / "run"), **fields)
    assert run_ranks(size, train_here, config) == [0] * size
    assert_same_run(config, alone)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["calls"][0]["processes"] == size


def test_passes_make_the_step_of_one(base: TrainConfig, alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, out=str(tmp_path / "run"), blocks_per_pass=4)
    train(config)
    assert_same_run(config, alone)


def test_rounds_are_played_once_for_all_processes(base: TrainConfig, tmp_path: Path) -> None:
    played = {"played_from": 0.5, "played_steps": 2, "played_texts": 3, "played_tokens": 12}
    whole = replace(base, out=str(tmp_path / "whole"), steps=6, state_steps=0, evaluate_every=6, log_every=1, **played)
    train(whole)
    shared = replace(whole, out=str(tmp_path / "shared"), parallel="fsdp", blocks_per_pass=4)
    assert run_ranks(2, train_here, shared) == [0, 0]
    assert_same_run(shared, whole)
    assert lines(tmp_path / "whole")[(6, "step")]["played"]["rounds"] > 0


def dies_at(ranks: Ranks, config: TrainConfig, step: int) -> None:
    """Train, and let the second process be killed after ``step`` steps, before the save; the first must say so."""
    asked = itertools.count()

    def die() -> bool:
        if ranks.rank == 1 and next(asked) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    with pytest.raises(RunError, match=r"a process of the run failed.*the same command goes on"):
        train(config, ranks=ranks, stop=die)
    os._exit(7)  # without the leave-taking of processes that are all there


def train_two_steps(ranks: Ranks, config: TrainConfig) -> None:
    asked = itertools.count()
    train(config, ranks=ranks, stop=lambda: next(asked) == 2 and ranks.rank == 1)  # one wish to stop is enough


@pytest.mark.parametrize("kind, drafter", [("ddp", "dspark"), ("fsdp", "eagle3")])
def test_a_dead_process_ends_the_run_and_another_number_goes_on(
    base: TrainConfig, tmp_path: Path, kind: str, drafter: str
) -> None:
    fields = {"steps": 8, "evaluate_every": 8, "log_every": 1, "save_seconds": 0.0}
    whole = of_method(base, drafter, out=str(tmp_path / "whole"), **fields)
    train(whole)
    torn = replace(whole, out=str(tmp_path / "torn"), parallel=kind)
    assert run_ranks(2, dies_at, torn, 4) == [7, -signal.SIGKILL]
    assert max((tmp_path / "torn").glob("state-*")).name == "state-00000003"
    size = 3 if kind == "ddp" else 2
    assert run_ranks(size, train_two_steps, torn) == [0] * size
    train(torn)
    assert_same_run(torn, whole)


def is_refused(ranks: Ranks, config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="seed"):
        train(replace(config, seed=1), ranks=ranks)


def test_bad_input_is_the_same_error_in_every_process(base: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, out=str(tmp_path / "run"), steps=1, evaluate_every=1)
    train(config)
    assert run_ranks(2, is_refused, config) == [0, 0]


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2"}, "RANK is None"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words), joined(environment):
        pass


def test_one_process_needs_no_environment() -> None:
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        with joined(environment) as ranks:
            assert ranks == ALONE and ranks.any(False, True) == [False, True] and ranks.first(lambda: 3) == 3
