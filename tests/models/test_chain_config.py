"""Shapes of Eagle3 and MTP drafters: written and read back, and refused by field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dspark.errors import CheckpointError, ConfigError
from dspark.models.chain_config import ChainConfig
from dspark.models.eagle3 import Eagle3Config
from dspark.models.mtp import MTPConfig
from dspark.models.target import FINAL

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 8,
    "num_target_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
}
CONFIGS = [
    Eagle3Config(**SHAPE, target_layer_ids=(0, 2, 4)),
    Eagle3Config(**SHAPE, target_layer_ids=(1,), own_head=True, qk_norm=False, draft_vocab_size=20),
    MTPConfig(**SHAPE, block_size=2, rope_theta=5e5, final_soft_cap=30.0),
    Eagle3Config(**SHAPE, target_layer_ids=(1, 2), layer_style="gemma4", attention_k_eq_v=True, final_soft_cap=30.0),
    Eagle3Config(**SHAPE, target_layer_ids=(1, 2), own_embedding=True, norm_before_fc=True, norm_before_residual=True),
    Eagle3Config(**SHAPE, target_layer_ids=(1, 2), own_head=True, final_soft_cap=30.0, fc_norm=True, norm_output=True),
    MTPConfig(**SHAPE, layer_style="gemma4", partial_rotary_factor=0.5),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_survives_json(config: ChainConfig) -> None:
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_deepspecs_names_are_written_and_read() -> None:
    data = CONFIGS[0].to_json()
    assert data["architectures"] == ["Qwen3Eagle3Model"] and data["draft_num_hidden_layers"] == 1
    del data["block_size"]
    assert Eagle3Config.from_json({**data, "ttt_length": 5}).block_size == 5
    del data["num_target_layers"], data["rope_theta"]
    whole = {**data, "num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert Eagle3Config.from_json(whole) == replace(CONFIGS[0], rope_theta=77.0)  # a copy of the target's config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"draft_num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
    ],
)
def test_a_layer_that_would_compute_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Eagle3Config.from_json({**CONFIGS[0].to_json(), **changes})


def test_deepspecs_own_gemma_config_is_read() -> None:
    """As DeepSpec writes it: a copy of the target's config, whose full-attention layers have names of their own."""
    data = {
        **SHAPE,
        "architectures": ["Gemma4Eagle3Model"],
        "model_type": "gemma4_text",
        "target_layer_ids": [0, 1, 2, 3, 4],
        "num_hidden_layers": 1,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
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
    }
    read = Eagle3Config.from_json(data)
    assert (read.head_dim, read.num_key_value_heads, read.block_size) == (16, 1, 7)
    assert (read.layer_style, read.attention_k_eq_v, read.final_soft_cap) == ("gemma4", True, 30.0)
    assert (read.partial_rotary_factor, read.rope_theta, read.num_target_layers) == (0.25, 1e6, 6)
    assert not read.own_head and not read.own_embedding
    for changes, words in (({"enable_moe_block": True}, "enable_moe_block"), ({"layer_style": "qwen3"}, "contradict")):
        with pytest.raises(CheckpointError, match=words):
            Eagle3Config.from_json({**data, **changes})


def test_a_missing_field_is_named() -> None:
    data = CONFIGS[2].to_json()
    del data["head_dim"], data["block_size"]
    with pytest.raises(CheckpointError, match="lacks block_size, head_dim"):
        MTPConfig.from_json(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"draft_vocab_size": 51}, "draft_vocab_size is 51"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (0, 5)}, "the last layer is refused"),
        ({"target_layer_ids": (0, FINAL)}, "final state"),
        ({"step_loss_decay": 0.0}, "step_loss_decay is 0"),
        ({"final_soft_cap": -1.0}, "final_soft_cap is -1"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"layer_style": "gemma4", "qk_norm": False}, "qk_norm is false"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v is True"),
        ({"layer_style": "llama"}, "layer_style is 'llama'"),
    ],
)
def test_unusable_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CONFIGS[0], **changes)


def test_mtp_taps_the_final_state_alone() -> None:
    assert CONFIGS[2].target_layer_ids == (FINAL,) and CONFIGS[2].feature_size == 8
