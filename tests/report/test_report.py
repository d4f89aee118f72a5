"""Figures from record files and simulations: their rows, their files, the page, and what is said of missing data."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tiny_records import answer_of, drawn_rounds, facts, round_of, save_cell
from typer.testing import CliRunner

from dspark.artifacts import atomic_write_text
from dspark.errors import ConfigError, DataError
from dspark.evaluate.comparison import compare
from dspark.evaluate.records import find_cells
from dspark.report.material import read_load
from dspark.report.records_figures import method
from dspark.report.write import figures_of, read_sources, write_report
from dspark.verbs.report import report

SETS = {"gsm8k": "math", "alpaca": "chat"}
PNG = b"\x89PNG\r\n\x1a\n"


def fill(out: Path) -> None:
    """Five drafters and plain decoding: two depths of DSpark, two block lengths of it, and others of one shape."""
    random = np.random.default_rng(0)

    def cell(label: str, kind: str, block: int, order: int, *, lift: float = 0.0, **about: Any) -> None:
        confident = about.get("has_confidence", False)
        answers = [
            answer_of(
                drawn_rounds(random, 30, [0.6 + lift] * block, confident=confident, sharp=2.0)
                if block
                else [round_of(0, 0)] * 5,
                name=name,
                domain=domain,
                prompt=f"p{i}",
            )
            for name, domain in SETS.items()
            for i in range(4)
        ]
        save_cell(out, label, 1.0, answers, about=facts(kind, block, **about), order=order)

    head = {"head": "vanilla", "has_confidence": True}
    cell("none", "none", 0, 0, layers=0)
    cell("two", "dspark", 4, 1, lift=0.1, **head)
    cell("one", "dspark", 4, 2, layers=1, **head)
    cell("long", "dspark", 8, 3, lift=0.1, **head)
    cell("flash", "dflash", 4, 4)
    cell("gated", "dspark", 4, 5, **{**head, "head": "gated"})


def simulation(path: Path) -> Path:
    points = [
        {
            "scheduler": scheduler,
            "loop": loop,
            "load": load,
            "throughput": 100.0 * load,
            "user_speed": {"p50": 90.0 / load},
            "verify_tokens": 8.0 / load,
        }
        for scheduler in ("fixed:7", "lagged")
        for loop, load in (("closed", 4), ("closed", 1), ("open", 2))
    ]
    made = {"command": "dspark simulate --out <load>", "git_commit": "abc", "date": "today", "cpu": "none"}
    content = {"kind": "simulation", "version": 1, "fields": {"points": points}, "provenance": made}
    atomic_write_text(path, json.dumps(content))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "records")
    sources = read_sources([simulation(folder / "load.json"), folder / "records"])
    write_report(folder / "out", sources)
    return folder


def data(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(json.loads((folder / "out" / f"{name}.json").read_text())["fields"]["data"])


def test_every_figure_has_its_files_and_its_numbers(made: Path) -> None:
    names = [
        *("figure-2-position", "figure-3-depth", "figure-4-block", "figure-5-threshold", "figure-6-reliability"),
        *("figure-7-throughput", "figure-8-budget"),
    ]
    for name in names:
        assert (made / "out" / f"{name}.png").read_bytes().startswith(PNG)
        assert "<svg" in (made / "out" / f"{name}.svg").read_text()
        assert data(made, name), name
    assert {p.stem for p in (made / "out").iterdir()} == {*names, "index"}


def test_positions_are_those_of_the_records(made: Path) -> None:
    cells = [c for c in find_cells([made / "records"]) if c.label in ("two", "flash", "gated")]
    rows = data(made, "figure-2-position")
    assert {row["method"] for row in rows} == {"DSpark", "DFlash", "DSpark (gated)"}  # one each, of block 4
    (at,) = compare(cells).temperatures
    for figures in at.drafters:
        wanted = [e.value for e in figures.domains["math"].conditional_acceptance]
        label = figures.label
        mine = [r for r in rows if (r["drafter"], r["domain"], r["kind"]) == (label, "math", "conditional")]
        assert [r["value"] for r in mine] == wanted and [r["position"] for r in mine] == [1, 2, 3, 4]
        assert all(r["low"] <= r["value"] <= r["high"] for r in mine)
    assert {row["domain"] for row in rows} == {"math", "chat", "mean"}


def test_shapes_are_told_apart(made: Path) -> None:
    depth, block = data(made, "figure-3-depth"), data(made, "figure-4-block")
    assert {(r["drafter"], r["x"]) for r in depth} == {("two", 2), ("one", 1), ("flash", 2), ("gated", 2)}
    assert {(r["drafter"], r["x"]) for r in block} == {("two", 4), ("long", 8)}
    longer = {r["x"]: r["value"] for r in block if r["domain"] == "mean"}
    assert longer[8] > longer[4] and all(0 < r["sequential_share"] < 0.1 for r in block)


def test_thresholds_and_calibration(made: Path) -> None:
    rows = [r for r in data(made, "figure-5-threshold") if r["domain"] == "math"]
    assert (
        rows[0]["threshold"] == 0.0
        and rows[0]["checked"] == 480
        and rows[0]["acceptance_rate"] < rows[-1]["acceptance_rate"]
    )
    assert rows[0]["low"] < rows[0]["acceptance_rate"] < rows[0]["high"]
    content = json.loads((made / "out" / "figure-6-reliability.json").read_text())["fields"]
    quality = content["Quality by position"]
    assert [row["position"] for row in quality] == [1, 2, 3, 4]
    for after in ("ece STS", "ece Platt"):
        assert sum(row[after] for row in quality) < sum(row["ece"] for row in quality)
    assert all(0 < row["floor"] < 0.3 for row in quality)
    assert sum(row["temperature"] for row in quality) > 1.2 * len(quality)  # the drafter is too sure by half
    assert {row["when"] for row in content["data"]} == {"before", "STS", "Platt"}


def test_loads_are_sorted_and_open_loops_left_out(made: Path) -> None:
    rows = data(made, "figure-7-throughput")
    assert [(r["scheduler"], r["users"]) for r in rows] == [
        ("fixed:7", 1),
        ("lagged", 1),
        ("fixed:7", 4),
        ("lagged", 4),
    ]
    assert rows[0]["user_speed"] == 90.0 and rows[0]["throughput"] == 100.0
    assert data(made, "figure-8-budget")[-1]["verify_tokens"] == 2.0


class Tags(HTMLParser):
    """Attributes of every tag, and that what opens is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_for_light_and_dark(made: Path) -> None:
    text = (made / "out" / "index.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    outside = [a.get("src") or a.get("srcset") or a.get("href") for _, a in tags.found]
    assert all(link is None or link.startswith(("data:", "#")) for link in outside)
    assert "<script" not in text and "http" not in re.sub(r"base64,[^\"]+", "", text)
    images = [a for tag, a in tags.found if tag == "img"]
    sources = [a for tag, a in tags.found if tag == "source"]
    assert len(images) == len(sources) == 7 and all(a["alt"] for a in images)
    assert all("prefers-color-scheme: dark" in str(a["media"]) for a in sources) and "prefers-color-scheme" in text
    light, dark = (
        base64.b64decode(str(link).partition("base64,")[2]).decode()
        for link in (images[0]["src"], sources[0]["srcset"])
    )
    assert "#e6e8eb" in dark and "#e6e8eb" not in light and "#1c1e21" in light
    assert "&lt;load&gt;" in text and "<load>" not in text  # what files say is text, not markup
    assert "Quality by position" in text and "acceptance length" in text and "Commands behind it" in text
    assert 'name="viewport"' in text


def test_the_same_records_give_the_same_picture(made: Path, tmp_path: Path) -> None:
    sources = read_sources([made / "load.json"])
    write_report(tmp_path, sources)
    for name in ("figure-7-throughput", "figure-8-budget"):
        assert (tmp_path / f"{name}.svg").read_bytes() == (made / "out" / f"{name}.svg").read_bytes()


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    save_cell(tmp_path / "records", "flash", 0.0, [answer_of([round_of(1, 4)])], about=facts("dflash", 4))
    app = typer.Typer()
    app.command()(report)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "figure-7-throughput.png").write_bytes(b"old")
    done = CliRunner().invoke(app, [str(tmp_path / "records"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = done.output.strip().split("\n")
    assert lines[0] == "figure 2, Acceptance by position: figure-2-position.png, .svg, .json"
    for line, command in (
        (lines[1], "recipes/compare_drafters.py"),
        (lines[2], "recipes/compare_drafters.py"),
        (lines[3], "dspark eval"),
        (lines[4], "dspark eval"),
        (lines[5], "dspark simulate --out"),
        (lines[6], "dspark simulate --out"),
    ):
        assert "Make it:" in line and command in line
    assert not (tmp_path / "out" / "figure-7-throughput.png").exists()  # nothing stale is left
    text = (tmp_path / "out" / "index.html").read_text()
    assert text.count('class="missing"') == 6 and "dspark simulate --out load.json" in text


def test_an_empty_report_says_how_to_begin(tmp_path: Path) -> None:
    figures = figures_of(read_sources([]))
    assert len(figures) == 7 and all(figure.missing for figure in figures)
    few = [answer_of(drawn_rounds(np.random.default_rng(0), 3, [0.5], confident=True))]
    save_cell(tmp_path, "few", 1.0, few, about=facts("dspark", 1, has_confidence=True))
    assert "100 are needed" in figures_of(read_sources([tmp_path]))[4].missing


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_sources([tmp_path / "nothing"])
    (tmp_path / "other.json").write_text('{"kind": "profile", "version": 1}')
    with pytest.raises(DataError, match="no simulation of version 1"):
        read_load(tmp_path / "other.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no records"):
        read_sources([tmp_path / "empty"])
    save_cell(tmp_path / "cold", "flash", 0.0, [answer_of([round_of(1, 4)])], about=facts("dflash", 4))
    with pytest.raises(DataError, match="temperature is 1; there are records of 0"):
        figures_of(read_sources([tmp_path / "cold"]), temperature=1.0)
    assert method(find_cells([tmp_path / "cold"])[0]) == "DFlash"


def test_records_that_are_there_twice_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save_cell(tmp_path / name, "flash", 0.0, [answer_of([round_of(1, 4)])], about=facts("dflash", 4))
    with pytest.raises(ConfigError, match="flash at temperature 0 is there twice"):
        write_report(tmp_path / "out", read_sources([tmp_path / "first", tmp_path / "second"]))
    assert not (tmp_path / "out").exists()
