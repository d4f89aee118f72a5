"""Checkpoints: bit-identical round trips, and errors that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafter import NO_HEADS, fill, tiny_config, tiny_eagle3_config, tiny_mtp_config
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError
from dspark.models.backbone import DraftModel
from dspark.models.checkpoint import (
    Checkpoint,
    build_model,
    check_shared,
    load_drafter_model,
    new_model,
    read_drafter,
    save_drafter,
    wanted_tensors,
)
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_files import read_tensors
from dspark.models.eagle3 import Eagle3Config
from dspark.models.mtp import MTPConfig

CONFIG = tiny_config(vocab_size=20, num_hidden_layers=2, target_layer_ids=(1, 3), markov_rank=3, draft_vocab_size=9)
KINDS = {
    "dspark": CONFIG,
    "dflash": tiny_config(vocab_size=20, **NO_HEADS),
    "eagle3": tiny_eagle3_config(vocab_size=20, draft_vocab_size=9, own_head=True),
    "mtp": tiny_mtp_config(vocab_size=20),
}


def saved(folder: Path, config: DraftConfig | Eagle3Config | MTPConfig = CONFIG) -> torch.nn.Module:
    torch.manual_seed(0)
    model = fill(new_model(config), scale=1.0)
    if config.draft_vocab_size is not None:
        model.d2t.copy_(torch.arange(9))
    save_drafter(folder, model, extra={"README.md": "a card"})
    return model


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, change: dict) -> None:
    path = folder / "config.json"
    data = {k: v for k, v in {**json.loads(path.read_text()), **change}.items() if v is not None}
    path.write_text(json.dumps(data))


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_is_bit_identical(tmp_path: Path, kind: str) -> None:
    saved(tmp_path / "d", KINDS[kind])
    one = read_drafter(tmp_path / "d")
    assert one.config == KINDS[kind] and one.kind == kind
    save_drafter(tmp_path / "e", build_model(one, dtype=torch.bfloat16))
    assert read_drafter(tmp_path / "e").same_as(one)
    assert one.tensors.keys() == wanted_tensors(KINDS[kind]).keys()


def test_same_as_sees_a_bit_a_dtype_and_a_fact() -> None:
    tensors = {"fc.weight": torch.tensor([0.0])}
    one = Checkpoint(config=CONFIG, tensors=tensors)
    assert one.same_as(Checkpoint(config=CONFIG, tensors={"fc.weight": torch.tensor([0.0])}))
    assert not one.same_as(Checkpoint(config=CONFIG, tensors={"fc.weight": torch.tensor([-0.0])}))
    assert not one.same_as(Checkpoint(config=CONFIG, tensors={"fc.weight": torch.tensor([0.0]).half()}))
    assert not one.same_as(Checkpoint(config=CONFIG, tensors=tensors, target_name="other"))


def test_a_model_of_another_kind_is_refused_as_a_block_drafter(tmp_path: Path) -> None:
    saved(tmp_path / "d", KINDS["mtp"])
    with pytest.raises(CheckpointError, match="kind mtp"):
        load_drafter_model(tmp_path / "d")


def test_embedding_and_head_may_be_stored_and_are_left_out_of_the_model(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    copies = {"lm_head.weight": torch.zeros(9, 8), "embed_tokens.weight": torch.ones(20, 8)}
    change_tensors(tmp_path / "d", lambda t: t.update(copies))
    assert read_drafter(tmp_path / "d").tensors.keys() >= copies.keys()
    assert isinstance(load_drafter_model(tmp_path / "d"), DraftModel)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), r"missing tensors \['fc.weight'\]"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"unknown tensors \['extra.weight'\]"),
        (lambda t: t.update({"fc.weight": torch.zeros(3, 3)}), r"fc.weight has shape \[3, 3\]"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(20, 8)}), r"lm_head.weight has shape \[20, 8\]"),
        (lambda t: [t.pop(n) for n in list(t) if "markov" in n], "markov_rank names a sequential head"),
        (lambda t: [t.pop(n) for n in list(t) if "confidence" in n], "enable_confidence_head promises a head"),
        (lambda t: t.pop("d2t"), "draft_vocab_size reduces the vocabulary"),
        (lambda t: t.update({"d2t": torch.zeros(9)}), "d2t is torch.float32"),
        (lambda t: t.update({"d2t": -torch.arange(9)}), "must ascend"),
        (lambda t: t.update({"d2t": torch.full((9,), 12)}), r"reaches target ids 12\.\.20; the vocabulary has 20"),
        (lambda t: t.update({"d2t": torch.full((9,), -1)}), r"reaches target ids -1\.\.7"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Callable, words: str) -> None:
    saved(tmp_path / "d")
    change_tensors(tmp_path / "d", change)
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
        ({"mask_token_id": None}, "mask_token_id"),
        ({"target_layer_ids": [1, 5]}, r"-1\.\.4"),
        ({"target_layer_ids": [3, 1]}, "ascending"),
        ({"mask_token_id": 20}, "mask_token_id is 20"),
        ({"eos_token_id": [7, 2]}, "mask_token_id is 2, which is an end token"),
        ({"pad_token_id": 2}, "mask_token_id is 2, which is the pad token"),
        ({"markov_head_type": "oracle"}, "oracle"),
        ({"markov_rank": 0}, r"unknown tensors \['markov_head.* \(markov_rank is 0"),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing although the file holds d2t"),
    ],
)
def test_wrong_configs_are_named(tmp_path: Path, change: dict, words: str) -> None:
    saved(tmp_path / "d")
    change_config(tmp_path / "d", change)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        load_drafter_model(tmp_path / "d")


def test_an_eagle3_drafter_without_the_head_it_was_trained_with_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "d", KINDS["eagle3"])
    change_tensors(tmp_path / "d", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors \['lm_head.weight'\].*head of its own"):
        read_drafter(tmp_path / "d")


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_drafter_model(tmp_path)
    saved(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is unreadable"):
        load_drafter_model(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_drafter_model(tmp_path / "d")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_drafter_model(tmp_path / "d")
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_drafter_model(tmp_path / "d")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_drafter_model(tmp_path / "d")
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\).*safetensors"):
        load_drafter_model(tmp_path / "d")


def shard(folder: Path, *, unlisted: str = "", lost: str = "") -> None:
    """Split a folder's weights into two files and an index; ``unlisted`` stays out of it, ``lost`` is in it alone."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some if name != lost}, folder / file)
    where = {name: file for file, some in parts.items() for name in some if name != unlisted}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_sharded_weights_are_read_through_their_index(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    whole = load_file(tmp_path / "d" / "model.safetensors")
    shard(tmp_path / "d")
    tensors = read_tensors(tmp_path / "d")
    assert tensors.keys() == whole.keys() and all(torch.equal(tensors[n], whole[n]) for n in whole)
    load_drafter_model(tmp_path / "d")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"unlisted": "fc.weight"}, r"does not list \['fc.weight'\]"),
        ({"lost": "fc.weight"}, "lacks the tensor fc.weight"),
    ],
)
def test_an_index_and_its_shards_must_agree(tmp_path: Path, fault: dict[str, str], words: str) -> None:
    saved(tmp_path / "d")
    shard(tmp_path / "d", **fault)
    with pytest.raises(CheckpointError, match=words):
        load_drafter_model(tmp_path / "d")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    shard(tmp_path / "d")
    (tmp_path / "d" / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors is missing"):
        load_drafter_model(tmp_path / "d")


# --- copies of the target --------------------------------------------------------------------------------------------


def shared(copies: dict[str, Tensor], embedding: Tensor, head: Tensor, scales: tuple[float, ...] = (1.0,)) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in wanted_tensors(CONFIG).items()}
    tensors["d2t"] = torch.arange(9)
    checkpoint = Checkpoint(config=CONFIG, tensors={**tensors, **copies})
    check_shared(
        checkpoint,
        embedding=lambda ids: embedding[ids],
        head=lambda ids: head[ids],
        where="here",
        target="it",
        scales=scales,
    )


def test_stored_copies_are_compared_with_the_target() -> None:
    torch.manual_seed(0)
    embedding, head = torch.randn(20, 8), torch.randn(20, 8)
    ids = torch.arange(0, 18, 2)  # what d2t = arange(9) maps to
    shared({}, embedding, head)
    shared({"embed_tokens.weight": embedding, "lm_head.weight": head[ids]}, embedding, head)
    shared({"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": head[ids].half()}, embedding, head)
    shared({"embed_tokens.weight": embedding}, (embedding * 8**0.5).bfloat16(), head, scales=(1.0, 8**0.5))
    with pytest.raises(CheckpointError, match=r"20 of 20 rows of embed_tokens\.weight are not those of it"):
        shared({"embed_tokens.weight": embedding}, embedding * 8**0.5, head)
    with pytest.raises(CheckpointError, match=r"9 of 9 rows of lm_head\.weight"):
        shared({"lm_head.weight": head[:9].flip(0)}, embedding, head)
    other = embedding.clone()
    other[7, 3] += 0.1
    with pytest.raises(CheckpointError, match="1 of 20 rows"):
        shared({"embed_tokens.weight": other}, embedding, head)
