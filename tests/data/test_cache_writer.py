"""Building a cache: the documented bytes, whatever kills it, whoever shares the work, and never a full disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_fakes import TAPS, independent_read, table_build, table_form, table_samples, table_target
from strikes import kills

from dspark.data import cache_writer
from dspark.data.cache_reader import FeatureCache
from dspark.data.features import Sample, target_states
from dspark.errors import ConfigError, DataError

FORMS = [("deepspec", "bfloat16"), ("small", "float32"), ("small", "float8_e4m3")]


@pytest.fixture(autouse=True)
def same_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whole folders can be compared byte for byte."""
    monkeypatch.setattr(cache_writer, "provenance", lambda: {"git_commit": "abc"})


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_independent_reader_finds_what_the_target_said(tmp_path: Path) -> None:
    target, samples = table_target(), table_samples()
    build = table_build(tmp_path / "cache", table_form("deepspec"), samples)
    assert build.run(target) and len(build.shards) > 2
    found = independent_read(tmp_path / "cache")
    assert len(found) == len(samples)
    for stored, sample in zip(found, samples, strict=True):
        states = target_states(target, sample, TAPS)
        assert torch.equal(stored["ids"], sample.token_ids.int()) and bool((stored["attention"] == 1).all())
        assert torch.equal(stored["loss"].bool(), sample.loss_mask)
        assert torch.equal(stored["features"], states.features.bfloat16())
        assert torch.equal(stored["last"], states.final.bfloat16())


def test_the_plan_is_true_to_the_byte(tmp_path: Path) -> None:
    for form, encoding in FORMS:
        build = table_build(tmp_path / f"{form}-{encoding}", table_form(form, encoding), table_samples())
        build.run(table_target())
        assert build.nbytes == sum(p.stat().st_size for p in build.folder.glob("shard-*.bin"))
        assert not build.todo() and FeatureCache(build.folder).nbytes == build.nbytes


def build_slowly(folder: Path, form: str, encoding: str) -> None:
    """In a process of its own: a build that takes long enough to be killed at any of its moments."""
    torch.set_num_threads(1)
    table_build(folder, table_form(form, encoding), table_samples()).run(
        table_target(), on_sample=lambda sample: time.sleep(0.01)
    )


@pytest.mark.parametrize(("form", "encoding"), FORMS)
def test_a_build_killed_at_any_moment_resumes_to_the_same_bytes(tmp_path: Path, form: str, encoding: str) -> None:
    table_build(tmp_path / "whole", table_form(form, encoding), table_samples()).run(table_target())
    draws, killed = random.Random(form + encoding), 0
    for _ in range(kills(8)):
        child = multiprocessing.get_context("fork").Process(
            target=build_slowly, args=(tmp_path / "torn", form, encoding)
        )
        child.start()
        time.sleep(draws.uniform(0.0, 0.08))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if not (tmp_path / "torn" / "manifest.json").exists():
            with pytest.raises(DataError, match=r"unfinished cache|is missing"):
                FeatureCache(tmp_path / "torn")
    assert killed >= 3
    build = table_build(tmp_path / "torn", table_form(form, encoding), table_samples())
    assert build.run(table_target())
    assert content(tmp_path / "torn") == content(tmp_path / "whole")


def test_finished_shards_are_not_written_again(tmp_path: Path) -> None:
    seen: list[str] = []

    def stop_late(sample: object) -> None:
        seen.append(sample.id)
        if len(seen) == 5:
            raise KeyboardInterrupt

    build = table_build(tmp_path / "cache", table_form("deepspec"), table_samples())
    with pytest.raises(KeyboardInterrupt):
        build.run(table_target(), on_sample=stop_late)
    assert not list((tmp_path / "cache").glob(".*.partial"))
    left = [build.samples[i].id for shard in build.todo() for i in range(shard.first, shard.end)]
    seen.clear()
    assert build.run(table_target(), on_sample=lambda sample: seen.append(sample.id))
    assert seen == left and 0 < len(left) < len(build.samples)


