"""speculators (what vLLM serves from one folder): the draft layers' config nested, layer ids as ``hidden_states``
indices, the vocabulary maps ``d2t`` and ``t2d``, and the target's name.

``sample_from_anchor`` says whether the anchor's slot predicts. Its class defaults (true for DSpark, false for DFlash)
came later than many files, and a wrong guess serves drafts that are never accepted, so a DSpark file without it is
refused. ``block_size`` counts slots: one more than ours where the anchor's predicts nothing.

Nested configs leave out whatever equals the default of their class in transformers; it is filled in from there. We add
``num_target_layers`` to the nested config, which speculators passes over.

Eagle3. An embedding that was trained (``embed_requires_grad``) is the drafter's own, any other a copy of the target's.
``norm_before_residual`` must be there: the class's default is false, that of vLLM's reader true. No engine caps the
logits of these drafters; a cap, which moves no argmax, stays as a field of ours. Without layer ids the authors' default
of three is meant.

Source: speculators ``models/{dspark,dflash,eagle3}/config.py``, pull requests 610, 670, 753 and 760, vLLM issue 56792
and ``transformers_utils/configs/speculators/algos.py``.
"""

from __future__ import annotations

from typing import Any

from dspark.errors import CheckpointError
from dspark.export.form import (
    EAGLE3_NORMS,
    Context,
    Format,
    Json,
    Layout,
    agreed,
    default_eagle3_ids,
    from_aux_ids,
    has_own_head,
    read_draft_vocab,
    refuse,
    refuse_gemma_layers,
    require,
    section,
    target_layers,
    to_aux_ids,
    with_t2d,
    without_t2d,
)
from dspark.models.checkpoint import HEAD, Checkpoint
from dspark.models.draft_config import ARCHITECTURES, DraftConfig
from dspark.models.eagle3 import Eagle3Config

