"""From a bundle to an engine: which calibration and profile it takes, and which it refuses or leaves aside."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_chat import BLOCK, save_chat_model, save_random_drafter

from dspark.bundle import Bundle
from dspark.errors import ConfigError
from dspark.models.registry import default_drafter_folder
from dspark.schedule_files import (
    CALIBRATION_NAMES,
    Calibration,
    Profile,
    Setting,
    drafter_fingerprint,
    folder_fingerprint,
)
from dspark.serve.building import build_engine
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.settings import EngineConfig

GREEDY = EngineConfig(seats=2, memory_mib=8, scheduler="greedy", prefill_tokens=8)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    model, drafter = save_chat_model(tmp_path / "model"), save_random_drafter(tmp_path / "drafter")
    return Bundle.load(str(model), str(drafter), dtype="float32", device="cpu")


def calibration(bundle: Bundle, temperature: float) -> Calibration:
    return Calibration(
        model=bundle.model,
        model_fingerprint=folder_fingerprint(bundle.folder),
        drafter=bundle.drafter_spec,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        block_size=BLOCK,
        sampling={"temperature": temperature},
        prompts=(),
        sts_temperatures=(1.5,) * BLOCK,
        estimator=None,
        fitted_rounds=1,
        held_out_rounds=1,
        before=(),
        after=(),
    )


def profile(bundle: Bundle) -> Profile:
    return Profile(
        model=bundle.model,
        setting=Setting.of(bundle.target, model_fingerprint=folder_fingerprint(bundle.folder)),
        contexts=(64,),
        tokens_per_request=5,
        sps=((0.0, *(1.0 / (1 + 0.1 * b) for b in range(1, 11))),),
        drafter=bundle.drafter_spec,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        draft_requests=(1, 2),
        draft_seconds=(0.25, 0.375),
        repeats=3,
    )


def test_given_files_are_what_it_decides_by(bundle: Bundle, tmp_path: Path) -> None:
    profile(bundle).write(tmp_path / "p.json")
    calibration(bundle, 0.0).write(tmp_path / "g.json")
    calibration(bundle, 1.0).write(tmp_path / "s.json")
    files = (tmp_path / "g.json", tmp_path / "s.json")
    engine = build_engine(bundle, GREEDY, calibrations=files, profile=tmp_path / "p.json")
    costs = engine.planner.costs
    assert costs is not None and costs.max_tokens == 2 * (1 + BLOCK) + 8
    assert costs.drafting(2, BLOCK) == 0.375 and costs.curve(10.0)[4] == pytest.approx(1.4)
    confidences = engine.planner._confidences
    assert confidences.greedy is not None and confidences.sampled is not None
    with pytest.raises(ConfigError, match="two calibrations"):
        build_engine(bundle, GREEDY, calibrations=(files[0], files[0]), profile=tmp_path / "p.json")


def test_the_drafters_own_files_are_taken_where_they_fit(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(bundle.drafter_spec)
    profile(bundle).write(folder / "profile.json")
    calibration(bundle, 0.0).write(folder / "calibration.json")
    engine = build_engine(bundle, GREEDY)
    assert engine.planner.costs is not None and engine.planner.costs.drafting(1, BLOCK) == 0.25
    assert engine.planner._confidences.greedy is not None and engine.planner._confidences.sampled is None
    calibration(bundle, 1.0).write(folder / "calibration.json")
    calibration(bundle, 0.0).write(folder / "calibration-greedy.json")  # one for each kind of requests
    both = build_engine(bundle, GREEDY).planner._confidences
    assert both.greedy is not None and both.greedy.greedy and both.sampled is not None and not both.sampled.greedy
    (folder / "calibration-greedy.json").unlink()
    replace(calibration(bundle, 0.0), model_fingerprint="another").write(folder / "calibration.json")
    with caplog.at_level(logging.WARNING):
        assert build_engine(bundle, GREEDY).planner._confidences.greedy is None
    assert "left aside" in caplog.text


def test_the_shipped_drafters_files_are_looked_for_in_its_folder(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = replace(bundle, drafter_spec="default")
    assert shipped.own_folder == default_drafter_folder() and replace(bundle, drafter_spec="ngram").own_folder is None
    with caplog.at_level(logging.WARNING):
        assert shipped.own_calibrations() == {}  # they are of another model than this one
    assert caplog.text.count("model_fingerprint") == len(CALIBRATION_NAMES)


def test_what_would_not_be_read_or_does_not_fit_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    profile(bundle).write(path)
    fixed = replace(GREEDY, scheduler="fixed")
    with pytest.raises(ConfigError, match="does not read"):
        build_engine(bundle, fixed, profile=path)
    calibration(bundle, 0.0).write(path)
    with pytest.raises(ConfigError, match="does not read"):
        build_engine(bundle, fixed, calibrations=(path,))
    replace(profile(bundle), drafter_fingerprint="another").write(path)
    with pytest.raises(ConfigError, match="drafter_fingerprint"):
        build_engine(bundle, GREEDY, profile=path)


def test_the_loop_is_a_setting(bundle: Bundle) -> None:
    assert isinstance(build_engine(bundle, replace(GREEDY, scheduler="fixed", overlap=True)), OverlappedEngine)
