"""EAGLE3 as its authors store it and SGLang reads it: one Llama layer called ``midlayer``, a head of the drafter's own.

Tensors: ``fc``, ``norm``, ``lm_head``, ``d2t``, ``t2d`` and ``midlayer.*``; SGLang passes over names it does not know,
so norms on q and k, which its layer lacks, would be lost without a word, and are refused here when writing. Layer ids
are outputs of decoder layers (SGLang adds one itself); without any the authors' default of three is meant. How many
tokens to draft is the server's choice, so the layout does not say; we write ``ttt_length`` beside it.

Source: SGLang ``srt/models/llama_eagle3.py`` and ``set_eagle3_layers_to_capture``; SpecForge ``configs/*-eagle3.json``.
"""

from __future__ import annotations

from dspark.errors import CheckpointError
from dspark.export.form import (
    Context,
    Format,
    Json,
    Layout,
    agreed,
    check_layer_ids,
    has_own_head,
    names,
    read_draft_vocab,
    refuse,
    require,
    section,
    target_layers,
    with_t2d,
    without_t2d,
)
from dspark.export.speculators import require_head
from dspark.models.checkpoint import Checkpoint
from dspark.models.eagle3 import Eagle3Config

ARCHITECTURE = "LlamaForCausalLMEagle3"
OURS, THEIRS = "layers.0.", "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_MODEL: Json = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "num_hidden_layers": 1}
OTHER_MODEL |= {"model_type": "llama", "mlp_bias": False}
_ELSEWHERE = ("architectures", "model_type", "target_layer_ids", "qk_norm", "draft_num_hidden_layers", "layer_types")


def recognises(data: Json) -> bool:
    return "speculators_model_type" not in data and ARCHITECTURE in names(data)


def read(layout: Layout, context: Context) -> Layout:
    """Translate into DeepSpec's fields and names."""
    data = dict(layout.data)
    eagle = section(data, "eagle_config")
    for place in (data, eagle):
        refuse(place, OTHER_MODEL, context, why="the layer computes something that is not supported here")
    refuse(eagle, {"use_aux_hidden_state": True}, context, why="an Eagle3 drafter reads states of several layers")
    require(data, ("vocab_size", "hidden_size", "num_attention_heads"), context)
    refuse(data, {"target_hidden_size": data["hidden_size"]}, context, why="its states have another width")
    layers = target_layers(data, context)
    ids = eagle.get(IDS)
    told = agreed({"the top": {"ids": data.get("target_layer_ids")}, "eagle_config": {"ids": ids}}, "ids", context)
    heads = data["num_attention_heads"]
    tensors = {
        name.replace(THEIRS, OURS, 1) if name.startswith(THEIRS) else name: t for name, t in layout.tensors.items()
    }
    vocabulary = read_draft_vocab(data, tensors)
    own_head = has_own_head(data, tensors, vocabulary)
    native = {
        **data,
        "architectures": [Eagle3Config.ARCHITECTURE],
        "num_target_layers": layers,
        "target_layer_ids": check_layer_ids(told or default_ids(layers), layers, context),
        "num_key_value_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or data["hidden_size"] // heads,
        "draft_vocab_size": vocabulary,
        "qk_norm": f"{OURS}self_attn.q_norm.weight" in tensors,
        "own_head": own_head,
        "final_logit_softcapping": None if own_head else data.get("final_logit_softcapping"),
        "ttt_length": data.get("ttt_length") or Eagle3Config.block_size,
    }
    kept = {key: value for key, value in native.items() if value is not None and key != "eagle_config"}
    return Layout(kept, without_t2d(tensors, data["vocab_size"], context))


def default_ids(num_layers: int) -> list[int]:
    """What engines tap where a file says nothing: inputs of layers 2, L/2 and L - 3, as outputs of those before."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    """Raises :class:`CheckpointError` for anything that SGLang's layer would compute otherwise."""
    config = checkpoint.config
    if not isinstance(config, Eagle3Config):
        raise CheckpointError(f"the drafter is {checkpoint.kind}; this layout holds Eagle3 alone")
    if config.qk_norm:
        raise CheckpointError(
            "qk_norm is true; SGLang's Eagle3 layer has no norms on q and k and would leave them out without a word: "
            "train with qk_norm false, or convert to speculators"
        )
    require_head(config, checkpoint, "SGLang")
    data = {key: value for key, value in layout.data.items() if key not in (*_ELSEWHERE, "block_size")}
    data |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": config.output_size,
        "eagle_config": {IDS: list(config.target_layer_ids), "use_aux_hidden_state": True},
    }
    tensors = {
        name.replace(OURS, THEIRS, 1) if name.startswith(OURS) else name: t for name, t in layout.tensors.items()
    }
    return Layout(data, with_t2d(tensors, config.vocab_size))


FORMAT = Format(
    name="sglang-eagle3",
    title="EAGLE3 (SGLang)",
    layer_ids="outputs of decoder layers",
    stores_copies=True,
    recognises=recognises,
    read=read,
    write=write,
)