CLASSES = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "eagle3": "Eagle3Speculator"}
NESTED = "transformer_layer_config"
AUX = {"dspark": "aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}
AUX["eagle3"] = "eagle_aux_hidden_state_layer_ids"
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
STYLES = {"qwen3": "qwen3", "gemma4": "gemma4", "gemma4_text": "gemma4"}  # model_type of the nested config -> ours
DEFAULTED: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
DEFAULTED += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act")
FOREIGN: Json = {"projector_type": "dflash", "draft_adapter_rank": 0}  # values that change nothing
NOT_IN_BLOCKS: Json = {name: False for name in (*EAGLE3_NORMS, "embed_requires_grad")}


def recognises(data: Json) -> bool:
    return "speculators_model_type" in data


def read(layout: Layout, context: Context) -> Layout:
    """Translate into DeepSpec's fields and names."""
    data = layout.data
    algorithm = agreed(
        {
            "the top": {"algorithm": data["speculators_model_type"]},
            "speculators_config": section(data, "speculators_config"),
        },
        "algorithm",
        context,
    )
    if algorithm not in CLASSES:
        raise CheckpointError(
            f"{context.where}: speculators_model_type is {algorithm!r}; supported: {', '.join(CLASSES)}"
        )
    chain = algorithm == "eagle3"
    require(data, (NESTED,) if chain else (NESTED, AUX[algorithm]), context)
    harmless = FOREIGN if chain else FOREIGN | NOT_IN_BLOCKS
    refuse(data, harmless, context, why="the drafter computes something that is not supported here")
    native = _with_defaults(section(data, NESTED), context)
    refuse(data, {"target_hidden_size": native["hidden_size"]}, context, why="its states have another width")
    layers = target_layers(native, context)
    aux = data.get(AUX[algorithm]) or to_aux_ids(default_eagle3_ids(layers))
    native |= {
        "num_target_layers": layers,
        "target_layer_ids": from_aux_ids(aux, layers, context, key=AUX[algorithm]),
        "draft_vocab_size": read_draft_vocab({**native, **data}, layout.tensors),
        **_target(data),
    }
    tensors = without_t2d(layout.tensors, native["vocab_size"], context)
    native |= _read_chain(data, native, tensors, context) if chain else _read_block(data, native, context)
    return Layout({key: value for key, value in native.items() if value is not None}, tensors)


def _read_block(data: Json, nested: Json, context: Context) -> Json:
    """Fields of a DSpark or DFlash drafter."""
    require(data, ("block_size", "mask_token_id"), context)
    if (style := STYLES.get(nested.get("model_type", "qwen3"))) is None:
        raise CheckpointError(
            f"{context.where}: {NESTED}.model_type is {nested['model_type']!r}; supported: {', '.join(STYLES)}"
        )
    anchored, slots = _sample_from_anchor(data, context), int(data["block_size"])
    if (wanted := _speculative_tokens(data)) is not None and wanted > slots - (not anchored):
        raise CheckpointError(
            f"{context.where}: speculative_tokens is {wanted}, but {slots} slots with sample_from_anchor "
            f"{str(anchored).lower()} predict {slots - (not anchored)}; one of the three is wrong"
        )
    heads = {key: data[key] for key in HEADS if data.get(key) is not None}
    return {
        "architectures": [ARCHITECTURES[style]],
        "block_size": slots - (not anchored),
        "mask_token_id": data["mask_token_id"],
        "sample_from_anchor": anchored,
        "markov_rank": 0,
        **heads,
    }


def _sample_from_anchor(data: Json, context: Context) -> bool:
    told, shifted = data.get("sample_from_anchor"), data.get("shift_label")
    if told is not None and shifted is not None and told != shifted:
        raise CheckpointError(
            f"{context.where}: sample_from_anchor is {told} and shift_label {shifted}; both say whether the anchor's "
            "slot predicts: correct one of them"
        )
    told = shifted if told is None else told
    if told is not None:
        return bool(told)
    if data["speculators_model_type"] == "dspark":
        raise CheckpointError(
            f"{context.where}: sample_from_anchor is missing, and files from before it was introduced use either "
            "convention; add it to config.json: true if the anchor's slot predicts the next token (DeepSpec, "
            "speculators since pull request 760), false if the block is an anchor and masks to fill in"
        )
    return False


def _read_chain(data: Json, nested: Json, tensors: Json, context: Context) -> Json:
    """Fields of an Eagle3 drafter; Llama's layers have no norms on q and k."""
    if data.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{context.where}: norm_before_residual is missing; speculators' own class takes it for false and vLLM's "
            "reader for true: add to config.json what the drafter was trained with"
        )
    kind = nested.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise CheckpointError(f"{context.where}: {NESTED}.model_type is {kind!r}; supported: llama, qwen3")
    own_head = has_own_head(nested, tensors, nested["draft_vocab_size"])
    return {
        "architectures": [Eagle3Config.ARCHITECTURES["qwen3"]],
        "block_size": nested.get("block_size") or _speculative_tokens(data) or Eagle3Config.block_size,
        "qk_norm": nested.get("qk_norm", kind == "qwen3"),
        "own_head": own_head,
        "own_embedding": bool(data.get("embed_requires_grad")),
        **{name: bool(data.get(name)) for name in EAGLE3_NORMS},
        "final_logit_softcapping": None if own_head else nested.get("final_logit_softcapping"),
    }


