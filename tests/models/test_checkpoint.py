"""Checkpoints: bit-identical round trips, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import CheckpointError, ConfigError
from dspark.models.backbone import DraftModel
from dspark.models.checkpoint import load_drafter_model, save_drafter
from dspark.models.draft_config import DraftConfig

CONFIG = DraftConfig(
    vocab_size=20,
    hidden_size=8,
    num_target_layers=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=12,
    target_layer_ids=(1, 3),
    mask_token_id=2,
    markov_rank=3,
    draft_vocab_size=9,
)


def saved(folder: Path) -> DraftModel:
    torch.manual_seed(0)
    model = DraftModel(CONFIG)
    model.d2t.copy_(torch.arange(9))
    save_drafter(folder, model, extra={"README.md": "a card"})
    return model


def test_tensor_names_and_config_are_deepspecs(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    names = set(load_file(tmp_path / "d" / "model.safetensors"))
    layer = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layer += tuple(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
    expected = {f"layers.{i}.{n}.weight" for i in range(2) for n in layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight", "markov_head.markov_w1.weight", "d2t"}
    expected |= {"markov_head.markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert names == expected
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["tie_word_embeddings"] is False
    assert config["layer_types"] == ["full_attention"] * 2 and config["target_layer_ids"] == [1, 3]
    assert (tmp_path / "d" / "README.md").read_text() == "a card"


def test_a_round_trip_is_bit_identical(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    again = load_drafter_model(tmp_path / "d", dtype=torch.bfloat16)
    assert again.config == CONFIG
    save_drafter(tmp_path / "e", again)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "de")
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_embedding_and_head_may_be_stored_and_are_ignored(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.zeros(20, 8), "embed_tokens.weight": torch.ones(20, 8)}, path)
    load_drafter_model(tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), r"missing tensors \['fc.weight'\]"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"unknown tensors \['extra.weight'\]"),
        (lambda t: t.update({"fc.weight": torch.zeros(3, 3)}), r"fc.weight has shape \[3, 3\]"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    saved(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=words):
        load_drafter_model(tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"block_size": None}, "block_size"),
        ({"target_layer_ids": [1, 5]}, r"-1\.\.4"),
        ({"target_layer_ids": [3, 1]}, "ascending"),
        ({"mask_token_id": 20}, "mask_token_id is 20"),
        ({"markov_head_type": "oracle"}, "oracle"),
    ],
)
def test_wrong_configs_are_named(tmp_path: Path, change: dict, words: str) -> None:
    saved(tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    data = {k: v for k, v in {**json.loads(path.read_text()), **change}.items() if v is not None}
    path.write_text(json.dumps(data))
    with pytest.raises((CheckpointError, ConfigError), match=words):
        load_drafter_model(tmp_path / "d")


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config"):
        load_drafter_model(tmp_path)
