"""Learning-rate schedules and the optimiser's state on disk. Gradients and masters are fp32; bf16 accumulation is
refused."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dspark.errors import CheckpointError, ConfigError
from dspark.train.shards import placed_like

SCHEDULES = ("cosine", "trapezoid")


def learning_rate(
    train_step: int,
    total_steps: int,
    peak: float,
    *,
    warmup: float = 0.04,
    schedule: str = "cosine",
    decay: float = 0.25,
) -> float:
    """Rate of 0-based ``train_step``: linear warm-up over ``warmup`` of the steps, then the schedule down to 0.

    "cosine" is DeepSpec's (`utils/optim.py`). "trapezoid" stays at the peak and falls linearly over the last
    ``decay`` of the steps: a run can be lengthened before its decay begins without having wasted anything.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}; supported: {', '.join(SCHEDULES)}")
    rise = max(1, int(warmup * total_steps))
    if train_step < rise:
        return peak * (train_step + 1) / rise
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (train_step - rise) / max(1, total_steps - rise)))
    fall = max(1, int(decay * total_steps))
    return peak * min(1.0, (total_steps - train_step) / fall)


def make_optimizer(model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW over all parameters; the learning rate is set every step."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=betas, eps=1e-8, weight_decay=weight_decay, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Moments by parameter name, for a safetensors file."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Inverse of :func:`optimizer_tensors`. Raises :class:`CheckpointError` on a tensor that belongs to no
    parameter."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, moment = key.rpartition(":")
        if name not in parameters:
            raise CheckpointError(f"optimiser state {key!r} belongs to no parameter; the run was of another shape")
        optimizer.state[parameters[name]][moment] = placed_like(value, parameters[name])
