"""What the formats share: a layout as config and tensors, the two conventions of layer ids, and contradictions.

Layer ids. DeepSpec, SpecForge, z-lab and SGLang's EAGLE3 number decoder layers: id k is the output of layer k, -1 the
embedding. speculators and vLLM index transformers' ``hidden_states``: aux = k + 1. The last layer is forbidden in both,
because its entry of ``hidden_states`` is already normed; ids that are legal only under the other convention reach it,
which is how a shift is noticed. (A shifted set of ids that stays inside the range cannot be told from a deliberate
one.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.checkpoint import HEAD, SHARED_WITH_TARGET, Checkpoint, check_vocabulary, wanted_tensors
from dspark.models.drafter_shape import DrafterShape

Json = dict[str, Any]  # Any: whatever JSON holds
SECTIONS = ("dflash_config", "dspark_config", "eagle_config", "speculators_config", "transformer_layer_config")


@dataclass(frozen=True)
class Layout:
    """A drafter as one format stores it: ``config.json`` and the tensors by that format's names."""

    data: Json
    tensors: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a reader may use besides the files."""

    where: Path  # of the folder, for messages
    num_target_layers: int | None = None  # of the target at hand, for formats that do not record it


@dataclass(frozen=True, kw_only=True)
class Format:
    """One project's layout. ``read`` translates into DeepSpec's layout, ``write`` out of it; both raise
    :class:`CheckpointError` for what the other side has no place for."""

    name: str  # as ``dspark convert --to`` takes it
    title: str
    layer_ids: str  # what the format's layer ids count
    stores_copies: bool  # whether its files may hold copies of the target's embedding and head
    wants_head_rows: bool = False  # whether engines need the head's rows of a reduced vocabulary in the file
    recognises: Callable[[Json], bool]
    read: Callable[[Layout, Context], Layout]
    write: Callable[[Layout, Checkpoint], Layout]


def names(data: Json) -> list[str]:
    """``architectures`` of a config, as a list of strings whatever is there."""
    return [str(name) for name in data.get("architectures") or []]


def section(data: Json, key: str) -> Json:
    """A copy of the object nested under ``key``; empty where there is none."""
    return dict(data.get(key) or {})


def check_sections(data: Json, where: Path) -> None:
    """Raise :class:`CheckpointError` if anything but an object stands where some format nests one."""
    for key in SECTIONS:
        if data.get(key) is not None and not isinstance(data[key], dict):
            raise CheckpointError(f"{where}: {key} is {data[key]!r}; config.json must hold an object there")


def require(data: Json, keys: Iterable[str], context: Context, *, of: str = "config.json") -> None:
    """Raise :class:`CheckpointError` naming every key that is absent or null."""
    missing = sorted(key for key in keys if data.get(key) is None)
    if missing:
        raise CheckpointError(f"{context.where}: {of} lacks {', '.join(missing)}; the export is not complete")


def refuse(data: Json, harmless: Mapping[str, Any], context: Context, *, why: str) -> None:
    """Raise :class:`CheckpointError` for a field whose value is neither absent, null nor the harmless one."""
    for key, value in harmless.items():
        if data.get(key) is not None and data[key] != value:
            raise CheckpointError(f"{context.where}: {key} is {data[key]!r}; {why} ({value!r} is read)")


def agreed(places: Mapping[str, Json], key: str, context: Context) -> Any:
    """The value of a field that may stand in several places; None if it is in none of them.

    ``places`` maps what to call a place to its fields. Raises :class:`CheckpointError` if two disagree.
    """
    found = {place: fields[key] for place, fields in places.items() if fields.get(key) is not None}
    values = list(found.values())
    if any(value != values[0] for value in values):
        told = ", ".join(f"{place} says {value!r}" for place, value in found.items())
        raise CheckpointError(f"{context.where}: {key} contradicts itself: {told}; correct one of them")
    return values[0] if values else None


def target_layers(data: Json, context: Context) -> int:
    """Number of the target's layers: the file's word, else the target's at hand."""
    count = data.get("num_target_layers") or context.num_target_layers
    if count is None:
        raise CheckpointError(
            f"{context.where}: this layout does not record the target's number of layers, which its layer ids are "
            "checked against; name the target (--target)"
        )
    return int(count)


