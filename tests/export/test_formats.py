"""Every layout: read from a foreign folder, decoded with, written back bit by bit, and changed into the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import TableTarget
from foreign_formats import (
    BLOCK,
    DRAFT_IDS,
    HIDDEN,
    LAYERS,
    MADE,
    MASK,
    TAPS,
    VOCAB,
    Foreign,
    nvidia_eagle3,
    sglang_eagle3,
)
from safetensors.torch import load_file
from tiny_drafter import tiny_config
from transformers import Qwen3Config

from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import CheckpointError, ConfigError
from dspark.export.form import EAGLE3_NORMS
from dspark.export.formats import FORMATS, format_named, layout_of, open_folder, read_checkpoint, write_checkpoint
from dspark.export.inspection import describe
from dspark.models.draft_config import DraftConfig
from dspark.models.drafter import NoDrafter
from dspark.models.eagle3 import Eagle3Config
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.registry import load_drafter


def target() -> TableTarget:
    return TableTarget(vocab_size=VOCAB, hidden_size=HIDDEN, order=1)


def made(name: str, folder: Path) -> Path:
    return MADE[name][2]().save(folder)


def identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", MADE)
def test_a_foreign_folder_loads_and_decodes(tmp_path: Path, name: str) -> None:
    folder = made(name, tmp_path / name)
    opened = open_folder(folder)
    assert (opened.format.name, opened.checkpoint.kind) == MADE[name][:2]
    assert opened.checkpoint.eos_token_ids == (3,)
    model = target()
    drafter = load_drafter(str(folder), model)
    assert drafter.taps == opened.checkpoint.config.target_layer_ids
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=5)):
        done = generate(model, drafter, [1, 2, 3], sampling=sampling, max_new_tokens=12)
        assert len(done.token_ids) == 12 and any(record.draft_tokens for record in done.rounds)
        if sampling.greedy:
            alone = generate(model, NoDrafter(), [1, 2, 3], sampling=sampling, max_new_tokens=12)
            assert done.token_ids == alone.token_ids
        if opened.checkpoint.config.draft_vocab_size is not None:
            assert {t for record in done.rounds for t in record.draft_tokens} <= set(DRAFT_IDS)


@pytest.mark.parametrize("name", MADE)
def test_reading_and_writing_the_same_format_changes_no_bit(tmp_path: Path, name: str) -> None:
    folder = made(name, tmp_path / "one")
    opened = open_folder(folder)
    write_checkpoint(tmp_path / "two", opened.checkpoint, opened.format)
    again = open_folder(tmp_path / "two")
    assert again.format is opened.format and again.checkpoint.same_as(opened.checkpoint)
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert identical(one, two)
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert manifest["fields"]["format"] == opened.format.name and manifest["provenance"]["libraries"]["torch"]


# Which kinds a format has no place for, by what its refusal says.
REFUSALS = {
    ("specforge", "dflash given"): "sample_from_anchor is false",
    ("specforge", "dspark given"): "sample_from_anchor is false",
    ("specforge", "eagle3"): "cannot hold it",
    ("zlab", "dspark"): "holds DFlash alone",
    ("zlab", "dflash anchored"): "sample_from_anchor is True",
    ("zlab", "eagle3"): "holds DFlash alone",
    ("sglang-eagle3", "dspark"): "holds Eagle3 alone",
    ("sglang-eagle3", "dflash anchored"): "holds Eagle3 alone",
    ("sglang-eagle3", "dflash given"): "holds Eagle3 alone",
    ("sglang-eagle3", "eagle3 normed"): "qk_norm is true",
    ("sglang-eagle3", "eagle3 residual"): "norm_before_residual is true",
    ("sglang-eagle3", "eagle3 gemma4"): "layer_style is gemma4",
    ("speculators", "eagle3 gemma4"): "layer_style is gemma4",
}


def variety(checkpoint) -> str:  # type: ignore[no-untyped-def]
    config = checkpoint.config
    if checkpoint.kind in ("dspark", "dflash"):
        return f"{checkpoint.kind} {'anchored' if config.sample_from_anchor else 'given'}"
    if config.layer_style == "gemma4":
        return "eagle3 gemma4"
    return "eagle3 normed" if config.qk_norm else "eagle3 residual" if config.norm_before_residual else "eagle3"


@pytest.mark.parametrize("to", [form.name for form in FORMATS])
@pytest.mark.parametrize("name", MADE)
def test_another_format_gives_the_same_checkpoint_back_or_refuses(tmp_path: Path, name: str, to: str) -> None:
    checkpoint = read_checkpoint(made(name, tmp_path / "one"))
    kind = variety(checkpoint)
    refusal = REFUSALS.get((to, kind)) or REFUSALS.get((to, checkpoint.kind))
    if refusal:
        with pytest.raises(CheckpointError, match=refusal):
            write_checkpoint(tmp_path / "two", checkpoint, format_named(to))
        assert not (tmp_path / "two").exists()
        return
    write_checkpoint(tmp_path / "two", checkpoint, format_named(to))
    opened = open_folder(tmp_path / "two")
    assert opened.format.name == to and opened.checkpoint.same_as(checkpoint)


def test_conventions_are_translated(tmp_path: Path) -> None:
    zlab = read_checkpoint(made("zlab", tmp_path / "z")).config
    assert isinstance(zlab, DraftConfig)
    assert (zlab.block_size, zlab.sample_from_anchor, zlab.mask_token_id) == (15, False, MASK)
    assert zlab.target_layer_ids == tuple(TAPS) and zlab.num_target_layers == LAYERS
    spec = read_checkpoint(made("speculators", tmp_path / "s"))
    assert isinstance(spec.config, DraftConfig) and spec.config.target_layer_ids == tuple(TAPS)
    assert spec.config.block_size == BLOCK and spec.config.sample_from_anchor and spec.config.rope_theta == 5000.0
    assert (spec.target_name, spec.target_architectures) == ("acme/target", ("AcmeForCausalLM",))
    given = read_checkpoint(made("speculators-dflash", tmp_path / "d")).config
    assert isinstance(given, DraftConfig) and (given.block_size, given.sample_from_anchor) == (BLOCK, False)
    assert given.draft_vocab_size is None and given.output_size == VOCAB
    eagle = read_checkpoint(made("sglang-eagle3", tmp_path / "e")).config
    assert isinstance(eagle, Eagle3Config) and eagle.own_head and not eagle.qk_norm
    assert eagle.target_layer_ids == (1, 2, 3) and eagle.head_dim == HIDDEN // 2
    assert read_checkpoint(made("speculators-eagle3", tmp_path / "f")).config.target_layer_ids == (1, 2, 3)
    native = read_checkpoint(made("deepspec-eagle3", tmp_path / "g")).config
    assert isinstance(native, Eagle3Config) and not native.own_head and native.block_size == 4


def test_the_norms_of_published_eagle3_drafters_are_read(tmp_path: Path) -> None:
    def norms(config: Eagle3Config) -> set[str]:
        return {name for name in EAGLE3_NORMS if getattr(config, name)}

    trained = read_checkpoint(made("speculators-eagle31", tmp_path / "a"))
    assert isinstance(trained.config, Eagle3Config) and trained.config.own_embedding and trained.config.own_head
    assert norms(trained.config) == {"norm_before_residual", "norm_before_fc", "norm_output"}
    facts = describe(open_folder(tmp_path / "a"), tmp_path / "a")
    assert facts["norms"] == ["norm_before_residual", "norm_before_fc", "norm_output"]
    assert facts["heads"] == ["language-model head of its own", "embedding of its own"]
    assert facts["copies_of_the_target"] == [] and facts["layer_style"] == "qwen3"
    capped = read_checkpoint(made("sglang-eagle31", tmp_path / "b"))
    assert layout_of(capped, format_named("sglang-eagle3")).data["final_logit_softcapping"] == 20.0
    sglang = capped.config
    assert isinstance(sglang, Eagle3Config) and norms(sglang) == {"fc_norm", "norm_output"}
    assert sglang.own_head and sglang.final_soft_cap == 20.0  # SGLang caps a drafter's logits where its config says so
    nvidia = nvidia_eagle3()
    read = read_checkpoint(nvidia.save(tmp_path / "c"))
    assert isinstance(read.config, Eagle3Config) and norms(read.config) == {"norm_before_fc", "norm_output"}
    with pytest.raises(CheckpointError, match="norm_before_fc is true; SGLang"):
        layout_of(read, format_named("sglang-eagle3"))
    write_checkpoint(tmp_path / "d", read, format_named("speculators"))
    assert read_checkpoint(tmp_path / "d").same_as(read)


def test_an_embedding_apart_is_the_drafters_own_only_if_it_says_so(tmp_path: Path) -> None:
    foreign = sglang_eagle3()
    random = torch.Generator().manual_seed(1)
    foreign.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=random).bfloat16()
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight are not those of table.*set own_embedding true"):
        load_drafter(str(foreign.save(tmp_path / "a")), target())
    foreign.config["own_embedding"] = True
    drafter = load_drafter(str(foreign.save(tmp_path / "b")), target())
    assert isinstance(drafter, Eagle3Drafter) and drafter.config.own_embedding
    torch.testing.assert_close(drafter.embed(torch.tensor([5])), foreign.tensors["embed_tokens.weight"][5:6].float())
    with pytest.raises(CheckpointError, match="own_embedding is true; SGLang"):
        layout_of(read_checkpoint(tmp_path / "b"), format_named("sglang-eagle3"))
    del foreign.tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="embedding of its own"):
        read_checkpoint(foreign.save(tmp_path / "c"))


def layout(name: str, to: str, folder: Path):  # type: ignore[no-untyped-def]
    return layout_of(read_checkpoint(made(name, folder)), format_named(to))


def test_what_engines_read_is_written(tmp_path: Path) -> None:
    spec = layout("deepspec", "speculators", tmp_path / "a")
    assert spec.data["speculators_model_type"] == "dspark" and spec.data["architectures"] == ["DSparkSpeculator"]
    assert spec.data["aux_hidden_state_layer_ids"] == [k + 1 for k in TAPS] and spec.data["sample_from_anchor"] is True
    assert spec.data["draft_vocab_size"] == VOCAB and spec.data["block_size"] == BLOCK
    assert spec.data["transformer_layer_config"]["model_type"] == "qwen3" and "t2d" not in spec.tensors
    assert spec.data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK
    given = layout("zlab", "speculators", tmp_path / "b").data
    assert given["speculators_model_type"] == "dflash" and given["sample_from_anchor"] is False
    assert given["block_size"] == 16 and given["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 15
    mapped = layout("speculators", "specforge", tmp_path / "c")
    assert mapped.data["architectures"] == ["DSparkDraftModel"] and mapped.data["block_size"] == BLOCK
    assert mapped.data["dflash_config"]["target_layer_ids"] == TAPS and "target_layer_ids" not in mapped.data
    assert mapped.tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS
    eagle = layout("speculators-eagle3", "sglang-eagle3", tmp_path / "d")
    names = {name.split(".")[0] for name in eagle.tensors}
    assert names == {"fc", "norm", "lm_head", "midlayer", "d2t", "t2d"}
    assert eagle.data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    back = layout("speculators-dflash", "zlab", tmp_path / "e").data
    assert back["architectures"] == ["DFlashDraftModel"] and back["block_size"] == BLOCK + 1
    assert back["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": TAPS}


def test_a_format_that_does_not_record_the_targets_depth_takes_it_from_the_target(tmp_path: Path) -> None:
    foreign = MADE["speculators"][2]()
    del foreign.config["transformer_layer_config"]["num_target_layers"]
    folder = foreign.save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"number of layers.*--target"):
        open_folder(folder)
    assert open_folder(folder, num_target_layers=LAYERS).checkpoint.config.num_target_layers == LAYERS
    load_drafter(str(folder), target())
    with pytest.raises(CheckpointError, match=r"is \[1, 3, 5\]; indices of hidden_states lie in 0\.\.4"):
        open_folder(folder, num_target_layers=5)


def test_left_out_defaults_of_a_nested_config_are_those_of_transformers(tmp_path: Path) -> None:
    made = MADE["speculators"][2]()
    nested = made.config["transformer_layer_config"]
    assert "hidden_act" not in nested  # equal to Qwen3Config's default
    assert read_checkpoint(made.save(tmp_path / "s")).config.head_dim == 4
    nested["rope_parameters"] = None  # as good as left out
    theta = read_checkpoint(Foreign(made.config, made.tensors).save(tmp_path / "r")).config.rope_theta
    assert theta == Qwen3Config().rope_parameters["rope_theta"]
    del nested["head_dim"]  # Qwen3Config's default is 128 whatever the width
    with pytest.raises(CheckpointError, match=r"k_norm.* has shape \[4\]; the config wants \[128\]"):
        read_checkpoint(Foreign(made.config, made.tensors).save(tmp_path / "t"))


def test_a_gemma_drafter_travels_through_speculators(tmp_path: Path) -> None:
    from dspark.models.checkpoint import Checkpoint, new_model

    config = tiny_config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_target_layers=LAYERS,
        layer_style="gemma4",
        attention_k_eq_v=True,
        final_soft_cap=30.0,
        target_layer_ids=tuple(TAPS),
    )
    torch.manual_seed(0)
    tensors = {name: torch.randn(t.shape) for name, t in new_model(config).state_dict().items()}
    checkpoint = Checkpoint(config=config, tensors=tensors)
    for to in ("deepspec", "speculators"):
        write_checkpoint(tmp_path / to, checkpoint, format_named(to))
        assert read_checkpoint(tmp_path / to).same_as(checkpoint)
    with pytest.raises(CheckpointError, match="layer_style is gemma4"):
        layout_of(checkpoint, format_named("specforge"))


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gguf'; it must be one of speculators, deepspec"):
        format_named("gguf")
    foreign = MADE["deepspec"][2]()
    foreign.config["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(CheckpointError, match=r"\['LlamaForCausalLM'\], which is no drafter's"):
        open_folder(foreign.save(tmp_path / "d"))


def test_an_existing_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(made("deepspec", tmp_path / "d"))
    with pytest.raises(ConfigError, match="exists already"):
        write_checkpoint(tmp_path / "d", checkpoint, format_named("deepspec"))
    write_checkpoint(tmp_path / "d", checkpoint, format_named("deepspec"), replace=True)
    assert read_checkpoint(tmp_path / "d").same_as(checkpoint)
