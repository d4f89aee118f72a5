"""What a run reads: answers are rendered with the options of the chat template that they were made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_chat import TEMPLATE
from tiny_run import tiny_config
from transformers import AutoTokenizer

from dspark.cache_runs import prepare
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings
from dspark.data.prompts import read_prompts
from dspark.errors import ConfigError
from dspark.train.config import TrainConfig
from dspark.train.run import load_corpus

THINKING = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<none>{% endif %}"


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Answers made with thinking off, by a model whose template says so in every prompt."""
    config = tiny_config(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokenizer.chat_template = TEMPLATE + THINKING
    tokenizer.save_pretrained(config.model)
    _sign(config.answers[0], config, {"enable_thinking": False})
    return config


def _sign(answers: str, config: TrainConfig, options: dict[str, bool]) -> None:
    """Give an answers file the manifest of answers made with ``options``."""
    chat = ChatFormat.from_folder(config.model, template_options=options)
    rows = Path(answers).read_text()
    Path(answers).unlink()
    AnswerFile(
        answers, answer_settings("tiny", chat, SamplingParams(), max_new_tokens=40), read_prompts(config.prompts)
    )
    Path(answers).write_text(rows)


def test_a_run_renders_answers_as_they_were_made(config: TrainConfig) -> None:
    corpus = load_corpus(config)
    assert corpus.chat.template_options == {"enable_thinking": False}
    for sample in corpus.training:
        prompt = sample.token_ids[: int(sample.loss_mask.nonzero()[0, 0])]
        assert corpus.chat.decode(prompt.tolist()).endswith("assistant\n<none>")


def test_a_cache_holds_answers_as_they_were_made(config: TrainConfig) -> None:
    job, corpus = prepare(config), load_corpus(config)
    ours = {sample.id: sample.token_ids.tolist() for sample in job.samples}
    assert all(ours[sample.id] == sample.token_ids.tolist() for sample in corpus.training)


def test_answers_of_two_settings_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "p0", "sample": 1, "answer_ids": [50, 51, 52]}) + "\n")
    _sign(str(other), config, {"enable_thinking": True})
    with pytest.raises(ConfigError, match="template_options"):
        load_corpus(replace(config, answers=(*config.answers, str(other))))
