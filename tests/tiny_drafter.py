"""A DSpark drafter of a few hundred random parameters, for targets that are tables or tiny models."""

from __future__ import annotations

import torch

from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig


def tiny_config(**changes: object) -> DraftConfig:
    """One layer of width 8 for a target of 13 tokens and six layers; ``changes`` are fields of the config."""
    fields: dict = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_target_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "block_size": 3,
        "mask_token_id": 2,
        "target_layer_ids": (0, 3),
        "markov_rank": 4,
    }
    return DraftConfig(**{**fields, **changes})


def tiny_drafter(
    *, seed: int = 0, scale: float = 0.5, norms: float = 0.0, dtype: torch.dtype = torch.float32, **changes: object
) -> DraftModel:
    """A model of :func:`tiny_config` with normal parameters of standard deviation ``scale``, drawn from ``seed`` in
    ``dtype``; ``norms`` is the mean of vectors."""
    torch.manual_seed(seed)
    model = DraftModel(tiny_config(**changes)).to(dtype)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * scale + (norms if parameter.dim() == 1 else 0.0)
    return model
