"""Tiny drafters in every layout, written from the tables of the formats' own sources and not by the package's writers.

All of them fit a target of :data:`VOCAB` tokens, :data:`HIDDEN` channels and :data:`LAYERS` layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, LAYERS = 12, 8, 6
HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 1, 4, 10
TAPS, MASK, BLOCK, RANK = [0, 2, 4], 11, 3, 3
GELU = "gelu_pytorch_tanh"
DRAFT_IDS = [0, 1, 4, 5, 9, 11]  # target ids of a reduced vocabulary
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "eos_token_id": 3,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Foreign:
    """A folder to be: what stands in ``config.json`` and in the weights."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


class Maker:
    """Random tensors by name, in bfloat16 as released drafters are."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, *shape: int) -> None:
        self.tensors[name] = (torch.randn(*shape, generator=self.random) * 0.4).bfloat16()

    def layer(self, prefix: str, *, inputs: int = HIDDEN, norms: bool = True) -> None:
        self.add(f"{prefix}.self_attn.q_proj.weight", HEADS * HEAD_DIM, inputs)
        self.add(f"{prefix}.self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, inputs)
        self.add(f"{prefix}.self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, inputs)
        self.add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        for name in ("q_norm", "k_norm") if norms else ():
            self.add(f"{prefix}.self_attn.{name}.weight", HEAD_DIM)
        self.add(f"{prefix}.mlp.gate_proj.weight", MLP, HIDDEN)
        self.add(f"{prefix}.mlp.up_proj.weight", MLP, HIDDEN)
        self.add(f"{prefix}.mlp.down_proj.weight", HIDDEN, MLP)
        self.add(f"{prefix}.input_layernorm.weight", HIDDEN)
        self.add(f"{prefix}.post_attention_layernorm.weight", HIDDEN)

    def backbone(self, layers: int = 2) -> None:
        self.add("fc.weight", HIDDEN, len(TAPS) * HIDDEN)
        self.add("hidden_norm.weight", HIDDEN)
        self.add("norm.weight", HIDDEN)
        for i in range(layers):
            self.layer(f"layers.{i}")

    def heads(self, kind: str = "vanilla", outputs: int = VOCAB) -> None:
        self.add("markov_head.markov_w1.weight", VOCAB, RANK)
        self.add("markov_head.markov_w2.weight", outputs, RANK)
        if kind == "gated":
            self.add("markov_head.gate_proj.weight", RANK, HIDDEN + RANK)
            self.add("markov_head.gate_proj.bias", RANK)
        if kind == "rnn":
            self.add("markov_head.joint_proj.weight", 3 * RANK, 2 * RANK + HIDDEN)
            self.add("markov_head.joint_proj.bias", 3 * RANK)
        self.add("confidence_head.proj.weight", 1, HIDDEN + RANK)
        self.add("confidence_head.proj.bias", 1)

    def vocabulary(self) -> None:
        ids = torch.tensor(DRAFT_IDS)
        self.tensors["d2t"] = ids - torch.arange(len(DRAFT_IDS))
        self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)


HEAD_FIELDS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def deepspec(kind: str = "vanilla") -> Foreign:
    """DeepSpec's DSpark; the embedding and the head of some target are stored beside it."""
    make = Maker()
    make.backbone()
    make.heads(kind)
    config = {**QWEN3, "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 2, "num_target_layers": LAYERS}
    config |= {"layer_types": ["full_attention"] * 2, "block_size": BLOCK, "mask_token_id": MASK, "num_anchors": 512}
    config |= {"target_layer_ids": TAPS, **HEAD_FIELDS, "markov_head_type": kind}
    return Foreign(config, make.tensors)


def deepspec_dflash() -> Foreign:
    """DFlash as DeepSpec trains it: the same architecture, rank 0, no confidence head."""
    make = Maker()
    make.backbone()
    config = {**deepspec().config, "markov_rank": 0, "enable_confidence_head": False}
    for key in ("markov_head_type", "confidence_head_with_markov"):
        del config[key]
    return Foreign(config, make.tensors)


def deepspec_eagle3() -> Foreign:
    """DeepSpec's Eagle3: the target's config with its own layer count, and the draft layer's beside it."""
    make = Maker()
    make.add("fc.weight", HIDDEN, 5 * HIDDEN)
    make.layer("layers.0", inputs=2 * HIDDEN)
    make.add("layers.0.hidden_norm.weight", HIDDEN)
    make.add("norm.weight", HIDDEN)
    config = {**QWEN3, "architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": LAYERS}
    config |= {"draft_num_hidden_layers": 1, "target_model_name_or_path": "acme/target", "ttt_length": 4}
    config |= {"step_loss_decay": 0.8, "target_layer_ids": [0, 1, 2, 3, 4]}
    return Foreign(config, make.tensors)


def speculators(algorithm: str = "dspark", *, anchored: bool = True) -> Foreign:
    """speculators' DSpark with a reduced vocabulary."""
    make = Maker()
    make.backbone()
    make.heads(outputs=len(DRAFT_IDS))
    make.vocabulary()
    nested = {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "rope_scaling", "head_dim", "hidden_act")}
    nested |= {"num_hidden_layers": 2, "head_dim": HEAD_DIM, "num_target_layers": LAYERS}
    nested |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    slots = BLOCK if anchored else BLOCK + 1
    method = {"proposal_type": "greedy", "speculative_tokens": BLOCK, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": "acme/target", "architectures": ["AcmeForCausalLM"]}
    config = {
        "speculators_model_type": algorithm,
        "architectures": ["DSparkSpeculator"],
        "speculators_version": "0.5.0",
        "aux_hidden_state_layer_ids": [k + 1 for k in TAPS],
        "block_size": slots,
        "draft_vocab_size": len(DRAFT_IDS),
        "mask_token_id": MASK,
        "sample_from_anchor": anchored,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        **HEAD_FIELDS,
        "transformer_layer_config": nested,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }
    return Foreign(config, make.tensors)


def speculators_dflash() -> Foreign:
    """speculators' DFlash: four slots, of which the anchor's is given, over the whole vocabulary."""
    made = speculators("dflash", anchored=False)
    tensors = {k: v for k, v in made.tensors.items() if "head" not in k and k not in ("d2t", "t2d")}
    config = {k: v for k, v in made.config.items() if k not in HEAD_FIELDS}
    del config["sample_from_anchor"]
    return Foreign({**config, "architectures": ["DFlashSpeculator"], "draft_vocab_size": VOCAB}, tensors)


def speculators_eagle3() -> Foreign:
    """speculators' Eagle3 over a Llama layer, with its own head and the defaults of its config class left out."""
    made = sglang_eagle3()
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.tensors.items()}
    base = speculators("eagle3").config
    nested = {**base["transformer_layer_config"], "model_type": "llama", "num_hidden_layers": 1}
    del nested["head_dim"]
    config = {k: v for k, v in base.items() if k not in (*HEAD_FIELDS, "aux_hidden_state_layer_ids", "block_size")}
    for key in ("mask_token_id", "sample_from_anchor", "sliding_window_non_causal"):
        del config[key]
    config |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": False}
    config |= {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "transformer_layer_config": nested}
    return Foreign(config, tensors)


