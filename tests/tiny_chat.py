"""A tiny random chat model in a folder, byte-level tokenizer and template included, and a random drafter for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_drafter import tiny_drafter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspark.models.checkpoint import save_drafter

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<reserved>")
MAX_LEN = 256
BLOCK = 4


def save_chat_model(folder: Path) -> Path:
    """Save a Llama-shaped model of 4 layers whose tokens are single bytes, and its tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=list(SPECIAL)
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        eos_token_id=vocabulary["<|im_end|>"],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 6 if parameter.dim() > 1 else 1  # far from uniform, so that ties are rare
        model.lm_head.weight[vocabulary["<|im_end|>"]] = 0  # and not stopping by chance
    model.save_pretrained(folder)
    return folder


def save_random_drafter(folder: Path, *, hidden_size: int = 32, confidence: bool = True) -> Path:
    """Save a DSpark drafter with random weights that fits :func:`save_chat_model`'s model; its drafts are bad."""
    model = tiny_drafter(
        seed=4,
        scale=0.3,
        norms=1.0,
        vocab_size=len(SPECIAL) + 256,
        hidden_size=hidden_size,
        num_target_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        max_position_embeddings=MAX_LEN,
        enable_confidence_head=confidence,
    )
    save_drafter(folder, model)
    return folder
