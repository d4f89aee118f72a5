"""Sets, their order, and where they are read from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError, DataError
from dspark.eval_sources import read_sets
from dspark.evaluate.suite import KNOWN_SETS, Conversation, answer_seed, chosen, hub_row, in_rounds


def talks(name: str, count: int) -> list[Conversation]:
    return [Conversation(set_name=name, domain="d", id=f"{name}{i}", turns=(f"ask {i}",)) for i in range(count)]


def test_the_nine_sets_of_the_paper_are_three_domains() -> None:
    by_domain: dict[str, set[str]] = {}
    for name, known in KNOWN_SETS.items():
        by_domain.setdefault(known.domain, set()).add(name)
    assert by_domain == {
        "math": {"gsm8k", "math500", "aime25"},
        "code": {"mbpp", "humaneval", "livecodebench"},
        "chat": {"mt-bench", "alpaca", "arena-hard-v2"},
    }


def test_a_larger_limit_keeps_the_smaller_ones_and_sets_take_turns() -> None:
    few, more = (chosen(talks("a", 20), limit=n, seed=3) for n in (4, 9))
    assert more[:4] == few and len(more) == 9 and few != chosen(talks("a", 20), limit=4, seed=4)
    assert chosen(talks("a", 3), limit=None, seed=0) != [] and chosen([], limit=2, seed=0) == []
    order = in_rounds([talks("a", 1), talks("b", 3)])
    assert [each.id for each in order] == ["a0", "b0", "b1", "b2"]


def test_seeds_differ_by_everything_but_the_drafter() -> None:
    one = talks("a", 2)
    seeds = {answer_seed(seed, each, turn) for seed in (0, 1) for each in (*one, *talks("b", 2)) for turn in (0, 1)}
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)
    assert one[0].asked != one[1].asked and one[0].asked == talks("x", 1)[0].asked


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sources(tmp_path: Path) -> None:
    file = write(tmp_path / "riddles.jsonl", [{"prompt": "one", "domain": "fun"}, {"turns": ["two", "three"]}])
    write(tmp_path / "suite" / "zebra.jsonl", [{"prompt": "z"}])
    write(tmp_path / "suite" / "mt-bench.jsonl", [{"turns": ["a", "b"]}])
    write(tmp_path / "suite" / "gsm8k.jsonl", [{"prompt": "1 + 1"}])
    asked: list[tuple[str, str]] = []

    def hub(name: str, *, split: str, limit: int) -> Iterator[dict[str, Any]]:
        asked.append((name, split))
        yield from [{"question": f"how many {i}", "prompt": f"q {i}", "answer": "42"} for i in range(3)]

    found = read_sets([str(file), str(tmp_path / "suite")], limit=None, seed=0, hub=hub)
    assert list(found) == ["riddles", "gsm8k", "mt-bench", "zebra"] and not asked
    assert {each.domain for each in found["riddles"]} == {"fun", "riddles"}
    assert found["mt-bench"][0].turns == ("a", "b") and found["mt-bench"][0].domain == "chat"
    found = read_sets(["gsm8k", "owner/some-set:main@test", f"mine={file}"], limit=2, seed=0, hub=hub)
    assert asked == [("openai/gsm8k:main", "test"), ("owner/some-set:main", "test")]
    assert [len(found[name]) for name in ("gsm8k", "some-set", "mine")] == [2, 2, 2]
    assert found["gsm8k"][0].turns[0].endswith("within \\boxed{}.") and found["gsm8k"][0].id.startswith("gsm8k-000")


def test_sources_that_are_none(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "x"}])
    for sources, words in (
        (["nowhere.jsonl"], "no file, no folder"),
        ([str(file), f"a={file}"], "two sets are called 'a'"),
        ([f"name={tmp_path}"], "give it no name"),
        ([], "prompts is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_sets(sources, limit=None, seed=0)
    with pytest.raises(DataError, match="no prompts inside"):
        read_sets([str(write(tmp_path / "empty.jsonl", []))], limit=None, seed=0)
    with pytest.raises(DataError, match="no text in 'question'"):
        hub_row(KNOWN_SETS["gsm8k"], {"problem": "x"})


def test_hub_rows_ask_in_the_sets_wording() -> None:
    assert hub_row(KNOWN_SETS["mt-bench"], {"prompt": ["a", "b"]}) == {"turns": ["a", "b"]}
    code = hub_row(KNOWN_SETS["humaneval"], {"prompt": "def f(x): {}"})["turns"][0]
    assert "def f(x): {}" in code and code.startswith("Write a solution")
    assert hub_row(KNOWN_SETS["alpaca"], {"instruction": "i", "input": ""}) == {"instruction": "i", "input": ""}
