"""Tiny GGUF files for tests: a byte-level vocabulary with a few merges, and any small model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from dspark.models.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED, Vocabulary

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>"]
MERGES = ["t h", "th e", "Ġ the", "h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "1 2", "( he"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {  # independent of the importer's own table: this one is written in llama.cpp's direction
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_vocabulary(**changes: Any) -> Vocabulary:
    """Three control tokens, one user-defined token, the 256 bytes, and what :data:`MERGES` make of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [merge.replace(" ", "") for merge in MERGES]
    fields: dict[str, Any] = {
        "kind": "gpt2",
        "pre": "smollm",
        "tokens": [*SPECIAL, *ADDED, *alphabet, *merged],
        "types": [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(ADDED) + [NORMAL] * (len(alphabet) + len(merged)),
        "merges": list(MERGES),
        "special_ids": {"bos": 1, "eos": 2, "unk": 0, "pad": 2},
        "add_bos": False,
        "space_prefix": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return Vocabulary(**(fields | changes))


VOCAB_SIZE = len(tiny_vocabulary().tokens)


def gguf_tensors(model: PreTrainedModel, *, permuted: bool) -> dict[str, np.ndarray]:
    """The model's tensors in fp32 under llama.cpp's names, q and k in its order of rows if ``permuted``."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        layer = ""
        if module.startswith("model.layers."):
            number, module = module.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{number}."
        array = tensor.float().numpy()
        if permuted and module in ("self_attn.q_proj", "self_attn.k_proj"):
            q = module.endswith("q_proj")
            array = permute_like_llama_cpp(
                array, model.config.num_attention_heads if q else model.config.num_key_value_heads
            )
        tensors[f"{layer}{NAMES[module]}.{kind}"] = array
    return tensors


def permute_like_llama_cpp(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion: the two rotary halves of a head are woven into pairs of neighbouring rows."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    vocabulary: Vocabulary | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write ``model`` as llama.cpp would. ``metadata`` is added, ``tensors`` replace the model's own."""
    config, vocabulary = model.config, vocabulary or tiny_vocabulary()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types or [])
    writer.add_token_merges(vocabulary.merges)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if name in vocabulary.special_ids:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", vocabulary.special_ids[name])
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, array in (tensors or gguf_tensors(model, permuted=arch == "llama")).items():
        if quantised is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_to_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """Give every parameter a value that bfloat16 holds exactly, and no two neighbours the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0)
            parameter.copy_(noise.bfloat16().float())
    return model.eval()
