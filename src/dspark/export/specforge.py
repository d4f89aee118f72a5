"""SpecForge's DSpark: ``block_size`` at the top, the drafter's other fields in ``dflash_config``, no copies of the
target.

What tells it from DFlash is ``projector_type`` "dspark", not the architecture: early configs say ``DFlashDraftModel``.
Its anchor slot predicts, as in DeepSpec, whose tensor names it uses.

Source: SpecForge ``configs/*-dspark.json``, ``scripts/gates/normalize_dflash_export.py``.
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
    read_draft_vocab,
    refuse,
    require,
    section,
    target_layers,
    with_t2d,
    without_t2d,
)
from dspark.models.checkpoint import Checkpoint
from dspark.models.draft_config import ARCHITECTURES, DraftConfig

ARCHITECTURE = "DSparkDraftModel"
AUTO_MAP = {"AutoModel": "dspark.DSparkDraftModel"}
PROJECTOR = "dspark"
ATTENTION_MODES = ("gqa", "mha")  # the second is the first with as many key heads as query heads
NESTED: tuple[str, ...] = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
)
NESTED += ("confidence_head_with_markov",)
FIELDS = (*NESTED, "block_size", "sample_from_anchor", "final_logit_softcapping", "num_target_layers")


def recognises(data: Json) -> bool:
    nested = section(data, "dflash_config")
    early = "DFlashDraftModel" in names(data) and nested.get("projector_type") == PROJECTOR
    return "speculators_model_type" not in data and (ARCHITECTURE in names(data) or early)


def read(layout: Layout, context: Context) -> Layout:
    """Gather the nested fields at the top. The slot convention must be certain: a missing projector type is refused."""
    data = dict(layout.data)
    nested = {**section(data, "dflash_config"), **section(data, "dspark_config")}
    if (projector := nested.get("projector_type")) != PROJECTOR:
        raise CheckpointError(
            f"{context.where}: architectures is {names(data)} and projector_type is {projector!r}; only {PROJECTOR!r} "
            "says that the anchor's slot predicts a token: correct dflash_config"
        )
    refuse(data, {"model_type": "qwen3"}, context, why="draft layers of another style are not supported")
    if (mode := str(nested.get("attention_mode") or "gqa").lower()) not in ATTENTION_MODES:
        raise CheckpointError(f"{context.where}: attention_mode is {mode!r}; supported: {', '.join(ATTENTION_MODES)}")
    for key in FIELDS:
        if (value := agreed({"the top": data, "dflash_config": nested}, key, context)) is not None:
            data[key] = value
    refuse(data, {"sample_from_anchor": True}, context, why="it contradicts projector_type 'dspark'")
    require(data, ("block_size", "target_layer_ids", "mask_token_id", "vocab_size"), context)
    layers = target_layers(data, context)
    data |= {
        "architectures": [ARCHITECTURES["qwen3"]],
        "num_target_layers": layers,
        "target_layer_ids": check_layer_ids(data["target_layer_ids"], layers, context),
        "sample_from_anchor": True,
        "draft_vocab_size": read_draft_vocab(data, layout.tensors),
    }
    kept = {key: value for key, value in data.items() if key not in _NOT_OURS and value is not None}
    return Layout(kept, without_t2d(layout.tensors, data["vocab_size"], context))


_NOT_OURS = ("auto_map", "dflash_config", "dspark_config")


def write(layout: Layout, checkpoint: Checkpoint) -> Layout:
    """Raises :class:`CheckpointError` for a drafter whose anchor slot is given, or whose layers are not Qwen3's."""
    config = checkpoint.config
    if not isinstance(config, DraftConfig):
        raise CheckpointError(f"the drafter is {checkpoint.kind}; SpecForge's DSpark layout cannot hold it")
    if not config.sample_from_anchor:
        raise CheckpointError(
            "sample_from_anchor is false; SpecForge's DSpark layout predicts from the anchor: try zlab"
        )
    if config.layer_style != "qwen3":
        raise CheckpointError(f"layer_style is {config.layer_style}; SpecForge's DSpark layout has qwen3 layers alone")
    data = {key: value for key, value in layout.data.items() if key not in ("sample_from_anchor", "layer_style")}
    nested = {key: data.pop(key) for key in NESTED if key in data}
    nested |= {"projector_type": PROJECTOR, "attention_mode": "gqa"}
    nested["confidence_head_alpha"] = 1.0 if config.enable_confidence_head else 0.0
    data |= {"architectures": [ARCHITECTURE], "auto_map": AUTO_MAP, "dflash_config": nested}
    return Layout(data, with_t2d(layout.tensors, config.vocab_size))


FORMAT = Format(
    name="specforge",
    title="SpecForge DSpark",
    layer_ids="outputs of decoder layers (-1: the embedding)",
    stores_copies=False,
    recognises=recognises,
    read=read,
    write=write,
)
