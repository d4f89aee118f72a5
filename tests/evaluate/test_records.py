"""Answers come back from disk as they were, and what is no answer is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import TableTarget
from tiny_records import answer_of, facts, made_for, round_of, save_cell

from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError, DataError
from dspark.evaluate.records import answer_record, find_cells, from_line, open_cell, read_answers, to_line, writing
from dspark.evaluate.suite import Conversation
from dspark.models.ngram import NgramDrafter


def test_a_completion_survives_the_disk() -> None:
    asked = Conversation(set_name="s", domain="d", id="p", turns=("hello",))
    completion = generate(
        TableTarget(max_len=60), NgramDrafter(), [0, 1, 2, 0, 1], sampling=SamplingParams(), max_new_tokens=30
    )
    record = answer_record(asked, 0, seed=9, prompt_tokens=5, completion=completion)
    line = json.loads(json.dumps(to_line(record)))
    again = from_line(line)
    assert again.token_ids == completion.token_ids and len(again.rounds) == len(completion.rounds)
    for one, other in zip(again.rounds, completion.rounds, strict=True):
        assert (one.committed, one.accepted, one.verify_len) == (other.committed, other.accepted, other.verify_len)
        assert one.draft_tokens == other.draft_tokens and one.confidence == other.confidence
        assert one.verify_seconds == pytest.approx(other.verify_seconds, abs=1e-6)
    # an anchor is the token before its round: the last of prompt and answer that the target had not yet run
    text = [0, 1, 2, 0, 1, *completion.token_ids]
    committed = 1
    for anchor, r, each in zip(again.anchors(), again.rounds, line["rounds"], strict=True):
        assert anchor == each["anchor"] == 5 + committed - 1
        assert text[anchor + 1 : anchor + 1 + len(r.committed)] == list(r.committed)
        committed += len(r.committed)


def test_lines_that_do_not_add_up_are_refused() -> None:
    line = to_line(answer_of([round_of(2, 3), round_of(0, 3)]))
    for change, words in (
        ({"token_ids": line["token_ids"][:-1]}, "the rounds commit"),
        ({"rounds": [{**line["rounds"][0], "anchor": 9}]}, "anchor is 9"),
        ({"rounds": [{"accepted": 1}]}, "no answer of this dspark"),
        ({"colour": "red"}, "no answer of this dspark"),
    ):
        with pytest.raises(DataError, match=words):
            from_line({**line, **change})


def test_cells_are_found_read_and_refused(tmp_path: Path) -> None:
    answers = [answer_of([round_of(1, 3)], prompt=f"p{i}") for i in range(2)]
    save_cell(tmp_path, "b", 1.0, answers, about=facts("dspark", 3))
    save_cell(tmp_path, "a", 0.0, answers, about=facts("dspark", 3), order=1)
    save_cell(tmp_path, "z", 0.0, answers, about=facts("none", 0), order=0)
    cells = find_cells([tmp_path])
    assert [(cell.label, cell.temperature) for cell in cells] == [("z", 0.0), ("a", 0.0), ("b", 1.0)]
    assert cells[1].timed and cells[1].drafts and not cells[0].drafts
    assert find_cells([tmp_path / "a-t0"])[0].answers == cells[1].answers
    with pytest.raises(ConfigError, match="threads 1, not 2"):
        open_cell(tmp_path / "a-t0", made_for=made_for("a", 0.0, threads=2), about={})
    with pytest.raises(DataError, match="dspark eval --out"):
        find_cells([tmp_path / "nothing"])


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    other = pytest.raises(ConfigError, match="is at work")
    with writing(tmp_path, 0, wait=False), writing(tmp_path, 1, wait=False), other, writing(tmp_path, 0, wait=False):
        raise AssertionError
    with writing(tmp_path, 0, wait=False):
        pass


def test_two_answers_to_one_turn_are_told(tmp_path: Path) -> None:
    cell = save_cell(tmp_path, "a", 0.0, [answer_of([round_of(1, 3)])], about=facts("dspark", 3))
    (cell.folder / "answers-1.jsonl").write_text(json.dumps(to_line(answer_of([round_of(1, 3)]))) + "\n")
    assert len(read_answers(cell.folder)) == 1
    (cell.folder / "answers-1.jsonl").write_text(json.dumps(to_line(answer_of([round_of(2, 3)]))) + "\n")
    with pytest.raises(DataError, match="has another answer before"):
        read_answers(cell.folder)
