"""Drafters of a few hundred random parameters, for targets that are tables or tiny models: their one shape, and what a
test changes of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.models.eagle3 import Eagle3Config
from dspark.models.mtp import MTPConfig

Model = TypeVar("Model", bound=nn.Module)

SHAPE: dict[str, Any] = {  # fields that drafters of all methods have; for a target of 13 tokens and six layers
    "vocab_size": 13,
    "hidden_size": 8,
    "num_target_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "block_size": 3,
}
BLOCKS = {"num_hidden_layers": 1, "mask_token_id": 2, "target_layer_ids": (0, 3), "markov_rank": 4}
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}


def tiny_config(**changes: object) -> DraftConfig:
    """A DSpark drafter of one layer of width 8; ``changes`` are fields of the config, those of DFlash ``NO_HEADS``."""
    return DraftConfig(**{**SHAPE, **BLOCKS, **changes})


def tiny_eagle3_config(**changes: object) -> Eagle3Config:
    """The same for Eagle3, with two taps."""
    return Eagle3Config(**{**SHAPE, "target_layer_ids": (0, 2), **changes})


def tiny_mtp_config(**changes: object) -> MTPConfig:
    """The same for MTP."""
    return MTPConfig(**{**SHAPE, **changes})


def fill(model: Model, random: torch.Generator | None = None, *, scale: float = 0.5, norms: float = 0.0) -> Model:
    """Draw all parameters from a normal distribution of standard deviation ``scale``; ``norms`` is the mean of
    vectors. Without ``random`` the global generator is used."""
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
        parameter.data = drawn * scale + (norms if parameter.dim() == 1 else 0.0)
    return model


def tiny_drafter(
    *, seed: int = 0, scale: float = 0.5, norms: float = 0.0, dtype: torch.dtype = torch.float32, **changes: object
) -> DraftModel:
    """A model of :func:`tiny_config`, filled from ``seed`` in ``dtype``."""
    torch.manual_seed(seed)
    return fill(DraftModel(tiny_config(**changes)).to(dtype), scale=scale, norms=norms)
