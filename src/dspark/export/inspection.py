"""What a drafter's folder holds, by which conventions, and whether it fits a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError, ModelError
from dspark.export.deepspec import dtype_name
from dspark.export.form import EAGLE3_NORMS, to_aux_ids, without_copies
from dspark.export.formats import Opened, open_folder
from dspark.export.target_facts import TargetFacts
from dspark.models.checkpoint import Checkpoint, check_mask, check_shared, misfits
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_files import TENSORS_NAME
from dspark.models.eagle3 import Eagle3Config
from dspark.models.target import FINAL


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The findings. ``facts`` maps what is told to its value, in the order to show it; values are JSON's.

    ``problems`` say why the drafter does not fit the target that was named; none, and it fits (or no target was named:
    ``target`` is then empty).
    """

    facts: dict[str, Any]
    target: str
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        fit = {"target": self.target, "fits": self.fits, "problems": list(self.problems)} if self.target else {}
        return {**self.facts, **fit}


def inspect_folder(folder: Path, target: TargetFacts | None = None) -> Inspection:
    """Read a folder, judge it and describe it. Raises :class:`CheckpointError` if it is damaged or contradictory."""
    opened = open_folder(folder, num_target_layers=None if target is None else target.info.num_layers)
    problems = () if target is None else problems_with(opened.checkpoint, target, folder)
    return Inspection(
        facts=describe(opened, folder), target="" if target is None else target.info.name, problems=problems
    )


def problems_with(checkpoint: Checkpoint, target: TargetFacts, where: Path) -> tuple[str, ...]:
    """Every reason why a checkpoint cannot serve a target."""
    if problems := misfits(checkpoint.config, target.info):
        return tuple(problems)  # shapes that differ leave nothing else to compare
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_mask(checkpoint, where=where, reserved=target.reserved),
        lambda: check_shared(
            checkpoint,
            embedding=lambda ids: target.embedding[ids],
            head=lambda ids: target.head[ids],
            where=where,
            target=target.info.name,
            scales=(1.0,),
        ),
    )
    for run in checks:
        try:
            run()
        except (CheckpointError, ModelError) as error:
            problems.append(str(error))
    return tuple(problems)


def describe(opened: Opened, folder: Path) -> dict[str, Any]:
    """What a checkpoint is, in the order to show it."""
    checkpoint, config = opened.checkpoint, opened.checkpoint.config
    own = without_copies(checkpoint)
    copies = sorted(checkpoint.tensors.keys() - own.keys())
    facts: dict[str, Any] = {
        "folder": str(folder),
        "format": opened.format.name,
        "format_title": opened.format.title,
        "architectures": opened.layout.data.get("architectures") or [],
        "drafter": checkpoint.kind,
        "trained_for": checkpoint.target_name or None,
    }
    facts |= _conventions(opened)
    facts |= {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "heads": _heads(checkpoint),
        "hidden_size": config.hidden_size,
        "num_target_layers": config.num_target_layers,
        "draft_layers": getattr(config, "num_hidden_layers", 1),
        "parameters": sum(t.numel() for name, t in own.items() if name != "d2t"),
        "copies_of_the_target": copies,
        "dtype": dtype_name(checkpoint),
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "files": sorted(path.name for path in folder.glob("*.safetensors")) or [TENSORS_NAME],
    }
    return facts


def _conventions(opened: Opened) -> dict[str, Any]:
    """Slots, layer ids and mask token: what two readers may take differently."""
    config, ids = opened.checkpoint.config, list(opened.checkpoint.config.target_layer_ids)
    facts: dict[str, Any] = {"block_size": config.block_size}
    if isinstance(config, DraftConfig):
        facts["block_slots"] = config.block_inputs
        facts["sample_from_anchor"] = config.sample_from_anchor
        facts["mask_token_id"] = config.mask_token_id
    if isinstance(config, Eagle3Config):
        facts["norms"] = [name for name in EAGLE3_NORMS if getattr(config, name)]
    facts["layer_style"] = config.layer_style
    layers = [k for k in ids if k != FINAL]
    return facts | {
        "target_layer_ids": layers,
        "hidden_states_indices": to_aux_ids(layers),
        "final_state": FINAL in ids,
        "layer_ids_of_the_file": opened.format.layer_ids,
    }


def _heads(checkpoint: Checkpoint) -> list[str]:
    """The parts behind the backbone, by name."""
    config, heads = checkpoint.config, []
    if isinstance(config, DraftConfig):
        if config.markov_rank:
            heads.append(f"{config.markov_head_type} sequential head of rank {config.markov_rank}")
        if config.enable_confidence_head:
            inputs = "state and Markov embedding" if config.confidence_head_with_markov else "state"
            heads.append(f"confidence head of {inputs}")
    if isinstance(config, Eagle3Config) and config.own_head:
        heads.append("language-model head of its own")
    if isinstance(config, Eagle3Config) and config.own_embedding:
        heads.append("embedding of its own")
    return heads
