"""Drafter checkpoints: the form that every format is read into and written from, and our own folders.

A :class:`Checkpoint` is a config and tensors under DeepSpec's names; our own folders hold just that, in DeepSpec's
layout, written atomically. The readers and writers of other projects' layouts are in :mod:`dspark.export`; all of them
come through :func:`check`, which finds what would otherwise show only as drafts that are never accepted: a missing
head, a vocabulary map that does not fit, a mask token that answers contain. Key sets are compared both ways: a missing
or unknown tensor is an error that names it.

Embedding and head are usually omitted (they are the target's); a file may store them all the same, and
:func:`check_shared` compares them with a target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspark.artifacts import atomic_folder
from dspark.errors import CheckpointError
from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_files import read_config_json, read_tensors, write_files
from dspark.models.eagle3 import Eagle3Config, Eagle3Model
from dspark.models.mtp import MTPConfig, MTPModel
from dspark.models.target import TargetInfo

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SHARED_WITH_TARGET = frozenset({EMBEDDING, HEAD})
CHUNK = 8192  # rows of an embedding compared at a time

AnyConfig = DraftConfig | Eagle3Config | MTPConfig


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A drafter as data. ``tensors`` go by DeepSpec's names, in the dtype they were stored in; do not write into them,
    they may be mapped from a file."""

    config: AnyConfig
    tensors: dict[str, Tensor] = field(repr=False)
    target_name: str = ""  # the target, as the file names it; empty if it does not
    target_architectures: tuple[str, ...] = ()  # its classes in transformers, likewise
    pad_token_id: int | None = None  # from the file's copy of the target's config
    eos_token_ids: tuple[int, ...] = ()  # likewise

    @property
    def kind(self) -> str:
        """What the drafter is, by the name that ``--drafter`` takes."""
        return kind_of(self.config)

    def same_as(self, other: Checkpoint) -> bool:
        """Whether every fact is equal and every tensor bit-identical, dtype included."""
        facts = ("config", "target_name", "target_architectures", "pad_token_id", "eos_token_ids")
        if any(getattr(self, name) != getattr(other, name) for name in facts):
            return False
        one, two = self.tensors, other.tensors
        return one.keys() == two.keys() and all(_identical(one[name], two[name]) for name in one)


def _identical(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), two.contiguous().flatten().view(torch.uint8))


def kind_of(config: AnyConfig) -> str:
    """dspark, dflash (no sequential stage and no confidences), eagle3 or mtp."""
    if isinstance(config, Eagle3Config):
        return "eagle3"
    if isinstance(config, MTPConfig):
        return "mtp"
    assert isinstance(config, DraftConfig)
    return "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"


def config_from_json(data: dict[str, Any]) -> AnyConfig:
    """The config in a ``config.json`` of DeepSpec's layout, whatever the method. Raises :class:`CheckpointError` if it
    is none or lacks a field, :class:`ConfigError` if a value is out of range."""
    for chain in (Eagle3Config, MTPConfig):
        if data.get("architectures") in [[name] for name in chain.ARCHITECTURES.values()]:
            return chain.from_json(data)
    return DraftConfig.from_json(data)


# --- checks ----------------------------------------------------------------------------------------------------------


def new_model(config: AnyConfig) -> nn.Module:
    """The module that a config describes, its parameters not yet filled."""
    if isinstance(config, Eagle3Config):
        return Eagle3Model(config)
    if isinstance(config, MTPConfig):
        return MTPModel(config)
    assert isinstance(config, DraftConfig)
    return DraftModel(config)


def wanted_tensors(config: AnyConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor that a drafter of ``config`` consists of."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in new_model(config).state_dict().items()}


def shared_tensors(config: AnyConfig) -> dict[str, torch.Size]:
    """Name and shape of what a file may store besides: copies of the target's embedding and head, the head cut to the
    draft vocabulary."""
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), HEAD: (config.output_size, config.hidden_size)}
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def check(checkpoint: Checkpoint, where: Path | str) -> Checkpoint:
    """Return ``checkpoint`` if it is whole and consistent; raise :class:`CheckpointError` naming ``where`` and every
    tensor that is missing, unknown or misshapen, or the field that contradicts another."""
    config, tensors = checkpoint.config, checkpoint.tensors
    wanted = wanted_tensors(config)
    known = {**shared_tensors(config), **wanted}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - known.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{where}: missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}"
            + _hint(missing, unknown)
        )
    for name, tensor in tensors.items():
        if tensor.shape != known[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensor.shape)}; the config wants {list(known[name])}"
            )
    if "d2t" in tensors:
        check_vocabulary(tensors["d2t"], config.vocab_size, where)
    check_mask(checkpoint, where=where)
    return checkpoint


