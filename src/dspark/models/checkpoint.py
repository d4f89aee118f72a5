"""Drafter checkpoints on disk: ``config.json`` and ``model.safetensors`` in DeepSpec's layout, written atomically.

Embedding and head are omitted (they are the target's); a file that stores them all the same is accepted if it names
nothing else that we do not know. Key sets are compared both ways: a missing or unknown tensor is an error that names
it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dspark.artifacts import atomic_folder
from dspark.errors import CheckpointError
from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.models.target import TargetInfo

SHARED_WITH_TARGET = frozenset({"embed_tokens.weight", "lm_head.weight"})


def save_drafter(folder: Path, model: DraftModel, *, extra: dict[str, str] | None = None) -> None:
    """Write ``folder`` (replaced as a whole) in bfloat16. ``extra`` maps further file names to texts, a model card
    for instance."""
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in model.state_dict().items()
    }
    with atomic_folder(folder, existing="replace") as draft:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "config.json").write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
        for name, text in (extra or {}).items():
            (draft / name).write_text(text)


def read_draft_config(folder: Path) -> DraftConfig:
    """Read ``config.json``. Raises :class:`CheckpointError` if there is none or it is not a drafter's."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; give a drafter's folder, `ngram` or `none`")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return DraftConfig.from_json(data)


def load_drafter_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> DraftModel:
    """Build the module and fill it. Raises :class:`CheckpointError` naming every missing, unknown or misshapen
    tensor."""
    config = read_draft_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no model.safetensors")
    tensors = {name: t for name, t in load_file(path).items() if name not in SHARED_WITH_TARGET}
    model = DraftModel(config)
    wanted = model.state_dict()
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(f"{path}: missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}; the config wants {list(wanted[name].shape)}"
            )
    model.load_state_dict(tensors)
    return model.to(dtype)


def check_fits(config: DraftConfig, target: TargetInfo) -> None:
    """Raise :class:`CheckpointError` unless a drafter of ``config`` can serve ``target``."""
    for field, draft, own in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if draft != own:
            raise CheckpointError(
                f"the drafter's {field} is {draft}, that of {target.name} is {own}; it was trained for another target"
            )
