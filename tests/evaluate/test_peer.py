"""The transformers column answers the same question: same ids, same stops, same settings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_chat import save_chat_model

from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ModelError
from dspark.evaluate.peer import TransformersPeer
from dspark.models.drafter import NoDrafter
from dspark.models.loading import load_target

PROMPT = [70, 80, 90, 71]
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "repetition_penalty": 5.0}))
    return folder


@pytest.fixture(scope="module")
def peer(folder: Path) -> TransformersPeer:
    return TransformersPeer(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_greedy_answer_is_ours_whatever_the_folders_defaults(folder: Path, peer: TransformersPeer) -> None:
    target = load_target(str(folder), dtype="float32", device="cpu")
    ours = generate(target, NoDrafter(), PROMPT, sampling=GREEDY, max_new_tokens=20)
    theirs = peer.run(PROMPT, sampling=GREEDY, max_new_tokens=20, stop_token_ids=())
    assert theirs.token_ids == ours.token_ids and theirs.tokens_per_second > 0


def test_stop_tokens_and_single_tokens(peer: TransformersPeer) -> None:
    whole = peer.run(PROMPT, sampling=GREEDY, max_new_tokens=12, stop_token_ids=()).token_ids
    stop = next(t for t in whole if t != whole[0])
    cut = peer.run(PROMPT, sampling=GREEDY, max_new_tokens=12, stop_token_ids=(stop,)).token_ids
    assert cut == whole[: whole.index(stop) + 1]
    assert math.isnan(peer.run(PROMPT, sampling=GREEDY, max_new_tokens=1, stop_token_ids=()).tokens_per_second)


def test_sampling_follows_its_settings(peer: TransformersPeer) -> None:
    def run(**settings: float) -> tuple[int, ...]:
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        return peer.run(PROMPT, sampling=params, max_new_tokens=12, stop_token_ids=()).token_ids

    greedy = run()
    assert run(temperature=1.0, top_k=1, seed=1) == greedy
    assert run(temperature=1.0, min_p=0.999, seed=1) == greedy
    assert run(temperature=2.0, seed=1) == run(temperature=2.0, seed=1) != run(temperature=2.0, seed=2)


def test_a_folder_that_the_library_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        TransformersPeer(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
