"""A training run's state on disk: safe at any moment of a kill, and free of pickle.

Each save is a new folder ``state-<train step>``, written beside its place and renamed; older ones go only afterwards.
So the newest finished state always exists, and a run resumes from it exactly: all randomness is a function of (seed,
step).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark.artifacts import atomic_folder
from dspark.train.optim import optimizer_tensors, restore_optimizer


def save_state(
    run: Path,
    train_step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, Any],
    *,
    keep: int = 2,
) -> None:
    """Write masters, moments and ``facts`` (JSON) as of ``train_step`` finished steps; keep the newest ``keep``
    states."""
    tensors: dict[str, Tensor] = {f"model/{k}": v.contiguous().cpu() for k, v in model.state_dict().items()}
    tensors |= {f"optim/{k}": v.contiguous().cpu() for k, v in optimizer_tensors(optimizer, model).items()}
    with atomic_folder(run / f"state-{train_step:08d}", existing="keep") as folder:
        save_file(tensors, folder / "state.safetensors")
        (folder / "facts.json").write_text(json.dumps({"train_step": train_step, **facts}))
    for old in sorted(run.glob("state-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def load_state(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore the newest state in place and return its facts; None when the run has none yet."""
    states = sorted(run.glob("state-*"))
    if not states:
        return None
    tensors = load_file(states[-1] / "state.safetensors")
    model.load_state_dict({k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")})
    restore_optimizer(
        optimizer, model, {k.removeprefix("optim/"): v for k, v in tensors.items() if k.startswith("optim/")}
    )
    return json.loads((states[-1] / "facts.json").read_text())
