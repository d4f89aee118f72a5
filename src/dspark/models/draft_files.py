"""A drafter's files: ``config.json`` and safetensors, whole or sharded, read without a surprise and written back.

Weights come from safetensors alone: a pickle runs code when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.artifacts import read_json
from dspark.errors import CheckpointError, ModelError
from dspark.models.weights import INDEX_NAME, load_tensors

CONFIG_NAME, TENSORS_NAME = "config.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in a folder's ``config.json``. Raises :class:`CheckpointError` if there is none."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; give a drafter's folder, `ngram` or `none`")
    return read_json(path, remedy="copy or train the drafter again", error=CheckpointError)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors, sharded ones through their index, in the stored dtype.

    Raises :class:`CheckpointError` naming the file that is missing or damaged, a tensor that a shard holds and the
    index does not list, or the pickle that stands in place of safetensors.
    """
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX_NAME).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{folder} holds pickled weights ({pickles[0]}), which are never read because they can run code; "
                "save them as model.safetensors where you trust them (safetensors.torch.save_file)"
            )
        raise CheckpointError(f"{folder} has no {TENSORS_NAME}; copy or train the drafter again")
    try:
        tensors = load_tensors(folder)
        unlisted = _stored_names(folder) - tensors.keys()
    except (ModelError, SafetensorError) as error:
        raise CheckpointError(f"the weights of {folder} cannot be read: {error}") from None
    if unlisted:
        raise CheckpointError(f"{folder}: {INDEX_NAME} does not list {sorted(unlisted)}, which the shards hold")
    return tensors


def _stored_names(folder: Path) -> set[str]:
    """Names in every shard of a sharded checkpoint; empty for one without an index, which is always read whole."""
    names: set[str] = set()
    if not (folder / INDEX_NAME).is_file():
        return names
    shards = set(json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"].values())
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            names |= set(file.keys())
    return names


def write_files(folder: Path, config_json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing folder."""
    ready = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(ready, folder / TENSORS_NAME, metadata={"format": "pt"})
    text = json.dumps(config_json, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
