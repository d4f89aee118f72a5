"""The reference's choices, on tiny random targets of the same shape as the published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers

from dspark.errors import ConfigError
from dspark.models import draft_recipes
from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_recipes import DraftRecipe, default_taps, for_target
from dspark.train.config import TrainConfig

RECIPES = {name: getattr(draft_recipes, name) for name in ("qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b")}
LAYERS = {"qwen3_4b": 36, "qwen3_8b": 36, "qwen3_14b": 40, "gemma4_12b": 48}


def qwen3(layers: int = 36) -> Any:
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def gemma4(layers: int = 48) -> Any:
    """The text part of the 12B's shape: every sixth layer is full, with larger heads whose keys are its values."""
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "intermediate_size": 48,
        "final_logit_softcapping": 30.0,
    }
    return transformers.Gemma4UnifiedConfig(text_config=text)


def target_of(name: str) -> Any:
    return gemma4() if name == "gemma4_12b" else qwen3(LAYERS[name])


@pytest.mark.parametrize("method", ["dspark", "dflash"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_give_the_references_drafter(name: str, method: str) -> None:
    recipe: DraftRecipe = RECIPES[name](method)
    config = recipe.draft_config(target_of(name))
    assert (config.block_size, config.num_hidden_layers, len(config.target_layer_ids)) == (7, 5, 5)
    assert config.markov_rank == (256 if method == "dspark" else 0)
    assert config.enable_confidence_head == config.confidence_head_with_markov == (method == "dspark")
    assert config.sample_from_anchor and config.draft_vocab_size is None and config.markov_head_type == "vanilla"
    taps = {"qwen3_14b": (1, 10, 19, 28, 37), "gemma4_12b": (5, 17, 29, 41, 46)}
    assert config.target_layer_ids == taps.get(name, (1, 9, 17, 25, 33))
    assert config.mask_token_id == (4 if name == "gemma4_12b" else 151669)
    assert DraftConfig.from_json(config.to_json()) == config


def test_gemma_drafters_have_the_shape_of_full_attention_layers() -> None:
    config = draft_recipes.gemma4_12b().draft_config(gemma4())
    assert (config.layer_style, config.head_dim, config.num_key_value_heads) == ("gemma4", 16, 1)
    assert config.attention_k_eq_v and config.final_soft_cap == 30.0
    assert (config.rope_theta, config.partial_rotary_factor) == (1e6, 0.25)
    with torch.device("meta"):
        names = set(DraftModel(config).state_dict())
    assert "layers.4.layer_scalar" in names and "layers.0.self_attn.v_proj.weight" not in names


def test_a_gemma_draft_layer_is_transformers_layer_but_for_its_context() -> None:
    """Without context and with one slot, a draft layer of Gemma 4's style is a layer of Gemma 4 on one token."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

    from dspark.models.backbone import BlockBatch

    text = transformers.Gemma4TextConfig(**{**gemma4().text_config.to_dict(), "hidden_size_per_layer_input": 0})
    text._attn_implementation = "eager"
    torch.manual_seed(0)
    full = text.layer_types.index("full_attention")
    theirs = Gemma4TextDecoderLayer(text, full)
    model = DraftModel(
        for_target(text, mask_token_id=4, num_taps=2, num_hidden_layers=1, block_size=1, enable_confidence_head=False)
    )
    for tensor in theirs.state_dict().values():
        tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if tensor.dim() == 1 else 0.0))
    model.layers[0].load_state_dict(theirs.state_dict())
    x = torch.randn(1, 32)
    turning = Gemma4TextRotaryEmbedding(text)(x, torch.tensor([[0]]), "full_attention")
    with torch.no_grad():
        expected = theirs(x[None], position_embeddings=turning, shared_kv_states={})[0]
        batch = BlockBatch(torch.zeros(0, 64), [0], torch.tensor([0]), [1])
        seen: list[torch.Tensor] = []
        model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        model(batch, x, torch.zeros(32))
    torch.testing.assert_close(seen[0], expected.view(1, 32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_a_target_of_another_depth_is_refused(recipe: Callable[[], DraftRecipe]) -> None:
    with pytest.raises(ConfigError, match="the target has 12 layers"):
        recipe().draft_config(qwen3(12))


def test_training_is_the_references() -> None:
    dspark, dflash = draft_recipes.qwen3_4b().training, draft_recipes.qwen3_4b("dflash").training
    assert (dspark.alpha_ce, dspark.alpha_l1, dspark.alpha_confidence, dspark.loss_decay) == (0.1, 0.9, 1.0, 4.0)
    assert (dflash.alpha_ce, dflash.alpha_l1, dflash.alpha_confidence) == (1.0, 0.0, 0.0)
    assert (dspark.learning_rate, dspark.warmup, dspark.weight_decay, dspark.clip) == (6e-4, 0.04, 0.0, 1.0)
    assert (dspark.global_batch, dspark.epochs, dspark.max_tokens, dspark.num_anchors) == (512, 10, 4096, 512)
    assert dspark.steps(10_000) == 10 * 19  # 19 whole batches of 512 an epoch
    with pytest.raises(ConfigError, match="method is 'medusa'"):
        draft_recipes.qwen3_4b("medusa")


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_the_references_choices_make_a_training_run(method: str) -> None:
    chosen = draft_recipes.qwen3_8b(method).train_fields()
    assert chosen.keys() <= {f.name for f in fields(TrainConfig)}
    run = TrainConfig(**chosen)
    assert run.slots_per_step // (run.block_size * run.sequences_per_step) == 512  # anchors a sequence
    with pytest.raises(ConfigError, match="markov_head is 'oracle'"):
        TrainConfig(**{**chosen, "markov_head": "oracle"})
    assert run.soft_share(0) == 0.0 and run.block_at(0) == 7 and run.initialise == "fresh"


def test_any_target_gets_a_shape() -> None:
    llama = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=30,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    config = for_target(llama, mask_token_id=3)
    assert (config.head_dim, config.rope_theta, config.max_position_embeddings) == (8, 5e4, 512)
    assert config.target_layer_ids == (1, 8, 14, 20, 27) and config.layer_style == "qwen3"
    changed = for_target(llama, mask_token_id=3, num_taps=1, markov_head_type="rnn", vocab_size=104)
    assert (changed.target_layer_ids, changed.markov_head_type, changed.vocab_size) == ((15,), "rnn", 104)


def test_taps_are_spread_by_z_labs_formula() -> None:
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(30, 3) == (1, 14, 27)
    assert default_taps(30, 1) == (15,)
