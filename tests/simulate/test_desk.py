"""The verb, its files and tables, and the plan of a fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from simulation_scenes import scene
from test_parts import a_profile, record, write_records
from typer.testing import CliRunner

from dspark.errors import ConfigError, DataError
from dspark.simulate.files import as_json, read_simulation, write_simulation
from dspark.simulate.fleet import Goal, plan
from dspark.simulate.log import Point, Spread
from dspark.simulate.setup import Sources, scene_of
from dspark.simulate.sweep import closed_loop
from dspark.simulate.ways import read_way
from dspark.verbs.simulate import simulate

app = typer.Typer()
app.command()(simulate)


def ran(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "100"})
    assert done.exit_code == 0
    return done.stdout


def refused(*arguments: str) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        ran(*arguments)
    return str(caught.value)


QUICK = ("--concurrency", "1,4", "--set", "steps=40", "--set", "output_tokens=30")


def test_json_file_and_table_say_the_same(tmp_path: Path) -> None:
    out = tmp_path / "simulation.json"
    text = ran(*QUICK, "--scheduler", "none", "--scheduler", "lagged", "--seed", "3", "--out", str(out))
    read = read_simulation(out)
    assert [(point.scheduler, point.load) for point in read.points] == [
        (n, u) for n in ("none", "lagged") for u in (1, 4)
    ]
    assert read.scene["seed"] == 3 and read.scene["steps"] == 40 and read.scene["block_size"] == 7
    assert read.scene["costs"]["source"] == "synthetic" and read.provenance["dspark"]
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("none", "lagged"))]
    assert len(rows) == 4 and max(map(len, text.splitlines())) <= 100
    for row, point in zip(rows, read.points, strict=True):
        assert row[0] == point.scheduler and f"{point.verify_tokens:.2f}" in row
        assert f"{point.acceptance_length:.2f}" in row
    again = json.loads(ran(*QUICK, "--scheduler", "none", "--scheduler", "lagged", "--seed", "3", "--json"))
    assert again["fields"] == json.loads(out.read_text())["fields"]


def test_records_and_profile_take_the_place_of_numbers(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "r", [record(3), record(1), record(2)], [record(0), record(3)])
    a_profile().write(tmp_path / "profile.json")
    sources = ("--records", str(folder), "--profile", str(tmp_path / "profile.json"))
    content = json.loads(
        ran(*sources, "--extrapolate", *QUICK, "--scheduler", "greedy", "--scheduler", "mtp-1", "--json")
    )
    fields = content["fields"]
    assert fields["acceptance"]["rounds"] == 5 and fields["block_size"] == 3
    assert fields["costs"]["extrapolated"] is True and fields["costs"]["measured_tokens"] == 8
    assert [point["verify_tokens"] <= 2 for point in fields["points"]] == [False, False, True, True]
    assert "carries" in refused(*sources, *QUICK, "--scheduler", "fixed")
    assert "--set floor_ms: the profile says" in refused(*sources, "--set", "floor_ms=3.0")
    assert "--set spread: the records say" in refused(*sources, "--set", "spread=1.0")


def test_records_without_confidences_leave_the_schedulers_that_need_none(tmp_path: Path) -> None:
    folder = write_records(tmp_path / "r", [record(k, confidence=[]) for k in (1, 3, 0)])
    fields = json.loads(ran("--records", str(folder), *QUICK, "--json"))["fields"]
    assert {point["scheduler"] for point in fields["points"]} == {"none", "mtp-1", "fixed", "skip"}
    assert "greedy needs a confidence" in refused("--records", str(folder), *QUICK, "--scheduler", "greedy")


def test_open_loop_and_trace(tmp_path: Path) -> None:
    short = ("--set", "requests=25", "--set", "seats=4", "--set", "output_tokens=10", "--set", "prompt_tokens=20")
    few = (*short, "--scheduler", "none", "--json")
    points = json.loads(ran("--rate", "5,2000", *few))["fields"]["points"]
    assert [point["loop"] for point in points] == ["open", "open"] and points[0]["busy"] < 0.9 < points[1]["busy"]
    assert points[0]["waiting_at_end"] == 0 < points[1]["waiting_at_end"]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(json.dumps({"arrival": i, "prompt_tokens": 5, "output_tokens": 20}) + "\n" for i in range(9))
    )
    point = json.loads(ran("--trace", str(path), *few))["fields"]["points"][0]
    assert (point["loop"], point["load"]) == ("trace", 9.0)
    assert "wait-" in ran("--rate", "5", *short, "--scheduler", "none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scheduler", "fast"), "it must be one of none"),
        (("--scheduler", "none", "--scheduler", "none"), "scheduler none is given twice"),
        (("--concurrency", "4,2"), "--concurrency is '4,2'; give ascending positive numbers"),
        (("--concurrency", "1.5"), "users are whole numbers"),
        (("--rate", "0"), "--rate is '0'"),
        (("--rate", "1", "--trace", "x"), "--rate and --trace both"),
        (("--set", "speed=3"), "--set speed: no such field"),
        (("--users", "9"), "give --user-speed as well"),
        (("--rate", "1", "--user-speed", "9"), "leave --rate and --trace out"),
        (("--extrapolate",), "go with --profile"),
        (("--of", "gsm8k"), "go with --records"),
        (("--trace", "/nowhere.jsonl"), "cannot read /nowhere.jsonl"),
        (("--set", "conditional=[0.5,1.5]"), "conditional is"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_every_number_can_be_set() -> None:
    made = scene_of(
        Sources(),
        ["floor_ms=9", "conditional=[0.9,0.8]", "variety=0.0", "seats=3", "prefill_elsewhere=true", "steps=7"],
        {"seed": 5},
    )
    assert (made.seed, made.steps, made.shape.seats, made.shape.prefill_elsewhere) == (5, 7, 3, True)
    assert made.lengths.variety == 0.0 and made.source(read_way("fixed")).block_size == 2
    assert made.costs.target_seconds(1, 1, requests=1, context=0)[0] == pytest.approx(0.009)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    small = scene(steps=30)
    points = [closed_loop(small, read_way(name), 2) for name in ("none", "fixed:2")]
    plans = [plan(points[:1], Goal(user_speed=10.0, users=100))]
    write_simulation(tmp_path / "s.json", as_json(small, points, plans))
    read = read_simulation(tmp_path / "s.json")
    assert repr(read.points) == repr(tuple(points)) and read.plans == tuple(plans)  # nan equals nothing


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    for content, words in (
        ("{", "unreadable"),
        ('{"kind": "profile", "version": 1}', "kind 'profile', version 1; a simulation of version 1 is needed"),
        ('{"kind": "simulation", "version": 1, "fields": {"points": [{}]}}', "no simulation of this dspark"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=words):
            read_simulation(path)
    with pytest.raises(DataError, match=r"none\.json is missing; make it with"):
        read_simulation(tmp_path / "none.json")


# --- fleet -----------------------------------------------------------------------------------------------------------


def point(load: float, speed: float, throughput: float, *, first: float = 0.1, **changes: Any) -> Point:
    template = closed_loop(scene(steps=3, warm_up=0.0), read_way("none"), 1)
    alike = {name: Spread(mean=v, p5=v, p50=v, p95=v) for name, v in (("user_speed", speed), ("first_token", first))}
    return replace(template, load=load, throughput=throughput, **{**alike, **changes})


def test_a_plan_by_hand() -> None:
    points = [point(8.0, 50.0, 400.0), point(1.0, 100.0, 100.0), point(32.0, 20.0, 640.0)]
    found = plan(points, Goal(user_speed=35.0, users=1000))
    assert found.users_per_engine == pytest.approx(20.0) and found.throughput == pytest.approx(520.0)
    assert found.engines == 50
    assert plan(points, Goal(user_speed=10.0)).users_per_engine == 32.0  # no promise beyond what was tried
    unreached = plan(points, Goal(user_speed=200.0, users=5))
    assert unreached.users_per_engine is None and unreached.engines is None
    slow_start = [point(1.0, 100.0, 100.0), point(9.0, 90.0, 800.0, first=1.7)]
    assert plan(slow_start, Goal(user_speed=50.0, first_token=0.9)).users_per_engine == pytest.approx(5.0)
    assert plan(slow_start, Goal(user_speed=50.0)).users_per_engine == 9.0


def test_plans_on_the_command_line() -> None:
    text = ran(*QUICK, "--scheduler", "none", "--user-speed", "20,1000", "--users", "5000")
    rows = [line.split() for line in text.splitlines() if line.strip()[:2] in ("20", "1,", "10")]
    assert rows[0][:3] == ["20", "none", "4"] and rows[0][-1] == "1,250"
    assert "not reached" in text


def test_refused_goals() -> None:
    for changes, words in (({"user_speed": 0.0}, "user_speed is 0"), ({"first_token": 0.0}, "first_token is 0")):
        with pytest.raises(ConfigError, match=words):
            Goal(**{"user_speed": 1.0, **changes})
    with pytest.raises(ConfigError, match="points of one scheduler"):
        plan([point(1.0, 1.0, 1.0), point(2.0, 1.0, 1.0, scheduler="fixed")], Goal(user_speed=1.0))
