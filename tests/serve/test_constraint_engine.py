"""Constraints in the engine: whatever drafts and whichever loop runs, every answer matches, and greedy ones are those
of the masked target."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from tiny_chat import save_chat_model, save_random_drafter

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.serve.constraint import Constraint
from dspark.serve.grammars import Grammars
from dspark.serve.llm import LLM, AnswerParams
from dspark.serve.settings import EngineConfig

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yé"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("constrained")
    return str(save_chat_model(folder / "model")), str(save_random_drafter(folder / "drafter"))


def bundle_of(folders: tuple[str, str], drafter: str) -> Bundle:
    return Bundle.load(folders[0], folders[1] if drafter == "dspark" else drafter, dtype="float32", device="cpu")


def masked_greedy(bundle: Bundle, prompt: list[int], constraint: Constraint, most: int) -> list[int]:
    """The target alone, token by token, its logits masked by a matcher that reads the text from the start."""
    text: list[int] = []
    while len(text) < most and not (text and text[-1] in bundle.chat.stop_token_ids):
        matcher = constraint.matcher()
        matcher.commit(text)
        memory = bundle.target.new_memory(rows=1, max_len=len(prompt) + len(text))
        logits = bundle.target.forward(torch.tensor([*prompt, *text]), memory, last_only=True).logits
        assert logits is not None
        text.append(int(logits[0].masked_fill(~torch.from_numpy(matcher.next_mask()), -math.inf).argmax()))
    return text


MOST = 56  # tokens of an answer; most end before
GREEDY, PLAIN = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
JOINT = SamplingParams(temperature=1.0, seed=2, rule="block", presence_penalty=0.5)


@pytest.mark.parametrize(
    ("drafter", "overlap"), [("none", False), ("ngram", False), ("dspark", False), ("dspark", True)]
)
def test_answers_match_whatever_drafts(folders: tuple[str, str], drafter: str, overlap: bool) -> None:
    """Schema, expression and free answers, greedy and at temperature 1, by both rules."""
    bundle = bundle_of(folders, drafter)
    grammars = Grammars(bundle.chat, bundle.target.info.vocab_size)
    schema, expression = grammars.json_schema(SCHEMA), grammars.regex("[a-c]{3,9}(-[0-9]{2}){1,4}x")
    config = EngineConfig(seats=4, memory_mib=8, scheduler="fixed", overlap=overlap)
    with LLM(bundle, config=config) as llm:
        for sampling, constraint in ((GREEDY, schema), (PLAIN, expression), (JOINT, schema), (PLAIN, None)):
            params = AnswerParams(sampling=sampling, max_new_tokens=MOST, constraint=constraint, logprobs=1)
            output = llm.generate(["ab"], params)[0]
            answer = output.answers[0]
            assert answer.finish_reason in ("stop", "length"), answer.error
            assert len(answer.logprobs) == len(answer.token_ids)
            if constraint is None:
                continue
            if answer.finish_reason == "length":  # cut; so far all is well
                assert constraint.matcher().allowed(answer.token_ids) == len(answer.token_ids)
            elif constraint is schema:
                found = json.loads(answer.text)
                assert isinstance(found["ok"], bool) and found["kind"] in ("x", "yé") and len(found) == 2
            else:
                assert re.fullmatch("[a-c]{3,9}(-[0-9]{2}){1,4}x", answer.text)
            if sampling.greedy:
                assert answer.token_ids == masked_greedy(bundle, list(output.prompt_ids), constraint, MOST)
