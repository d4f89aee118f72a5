"""Configurations round-trip through DeepSpec's layout, and what we would compute wrongly is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.errors import CheckpointError, ConfigError
from dspark.models.draft_config import DraftConfig
from dspark.models.registry import default_drafter_folder

FIELDS: dict = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_target_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "mask_token_id": 3,
    "target_layer_ids": (1, 4),
}
GEMMA = {
    "layer_style": "gemma4",
    "attention_k_eq_v": True,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e6,
    "final_soft_cap": 30.0,
}
CHANGES: dict[str, dict] = {
    "dspark": {},
    "gated": {"markov_head_type": "gated"},
    "rnn, state alone": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "anchor's slot given": {"sample_from_anchor": False, "block_size": 15, "draft_vocab_size": 20},
    "gemma4": GEMMA,
    "gemma4, values of their own": {"layer_style": "gemma4"},
}


def config(**changes: object) -> DraftConfig:
    return DraftConfig(**{**FIELDS, **changes})


@pytest.mark.parametrize("name", CHANGES)
def test_round_trip(name: str) -> None:
    made = config(**CHANGES[name])
    assert DraftConfig.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_deepspecs_own_gemma_config_is_read() -> None:
    """As DeepSpec writes it: a copy of the target's config, whose full-attention layers have names of their own."""
    data = {
        **{k: v for k, v in FIELDS.items() if k != "target_layer_ids"},
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "target_layer_ids": [1, 4],
        "num_hidden_layers": 5,
        "block_size": 7,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "enable_moe_block": False,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
        "sliding_window": 1024,
    }
    read = DraftConfig.from_json(data)
    assert (read.layer_style, read.head_dim, read.num_key_value_heads) == ("gemma4", 16, 1)
    assert (read.rope_theta, read.partial_rotary_factor, read.final_soft_cap) == (1e6, 0.25, 30.0)
    assert read.attention_scale == 1.0 and read.attention_k_eq_v and read.sample_from_anchor
    own_values = DraftConfig.from_json({**data, "attention_k_eq_v": False})
    assert own_values.num_key_value_heads == 2 and own_values.head_dim == 16
    assert DraftConfig.from_json(json.loads(json.dumps(read.to_json()))) == read


def test_old_files_with_an_embedding_scale_are_read() -> None:
    data = {**config().to_json(), "embed_scale": 1.0}
    assert DraftConfig.from_json(data) == config()


def test_the_shipped_config_is_current() -> None:
    path = Path(default_drafter_folder()) / "config.json"
    stored = json.loads(path.read_text())
    read = DraftConfig.from_json(stored)
    assert read.layer_style == "qwen3" and read.sample_from_anchor and read.markov_head_type == "vanilla"
    assert not stored.keys() - read.to_json().keys()


def test_slots_and_scale_follow_from_the_convention() -> None:
    assert config(block_size=15).block_inputs == 15
    given = config(block_size=15, sample_from_anchor=False)
    assert (given.block_inputs, given.slots(3)) == (16, 4)
    assert config().attention_scale == 8**-0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_head_type": "oracle"}, "markov_head_type is 'oracle'"),
        ({"layer_style": "llama"}, "layer_style is 'llama'"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_style": "gemma4", "partial_rotary_factor": 0.0}, "partial_rotary_factor 0.0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4"),
        ({"draft_vocab_size": 51}, "draft_vocab_size is 51"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
    ],
)
def test_wrong_fields_are_named(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"layer_style": "qwen3"}, "contradict"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 8.0}}}, "proportional"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        DraftConfig.from_json({**config(**GEMMA).to_json(), **changes})
