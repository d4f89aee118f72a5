"""A training run's state on disk: safe at any moment of a kill, and free of pickle.

Each save is a new folder ``state-<train step>``, written beside its place and renamed; older ones go only afterwards.
So the newest finished state always exists, and a run resumes from it exactly: all randomness is a function of (seed,
step).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark.artifacts import atomic_folder
from dspark.numbers import json_data
from dspark.train.optim import optimizer_tensors
from dspark.train.ranks import ALONE, Ranks
from dspark.train.shards import whole


@dataclass(frozen=True)
class SavedState:
    """What a run goes on from, whole, however many processes saved it."""

    model: dict[str, Tensor]  # masters and buffers by name
    moments: dict[str, Tensor]  # as optimizer_tensors names them
    facts: dict[str, Any]


def save_state(
    run: Path,
    train_step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, Any],
    *,
    keep: int = 2,
    ranks: Ranks = ALONE,
) -> None:
    """Write masters, moments and ``facts`` (as JSON, infinities null) as of ``train_step`` finished steps; keep the
    newest ``keep`` states. All processes of a run must ask; the first one writes."""
    tensors = {f"model/{k}": v for k, v in whole(model.state_dict(), keep=ranks.leads).items()}
    moments = whole(optimizer_tensors(optimizer, model), keep=ranks.leads)
    tensors |= {f"optim/{k}": v for k, v in moments.items()}
    if not ranks.leads:
        return
    with atomic_folder(run / f"state-{train_step:08d}", existing="keep") as folder:
        save_file(tensors, folder / "state.safetensors")
        (folder / "facts.json").write_text(json.dumps(json_data({"train_step": train_step, **facts})))
    for old in sorted(run.glob("state-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def read_state(run: Path) -> SavedState | None:
    """The newest state; None when the run has none yet."""
    states = sorted(run.glob("state-*"))
    if not states:
        return None
    tensors = load_file(states[-1] / "state.safetensors")

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    return SavedState(part("model/"), part("optim/"), json.loads((states[-1] / "facts.json").read_text()))
