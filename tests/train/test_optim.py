"""Schedules by hand, and moments that survive a file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark.errors import CheckpointError, ConfigError
from dspark.train.optim import learning_rate, make_optimizer, optimizer_tensors, restore_optimizer


def test_cosine_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(s, 100, 1.0, warmup=0.04) for s in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[52] == pytest.approx(0.5) and rates[100] == pytest.approx(0.0)


def test_trapezoid_is_flat_until_its_decay() -> None:
    rates = [learning_rate(s, 100, 2.0, warmup=0.1, schedule="trapezoid", decay=0.2) for s in range(101)]
    assert rates[9:80] == [2.0] * 71
    assert rates[90] == pytest.approx(1.0) and rates[100] == 0.0


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="stairs"):
        learning_rate(0, 10, 1.0, schedule="stairs")


def test_restored_moments_continue_as_if_nothing_had_happened() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for i in range(count):
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.zero_grad()
            (model(torch.full((1, 3), float(i + 1))) ** 2).sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    one = nn.Linear(3, 2)
    first = make_optimizer(one, betas=(0.9, 0.95), weight_decay=0.0)
    steps(one, first, 3)
    two = nn.Linear(3, 2)
    two.load_state_dict(one.state_dict())
    second = make_optimizer(two, betas=(0.9, 0.95), weight_decay=0.0)
    restore_optimizer(second, two, optimizer_tensors(first, one))
    steps(one, first, 2)
    steps(two, second, 2)
    assert torch.equal(one.weight, two.weight)
    with pytest.raises(CheckpointError, match="elsewhere"):
        restore_optimizer(second, two, {"elsewhere.weight:exp_avg": torch.zeros(1)})
