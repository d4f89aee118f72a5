"""Prompts of every common shape become one; what cannot be read is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dspark.data.prompts import prompt_messages, prompt_of, read_hub, read_prompts
from dspark.errors import ConfigError, DataError

OPENAI = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": [{"type": "text", "text": "c"}]},
    {"role": "assistant", "content": "d"},
]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]


@pytest.mark.parametrize(
    "row, turns, system",
    [
        ({"turns": ["a", "c"]}, ["a", "c"], None),
        ({"messages": OPENAI}, ["a", "c"], "be kind"),
        ({"conversations": OPENAI}, ["a", "c"], "be kind"),
        ({"conversations": SHAREGPT}, ["a", "c"], None),
        ({"conversations": SHAREGPT, "system": "be kind"}, ["a", "c"], "be kind"),
        ({"prompt": "a"}, ["a"], None),
        ({"prompt": OPENAI[:2]}, ["a"], "be kind"),
        ({"instruction": "sum up", "input": "a text", "output": "no"}, ["sum up\n\na text"], None),
        ({"instruction": "sum up", "input": ""}, ["sum up"], None),
        ({"instruction": "sum up"}, ["sum up"], None),
        ({"turns": ["a"], "prompt": "not this"}, ["a"], None),
    ],
)
def test_common_shapes(row: dict, turns: list, system: str | None) -> None:
    prompt = prompt_of({**row, "id": "x", "domain": "math"})
    assert (prompt["id"], prompt["turns"], prompt.get("system"), prompt["domain"]) == ("x", turns, system, "math")
    assert not set(prompt) & {"messages", "conversations", "prompt", "instruction", "input"}


def test_ids_are_stable_and_tell_prompts_apart() -> None:
    rows = [{"turns": ["a"]}, {"turns": ["a", "b"]}, {"turns": ["ab"]}, {"turns": ["a"], "system": "s"}]
    ids = [prompt_of(row)["id"] for row in rows]
    assert len(set(ids)) == 4
    assert prompt_of({"prompt": "a", "domain": "other"})["id"] == ids[0] == "e15610d715569b22"
    assert prompt_of({"id": 7, "turns": ["a"]})["id"] == "7"


@pytest.mark.parametrize(
    "row, words",
    [
        ({}, "a prompt needs `turns`"),
        ({"turns": "x"}, "list of texts"),
        ({"turns": []}, "at least one turn"),
        ({"turns": ["  "]}, "not blank"),
        ({"turns": ["a", 3]}, "not blank"),
        ({"turns": ["a \ud800"]}, "surrogate"),
        ({"turns": ["a"], "domain": 3}, "domain"),
        ({"turns": ["a"], "system": 3}, "system"),
        ({"id": True, "turns": ["a"]}, "`id` is True"),
        ({"messages": []}, "at least one turn"),
        ({"messages": ["a"]}, "message 0 is no object"),
        ({"messages": [{"role": "user"}]}, "message 0 has no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ({"messages": [OPENAI[1], OPENAI[1]]}, "must alternate"),
        ({"messages": [OPENAI[2], OPENAI[1]]}, "begins with the assistant"),
        ({"messages": [OPENAI[1], OPENAI[0]]}, "role 'system' here"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"instruction": "a", "input": 3}, "`input`"),
    ],
)
def test_what_is_no_prompt_is_said(row: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        prompt_of(row)


def test_files_of_several_shapes_with_odd_lines(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    lines = [
        '{"id": "a", "turns": ["x\u2028y\x85z"]}\r',
        '{"prompt": "q", "source": "s"}',
        '{"id":"a","prompt":"x\u2028y\x85z"}',
        '{"prompt": "r"}',
        "",
    ]
    path.write_bytes("\n".join(lines).encode())
    prompts = read_prompts([path, path])
    assert [p["turns"] for p in prompts.values()] == [["x\u2028y\x85z"], ["q"], ["r"]]
    with open(path, "a") as file:
        file.write('\n{"id": "a", "prompt": "other"}\n')
    with pytest.raises(DataError, match=r"odd\.jsonl:5: id 'a' was given before"):
        read_prompts([path])


def test_a_prompt_becomes_the_conversation_before_an_answer() -> None:
    prompt = prompt_of({"messages": OPENAI})
    assert prompt_messages(prompt) == [OPENAI[0], OPENAI[1]]
    assert prompt_messages(prompt, ["mine"]) == [
        *OPENAI[:2],
        {"role": "assistant", "content": "mine"},
        {"role": "user", "content": "c"},
    ]


def test_hub_rows_come_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, **options: object) -> list[dict]:
        asked.append((name, config, options))
        if name == "gone":
            raise FileNotFoundError("no such data set\non the Hub")
        return [{"prompt": str(i)} for i in range(9)]

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_hub("some/set:part", split="test", limit=2)) == [{"prompt": "0"}, {"prompt": "1"}]
    assert asked == [("some/set", "part", {"split": "test", "streaming": True})]
    with pytest.raises(ConfigError, match=r"hub is 'gone', split 'train'.*no such data set on the Hub"):
        list(read_hub("gone"))


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'dspark\[datasets\]'"):
        next(read_hub("some/set"))


def test_the_extra_is_offered() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert json.loads(text.partition("\ndatasets = ")[2].partition("\n")[0])[0].startswith("datasets")
