"""z-lab's DFlash: an anchor whose slot predicts nothing, masks behind it, and neither heads nor copies of the target.

``block_size`` counts the anchor's slot (16 slots predict 15 tokens), so it is one more than ours. It stands at the top,
in newer files inside ``dflash_config`` with ``target_layer_ids`` and ``mask_token_id``. Tensor names are DeepSpec's.

Source: z-lab ``dflash/model.py``, the configs of its released drafters, SpecForge ``configs/*-dflash.json``.
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
    names,
    refuse,
    require,
    section,
    target_layers,
)
from dspark.models.checkpoint import Checkpoint
from dspark.models.draft_config import ARCHITECTURES, DraftConfig

ARCHITECTURE = "DFlashDraftModel"
FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "final_logit_softcapping")
SLOTS = {"sample_from_anchor": False, "shift_label": False}
OTHER_MODEL: Json = {"projector_type": "dflash", "attention_mode": "gqa", "is_causal": False, "output_multiplier": 1.0}
OTHER_MODEL |= {"input_embedding_scale": 1.0, "markov_rank": 0, "enable_confidence_head": False}
OTHER_MODEL |= {"selector_rank": 0, "conv_kernel_size": 0}


def recognises(data: Json) -> bool:
    nested = section(data, "dflash_config")
    return ARCHITECTURE in names(data) and nested.get("projector_type") != "dspark"


def read(layout: Layout, context: Context) -> Layout:
    """Translate into DeepSpec's fields; refuses DFlash's descendants (DSpark, DFlash-2, Domino), whose slots differ."""
    data = dict(layout.data)
    nested = section(data, "dflash_config")
    for place in (data, nested):
        refuse(
            place, SLOTS, context, why="z-lab's anchor slot predicts nothing, the slot convention contradicts itself"
        )
        refuse(place, OTHER_MODEL, context, why=f"a {ARCHITECTURE} has no such part, or computes otherwise")
    for key in FIELDS:
        data[key] = agreed({"the top": data, "dflash_config": nested}, key, context)
    require(data, ("block_size", "target_layer_ids", "mask_token_id"), context)
    if data["block_size"] < 2:
        raise CheckpointError(
            f"{context.where}: block_size is {data['block_size']}; it counts the anchor, give 2 or more"
        )
    layers = target_layers(data, context)
    data |= {
        "architectures": [ARCHITECTURES["qwen3"]],
        "num_target_layers": layers,
        "target_layer_ids": check_layer_ids(data["target_layer_ids"], layers, context),
        "block_size": data["block_size"] - 1,
        "sample_from_anchor": False,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    return Layout(
        {key: value for key, value in data.items() if key not in ("auto_map", "dflash_config")}, layout.tensors
    )


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    """Raises :class:`CheckpointError` for anything but a DFlash drafter of this convention and vocabulary."""
    config = checkpoint.config
    if checkpoint.kind != "dflash" or not isinstance(config, DraftConfig):
        raise CheckpointError(f"the drafter is {checkpoint.kind}; z-lab's layout holds DFlash alone: try speculators")
    for name, value, wanted in (
        ("sample_from_anchor", config.sample_from_anchor, False),
        ("layer_style", config.layer_style, "qwen3"),
        ("draft_vocab_size", config.draft_vocab_size, None),
    ):
        if value != wanted:
            raise CheckpointError(
                f"{name} is {value}; z-lab's layout knows {wanted} alone: try speculators or deepspec"
            )
    data = {key: value for key, value in layout.data.items() if key not in _OURS}
    data |= {"architectures": [ARCHITECTURE], "block_size": config.block_size + 1}
    data["dflash_config"] = {key: data.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    return Layout(data, layout.tensors)


# Fields of ours whose value the layout implies.
_OURS = ("sample_from_anchor", "layer_style", "markov_rank", "enable_confidence_head")

FORMAT = Format(
    name="zlab",
    title="z-lab DFlash",
    layer_ids="outputs of decoder layers (-1: the embedding)",
    stores_copies=False,
    recognises=recognises,
    read=read,
    write=write,
)
