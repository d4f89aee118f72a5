"""Tiny chat models of two families that write words: random weights, with a head that prefers letters and spaces.

The first dimension of the residual stream is a large constant, so the head's first column acts as a bias over the
vocabulary. What comes out is no language, but it has words, ends of turns, and habits that a drafter can learn.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from chat_templates import FAMILIES, byte_tokenizer

MAX_LEN = 256
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
GEMMA3 = {"query_pre_attn_scalar": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {"qwen3": ("Qwen3Config", {}), "gemma": ("Gemma3TextConfig", GEMMA3)}
CONSTANT = 8.0  # of the first dimension, as the layers see it; after the last norm it is about half of that
BIAS = {"space": 1.6, "letter": 1.0, "end": 1.0, "other": -3.0}  # times that half: logits


def save_writer(folder: Path, family: str, *, template: bool = True) -> Path:
    """Save a model of ``family`` (qwen3 or gemma), with its chat template or without any."""
    kind = FAMILIES[family]
    tokenizer = byte_tokenizer(kind)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    name, extra = CLASSES[family]
    torch.manual_seed(5)
    ends = [tokenizer.convert_tokens_to_ids(kind.end), tokenizer.convert_tokens_to_ids(kind.eos)]
    config = getattr(transformers, name)(
        **{**SHAPE, **extra}, vocab_size=len(tokenizer), eos_token_id=ends[1], bos_token_id=None, pad_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter *= 12 if key == "lm_head.weight" else 8
        scale = config.hidden_size**0.5 if family == "gemma" else 1.0  # Gemma multiplies its embeddings
        model.get_input_embeddings().weight[:, 0] = CONSTANT / scale
        bias = torch.full((len(tokenizer),), BIAS["other"])
        bias[[tokenizer.convert_tokens_to_ids(c) for c in string.ascii_lowercase]] = BIAS["letter"]
        bias[tokenizer.convert_tokens_to_ids("\u0120")] = BIAS["space"]  # how byte-level vocabularies write a space
        bias[ends] = BIAS["end"]
        model.lm_head.weight[:, 0] = bias
    model.save_pretrained(folder)
    return folder
