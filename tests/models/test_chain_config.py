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
        ({"own_head": True, "final_soft_cap": 30.0}, "final_soft_cap is 30"),
    ],
)
def test_unusable_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CONFIGS[0], **changes)


def test_mtp_taps_the_final_state_alone() -> None:
    assert CONFIGS[2].target_layer_ids == (FINAL,) and CONFIGS[2].feature_size == 8