def check_layer_ids(ids: Sequence[int], num_layers: int, context: Context) -> list[int]:
    """Return DeepSpec's layer ids; raise :class:`CheckpointError` if they tap the last layer or lie outside the model,
    which is what ids of the other convention look like."""
    ids = [int(k) for k in ids]
    if ids and (max(ids) > num_layers - 2 or min(ids) < -1):
        hint = "the last layer's stored state is already normed"
        if min(ids) >= 0 and max(ids) <= num_layers - 1:
            hint += "; as indices of hidden_states (speculators' aux ids, one higher) they would be legal"
        raise CheckpointError(
            f"{context.where}: target_layer_ids is {ids}; outputs of decoder layers lie in -1..{num_layers - 2} of a "
            f"target with {num_layers} layers ({hint})"
        )
    return ids


def from_aux_ids(aux: Sequence[int], num_layers: int, context: Context, *, key: str) -> list[int]:
    """DeepSpec's layer ids of indices into ``hidden_states``; raises :class:`CheckpointError` as above."""
    aux = [int(index) for index in aux]
    if aux and (max(aux) > num_layers - 1 or min(aux) < 0):
        hint = "-1 is DeepSpec's embedding, 0 here" if min(aux) < 0 else "the last entry is already normed"
        raise CheckpointError(
            f"{context.where}: {key} is {aux}; indices of hidden_states lie in 0..{num_layers - 1} of a target with "
            f"{num_layers} layers ({hint})"
        )
    return [index - 1 for index in aux]


def to_aux_ids(ids: Sequence[int]) -> list[int]:
    """Indices into ``hidden_states`` of DeepSpec's layer ids."""
    return [k + 1 for k in ids]


# --- Eagle3 -----------------------------------------------------------------------------------------------------------


# Fields of Eagle3Config that all layouts name alike.
EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def default_eagle3_ids(num_layers: int) -> list[int]:
    """What engines tap where a file says nothing: inputs of layers 2, L/2 and L - 3, as outputs of those before."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def refuse_gemma_layers(config: DrafterShape, title: str) -> None:
    """Raise :class:`CheckpointError` for a drafter with Gemma's layers, where no engine has such."""
    if config.layer_style == "gemma4":
        raise CheckpointError(
            f"layer_style is gemma4; {title} knows Eagle3 drafters with Llama's and Qwen3's layers alone: keep to "
            "deepspec"
        )


# --- the draft vocabulary --------------------------------------------------------------------------------------------


def without_t2d(tensors: Mapping[str, Tensor], vocab_size: int, context: Context) -> dict[str, Tensor]:
    """Tensors without ``t2d`` [vocab] of bool, which repeats what ``d2t`` says. Raises :class:`CheckpointError` if it
    says something else, or stands alone."""
    rest = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    if "t2d" not in tensors:
        return rest
    if "d2t" not in tensors:
        raise CheckpointError(f"{context.where}: t2d is stored without d2t; draft ids cannot be mapped to target ids")
    check_vocabulary(tensors["d2t"], vocab_size, context.where)
    told, ids = tensors["t2d"].bool().cpu(), _target_ids(tensors["d2t"])
    if told.shape != (vocab_size,):
        raise CheckpointError(f"{context.where}: t2d has shape {list(told.shape)}; the config wants [{vocab_size}]")
    if not torch.equal(told.nonzero().flatten(), ids):
        raise CheckpointError(
            f"{context.where}: t2d marks {int(told.sum())} target tokens and d2t maps to {len(ids)}, not the same; the "
            "two were saved from different vocabularies"
        )
    return rest


def with_t2d(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Tensors and, where the vocabulary is mapped, ``t2d``: whether a target token is in the draft vocabulary."""
    if "d2t" not in tensors:
        return dict(tensors)
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[_target_ids(tensors["d2t"])] = True
    return {**tensors, "t2d": marks}


def _target_ids(d2t: Tensor) -> Tensor:
    return torch.arange(d2t.shape[0]) + d2t.long().cpu()


def read_draft_vocab(data: Json, tensors: Mapping[str, Tensor]) -> int | None:
    """Size of the draft vocabulary; None where a config states the target's own and nothing maps it."""
    size = data.get("draft_vocab_size")
    return None if size is None or (size == data.get("vocab_size") and "d2t" not in tensors) else int(size)


def has_own_head(data: Json, tensors: Mapping[str, Tensor], draft_vocab_size: int | None) -> bool:
    """Whether an Eagle3 drafter's logits come from a head of its own, in layouts that imply it by storing one.

    A reduced vocabulary implies one even where it is not stored, so that it is then missed. We write ``own_head``
    where a stored head is a copy of the target's rows.
    """
    told = data.get("own_head")
    return bool(told) if told is not None else HEAD in tensors or draft_vocab_size is not None


def without_copies(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors of the drafter alone: what belongs to the target left out."""
    own = wanted_tensors(checkpoint.config)
    return {n: t for n, t in checkpoint.tensors.items() if n in own or n not in SHARED_WITH_TARGET}