def test_several_processes_write_the_bytes_that_one_writes(tmp_path: Path) -> None:
    table_build(tmp_path / "one", table_form("small"), table_samples()).run(table_target())
    for rank in (2, 0, 1):
        build = table_build(tmp_path / "three", table_form("small"), table_samples())
        assert build.run(table_target(), rank=rank, world=3) == (rank == 1)
    assert content(tmp_path / "three") == content(tmp_path / "one")
    with pytest.raises(ConfigError, match="rank is 3 of 3"):
        build.todo(3, 3)


def test_a_shard_under_way_in_another_process_is_left_alone(tmp_path: Path) -> None:
    build = table_build(tmp_path / "cache", table_form("deepspec"), table_samples())
    build.folder.mkdir()
    build._claim()
    with cache_writer._open_alone(build.folder / ".shard-00000.bin.partial") as file:
        file.write(b"theirs")
        file.flush()
        with pytest.raises(ConfigError, match="another process"):
            build.run(table_target())
        assert (build.folder / ".shard-00000.bin.partial").read_bytes() == b"theirs"


Usage = namedtuple("Usage", "total used free")


def disk_with(free: Callable[[], int]) -> Callable[[Path], Usage]:
    return lambda path: Usage(10**12, 0, free())


def test_a_disk_too_small_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = table_build(tmp_path / "cache", table_form("deepspec"), table_samples(), reserve_bytes=1000)
    monkeypatch.setattr(shutil, "disk_usage", disk_with(lambda: build.nbytes + 999))
    with pytest.raises(
        ConfigError, match=rf"{build.nbytes + 999:,} bytes free; {build.nbytes:,} are still needed.* 1,000"
    ):
        build.run(table_target())
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", disk_with(lambda: build.nbytes + 1000))
    assert build.run(table_target())


def test_a_disk_that_others_fill_stops_the_build_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_build(tmp_path / "whole", table_form("deepspec"), table_samples()).run(table_target())
    build = table_build(tmp_path / "cache", table_form("deepspec"), table_samples())
    frees = iter([10**9] * 5)
    monkeypatch.setattr(shutil, "disk_usage", disk_with(lambda: next(frees, 10)))
    with pytest.raises(ConfigError, match="10 bytes free"):
        build.run(table_target())
    finished = [shard for shard in build.shards if shard not in build.todo()]
    assert finished and not list(build.folder.glob(".*.partial"))
    monkeypatch.setattr(shutil, "disk_usage", disk_with(lambda: 10**9))
    assert build.run(table_target()) and content(build.folder) == content(tmp_path / "whole")


def test_a_write_that_fails_for_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = table_build(tmp_path / "cache", table_form("deepspec"), table_samples())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cache_writer.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):  # the build's own description does not fit either
            build.run(table_target())
    build._claim()
    monkeypatch.setattr(cache_writer.os, "replace", full)
    monkeypatch.setattr(cache_writer, "atomic_write_bytes", lambda *_: None)
    with pytest.raises(ConfigError, match="disk is full"):
        build.run(table_target())


def renamed(sample: Sample) -> Sample:
    return replace(sample, id="another#0")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"form": table_form("small")}, "form"),
        ({"samples": table_samples(6)}, "the samples"),
        ({"samples": [*table_samples(6), renamed(table_samples()[6])]}, "the samples"),
        ({"shard_bytes": 900}, "num_shards|shard_bytes"),
    ],
)
def test_another_build_in_the_same_folder_is_refused_by_field(tmp_path: Path, change: dict, field: str) -> None:
    table_build(tmp_path, table_form("deepspec"), table_samples()).run(table_target(), world=2)
    with pytest.raises(ConfigError, match=rf"^({field}) .* was begun with"):
        table_build(tmp_path, **{"form": table_form("deepspec"), "samples": table_samples(), **change})


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds files but no"):
        table_build(tmp_path, table_form("deepspec"), table_samples())


def test_states_that_are_not_finite_are_refused_by_sample(tmp_path: Path) -> None:
    target = table_target()
    target.states[:] = float("nan")
    with pytest.raises(DataError, match=r"sample s0#0: .* not finite"):
        table_build(tmp_path / "cache", table_form("deepspec"), table_samples()).run(target)
