"""The comparison recipe at tiny scale: trains, evaluates, reports, stops by the clock and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_run import tiny_config

from dspark.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    import compare_drafters

    return compare_drafters


def command(folder: Path, *more: str) -> list[str]:
    base = tiny_config(folder) if not (folder / "model").exists() else None
    fields = {"draft_vocab": 60, "mask_token_id": 3, "held_out": 4, "sequences_per_step": 2, "slots_per_step": 12}
    fields |= {"dtype": "float32", "num_taps": 2, "state_slots": 12}
    sets = folder / "gsm8k.jsonl"
    sets.write_text("".join(json.dumps({"id": f"q{i}", "turns": [f"count {i}"]}) + "\n" for i in range(2)))
    assert base is None or Path(base.answers[0]).is_file()
    return [
        *("--model", str(folder / "model"), "--answers", str(folder / "answers.jsonl")),
        *("--prompts", str(folder / "prompts.jsonl"), "--sets", str(sets), "--out", str(folder / "out")),
        *("--seconds", "0.7", "--pool", "4", "--limit", "1", "--max-new-tokens", "6", "--dtype", "float32"),
        *("--only", "dspark-7,dflash-7", "--set", json.dumps(fields), *more),
    ]


def test_variants_are_those_of_the_comparison(recipe: ModuleType) -> None:
    names = set(recipe.VARIANTS)
    for method in ("dspark", "dspark-gated", "dspark-rnn", "dflash", "eagle3", "mtp"):
        assert {f"{method}-7", f"{method}-15"} <= names
    plan = recipe.Plan(model="m", answers=(), prompts=(), seconds=1.0, pool=1, fields={"markov_rank": 32})
    two, five = (plan.config(name, Path("x")) for name in ("dspark-7", "dflash-5-layers-7"))
    assert (two.layers, two.block_size, two.markov_rank, two.confidence) == (2, 7, 32, True)
    assert (five.drafter, five.layers, five.markov_rank, five.confidence) == ("dflash", 5, 0, False)
    for name in names:
        plan.config(name, Path("x"))  # every one is a config that training takes


def test_it_trains_evaluates_reports_and_goes_on(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    out = tmp_path / "out"
    recipe.main(command(tmp_path, "--minutes", "0.001"))
    assert "time is up before all drafters were trained" in capsys.readouterr().out
    assert (out / "plan.json").is_file() and not (out / "drafters").exists()
    recipe.main(command(tmp_path))
    lines = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["dspark-7", "dflash-7"] and all(line["steps"] > 0 for line in lines)
    shown = capsys.readouterr().out
    assert "temperature 1: all sets" in shown and "greedy: all sets" in shown and "dflash-7" in shown
    cells = {path.parent.name for path in (out / "records").glob("*/manifest.json")}
    assert cells == {f"{name}-t{t}" for name in ("none", "dspark-7", "dflash-7") for t in (0, 1)}
    assert "DFlash" in (out / "report" / "index.html").read_text()
    before = (out / "records" / "dspark-7-t1" / "answers-0.jsonl").read_bytes()
    recipe.main(command(tmp_path))  # nothing is left to do
    assert (out / "records" / "dspark-7-t1" / "answers-0.jsonl").read_bytes() == before
    assert len((out / "training.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match=r"was begun with seconds 0.7, not 9"):
        recipe.main(command(tmp_path, "--seconds", "9"))
    with pytest.raises(ConfigError, match="only is 'gru'"):
        recipe.main(command(tmp_path, "--only", "gru"))
