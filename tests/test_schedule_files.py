"""Calibrations and profiles on disk: what comes back, what is refused, what they say to schedulers and to SGLang."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TableTarget

from dspark.core import Proposal, SamplingParams
from dspark.errors import ConfigError, DataError
from dspark.export.schedule import sglang_table, sglang_temperatures, write_table
from dspark.maths.calibrated_scheduling import CalibratedScheduler, EstimatingScheduler
from dspark.maths.scheduling import ThresholdScheduler
from dspark.models.drafter import NoDrafter
from dspark.models.registry import default_drafter_folder
from dspark.schedule_files import (
    CALIBRATION_NAMES,
    Calibration,
    Profile,
    Setting,
    check_drafts,
    drafter_fingerprint,
    folder_fingerprint,
)

QUALITY = {"count": 500, "ece": 0.05, "auc": 0.8, "conditional_auc": 0.8, "brier": 0.1, "prediction": 0.7, "label": 0.6}
CALIBRATION = Calibration(
    model="tiny",
    model_fingerprint="aa",
    drafter="head",
    drafter_fingerprint="bb",
    block_size=2,
    sampling={"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "rule": "token"},
    prompts=("data/math.jsonl",),
    sts_temperatures=(1.5, 2.0),
    estimator=None,
    fitted_rounds=900,
    held_out_rounds=800,
    before=(QUALITY, QUALITY),
    after=({**QUALITY, "ece": 0.01}, {**QUALITY, "ece": None}),
)
SETTING = Setting(model_fingerprint="aa", implementation="LeanTarget", dtype="bfloat16", device="cpu: x", threads=2)
PROFILE = Profile(
    model="tiny",
    setting=SETTING,
    contexts=(128, 1024),
    tokens_per_request=2,
    sps=((0.0, 100.0, 50.0, 80.0), (0.0, 50.0, 40.0, 20.0)),
    drafter="head",
    drafter_fingerprint="bb",
    draft_requests=(1, 4),
    draft_seconds=(0.01, 0.025),
    repeats=3,
)


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    for thing in (CALIBRATION, replace(CALIBRATION, estimator=((0.1, 0.2, 0.3, 0.4),) * 2)):
        thing.write(tmp_path / "c.json")
        assert Calibration.read(tmp_path / "c.json") == thing
    PROFILE.write(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == PROFILE
    assert json.loads((tmp_path / "p.json").read_text())["provenance"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is unreadable"),
        ("[]", "holds a list and no JSON object"),
        (json.dumps({"kind": "profile", "version": 1, "fields": {}}), "is kind 'profile', version 1"),
        (json.dumps({"kind": "calibration", "version": 9, "fields": {}}), "version 9"),
        (
            json.dumps({"kind": "calibration", "version": 1, "fields": {"model": "x"}}),
            "is no calibration of this dspark",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(DataError, match=message):
        Calibration.read(tmp_path / "c.json")
    with pytest.raises(DataError, match="is missing; make it with dspark profile"):
        Profile.read(tmp_path / "none.json")
    with pytest.raises(DataError):
        Profile.read(tmp_path / "c.json")


def test_a_calibration_is_refused_for_anything_else() -> None:
    sampled, greedy = SamplingParams(temperature=0.7), SamplingParams()
    CALIBRATION.check(model="aa", drafter="bb", sampling=sampled)
    with pytest.raises(ConfigError, match="made for model_fingerprint aa and this run has cc; run dspark calibrate"):
        CALIBRATION.check(model="cc", drafter="bb", sampling=sampled)
    with pytest.raises(ConfigError, match="drafter_fingerprint"):
        CALIBRATION.check(model="aa", drafter="cc", sampling=sampled)
    with pytest.raises(ConfigError, match=r"of temperature 1.0 and this run has 0.0"):
        CALIBRATION.check(model="aa", drafter="bb", sampling=greedy)


def test_a_profile_is_refused_for_anything_else() -> None:
    PROFILE.check(SETTING, drafter="bb", tokens=3)
    others: dict[str, Any] = {
        "model_fingerprint": "cc",
        "implementation": "TransformersTarget",
        "dtype": "float32",
        "device": "cuda: y",
        "threads": 1,
    }
    assert set(others) == set(SETTING.__dataclass_fields__)
    for name, value in others.items():
        with pytest.raises(ConfigError, match=f"made for {name} .* and this run has {value}; run dspark profile"):
            PROFILE.check(replace(SETTING, **{name: value}), drafter="bb", tokens=3)
    with pytest.raises(ConfigError, match="drafter_fingerprint"):
        PROFILE.check(SETTING, drafter="cc", tokens=3)
    with pytest.raises(ConfigError, match="covers 3 tokens and a step can carry 4; run dspark profile --max-tokens 4"):
        PROFILE.check(SETTING, drafter="bb", tokens=4)


def test_the_setting_of_this_process() -> None:
    setting = Setting.of(TableTarget(), model_fingerprint="aa")
    assert (setting.implementation, setting.dtype, setting.threads) == (
        "TableTarget",
        "float32",
        torch.get_num_threads(),
    )
    assert setting.device.startswith("cpu: ")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CALIBRATION, {"sts_temperatures": (1.0,)}, "sts_temperatures has 1 entries; block_size 2"),
        (CALIBRATION, {"estimator": ((0.0,) * 4,)}, "estimator must be 2 rows of 4"),
        (CALIBRATION, {"estimator": ((0.0,) * 3,) * 2}, "estimator must be 2 rows of 4"),
        (PROFILE, {"contexts": (1024, 128)}, "ascending"),
        (PROFILE, {"sps": ((0.0, 1.0),)}, "2 curves of one length"),
        (PROFILE, {"sps": ((0.0, 1.0), (0.0, 0.0))}, "not positive and finite"),
        (PROFILE, {"draft_seconds": (0.1,)}, "as many entries"),
    ],
)
def test_malformed_fields_are_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(kind, **fields)


def test_biases_are_kept_obeyed_and_not_exported(tmp_path: Path) -> None:
    platt = replace(CALIBRATION, biases=(-1.0, 0.5))
    platt.write(tmp_path / "c.json")
    again = Calibration.read(tmp_path / "c.json")
    assert again == platt and (again.method, CALIBRATION.method) == ("platt", "sts")
    scheduler = again.scheduler(ThresholdScheduler(0.4))
    assert isinstance(scheduler, CalibratedScheduler) and not CALIBRATION.greedy
    # logits 0 and 0: chances 1/2 become sigmoid(-1) = 0.27 and sigmoid(0.5) = 0.62
    assert scheduler.choose(Proposal(torch.tensor([1, 2]), None, torch.tensor([0.5, 0.5])), 3) == 0
    assert (
        again.scheduler(ThresholdScheduler(0.2)).choose(Proposal(torch.tensor([1]), None, torch.tensor([0.5])), 3) == 1
    )
    with pytest.raises(ConfigError, match="temperatures alone"):
        sglang_temperatures(again)
    with pytest.raises(DataError, match="biases has 1 entries"):
        replace(CALIBRATION, biases=(1.0,))


def test_the_shipped_drafter_brings_true_confidences() -> None:
    """A calibration for greedy and one for sampled requests, of these very weights, both judged on held-out rounds."""
    found = [Calibration.read(default_drafter_folder() / name) for name in CALIBRATION_NAMES]
    assert [each.greedy for each in found] == [False, True]
    for each in found:
        assert each.drafter_fingerprint == drafter_fingerprint("default") and each.method == "platt"
        for before, after in zip(each.before, each.after, strict=True):
            assert abs(after["conditional_auc"] - before["conditional_auc"]) < 1e-3
        mean = {
            name: sum(slot["ece"] * slot["count"] for slot in slots) / sum(slot["count"] for slot in slots)
            for name, slots in (("before", each.before), ("after", each.after))
        }
        assert mean["after"] <= min(0.015, mean["before"] / 2)


def test_a_calibration_wraps_a_scheduler() -> None:
    rule = ThresholdScheduler(0.5)
    assert isinstance(CALIBRATION.scheduler(rule), CalibratedScheduler)
    estimating = replace(CALIBRATION, estimator=((0.1, 0.2, 0.3, 0.4),) * 2).scheduler(rule)
    assert isinstance(estimating, EstimatingScheduler) and estimating.estimator.weights.shape == (2, 4)


def test_drafting_belongs_into_the_rounds_rate() -> None:
    """1 / 100 s of a step and 0.01 s of drafting: 50 rounds a second; and on the lines between what was measured."""
    assert PROFILE.round_curves(1)[0].tolist() == pytest.approx([0.0, 50.0, 1 / 0.03, 1 / 0.0225])
    drafting = [PROFILE.drafting(n) for n in (0, 1, 2, 4, 5)]
    assert drafting == pytest.approx([0.0, 0.01, 0.015, 0.025, 0.03])
    bare = replace(PROFILE, draft_requests=(), draft_seconds=())
    assert bare.round_curves(3).tolist() == bare.curves().tolist()


def test_sglang_tables(tmp_path: Path) -> None:
    """The fields of its two structures, by name and type, and nothing that its reader would refuse."""
    write_table(tmp_path / "sts.json", sglang_temperatures(CALIBRATION))
    table = json.loads((tmp_path / "sts.json").read_text())
    assert table == {
        "temperatures": [1.5, 2.0],
        "dataset": "math.jsonl",
        "num_samples": 900,
        "ece_before": [0.05, 0.05],
        "ece_after": [0.01, 0.0],
    }
    write_table(tmp_path / "sps.json", sglang_table(PROFILE, context=1024))
    table = json.loads((tmp_path / "sps.json").read_text())
    assert table == {
        "sample_batch_tokens": [1, 2, 3],
        "sample_steps_per_sec": [50.0, 40.0, 20.0],
        "max_batch_tokens": 3,
    }
    assert sglang_table(PROFILE)["sample_steps_per_sec"][0] == 100.0
    with pytest.raises(ConfigError, match="context is 5; the profile has 128, 1024"):
        sglang_table(PROFILE, context=5)
    with pytest.raises(ConfigError, match="no confidence head"):
        sglang_temperatures(replace(CALIBRATION, estimator=((0.1, 0.2, 0.3, 0.4),) * 2))


def test_fingerprints_tell_folders_apart(tmp_path: Path) -> None:
    """Any byte of a small weight file matters, and so does the config; names of folders do not."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(range(256)) * 40)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "c" / "model.safetensors").write_bytes(bytes(range(256)) * 39 + bytes(256))
    (tmp_path / "d" / "config.json").write_text('{"x": 1}')
    prints = [folder_fingerprint(tmp_path / name) for name in ("a", "b", "c", "d")]
    assert prints[0] == prints[1] and len(set(prints)) == 3
    assert drafter_fingerprint(str(tmp_path / "a")) == prints[0]
    assert drafter_fingerprint("ngram") == "ngram"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        folder_fingerprint(tmp_path / "empty")


def test_a_drafter_that_proposes_nothing_is_not_calibrated() -> None:
    with pytest.raises(ConfigError, match="drafter is 'none', which proposes nothing"):
        check_drafts(NoDrafter())


def test_drafting_by_depth_is_a_share_of_whole_blocks() -> None:
    measured = replace(PROFILE, draft_requests=(2, 4), draft_seconds=(0.2, 0.3), draft_depth_shares=(0.5, 0.75, 1.0))
    assert [round(measured.drafting(3, depth), 6) for depth in (0, 1, 2, 3, 9)] == [0.0, 0.125, 0.1875, 0.25, 0.25]
    assert measured.drafting(3) == pytest.approx(0.25)
    assert replace(measured, draft_depth_shares=()).drafting(3, 1) == pytest.approx(0.25)  # nothing is known of depths
    with pytest.raises(DataError, match="draft_depth_shares"):
        replace(measured, draft_depth_shares=(0.5, 0.4, 1.0))
