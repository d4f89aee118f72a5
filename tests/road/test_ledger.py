"""The books of a road: they outlive kills, know what is done, and refuse other wishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.errors import ConfigError, DataError
from dspark.road.budget import Budget
from dspark.road.ledger import Ledger, locked


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, clock: FakeClock, **settings: object) -> Ledger:
    return Ledger(folder, {"model": "m", **settings}, Budget(100.0, clock=clock))


def test_a_ledger_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = opened(tmp_path, clock)
    assert not ledger.begin("prompts")
    clock.now = 5.0
    ledger.finish("prompts", {"count": 3})
    assert not ledger.begin("train")
    clock.now = 9.0
    ledger.beat(steps=77)
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write('{"event": "done", "st')  # a kill in the middle of a line
    again = opened(tmp_path, FakeClock())
    assert again.done == {"prompts": {"count": 3}} and again.note == {"steps": 77}
    assert again.budget.spent == 9.0  # since the clock of the new call stands at its beginning
    assert again.begin("train") and not again.begin("compare")
    third = opened(tmp_path, FakeClock())
    assert third.begin("compare") and third.done == again.done


def test_beats_are_rare_unless_there_is_news(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = opened(tmp_path, clock)

    def written() -> float:
        return json.loads((tmp_path / "spent.json").read_text())["seconds"]

    clock.now = 2.0
    ledger.beat()
    clock.now = 3.0
    ledger.beat()
    assert written() == 2.0
    ledger.beat(steps=5)
    assert written() == 3.0


def test_other_wishes_are_refused_by_field(tmp_path: Path) -> None:
    opened(tmp_path, FakeClock(), seed=1)
    with pytest.raises(ConfigError, match=r"seed is 2.*begun with 1"):
        opened(tmp_path, FakeClock(), seed=2)
    (tmp_path / "road.json").write_text("{")
    with pytest.raises(DataError, match="unreadable"):
        opened(tmp_path, FakeClock(), seed=1)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another `dspark accelerate` is at work")
    with locked(tmp_path / "road"), refused, locked(tmp_path / "road"):
        pass
    with locked(tmp_path / "road"):
        pass