HINTS: tuple[tuple[str, str, str], ...] = (
    ("markov_head.", "markov_rank names a sequential head that the file lacks", "markov_rank is 0 or missing"),
    ("confidence_head.", "enable_confidence_head promises a head that the file lacks", "enable_confidence_head is off"),
    ("d2t", "draft_vocab_size reduces the vocabulary, but nothing says to which tokens", "draft_vocab_size is missing"),
    ("input_norm.", "norm_before_fc promises a norm that the file lacks", "norm_before_fc is off"),
    ("fc_norm.", "fc_norm promises norms that the file lacks", "fc_norm is off"),
    ("embed_tokens.", "the drafter has an embedding of its own, which the target's cannot stand in for", ""),
    ("lm_head.", "the drafter has a head of its own, which the target's cannot stand in for", "the head is unexpected"),
)


def _hint(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Which field of the config contradicts the key set, where one does."""
    words = [text for prefix, text, _ in HINTS if any(name.startswith(prefix) for name in missing)]
    words += [f"{text} although the file holds {prefix}*" for prefix, _, text in HINTS if _starts(unknown, prefix)]
    return f" ({'; '.join(words)})" if words else ""


def _starts(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def check_vocabulary(d2t: Tensor, vocab_size: int, where: Path | str) -> None:
    """Raise :class:`CheckpointError` unless ``d2t`` [draft_vocab] of integers gives ascending ids of the target.

    speculators' convention: target id = draft id + d2t[draft id].
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t is {d2t.dtype}; it must hold integers, target id minus draft id")
    ids = torch.arange(d2t.shape[0]) + d2t.long().cpu()
    if bool((ids.diff() <= 0).any()):
        first = int((ids.diff() <= 0).nonzero()[0]) + 1
        raise CheckpointError(
            f"{where}: d2t maps draft id {first} to target id {int(ids[first])}, not above the one before "
            f"({int(ids[first - 1])}); target ids must ascend, and d2t must hold differences, not the ids themselves"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointError(
            f"{where}: d2t reaches target ids {int(ids[0])}..{int(ids[-1])}; the vocabulary has {vocab_size} tokens, "
            "so it belongs to another target"
        )


def check_mask(checkpoint: Checkpoint, *, where: Path | str, reserved: Mapping[int, str] | None = None) -> None:
    """Raise :class:`CheckpointError` if the mask token is one that answers contain or batches are padded with.

    ``reserved`` adds a target's own tokens to those that the file knows of: id -> what it is.
    """
    mask = getattr(checkpoint.config, "mask_token_id", None)
    if mask is None:
        return
    taken = {token: "an end token" for token in checkpoint.eos_token_ids}
    if checkpoint.pad_token_id is not None:
        taken.setdefault(checkpoint.pad_token_id, "the pad token")
    taken = {**taken, **(reserved or {})}
    if mask in taken:
        raise CheckpointError(
            f"{where}: mask_token_id is {mask}, which is {taken[mask]} of the target; a drafter is trained with a "
            "token that no answer contains: correct the field"
        )


def check_fits(config: AnyConfig, target: TargetInfo) -> None:
    """Raise :class:`CheckpointError` unless a drafter of ``config`` can serve ``target``."""
    if found := misfits(config, target):
        raise CheckpointError(found[0])


def misfits(config: AnyConfig, target: TargetInfo) -> list[str]:
    """Every dimension in which a drafter of ``config`` is not for ``target``, told in a sentence each."""
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    )
    return [
        f"the drafter's {name} is {draft}, that of {target.name} is {own}; it was trained for another target"
        for name, draft, own in pairs
        if draft != own
    ]


Rows = Callable[[Int[Tensor, "rows"]], Float[Tensor, "rows hidden"]]  # of a target's embedding or head, by token id


def check_shared(
    checkpoint: Checkpoint, *, embedding: Rows, head: Rows, where: Path | str, target: str, scales: Sequence[float]
) -> None:
    """Raise :class:`CheckpointError` if a stored embedding or head is not the target's.

    ``embedding`` and ``head`` give rows by token id. Values may differ by the rounding of the coarser dtype. Some
    targets hand out their embeddings scaled; ``scales`` are the factors that may have been applied (1 for none).
    """
    own = wanted_tensors(checkpoint.config)
    ids = torch.arange(checkpoint.config.vocab_size)
    for name, rows, factors in ((EMBEDDING, embedding, scales), (HEAD, head, (1.0,))):
        if name not in checkpoint.tensors or name in own:  # a head of the drafter's own is no copy
            continue
        stored = checkpoint.tensors[name]
        wanted = draft_token_ids(checkpoint) if name == HEAD else ids
        differ = min(_different_rows(stored, wanted, rows, factor) for factor in factors)
        if differ:
            raise CheckpointError(
                f"{where}: {differ} of {stored.shape[0]} rows of {name} are not those of {target}; the drafter was "
                "trained for another model, or its copies were never filled (without them the target's own are used)"
                + _remedy(checkpoint.config, name)
            )


def _remedy(config: AnyConfig, name: str) -> str:
    """What else a differing tensor may mean: some Eagle3 drafters have trained their embedding."""
    owns = isinstance(config, Eagle3Config) and name == EMBEDDING
    return ", or its embedding was trained: then set own_embedding true in config.json" if owns else ""


def draft_token_ids(checkpoint: Checkpoint) -> Int[Tensor, "draft_vocab"]:
    """Target id of every draft id, ascending."""
    ids = torch.arange(checkpoint.config.output_size)
    return ids + checkpoint.tensors["d2t"].long().cpu() if "d2t" in checkpoint.tensors else ids


def _different_rows(stored: Tensor, ids: Tensor, rows: Rows, scale: float) -> int:
    """Rows of ``stored`` that are not the target's at ``ids``, beyond rounding."""
    different = 0
    for part, some in zip(stored.split(CHUNK), ids.split(CHUNK), strict=True):
        other = rows(some).cpu()
        rounding = 2 * max(torch.finfo(part.dtype).eps, torch.finfo(other.dtype).eps)
        gap = (part.float() * scale - other.float()).abs()
        different += int((gap > rounding * other.float().abs()).any(1).sum())
    return different


# --- our own folders -------------------------------------------------------------------------------------------------


def build_model(checkpoint: Checkpoint, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module of a checked checkpoint, filled; stored copies of the target's embedding and head are left out."""
    model = new_model(checkpoint.config)
    wanted = model.state_dict().keys()
    model.load_state_dict({name: tensor for name, tensor in checkpoint.tensors.items() if name in wanted})
    return model.to(dtype)


def save_drafter(folder: Path, model: nn.Module, *, extra: dict[str, str] | None = None) -> None:
    """Write ``folder`` (replaced as a whole) in bfloat16. ``model`` is one of :func:`new_model`'s; ``extra`` maps
    further file names to texts, a model card for instance."""
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    config = model.config
    assert isinstance(config, AnyConfig)
    with atomic_folder(folder, existing="replace") as draft:
        write_files(draft, config.to_json(), tensors)
        for name, text in (extra or {}).items():
            (draft / name).write_text(text, encoding="utf-8")


def read_draft_config(folder: Path) -> AnyConfig:
    """Read ``config.json``. Raises :class:`CheckpointError` if there is none or it is not a drafter's."""
    return config_from_json(read_config_json(folder))


def read_drafter(folder: Path) -> Checkpoint:
    """Read and check a folder in DeepSpec's layout, our own. Raises :class:`CheckpointError` naming what is wrong."""
    data = read_config_json(folder)
    return check(Checkpoint(config=config_from_json(data), tensors=read_tensors(folder), **target_facts(data)), folder)


def target_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``config.json`` of DeepSpec's layout says about the target, as fields of a :class:`Checkpoint`."""
    eos = data.get("eos_token_id")
    return {
        "target_name": data.get("target_model_name_or_path") or "",
        "target_architectures": tuple(data.get("target_architectures") or ()),
        "pad_token_id": data.get("pad_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def load_drafter_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> DraftModel:
    """The module of a dspark or dflash drafter in our own layout. Raises :class:`CheckpointError` naming every
    missing, unknown or misshapen tensor, and for a drafter of another kind."""
    checkpoint = read_drafter(folder)
    model = build_model(checkpoint, dtype=dtype)
    if not isinstance(model, DraftModel):
        raise CheckpointError(f"{folder} holds a drafter of kind {checkpoint.kind}; a dspark or dflash one is needed")
    return model
