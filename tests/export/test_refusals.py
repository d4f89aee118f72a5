"""Mismatches that would only show as drafts that are never accepted are found when a folder is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_formats import MADE, MASK, TAPS, VOCAB, Foreign

from dspark.errors import CheckpointError
from dspark.export.formats import format_named, layout_of, open_folder, read_checkpoint

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def nested(key: str, value: Any) -> Change:
    return lambda c, t: c["dflash_config"].update({key: value})


def layer_config(key: str, value: Any) -> Change:
    return lambda c, t: c["transformer_layer_config"].update({key: value})


def top(**fields: Any) -> Change:
    return lambda c, t: c.update(fields)


def drop(key: str) -> Change:
    return lambda c, t: c.pop(key)


CASES: list[tuple[str, str, Change, str]] = [
    # slots
    ("slots", "speculators", drop("sample_from_anchor"), "sample_from_anchor is missing.*true if.*false if"),
    ("slots", "speculators", top(sample_from_anchor=False), "speculative_tokens is 3, but 3 slots.*predict 2"),
    ("slots", "speculators", top(shift_label=False), "sample_from_anchor is True and shift_label False"),
    ("slots", "speculators", lambda c, t: c["speculators_config"].update(algorithm="eagle3"), "algorithm contradicts"),
    ("slots", "specforge", lambda c, t: c["dflash_config"].pop("projector_type"), "projector_type is None"),
    ("slots", "specforge", nested("projector_type", "domino"), "projector_type is 'domino'"),
    ("slots", "specforge", nested("sample_from_anchor", False), "contradicts projector_type"),
    ("slots", "zlab", top(sample_from_anchor=True), "anchor slot predicts nothing"),
    ("slots", "zlab", nested("shift_label", True), "anchor slot predicts nothing"),
    ("slots", "zlab", nested("markov_rank", 3), "markov_rank is 3"),
    ("slots", "zlab", nested("projector_type", "domino"), "projector_type is 'domino'"),
    ("slots", "zlab", nested("block_size", 8), "block_size contradicts itself: the top says 16, dflash_config says 8"),
    ("slots", "zlab", top(block_size=1), "block_size is 1; it counts the anchor"),
    ("slots", "zlab", drop("block_size"), "lacks block_size"),
    ("slots", "deepspec-dflash", top(dflash_config={"projector_type": "dflash"}), "state sample_from_anchor"),
    # layer ids
    ("layers", "deepspec", top(target_layer_ids=[1, 3, 5]), "as indices of hidden_states .* legal"),
    ("layers", "deepspec", top(target_layer_ids=[1, 3, 6]), r"lie in -1\.\.4 .*already normed\)"),
    ("layers", "deepspec", top(aux_hidden_state_layer_ids=TAPS), r"must be \[1, 3, 5\]"),
    ("layers", "deepspec-eagle3", top(target_layer_ids=[1, 2, 3, 4, 5]), "as indices of hidden_states"),
    ("layers", "speculators", top(aux_hidden_state_layer_ids=[1, 3, 6]), r"lie in 0\.\.5 .*already normed"),
    ("layers", "speculators", top(aux_hidden_state_layer_ids=[-1, 3, 5]), "-1 is DeepSpec's embedding"),
    ("layers", "speculators", drop("aux_hidden_state_layer_ids"), "lacks aux_hidden_state_layer_ids"),
    ("layers", "specforge", nested("target_layer_ids", [1, 3, 5]), "as indices of hidden_states"),
    ("layers", "zlab", nested("target_layer_ids", [1, 3, 5]), "as indices of hidden_states"),
    ("layers", "zlab", nested("target_layer_ids", [3, 1, 2]), "ascending"),
    ("layers", "zlab", top(target_layer_ids=[1, 3, 4]), "target_layer_ids contradicts itself"),
    ("layers", "zlab", drop("num_target_layers"), "number of layers"),
    (
        "layers",
        "sglang-eagle3",
        lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 5]),
        "-1..4",
    ),
    # mask token
    ("mask", "deepspec", drop("mask_token_id"), "lacks mask_token_id"),
    ("mask", "deepspec", top(mask_token_id=None), "lacks mask_token_id"),
    ("mask", "deepspec", top(mask_token_id=VOCAB), f"mask_token_id is {VOCAB}"),
    ("mask", "deepspec", top(eos_token_id=[2, MASK]), "an end token"),
    ("mask", "deepspec", top(pad_token_id=MASK), "the pad token"),
    ("mask", "speculators", top(mask_token_id=None), "lacks mask_token_id"),
    ("mask", "speculators", top(mask_token_id=-1), "mask_token_id is -1"),
    ("mask", "speculators", layer_config("pad_token_id", MASK), "the pad token"),
    ("mask", "specforge", lambda c, t: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
    ("mask", "specforge", top(mask_token_id=1), "mask_token_id contradicts itself: the top says 1"),
    ("mask", "zlab", top(eos_token_id=MASK), "an end token"),
    # heads
    (
        "heads",
        "deepspec",
        lambda c, t: [t.pop(n) for n in list(t) if "markov" in n],
        "markov_rank names a sequential head",
    ),
    (
        "heads",
        "deepspec",
        top(markov_rank=0, confidence_head_with_markov=False),
        "markov_rank is 0 or missing although",
    ),
    ("heads", "deepspec", top(enable_confidence_head=False), "enable_confidence_head is off although"),
    ("heads", "deepspec-gated", top(markov_head_type="vanilla"), r"unknown tensors \['markov_head.gate_proj"),
    ("heads", "deepspec", top(markov_head_type="rnn"), r"missing tensors \['markov_head.joint_proj"),
    ("heads", "speculators", lambda c, t: t.pop("confidence_head.proj.bias"), "confidence_head.proj.bias"),
    ("heads", "sglang-eagle3", lambda c, t: t.pop("lm_head.weight"), "head of its own"),
    ("heads", "speculators-eagle3", lambda c, t: t.pop("lm_head.weight"), "head of its own"),
    ("heads", "sglang-eagle3", lambda c, t: t.pop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight"),
    # vocabulary
    ("vocabulary", "speculators", lambda c, t: t.pop("d2t"), "t2d is stored without d2t"),
    ("vocabulary", "speculators", lambda c, t: [t.pop("d2t"), t.pop("t2d")], "nothing says to which tokens"),
    ("vocabulary", "speculators", lambda c, t: t["t2d"].logical_not_(), "t2d marks 6 target tokens.*not the same"),
    ("vocabulary", "speculators", lambda c, t: t.update(t2d=t["t2d"][:-1].clone()), "t2d has shape"),
    ("vocabulary", "speculators", lambda c, t: t["d2t"].neg_(), "must ascend"),
    ("vocabulary", "sglang-eagle3", lambda c, t: t["d2t"].add_(1), r"reaches target ids 1\.\.12"),
    ("vocabulary", "speculators", top(draft_vocab_size=VOCAB), "config wants"),
    # parts that are not ours
    ("model", "speculators-eagle3", drop("norm_before_residual"), "norm_before_residual is missing"),
    ("model", "speculators-eagle3", top(norm_before_fc=True), r"\['input_norm.weight'\].*norm_before_fc promises"),
    ("model", "speculators-eagle31", top(norm_before_fc=False), "norm_before_fc is off although"),
    ("model", "speculators-eagle31", top(fc_norm=True), "norm_before_fc and fc_norm are both true"),
    ("model", "speculators-eagle31", lambda c, t: t.pop("embed_tokens.weight"), "embedding of its own"),
    ("model", "speculators", top(norm_output=True), "norm_output is True"),
    ("model", "sglang-eagle31", top(fc_norm=False), "fc_norm is off although"),
    (
        "model",
        "sglang-eagle31",
        lambda c, t: c["eagle_config"].update(norm_output=False),
        "norm_output contradicts itself",
    ),
    ("model", "sglang-eagle3", top(bias=True), "bias is True"),
    ("model", "speculators-eagle3", layer_config("model_type", "mixtral"), "mixtral"),
    ("model", "speculators", layer_config("model_type", "llama"), "model_type is 'llama'"),
    ("model", "speculators", top(speculators_model_type="medusa"), "algorithm contradicts itself"),
    ("model", "speculators", top(target_hidden_size=16), "target_hidden_size is 16"),
    ("model", "speculators", drop("transformer_layer_config"), "lacks transformer_layer_config"),
    ("model", "sglang-eagle3", top(num_hidden_layers=2), "num_hidden_layers is 2"),
    (
        "model",
        "sglang-eagle3",
        lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state",
    ),
    ("model", "zlab", top(layer_types=["sliding_attention"] * 2), "sliding_attention"),
    ("model", "zlab", nested("output_multiplier", 0.5), "output_multiplier is 0.5"),
    ("model", "zlab", nested("conv_kernel_size", 4), "conv_kernel_size is 4"),
    ("model", "specforge", nested("attention_mode", "MLA"), "attention_mode is 'mla'"),
    ("model", "specforge", top(model_type="llama"), "model_type is 'llama'"),
    ("model", "deepspec-gemma4-eagle3", top(enable_moe_block=True), "enable_moe_block is True"),
    ("model", "deepspec-gemma4-eagle3", top(attention_k_eq_v=False), "missing tensors.*v_proj"),
    ("model", "deepspec", top(hidden_size="8"), "wrong type"),
    ("model", "zlab", top(dflash_config="none"), "must hold an object"),
    ("model", "zlab", lambda c, t: t.update(extra=torch.zeros(1)), r"unknown tensors \['extra'\]"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), [case[1:] for case in CASES], ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)]
)
def test_a_mismatch_is_found_at_load(tmp_path: Path, name: str, change: Change, words: str) -> None:
    foreign: Foreign = MADE[name][2]()
    change(foreign.config, foreign.tensors)
    folder = foreign.save(tmp_path / "d")
    with pytest.raises(CheckpointError, match=words) as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)


def test_every_case_starts_from_a_folder_that_loads(tmp_path: Path) -> None:
    for name in {case[1] for case in CASES}:
        open_folder(MADE[name][2]().save(tmp_path / name))


def test_a_renamed_specforge_export_is_read_where_its_fields_are(tmp_path: Path) -> None:
    """SpecForge's own script renames the architecture and lifts the heads' fields; the rest stays nested."""
    foreign = MADE["specforge"][2]()
    config = {**foreign.config, "architectures": ["Qwen3DSparkModel"]}
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        config[key] = config["dflash_config"][key]
    renamed = open_folder(Foreign(config, foreign.tensors).save(tmp_path / "renamed"))
    assert renamed.format.name == "deepspec"
    assert renamed.checkpoint.same_as(read_checkpoint(foreign.save(tmp_path / "plain")))


def test_an_early_specforge_config_is_told_by_its_projector(tmp_path: Path) -> None:
    foreign = MADE["specforge"][2]()
    foreign.config["architectures"] = ["DFlashDraftModel"]
    assert open_folder(foreign.save(tmp_path / "d")).format.name == "specforge"


def test_default_taps_of_eagle3_are_those_of_the_engines(tmp_path: Path) -> None:
    foreign = MADE["sglang-eagle3"][2]()
    del foreign.config["eagle_config"]
    foreign.config["num_target_layers"] = 28
    assert read_checkpoint(foreign.save(tmp_path / "d")).config.target_layer_ids == (1, 13, 24)
    foreign = MADE["speculators-eagle31"][2]()
    foreign.config["eagle_aux_hidden_state_layer_ids"] = None
    foreign.config["transformer_layer_config"]["num_target_layers"] = 28
    assert read_checkpoint(foreign.save(tmp_path / "e")).config.target_layer_ids == (1, 13, 24)


def test_copies_are_refused_where_a_format_has_no_place_for_them(tmp_path: Path) -> None:
    foreign = MADE["specforge"][2]()
    foreign.tensors["lm_head.weight"] = torch.zeros(VOCAB, 8)
    checkpoint = read_checkpoint(foreign.save(tmp_path / "d"))
    with pytest.raises(CheckpointError, match="stores no copies of the target"):
        layout_of(checkpoint, format_named("specforge"))
