"""Costs, acceptance, workload and ways of the simulator, each by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation_scenes import flat_costs

from dspark.artifacts import append_jsonl, write_manifest
from dspark.errors import ConfigError, DataError
from dspark.maths.batch_schedulers import FixedBatch, GreedyBatch, LaggedBatch, ThresholdBatch
from dspark.maths.platt import Scaling
from dspark.schedule_files import Profile, Setting
from dspark.simulate.acceptance import (
    AcceptanceModel,
    ModelledRounds,
    RecordedRounds,
    ReplayedRounds,
    conditional_acceptance,
)
from dspark.simulate.costs import ProfileCosts, SyntheticCosts
from dspark.simulate.recorded import read_records
from dspark.simulate.ways import ALL, read_way
from dspark.simulate.workload import Lengths, poisson, read_trace

# --- costs -----------------------------------------------------------------------------------------------------------


def a_profile(**changes: Any) -> Profile:
    """Steps of 10 ms plus 1 ms a token behind 100 tokens, and twice that behind 300."""
    curve = tuple(1.0 / (0.010 + 0.001 * tokens) for tokens in range(9))
    fields: dict[str, Any] = {
        "model": "m",
        "setting": Setting(model_fingerprint="f", implementation="I", dtype="float32", device="cpu: c", threads=1),
        "contexts": (100, 300),
        "tokens_per_request": 4,
        "sps": (curve, tuple(rate / 2 for rate in curve)),
        "drafter": "d",
        "drafter_fingerprint": "e",
        "draft_requests": (1, 4),
        "draft_seconds": (0.002, 0.005),
        "repeats": 3,
    }
    return Profile(**{**fields, **changes})


def test_a_synthetic_step_has_floor_slope_and_jags() -> None:
    costs = SyntheticCosts(floor_ms=5.0, us_per_token=100.0, tile=8, ns_per_context_token=1000.0)
    seconds = costs.target_seconds(1, 100, requests=10, context=0)
    assert seconds[:48] == pytest.approx(np.full(48, 5e-3))  # 48 tokens compute in 4.8 ms
    assert seconds[48:56] == pytest.approx(np.full(8, 5.6e-3))  # a tile at a time
    assert seconds[-1] == pytest.approx(10.4e-3)
    assert costs.target_seconds(1, 1, requests=1, context=1000)[0] == pytest.approx(6e-3)
    assert costs.draft_seconds(0, 7) == costs.mtp_seconds(0) == 0.0
    assert costs.draft_seconds(10, 7) == pytest.approx(0.8e-3 + 10 * 7 * 3e-6)
    assert costs.mtp_seconds(10) == pytest.approx((0.8e-3 + 10 * 3e-6) / 3)


def test_a_profile_s_step_lies_between_its_curves() -> None:
    costs = ProfileCosts(profile=a_profile(), host_seconds=0.001)

    def at(context: int) -> float:
        return float(costs.target_seconds(5, 5, requests=2, context=2 * context)[0])

    assert at(50) == at(100) == pytest.approx(0.015) and at(300) == at(9000) == pytest.approx(0.030)
    assert at(200) == pytest.approx(0.0225)
    assert costs.draft_seconds(4, 3) == 0.005 and costs.mtp_seconds(4) == pytest.approx(0.005 / 3)
    other = ProfileCosts(profile=a_profile(), mtp_profile=a_profile(draft_seconds=(0.001, 0.002)))
    assert other.mtp_seconds(4) == 0.002


def test_a_profile_s_end_is_refused_or_continued_straight() -> None:
    with pytest.raises(
        ConfigError, match=r"covers 8 tokens .* carries 20; measure with dspark profile --max-tokens 20"
    ):
        ProfileCosts(profile=a_profile()).target_seconds(3, 20, requests=2, context=0)
    costs = ProfileCosts(profile=a_profile(), extrapolate=True)
    line = 0.010 + 0.001 * np.arange(3, 41)
    assert costs.target_seconds(3, 40, requests=2, context=0) == pytest.approx(line)
    assert costs.describe()["extrapolated"] is True
    assert ProfileCosts(profile=a_profile()).describe()["extrapolated"] is False


# --- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "sharpness"), [(0.0, 0.0), (0.0, 1.5), (1.5, 0.0), (1.0, 1.0)])
def test_the_model_is_accepted_as_it_says_and_knows_it(spread: float, sharpness: float) -> None:
    model = AcceptanceModel(conditional=(0.9, 0.6, 0.75), spread=spread, sharpness=sharpness)
    source, rng, seats = ModelledRounds(model), np.random.default_rng(1), np.arange(60_000)
    source.open(seats, rng)
    rounds = source.draw(seats, rng)
    measured = conditional_acceptance(rounds.proposed, rounds.accepted, 3)
    assert measured == pytest.approx(np.array(model.conditional), abs=0.008)
    first, stood = rounds.confidence[:, 0], rounds.accepted > 0
    for low, high in ((0.0, 0.85), (0.85, 0.95), (0.95, 1.0)):
        there = (first >= low) & (first < high)
        if there.sum() > 2000:
            assert stood[there].mean() == pytest.approx(first[there].mean(), abs=0.02)


def test_an_overconfident_head_keeps_the_order_and_loses_the_truth() -> None:
    honest, boasting = AcceptanceModel(), AcceptanceModel(overconfidence=2.0)
    seats, drawn = np.arange(20_000), []
    for model in (honest, boasting):
        source, rng = ModelledRounds(model), np.random.default_rng(2)
        source.open(seats, rng)
        drawn.append(source.draw(seats, rng))
    assert (drawn[0].accepted == drawn[1].accepted).all()
    honest_first, boasting_first = (rounds.confidence[:1000, 0] for rounds in drawn)
    assert (np.argsort(honest_first) == np.argsort(boasting_first)).all()
    assert drawn[1].confidence[:, 0].mean() > (drawn[1].accepted > 0).mean() + 0.03


def test_requests_replay_conversations_in_order_and_in_circles() -> None:
    records = RecordedRounds(
        confidence=np.linspace(0.1, 0.6, 12).reshape(6, 2),
        proposed=np.full(6, 2),
        accepted=np.array([0, 1, 2, 0, 1, 2]),
        starts=np.array([0, 2]),
    )
    source, rng, seats = ReplayedRounds(records), np.random.default_rng(3), np.arange(3000)
    source.open(seats, rng)
    first = [source.draw(seats, rng) for _ in range(5)]
    at = np.array([np.searchsorted(records.confidence[:, 0], rounds.confidence[:, 0]) for rounds in first])
    short, long = at[:, at[0] < 2], at[:, at[0] >= 2]
    assert (np.diff(short, axis=0) % 2 == 1).all() and set(np.unique(short)) == {0, 1}
    assert (np.diff(long - 2, axis=0) % 4 == 1).all()
    assert short.shape[1] / 3000 == pytest.approx(1 / 3, abs=0.04)  # by rounds, not by conversations
    assert (first[0].accepted == records.accepted[at[0]]).all()
    only = records.first_only()
    assert only.block_size == 1 and only.accepted.tolist() == [0, 1, 1, 0, 1, 1]


def record(accepted: int, *, drafts: int = 3, committed: int | None = None, **changes: Any) -> dict[str, Any]:
    said = [0.9, 0.8, 0.7][:drafts]
    counts = {"verify_len": drafts, "accepted": accepted, "committed": accepted + 1 if committed is None else committed}
    return {"anchor": 5, "draft_tokens": [1] * drafts, "confidence": said, **counts, **changes}


def write_records(folder: Path, *answers: list[dict[str, Any]], name: str = "gsm8k") -> Path:
    folder.mkdir(exist_ok=True)
    about = {"drafter_spec": "default", "model": "smollm2"}
    write_manifest(folder, "eval-records", 1, {"made_for": {}, "about": about})
    lines = [{"set": name, "prompt": str(i), "turn": 0, "rounds": rounds} for i, rounds in enumerate(answers)]
    append_jsonl(folder / "answers-0.jsonl", lines)
    return folder


def test_records_become_rounds_without_those_that_an_end_cut_off(tmp_path: Path) -> None:
    stopped = record(2, committed=2)  # the second draft was the stop token
    found_nothing = record(0, drafts=0)
    folder = write_records(tmp_path / "r", [record(3), found_nothing, stopped], [record(1), record(0, drafts=0)], [])
    rounds = read_records(folder)
    assert rounds.proposed.tolist() == [3, 0, 3] and rounds.accepted.tolist() == [3, 0, 1]
    assert rounds.starts.tolist() == [0, 2] and rounds.block_size == 3 and rounds.has_confidence
    assert rounds.confidence[0].tolist() == [0.9, 0.8, 0.7] and rounds.description is not None
    assert rounds.description["sets"] == ["gsm8k"] and rounds.description["drafter"] == "default"
    cooler = read_records(folder, scaling=Scaling(sts_temperatures=np.full(3, 2.0), biases=np.zeros(3)))
    assert cooler.confidence[0, 0] == pytest.approx(0.75)  # odds of 9 become 3
    assert cooler.confidence[1].tolist() == [0.0] * 3


def test_records_that_cannot_be_replayed_are_refused(tmp_path: Path) -> None:
    cut = write_records(tmp_path / "cut", [record(1, verify_len=2), record(0)])
    with pytest.raises(DataError, match=r"checked 2 of 3 drafts; record whole blocks, with --scheduler fixed"):
        read_records(cut)
    with pytest.raises(DataError, match="no answers of the set mtbench"):
        read_records(write_records(tmp_path / "sets", [record(1), record(2)]), sets=["mtbench"])
    with pytest.raises(DataError, match="holds no round that drafted"):
        read_records(write_records(tmp_path / "none", [record(0, drafts=0)]))
    with pytest.raises(DataError, match="lacks 'accepted'"):
        read_records(write_records(tmp_path / "old", [{"draft_tokens": [1]}]))
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_records(tmp_path / "nowhere")
    silent = write_records(tmp_path / "ngram", [record(1, confidence=[]), record(0, confidence=[])])
    assert not read_records(silent).has_confidence


# --- workload --------------------------------------------------------------------------------------------------------


def test_lengths_and_arrivals_have_the_means_asked_for() -> None:
    lengths = Lengths(prompt_tokens=300.0, output_tokens=80.0, variety=0.8)
    requests = poisson(40_000, 5.0, lengths, np.random.default_rng(0))
    assert requests.prompt_tokens.mean() == pytest.approx(300, rel=0.03)
    assert requests.output_tokens.mean() == pytest.approx(80, rel=0.03) and requests.output_tokens.min() >= 1
    gaps = np.diff(requests.arrival)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(0.2, rel=0.05)
    alike = Lengths(prompt_tokens=7.0, output_tokens=9.0, variety=0.0).draw(5, np.random.default_rng(0))
    assert [values.tolist() for values in alike] == [[7] * 5, [9] * 5]


def test_a_trace_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"arrival": 0.5, "prompt_tokens": 3, "output_tokens": 4}
    path.write_text("".join(json.dumps({**row, "arrival": at}) + "\n" for at in (0, 0.5, 2)))
    assert read_trace(path).arrival.tolist() == [0.0, 0.5, 2.0]
    for wrong, message in (
        ({**row, "output_tokens": 4.5}, r":2: output_tokens is 4\.5; it must be a whole number"),
        ({**row, "extra": 1}, r":2: the fields are .* exactly arrival, prompt_tokens, output_tokens"),
        ({**row, "arrival": "now"}, ":2: arrival is 'now'"),
        ({**row, "arrival": 0.1}, "request 2 arrives before the one in front of it"),
        ({**row, "prompt_tokens": 0}, r"prompt_tokens must be in 1\.\.1000000"),
    ):
        path.write_text(json.dumps(row) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(DataError, match=message):
            read_trace(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no requests"):
        read_trace(path)


# --- ways ------------------------------------------------------------------------------------------------------------


def test_names_of_ways() -> None:
    assert [read_way(name).name for name in ALL] == list(ALL)
    kinds = {"fixed:3": FixedBatch, "threshold:0.5": ThresholdBatch, "greedy": GreedyBatch, "gate:lagged": LaggedBatch}
    for name, kind in kinds.items():
        assert isinstance(read_way(name).scheduler(block_size=4), kind)
    assert read_way("skip:threshold:0.5").guard == "skip" and read_way("skip").rule == "fixed"
    assert read_way("mtp-1").drafts == "mtp" and read_way("none").drafts == "none"
    for name in ("fast", "skip:", "gate:gate", "", "skip:none", "mtp-1:2"):
        with pytest.raises(ConfigError, match="it must be one of none, mtp-1"):
            read_way(name)
    for name, message in (
        ("threshold", "needs the least confidence"),
        ("threshold:2", r"threshold is 2\.0"),
        ("threshold:x", "'x' is no number"),
        ("fixed:-1", "length is -1"),
        ("greedy:3", "greedy takes no number"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_way(name)


def test_refused_numbers() -> None:
    for make, message in (
        (lambda: flat_costs(floor_ms=0.0), "floor_ms is 0"),
        (lambda: flat_costs(tile=0), "tile is 0"),
        (lambda: AcceptanceModel(conditional=(1.0,)), "conditional is"),
        (lambda: AcceptanceModel(spread=-1.0), "spread is -1"),
        (lambda: AcceptanceModel(overconfidence=0.0), "overconfidence is 0"),
        (lambda: Lengths(prompt_tokens=0.0), "prompt_tokens is 0"),
        (lambda: Lengths(variety=9.0), "variety is 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