def _with_defaults(nested: Json, context: Context) -> Json:
    """The nested config with what equals its class's defaults filled in."""
    if all(nested.get(key) is not None for key in DEFAULTED):
        return dict(nested)
    from transformers import CONFIG_MAPPING  # late: half of the library

    kind = nested.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"{context.where}: {NESTED}.model_type is {kind!r}, which transformers does not know")
    defaults = CONFIG_MAPPING[kind]().to_dict()
    filled = {key: defaults.get(key) for key in DEFAULTED}
    if all(nested.get(key) is None for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        filled["rope_parameters"] = defaults.get("rope_parameters")
    if kind == "llama":  # derived there from the sizes that the file gives
        heads = nested.get("num_attention_heads", defaults["num_attention_heads"])
        filled["head_dim"] = nested.get("hidden_size", defaults["hidden_size"]) // heads
        filled["num_key_value_heads"] = heads
    given = {key: value for key, value in nested.items() if value is not None}
    return {key: value for key, value in (filled | given).items() if value is not None}


def _speculative_tokens(data: Json) -> int | None:
    """Drafts of one proposal, as the default proposal method says."""
    config = section(data, "speculators_config")
    methods = config.get("proposal_methods") or []
    chosen = [m for m in methods if m.get("proposal_type") == config.get("default_proposal_method")] or methods
    return chosen[0].get("speculative_tokens") if chosen else None


def _target(data: Json) -> Json:
    verifier = section(data, "speculators_config").get("verifier") or {}
    return {
        "target_model_name_or_path": verifier.get("name_or_path"),
        "target_architectures": verifier.get("architectures"),
    }


# --- writing ---------------------------------------------------------------------------------------------------------


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    """Raises :class:`CheckpointError` for a drafter that speculators has no class for."""
    config = checkpoint.config
    if isinstance(config, Eagle3Config):
        algorithm, drafts = "eagle3", config.block_size
        fields = _write_chain(config, checkpoint)
    elif isinstance(config, DraftConfig):
        algorithm = "dflash" if checkpoint.kind == "dflash" and not config.sample_from_anchor else "dspark"
        drafts, fields = config.block_size, _write_block(config, algorithm)
    else:
        raise CheckpointError(f"the drafter is {checkpoint.kind}; speculators has no class for it: try deepspec")
    nested = {key: value for key, value in layout.data.items() if key not in (*fields, *_ELSEWHERE)}
    if isinstance(config, Eagle3Config):
        nested |= {"model_type": "qwen3" if config.qk_norm else "llama", "block_size": config.block_size}
    method = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    data = {
        "speculators_model_type": algorithm,
        "architectures": [CLASSES[algorithm]],
        "draft_vocab_size": config.output_size,
        AUX[algorithm]: to_aux_ids(config.target_layer_ids),
        **fields,
        "tie_word_embeddings": False,
        "torch_dtype": layout.data["torch_dtype"],
        NESTED: nested,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": checkpoint.target_name or None,
                "architectures": list(checkpoint.target_architectures),
            },
        },
    }
    return Layout(data, with_t2d(layout.tensors, config.vocab_size))


_ELSEWHERE: tuple[str, ...] = ("architectures", "target_layer_ids", "draft_vocab_size", "target_model_name_or_path")
_ELSEWHERE += ("target_architectures", "torch_dtype", "ttt_length", "draft_num_hidden_layers", "own_embedding")


def _write_block(config: DraftConfig, algorithm: str) -> Json:
    fields: dict[str, Any] = {
        "block_size": config.block_inputs,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": True,  # no layer slides; vLLM reads false as: every layer is causal
    }
    if algorithm == "dspark":
        fields |= {key: getattr(config, key) for key in HEADS}
    return fields


def _write_chain(config: Eagle3Config, checkpoint: Checkpoint) -> Json:
    refuse_gemma_layers(config, "speculators")
    require_head(config, checkpoint, "speculators")
    norms = {name: getattr(config, name) for name in EAGLE3_NORMS}
    return norms | {"embed_requires_grad": config.own_embedding}


def require_head(config: Eagle3Config, checkpoint: Checkpoint, title: str) -> None:
    """Raise :class:`CheckpointError` if an engine would have to do without the rows of the head it needs."""
    if config.draft_vocab_size is not None and HEAD not in checkpoint.tensors:
        raise CheckpointError(
            f"the drafter uses the target's head over a reduced vocabulary; {title} wants those rows stored: convert "
            "with --with-embeddings --target MODEL"
        )


FORMAT = Format(
    name="speculators",
    title="speculators (vLLM)",
    layer_ids="indices of hidden_states (0: the embedding)",
    stores_copies=True,
    wants_head_rows=True,
    recognises=recognises,
    read=read,
    write=write,
)
