"""EAGLE3 as its authors store it and SGLang reads it: one Llama layer called ``midlayer``, a head of the drafter's own.

Tensors: ``fc``, ``norm``, ``lm_head``, ``d2t``, ``t2d`` and ``midlayer.*``, in EAGLE 3.1 ``fc_norm.*`` besides. Other
engines read more from the same layout (NVIDIA's drafters have ``norm_before_fc`` in ``eagle_config``), and so do we.
But SGLang passes over names it does not know and always takes the target's embedding, so what it would lose without a
word is refused here when writing. Layer ids are outputs of decoder layers (SGLang adds one itself); without any the
authors' default of three is meant. How many tokens to draft is the server's choice, so the layout does not say; we
write ``ttt_length`` beside it.

A stored embedding is a copy of the target's, unless ``own_embedding``, a field of ours, says otherwise.

Source: SGLang ``srt/models/llama_eagle3.py`` and ``set_eagle3_layers_to_capture``; vLLM pull requests 42143 and 42764;
TensorRT-LLM pull request 14988; SpecForge ``configs/*-eagle3.json``.
"""

from __future__ import annotations

from dspark.errors import CheckpointError
from dspark.export.form import (
    EAGLE3_NORMS,
    Context,
    Format,
    Json,
    Layout,
    agreed,
    check_layer_ids,
    default_eagle3_ids,
    has_own_head,
    names,
    read_draft_vocab,
    refuse,
    refuse_gemma_layers,
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
OTHER_MODEL: Json = {"num_hidden_layers": 1, "model_type": "llama", "mlp_bias": False, "bias": False}
OTHER_MODEL |= {"logit_scale": 1.0, "use_aux_norm": False, "eh_proj_before_attn": False}
LOST = ("qk_norm", "norm_before_residual", "norm_before_fc", "own_embedding")  # what SGLang's layer does without
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
    native = {
        **data,
        "architectures": [Eagle3Config.ARCHITECTURES["qwen3"]],
        "num_target_layers": layers,
        "target_layer_ids": check_layer_ids(told or default_eagle3_ids(layers), layers, context),
        "num_key_value_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or data["hidden_size"] // heads,
        "draft_vocab_size": vocabulary,
        "qk_norm": f"{OURS}self_attn.q_norm.weight" in tensors,
        "own_head": has_own_head(data, tensors, vocabulary),
        **_norms(data, eagle, context),
        "ttt_length": data.get("ttt_length") or Eagle3Config.block_size,
    }
    kept = {key: value for key, value in native.items() if value is not None and key != "eagle_config"}
    return Layout(kept, without_t2d(tensors, data["vocab_size"], context))


def _norms(data: Json, eagle: Json, context: Context) -> Json:
    """The norms that the drafter has; the top names them or ``eagle_config`` does."""
    eagle = {**eagle, "norm_output": eagle.get("norm_output", eagle.get("return_hidden_post_norm"))}  # TensorRT-LLM's
    places = {"the top": data, "eagle_config": eagle}
    return {name: bool(agreed(places, name, context)) for name in EAGLE3_NORMS}


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    """Raises :class:`CheckpointError` for anything that SGLang's layer would compute otherwise."""
    config = checkpoint.config
    if not isinstance(config, Eagle3Config):
        raise CheckpointError(f"the drafter is {checkpoint.kind}; this layout holds Eagle3 alone")
    refuse_gemma_layers(config, "SGLang")
    for name in LOST:
        if getattr(config, name):
            raise CheckpointError(
                f"{name} is true; SGLang's Eagle3 would leave that out without a word: train with {name} false, or "
                "convert to speculators"
            )
    require_head(config, checkpoint, "SGLang")
    data = {key: value for key, value in layout.data.items() if key not in (*_ELSEWHERE, "block_size")}
    data |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "draft_vocab_size": config.output_size,
        "final_logit_softcapping": config.final_soft_cap or None,
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
    wants_head_rows=True,
    recognises=recognises,
    read=read,
    write=write,
)
