"""What engines need in a folder beyond what the formats' own tables say, as vLLM 0.32.0 showed (docs/exports.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign_formats import MADE
from safetensors.torch import load_file
from tiny_chat import save_chat_model, save_random_drafter

from dspark.errors import CheckpointError
from dspark.export.conversion import convert_folder
from dspark.export.formats import format_named, layout_of, read_checkpoint, write_checkpoint
from dspark.export.target_facts import TargetFacts
from dspark.models.checkpoint import Checkpoint

KEPT = torch.tensor([0, 3, 7, 50, 200, 259])  # target ids of the reduced vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return TargetFacts.of(str(save_chat_model(tmp_path_factory.mktemp("chat") / "model")))


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    """A drafter of six tokens, stored without the target's embedding and head."""
    whole = read_checkpoint(save_random_drafter(tmp_path / "whole"))
    tensors = dict(whole.tensors)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][KEPT].clone()
    tensors["d2t"] = KEPT - torch.arange(len(KEPT))
    checkpoint = Checkpoint(config=replace(whole.config, draft_vocab_size=len(KEPT)), tensors=tensors)
    write_checkpoint(tmp_path / "reduced", checkpoint, format_named("deepspec"))
    return tmp_path / "reduced"


@pytest.mark.parametrize("name", ["deepspec", "speculators-dflash"])
def test_no_layer_of_a_speculators_export_is_read_as_causal(tmp_path: Path, name: str) -> None:
    """vLLM takes the field for all layers of a DFlash drafter, sliding or not (its pull request 56692)."""
    data = layout_of(read_checkpoint(MADE[name][2]().save(tmp_path / "d")), format_named("speculators")).data
    assert set(data["transformer_layer_config"]["layer_types"]) == {"full_attention"}
    assert data["sliding_window_non_causal"] is True


def test_rows_of_the_head_go_with_a_reduced_vocabulary(reduced: Path, target: TargetFacts, tmp_path: Path) -> None:
    convert_folder(reduced, tmp_path / "s", to="speculators", target=target)
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target.head[KEPT])
    assert "embed_tokens.weight" not in tensors and tensors["t2d"].nonzero().flatten().tolist() == KEPT.tolist()
    again = convert_folder(tmp_path / "s", tmp_path / "t", to="speculators", target=target)
    assert (
        again.dropped == ()
        and (tmp_path / "t" / "model.safetensors").read_bytes() == (tmp_path / "s" / "model.safetensors").read_bytes()
    )
    back = convert_folder(tmp_path / "s", tmp_path / "d", to="deepspec")
    assert back.dropped == ("lm_head.weight",)
    assert read_checkpoint(tmp_path / "d").tensors.keys() == read_checkpoint(reduced).tensors.keys()


def test_rows_of_the_head_without_a_target_are_an_error(reduced: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"reduced vocabulary.*name the target with --target"):
        convert_folder(reduced, tmp_path / "s", to="speculators")
    assert not (tmp_path / "s").exists()


def test_a_whole_vocabulary_shares_the_targets_head(target: TargetFacts, tmp_path: Path) -> None:
    convert_folder(save_random_drafter(tmp_path / "whole"), tmp_path / "s", to="speculators", target=target)
    assert "lm_head.weight" not in load_file(tmp_path / "s" / "model.safetensors")
