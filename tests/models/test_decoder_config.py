"""Configs that the lean decoder covers come out right; the others name the field that it does not cover."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tiny_models import GEMMA, SHAPE

from dspark.errors import ModelError
from dspark.models.decoder_config import from_transformers

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config_class", "extra", "field"),
    [
        ("GPT2Config", {}, "model_type"),
        ("Qwen3MoeConfig", {}, "model_type"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("LlamaConfig", {"hidden_act": "relu"}, "hidden_act"),
        ("LlamaConfig", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("LlamaConfig", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("Gemma3TextConfig", {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2Config", {**GEMMA, "hidden_activation": "quick_gelu"}, "hidden_activation"),
        ("Qwen2Config", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types"),
    ],
)
def test_what_lean_does_not_cover_is_named(config_class: str, extra: dict[str, Any], field: str) -> None:
    shape = {} if config_class == "GPT2Config" else SHAPE
    config = getattr(transformers, config_class)(**{**shape, **extra})
    with pytest.raises(ModelError, match=field):
        from_transformers(config)


def test_odd_heads_cannot_be_rotated() -> None:
    config = transformers.LlamaConfig(**SHAPE)
    config.head_dim = 15  # newer versions of the library refuse it at construction
    with pytest.raises(ModelError, match="head_dim"):
        from_transformers(config)


def test_families_differ_where_they_should() -> None:
    def decoder(config_class: str, **extra: Any) -> Any:
        return from_transformers(getattr(transformers, config_class)(**{**SHAPE, **extra}))

    llama, qwen2 = decoder("LlamaConfig"), decoder("Qwen2Config")
    assert (llama.qkv_bias, llama.o_bias, qwen2.qkv_bias, qwen2.o_bias) == (False, False, True, False)
    assert llama.slides == (False,) * 4 and llama.sliding_window is None and llama.local_rope == llama.rope
    assert decoder("Qwen3Config").qk_norm and not qwen2.qk_norm
    mistral = decoder("MistralConfig", sliding_window=9)
    assert mistral.sliding_window == 9 and all(mistral.slides)
    gemma2, gemma3 = (
        decoder(name, **GEMMA, attn_logit_softcapping=50.0) for name in ("Gemma2Config", "Gemma3TextConfig")
    )
    assert gemma2.slides == gemma3.slides == (True, False, True, False)
    assert gemma2.attention_softcap == 50.0 and gemma3.attention_softcap is None
    assert gemma2.local_rope == gemma2.rope and gemma3.local_rope != gemma3.rope
    assert gemma2.embedding_scale == pytest.approx(48**0.5) and gemma2.attention_scale == pytest.approx(20**-0.5)
    assert gemma3.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 16))
    assert gemma3.local_rope.inv_freq[1] == pytest.approx(1e4 ** (-2 / 16))
    yarn = decoder("Qwen2Config", rope_parameters=YARN)
    assert yarn.rope.scale == pytest.approx(0.1 * 1.3862943611 + 1.0)
