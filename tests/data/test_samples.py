"""From files to samples: what is read, what is refused, and which samples are held out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_chat import save_chat_model

from dspark.chat import ChatFormat
from dspark.data.features import Sample
from dspark.data.samples import (
    bigram_pairs,
    choose_draft_vocab,
    prompt_id,
    read_prompts,
    read_samples,
    split_held_out,
    token_counts,
)
from dspark.errors import DataError


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("model")))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def a_sample(name: str, domain: str = "all", ids: tuple[int, ...] = (5, 6, 7), prompt: int = 1) -> Sample:
    return Sample(name, domain, torch.tensor(ids), torch.arange(len(ids)) >= prompt)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_of_several_files_by_id(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"id": "b", "turns": ["x\u2028y"], "domain": "math"})
    two = write(tmp_path / "two.jsonl", {"id": "a", "turns": ["z", "more"]}, {"id": "b", "turns": ["x\u2028y"]})
    prompts = read_prompts([one, two])
    assert list(prompts) == ["b", "a"]
    assert prompts["a"] == {"id": "a", "turns": ["z", "more"]} and prompts["b"]["turns"] == ["x\u2028y"]


@pytest.mark.parametrize(
    "row",
    [
        {"id": 3.5, "turns": ["x"]},
        {"id": "c"},
        {"id": "c", "turns": "x"},
        {"id": "c", "turns": []},
        {"id": "c", "turns": [3]},
        {"id": "c", "turns": [{"role": "user"}]},
    ],
)
def test_a_row_that_is_no_prompt_is_named(row: dict, tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", {"id": "a", "turns": ["x"]}, row)
    with pytest.raises(DataError, match=r"odd\.jsonl:2: .*(needs|must be)"):
        read_prompts([path])


def test_one_id_for_two_prompts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.jsonl", {"id": "a", "turns": ["x"]}, {"id": "a", "turns": ["y"]})
    with pytest.raises(DataError, match=r"twice\.jsonl:2: id 'a' was given before"):
        read_prompts([path])


# --- answers ---------------------------------------------------------------------------------------------------------

PROMPTS = {"p": {"id": "p", "turns": ["hello", "ignored"], "domain": "chat"}, "q": {"id": "q", "turns": ["bye"]}}


def test_the_very_ids_of_an_answer_are_supervised(chat: ChatFormat, tmp_path: Path) -> None:
    path = write(
        tmp_path / "answers.jsonl",
        {"id": "p", "sample": 1, "answer_ids": [40, 41, 2], "finish_reason": "stop", "answer": "not read"},
        {"id": "q", "answer_ids": [42, 43], "finish_reason": "length"},
    )
    first, second = read_samples([path], PROMPTS, chat, max_tokens=99)
    prompt = chat.prompt_ids([{"role": "user", "content": "hello"}])
    assert first.token_ids.tolist() == [*prompt, 40, 41, 2]
    assert first.loss_mask.tolist() == [False] * len(prompt) + [True] * 3
    assert (first.id, first.domain, second.id, second.domain) == ("p#1", "chat", "q#0", "all")
    assert second.token_ids.tolist()[-2:] == [42, 43] and int(second.loss_mask.sum()) == 2


def test_long_samples_are_cut_on_the_right_and_left_out_without_two_supervised_tokens(
    chat: ChatFormat, tmp_path: Path
) -> None:
    prompt = len(chat.prompt_ids([{"role": "user", "content": "hello"}]))
    path = write(tmp_path / "answers.jsonl", {"id": "p", "answer_ids": [40, 41, 42]}, {"id": "q", "answer_ids": [40]})
    (sample,) = read_samples([path], PROMPTS, chat, max_tokens=prompt + 2)
    assert sample.token_ids.tolist()[prompt:] == [40, 41] and len(sample.loss_mask) == prompt + 2
    with pytest.raises(DataError, match="no usable answers"):
        read_samples([path], PROMPTS, chat, max_tokens=prompt + 1)
    with pytest.raises(DataError, match="no usable answers"):
        read_samples([], PROMPTS, chat, max_tokens=99)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"id": "z", "answer_ids": [1, 2]}, "answer to 'z', which no prompts file holds"),
        ({"answer_ids": [1, 2]}, "which no prompts file holds"),
        ({"id": ["p"], "answer_ids": [1, 2]}, "which no prompts file holds"),
        ({"id": "p"}, "answer_ids"),
        ({"id": "p", "answer_ids": "text"}, "answer_ids"),
        ({"id": "p", "answer_ids": [1, "2"]}, "answer_ids"),
        ({"id": "p", "answer_ids": [1, 2.5]}, "answer_ids"),
    ],
)
def test_a_row_that_is_no_answer_is_named(row: dict, words: str, chat: ChatFormat, tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", {"id": "p", "answer_ids": [4, 5]}, row)
    with pytest.raises(DataError, match=rf"odd\.jsonl:2: .*{words}"):
        read_samples([path], PROMPTS, chat, max_tokens=99)


# --- held out --------------------------------------------------------------------------------------------------------


def test_no_prompt_is_on_both_sides() -> None:
    samples = [a_sample(f"p#{i}#{k}", "ab"[i % 2]) for i in range(20) for k in range(3)]
    training, held = split_held_out(samples, 6)
    assert prompt_id(samples[0]) == "p#0"
    assert len({prompt_id(s) for s in held}) == len(held) == 6
    assert not {prompt_id(s) for s in held} & {prompt_id(s) for s in training}
    assert len(training) == 3 * (20 - 6)


def test_domains_share_the_held_out_set_evenly() -> None:
    samples = [a_sample(f"{domain}{i}#0", domain) for domain in ("x", "y", "z") for i in range(10)]
    assert Counter(s.domain for s in split_held_out(samples, 8)[1]) == {"x": 3, "y": 3, "z": 2}


def test_the_choice_does_not_depend_on_the_order_of_the_files() -> None:
    samples = [a_sample(f"p{i}#0", "ab"[i % 3 == 0]) for i in range(30)]
    one, other = (split_held_out(order, 7)[1] for order in (samples, samples[::-1]))
    assert [s.id for s in one] == [s.id for s in other]
    more = split_held_out([*samples, *(a_sample(f"p{i}#1", "ab"[i % 3 == 0]) for i in range(30))], 7)[1]
    assert [prompt_id(s) for s in more] == [prompt_id(s) for s in one]


def test_at_most_half_of_a_domain_is_held_out() -> None:
    samples = [a_sample(f"a{i}#0", "a") for i in range(5)] + [a_sample("b#0", "b")]
    training, held = split_held_out(samples, 100)
    assert Counter(s.domain for s in held) == {"a": 2} and len(training) == 4


# --- vocabulary ------------------------------------------------------------------------------------------------------


def test_only_supervised_tokens_are_counted() -> None:
    samples = [a_sample("p#0", ids=(9, 9, 3, 3, 1), prompt=2), a_sample("q#0", ids=(3, 9))]
    assert token_counts(samples, 11).tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 0, 1, 0]


def test_the_draft_vocabulary_is_the_frequent_tokens_and_the_stops() -> None:
    counts = torch.tensor([0, 5, 1, 5, 0, 9, 1])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 3, 5]
    assert choose_draft_vocab(counts, 4).tolist() == [1, 2, 3, 5], "of equals the small id"
    assert choose_draft_vocab(counts, 3, always=[4, 4]).tolist() == [1, 4, 5]
    assert choose_draft_vocab(counts, 99).tolist() == list(range(7))


def test_bigrams_end_in_supervised_tokens() -> None:
    samples = [a_sample("p#0", ids=(8, 9, 3, 4), prompt=2), a_sample("q#0", ids=(5, 6), prompt=0)]
    previous, following = bigram_pairs(samples)
    assert list(zip(previous.tolist(), following.tolist(), strict=True)) == [(9, 3), (3, 4), (5, 6)]
