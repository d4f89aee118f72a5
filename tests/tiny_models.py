"""Tiny random models of every family that the lean decoder covers, in folders as the library saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 89
LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
ALTERNATING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "linear-rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn-rope": (
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "smollm2": ("LlamaConfig", {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "ungrouped": ("LlamaConfig", {"num_key_value_heads": 6}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", ALTERNATING),
    "qwen3": ("Qwen3Config", {"attention_bias": True}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "final_logit_softcapping": 3.0}),
}


def tiny_model(name: str, **shape: int) -> PreTrainedModel:
    """A model of the family with weights large enough that every part of it shows in the logits."""
    config_class, extra = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        **{**SHAPE, **extra, **shape}, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter += torch.randn_like(parameter) * 0.3
            else:
                parameter *= 6
    return model


def save_model(model: PreTrainedModel, folder: Path) -> str:
    """Save and return the folder as a model's name."""
    model.save_pretrained(folder)
    return str(folder)


def reference(model: PreTrainedModel, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, all tapped states from the embedding to the last legal layer, and final states, of a whole sequence."""
    with torch.no_grad():
        out = model(token_ids[None], output_hidden_states=True, use_cache=False)
    return out.logits[0], torch.cat(out.hidden_states[:-1], -1)[0], out.hidden_states[-1][0]
