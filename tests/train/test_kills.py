"""A training run killed at any moment resumes bit for bit: the same losses, the same drafters."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strikes import kills
from tiny_run import fork, lines, of_method, tiny_config

import dspark.artifacts
import dspark.train.run
import dspark.train.state
from dspark.train.config import DRAFTERS, TrainConfig
from dspark.train.run import train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return replace(tiny_config(tmp_path_factory.mktemp("training")), state_steps=2)


@pytest.fixture(scope="module")
def whole(base: TrainConfig) -> TrainConfig:
    """The run that nothing disturbs."""
    config = replace(base, out=f"{base.out}-whole", save_seconds=99.0)
    train(config)
    return config


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def assert_bit_identical(torn: TrainConfig, whole: TrainConfig) -> None:
    ours, theirs = Path(torn.out), Path(whole.out)
    assert lines(ours) == lines(theirs)
    for name in (f"state-{whole.steps:08d}/state.safetensors", "best/model.safetensors", "last/model.safetensors"):
        a, b = load_file(ours / name), load_file(theirs / name)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), name


def killed_at(config: TrainConfig, step: int) -> None:
    """Die once ``step`` is logged, before it is saved."""
    train(config, on_step=lambda line: die() if line["step"] == step and "loss" in line else None)


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "dspark"])
def test_every_method_resumes_bit_for_bit(base: TrainConfig, tmp_path: Path, drafter: str) -> None:
    whole = of_method(base, drafter, out=str(tmp_path / "whole"), steps=7)
    train(whole)
    torn = replace(whole, out=str(tmp_path / "torn"))
    child = fork(killed_at, torn, 4)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    train(torn)
    assert_bit_identical(torn, whole)


def half_written(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Die with half a file on the disk."""
    Path(path).write_bytes(b"\0" * 1000)
    die()


def half_logged(folder: Path, line: dict) -> None:
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    die()


def half_deleted(folder: Path, **_: object) -> None:
    assert Path(folder).name.startswith("state-")
    (Path(folder) / "facts.json").unlink()
    die()


# where a run dies, and at which call since it was started
MOMENTS: dict[str, tuple[object, str, Callable[..., None], int]] = {
    "in the middle of a state's file": (dspark.train.state, "save_file", half_written, 3),
    "before a state is moved into place": (dspark.artifacts, "_move_into_place", die, 3),
    "before the best drafter is kept": (dspark.train.run, "save_drafter", die, 1),
    "while an old state is deleted": (dspark.train.state.shutil, "rmtree", half_deleted, 3),
    "in the middle of a line of the log": (dspark.train.run, "log", half_logged, 3),
    "before an update": (torch.optim.AdamW, "step", die, 3),
}


def killed_in(config: TrainConfig, moment: str) -> None:
    owner, name, death, fatal = MOMENTS[moment]
    real, calls = getattr(owner, name), itertools.count(1)

    def counted(*args: object, **kwargs: object) -> object:
        return death(*args, **kwargs) if next(calls) == fatal else real(*args, **kwargs)

    setattr(owner, name, counted)
    train(config)


def test_a_run_killed_at_the_worst_moments_resumes_bit_for_bit(
    base: TrainConfig, whole: TrainConfig, tmp_path: Path
) -> None:
    torn = replace(base, out=str(tmp_path / "torn"))
    for moment in MOMENTS:
        child = fork(killed_in, torn, moment)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, moment
    train(torn)
    assert_bit_identical(torn, whole)


def test_a_run_killed_at_random_moments_resumes_bit_for_bit(
    base: TrainConfig, whole: TrainConfig, tmp_path: Path
) -> None:
    """Whenever the signal comes; the first ones may find the run still loading."""
    torn, chance = replace(base, out=str(tmp_path / "torn")), random.Random(5)
    for _ in range(kills(6)):
        child = fork(train, torn)
        child.join(chance.uniform(0.1, 1.5))
        child.kill()
        child.join(60)
    train(torn)
    assert_bit_identical(torn, whole)


@pytest.mark.parametrize("drafter", ["dspark", "eagle3"])
def test_a_run_that_plays_its_rounds_resumes_bit_for_bit(base: TrainConfig, tmp_path: Path, drafter: str) -> None:
    """In the middle of a playing's steps, whose drafter is gone by then, and before the first of them."""
    played = {"played_from": 0.5, "played_steps": 3, "played_texts": 4, "played_tokens": 20, "played_temperature": 1.0}
    whole = of_method(base, drafter, out=str(tmp_path / "whole"), steps=11, save_seconds=99.0, **played)
    train(whole)
    torn = replace(whole, out=str(tmp_path / "torn"), save_seconds=0.0)
    for step in (7, 10):  # rounds are played before steps 7 and 10
        child = fork(killed_at, torn, step)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
    train(torn)
    assert_bit_identical(torn, whole)
    assert [path.name for path in (tmp_path / "torn" / "played").iterdir()] == ["00000009.safetensors"]
