"""The threshold sweep against the loop's own threshold scheduler, and calibration from records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_records import answer_of, drawn_rounds, facts, round_of, save_cell

from dspark.errors import DataError
from dspark.evaluate.confidence_curves import (
    calibrate_records,
    confident_cells,
    cut_at,
    outcomes_by_prompt,
    sweep,
    sweep_by_domain,
)
from dspark.evaluate.confidence_tables import confidence_data, confidence_figures, confidence_tables
from dspark.evaluate.records import Cell
from dspark.maths.calibration import RoundOutcomes
from dspark.maths.scheduling import threshold_verify_len

CHANCES = [0.7, 0.6, 0.6, 0.5]


def cell(folder: Path, *, prompts: int = 16, rounds: int = 60, sharp: float = 1.0) -> Cell:
    random = np.random.default_rng(1)
    found = [
        answer_of(
            drawn_rounds(random, rounds, CHANCES, confident=True, sharp=sharp),
            prompt=f"p{i:02d}",
            name=("gsm8k", "alpaca")[i % 2],
            domain=("math", "chat")[i % 2],
        )
        for i in range(prompts)
    ]
    return save_cell(folder, "head", 1.0, found, about=facts("dspark", 4, has_confidence=True))


def test_a_cut_is_the_schedulers_own() -> None:
    random = np.random.default_rng(0)
    confidence = random.random((200, 5))
    for threshold in (0.0, 0.3, 0.8, 1.0):
        cut = cut_at(confidence, np.full(200, 5), threshold)
        assert cut.tolist() == [threshold_verify_len(torch.from_numpy(row), threshold) for row in confidence]
    assert cut_at(confidence, np.full(200, 2), 0.0).tolist() == [2] * 200


def test_a_sweep_by_hand() -> None:
    outcomes = RoundOutcomes(
        confidence=np.array([[0.9, 0.8, 0.2], [0.6, 0.4, 0.4]]), lengths=np.array([3, 3]), accepted=np.array([2, 0])
    )
    all_checked, some, few = sweep(outcomes, (0.0, 0.5, 0.7)).points
    assert (all_checked.acceptance_rate, all_checked.verify_len) == (2 / 6, 3.0)
    assert (some.acceptance_rate, some.verify_len, some.acceptance_length) == (2 / 3, 1.5, 2.0)
    assert (few.acceptance_rate, few.verify_len) == (1.0, 1.0)
    assert np.isnan(sweep(outcomes, (0.95,)).points[0].acceptance_rate)
    assert [p.checked for p in sweep(outcomes, (0.0, 0.5, 0.7)).points] == [6, 3, 2]
    many = outcomes.take(np.arange(400) % 2)
    assert sweep(many).monotone
    against = many.replaced(1.0 - many.confidence)
    assert not sweep(against, (0.0, 0.3, 0.7)).monotone
    assert sweep(outcomes.replaced(1.0 - outcomes.confidence), (0.0, 0.3, 0.7)).monotone  # six drafts tell nothing


def test_true_confidences_raise_the_acceptance_rate_in_every_domain(tmp_path: Path) -> None:
    found = sweep_by_domain(cell(tmp_path, rounds=200), (0.0, 0.2, 0.4, 0.6, 0.8))
    assert set(found) == {"math", "chat"}
    for domain in found.values():
        rates = [point.acceptance_rate for point in domain.points]
        assert domain.monotone and rates[-1] > rates[0] + 0.2 and domain.rounds == 1600
        assert all(
            p.low is not None and p.high is not None and p.low < p.acceptance_rate < p.high for p in domain.points
        )
        lengths = [point.acceptance_length for point in domain.points]
        assert lengths == sorted(lengths, reverse=True)


def test_temperatures_mend_overconfidence_on_prompts_they_were_not_fitted_on(tmp_path: Path) -> None:
    found = calibrate_records(cell(tmp_path, prompts=24, rounds=100, sharp=2.0))
    assert found.fitted_rounds == found.held_out_rounds == 1200
    assert all(1.4 < t < 3.0 for t in found.sts.sts_temperatures) and not any(found.sts.biases)
    for method in (found.sts, found.platt):
        for before, after in zip(found.before, method.after, strict=True):
            assert after.ece < before.ece and after.brier < before.brier
            assert after.conditional_auc == pytest.approx(before.conditional_auc, abs=1e-3)
        assert len(method.bins) == 4 and sum(b.count for b in method.bins[0]) == 1200


def test_tables_and_data_hold_the_judgement(tmp_path: Path) -> None:
    (found,) = confidence_figures([cell(tmp_path, prompts=24, rounds=100, sharp=2.0)])
    quality, thresholds = confidence_tables([found])
    assert quality.head[-6:] == ("ECE held out", "floor", "T", "after STS", "T, b", "after Platt")
    before, _, _, sts, _, platt = quality.rows[-1][-6:]
    assert quality.rows[-1][0] == "= all"
    assert float(sts.rstrip("%")) < float(before.rstrip("%")) > float(platt.rstrip("%"))
    assert [row[0] for row in thresholds.rows] == ["math", "", "", "chat", "", ""] and "falls" not in thresholds.note
    (data,) = json.loads(json.dumps(confidence_data([found]), allow_nan=False))
    assert data["quality"][0]["count"] == 2400 and len(data["sweeps"]["math"]["points"]) == 20


def test_what_cannot_be_judged_is_said(tmp_path: Path) -> None:
    few = cell(tmp_path / "few", prompts=2, rounds=10)
    with pytest.raises(DataError, match="100 are needed"):
        calibrate_records(few)
    bare = save_cell(tmp_path, "bare", 1.0, [answer_of([round_of(1, 4)])], about=facts("dflash", 4))
    with pytest.raises(DataError, match="no confidence head"):
        outcomes_by_prompt(bare)
    cut = replace(
        few,
        answers=tuple(
            replace(a, rounds=tuple(replace(r, verify_len=1, accepted=0, committed=(7,)) for r in a.rounds))
            for a in few.answers
        ),
    )
    assert confident_cells([few, bare, cut]) == [few]
    with pytest.raises(DataError, match="full length"):
        outcomes_by_prompt(cut)
