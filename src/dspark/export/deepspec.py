"""DeepSpec's layout, the native one: everything at the top of ``config.json``, which is otherwise a copy of the
target's.

Architectures: ``Qwen3DSparkModel`` and ``Gemma4DSparkModel``, for DFlash as well (rank 0 and no confidence head, so the
fields decide, not the name); ``Qwen3Eagle3Model`` and ``Gemma4Eagle3Model``. MTP drafters are stored alike, under names
of our own. DeepSpec stores copies of the target's embedding and head; SGLang and vLLM take the target's where they are
missing, and vLLM reads ``d2t`` as ``draft_id_to_target_id``. Exports of SpecForge that were renamed for SGLang keep
some fields in ``dflash_config``: they are found there, and refused if they contradict the top.

Source: DeepSpec ``deepspec/modeling/{dspark,eagle3}/*/config.py``, SpecForge
``scripts/gates/normalize_dflash_export.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark.errors import CheckpointError, ConfigError
from dspark.export.form import (
    Context,
    Format,
    Json,
    Layout,
    agreed,
    check_layer_ids,
    names,
    section,
    to_aux_ids,
    without_t2d,
)
from dspark.models.checkpoint import Checkpoint, check, config_from_json, target_facts
from dspark.models.draft_config import ARCHITECTURES
from dspark.models.eagle3 import Eagle3Config
from dspark.models.mtp import MTPConfig

BLOCKS = tuple(ARCHITECTURES.values())
KNOWN = (*BLOCKS, *Eagle3Config.ARCHITECTURES.values(), *MTPConfig.ARCHITECTURES.values())
NESTED: tuple[str, ...] = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
NESTED += ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")


def recognises(data: Json) -> bool:
    return "speculators_model_type" not in data and any(name in KNOWN for name in names(data))


def read(layout: Layout, context: Context) -> Layout:
    """Check the conventions that a DeepSpec config states, and gather its fields at the top."""
    data = {key: value for key, value in layout.data.items() if key != "dflash_config"}
    if any(name in BLOCKS for name in names(data)):
        nested = section(layout.data, "dflash_config")
        _check_projector(layout.data, nested, context)
        for key in NESTED:
            if (value := agreed({"the top": data, "dflash_config": nested}, key, context)) is not None:
                data[key] = value
    ids, layers = data.get("target_layer_ids"), _num_target_layers(data)
    if ids is not None and layers is not None:
        check_layer_ids(ids, layers, context)
        for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
            if (aux := data.get(key)) is not None and list(aux) != to_aux_ids(ids):
                raise CheckpointError(
                    f"{context.where}: target_layer_ids is {ids} and {key} is {aux}; the second counts hidden_states "
                    f"and must be {to_aux_ids(ids)}"
                )
    return Layout(data, without_t2d(layout.tensors, int(data.get("vocab_size") or 0), context))


def _check_projector(data: Json, nested: Json, context: Context) -> None:
    """A projector type of z-lab's says that the anchor's slot predicts nothing, the architecture that it does."""
    projector = nested.get("projector_type")
    told = data.get("sample_from_anchor", nested.get("sample_from_anchor"))
    if projector not in (None, "dspark") and told is None:
        raise CheckpointError(
            f"{context.where}: architectures is {names(data)}, whose anchor slot predicts a token, and projector_type "
            f"is {projector!r}, whose slot does not; state sample_from_anchor"
        )


def _num_target_layers(data: Json) -> int | None:
    """Eagle3's config keeps the target's own ``num_hidden_layers`` and counts its draft layers apart."""
    if data.get("num_target_layers") is None and "draft_num_hidden_layers" in data:
        return data.get("num_hidden_layers")
    return data.get("num_target_layers")


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    return layout


FORMAT = Format(
    name="deepspec",
    title="DeepSpec, the native layout",
    layer_ids="outputs of decoder layers (-1: the embedding)",
    stores_copies=True,
    recognises=recognises,
    read=read,
    write=write,
)


# --- between the native layout and its meaning ------------------------------------------------------------------------


def to_checkpoint(layout: Layout, where: Path) -> Checkpoint:
    """The checked meaning of a native layout. Raises :class:`CheckpointError` naming ``where`` and what is wrong."""
    try:
        config = config_from_json(layout.data)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    except TypeError as error:  # a number in quotes, a list for a number
        raise CheckpointError(f"{where}: config.json holds a value of the wrong type ({error})") from None
    return check(Checkpoint(config=config, tensors=layout.tensors, **target_facts(layout.data)), where)


def to_layout(checkpoint: Checkpoint) -> Layout:
    """A checkpoint in the native layout."""
    return Layout({**checkpoint.config.to_json(), **_facts(checkpoint)}, dict(checkpoint.tensors))


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint knows of its target, and the dtype of its weights, as fields of ``config.json``."""
    eos = list(checkpoint.eos_token_ids)
    facts: dict[str, Any] = {
        "target_model_name_or_path": checkpoint.target_name,
        "target_architectures": list(checkpoint.target_architectures),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": checkpoint.pad_token_id,
        "torch_dtype": dtype_name(checkpoint),
    }
    return {key: value for key, value in facts.items() if value not in ("", [], None)}


def dtype_name(checkpoint: Checkpoint) -> str:
    """The dtype that most weights are stored in, by its name in torch."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)).removeprefix("torch.")