def speculators_eagle31() -> Foreign:
    """What speculators trains by default since EAGLE 3.1, here with its embedding trained too."""
    made = speculators_eagle3()
    make = Maker(1)
    make.add("embed_tokens.weight", VOCAB, HIDDEN)
    make.add("input_norm.weight", 3 * HIDDEN)
    config = {**made.config, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    config |= {"fc_norm": False, "embed_requires_grad": True}
    return Foreign(config, {**made.tensors, **make.tensors})


def specforge() -> Foreign:
    """SpecForge's DSpark."""
    made = deepspec()
    keys = ("mask_token_id", "target_layer_ids", *HEAD_FIELDS)
    nested = {key: made.config[key] for key in keys}
    nested |= {"attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0}
    config = {k: v for k, v in made.config.items() if k not in (*keys, "num_anchors")}
    config |= {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
    return Foreign({**config, "dflash_config": nested}, made.tensors)


def zlab(*, nested_block: bool = False) -> Foreign:
    """z-lab's DFlash of 16 slots; ``nested_block`` is its newer form."""
    made = deepspec_dflash()
    drop = ("markov_rank", "enable_confidence_head", "mask_token_id", "target_layer_ids", "num_anchors", "block_size")
    config = {k: v for k, v in made.config.items() if k not in drop}
    config |= {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    nested: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": TAPS}
    (nested if nested_block else config)["block_size"] = 16
    return Foreign({**config, "dflash_config": nested}, made.tensors)


def deepspec_gemma4_eagle3() -> Foreign:
    """DeepSpec's Eagle3 for Gemma 4: four norms, a scalar, and keys that serve as values."""
    make = Maker()
    make.add("fc.weight", HIDDEN, 5 * HIDDEN)
    make.layer("layers.0", inputs=2 * HIDDEN)
    del make.tensors["layers.0.self_attn.v_proj.weight"]
    for name in ("hidden_norm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
        make.add(f"layers.0.{name}.weight", HIDDEN)
    make.tensors["layers.0.layer_scalar"] = torch.ones(1).bfloat16()
    make.add("norm.weight", HIDDEN)
    config = {k: v for k, v in QWEN3.items() if k not in ("hidden_act", "rope_theta", "rope_scaling", "head_dim")}
    turning = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    config |= {"architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text", "hidden_activation": GELU}
    config |= {"head_dim": 2, "global_head_dim": HEAD_DIM, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    config |= {"attention_k_eq_v": True, "final_logit_softcapping": 30.0, "sliding_window": 16}
    config |= {"rope_parameters": {"full_attention": turning, "sliding_attention": {"rope_type": "default"}}}
    config |= {"num_hidden_layers": 1, "draft_num_hidden_layers": 1, "num_target_layers": LAYERS}
    config |= {"layer_types": ["full_attention"], "ttt_length": 4, "target_layer_ids": [0, 1, 2, 3, 4]}
    return Foreign(config, make.tensors)


def sglang_eagle31() -> Foreign:
    """EAGLE 3.1: each tap through a norm of its own, and normed states fed back."""
    made = sglang_eagle3()
    tensors = {**made.tensors, **{f"fc_norm.{i}.weight": torch.full((HIDDEN,), 1.0 + i).bfloat16() for i in range(3)}}
    return Foreign({**made.config, "fc_norm": True, "norm_output": True, "final_logit_softcapping": 20.0}, tensors)


def nvidia_eagle3() -> Foreign:
    """The same layout as NVIDIA writes it: the norm over all taps is named in ``eagle_config``."""
    made = sglang_eagle3()
    tensors = {**made.tensors, "input_norm.weight": torch.linspace(0.5, 1.5, 3 * HIDDEN).bfloat16()}
    eagle = {**made.config["eagle_config"], "norm_before_fc": True, "return_hidden_post_norm": True}
    return Foreign({**made.config, "eagle_config": eagle}, tensors)


def sglang_eagle3() -> Foreign:
    """EAGLE3 as its authors store it: Llama's layer, its own head, a reduced vocabulary."""
    make = Maker()
    make.add("fc.weight", HIDDEN, 3 * HIDDEN)
    make.add("norm.weight", HIDDEN)
    make.add("lm_head.weight", len(DRAFT_IDS), HIDDEN)
    make.layer("midlayer", inputs=2 * HIDDEN, norms=False)
    make.add("midlayer.hidden_norm.weight", HIDDEN)
    make.vocabulary()
    config = {k: v for k, v in QWEN3.items() if k != "head_dim"}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": len(DRAFT_IDS), "num_target_layers": LAYERS}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}}
    return Foreign(config, make.tensors)


MADE: dict[str, tuple[str, str, Callable[[], Foreign]]] = {  # name -> its format, its kind, how it is made
    "deepspec": ("deepspec", "dspark", deepspec),
    "deepspec-gated": ("deepspec", "dspark", lambda: deepspec("gated")),
    "deepspec-rnn": ("deepspec", "dspark", lambda: deepspec("rnn")),
    "deepspec-dflash": ("deepspec", "dflash", deepspec_dflash),
    "deepspec-eagle3": ("deepspec", "eagle3", deepspec_eagle3),
    "deepspec-gemma4-eagle3": ("deepspec", "eagle3", deepspec_gemma4_eagle3),
    "speculators": ("speculators", "dspark", speculators),
    "speculators-given": ("speculators", "dspark", lambda: speculators(anchored=False)),
    "speculators-dflash": ("speculators", "dflash", speculators_dflash),
    "speculators-eagle3": ("speculators", "eagle3", speculators_eagle3),
    "speculators-eagle31": ("speculators", "eagle3", speculators_eagle31),
    "specforge": ("specforge", "dspark", specforge),
    "zlab": ("zlab", "dflash", zlab),
    "zlab-nested": ("zlab", "dflash", lambda: zlab(nested_block=True)),
    "sglang-eagle3": ("sglang-eagle3", "eagle3", sglang_eagle3),
    "sglang-eagle31": ("sglang-eagle3", "eagle3", sglang_eagle31),
}
