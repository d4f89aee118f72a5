"""MTP-1: one multi-token-prediction module in DeepSeek's manner, which drafts on by feeding itself.

With u the state of an index i and e the embedding of the token after it, a run of the module is

    z = eh_proj [enorm(e) ; hnorm(u)]                      one decoder layer of the target's kind follows
    v = z + attention(input_layernorm(z));  u' = v + mlp(post_attention_layernorm(v))
    logits of the token after next = head(norm(u'))

The first u is the target's state after its final norm (the tap ``FINAL``). The module is trained for this one
prediction; drafts beyond the first feed u' and the token just drafted back in, one position on, which serving engines
do with DeepSeek's single module too.

What we take: DeepSeek's tensor order in ``eh_proj`` (the embedding's half first, as their checkpoints store it; the
paper's equation (21) writes the state first); the target's frozen embedding and head; a ``norm`` of the module's own
before the head, started from the target's final norm (``shared_head.norm`` of their files); u' before that norm as the
state fed back. The layer is Qwen3-shaped or Gemma's, without DeepSeek's latent attention.

Source: DeepSeek-V3 technical report, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspark.models.backbone import RMSNorm, linear
from dspark.models.chain import ChainModel, make_layer
from dspark.models.chain_config import ChainConfig
from dspark.models.target import FINAL


@dataclass(frozen=True, kw_only=True)
class MTPConfig(ChainConfig):
    """Shape of an MTP drafter. The architectures' names are this project's own: no engine knows these shapes yet."""

    ARCHITECTURES: ClassVar[dict[str, str]] = {"qwen3": "Qwen3MTPDraftModel", "gemma4": "Gemma4MTPDraftModel"}

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The one tap: the target's state after the final norm."""
        return (FINAL,)

    @property
    def feature_size(self) -> int:
        """Width of one row of features."""
        return self.hidden_size


class MTPModel(ChainModel):
    """All parameters of an MTP drafter; ``enorm``, ``hnorm`` and ``eh_proj`` bear DeepSeek's names."""

    config: MTPConfig

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config, make_layer(config, inputs=config.hidden_size))
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """The target's final state as it is."""
        return features

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """input_layernorm(z), and z as the residual."""
        z = linear(torch.cat((self.enorm(embeds), self.hnorm(states)), 1), self.eh_proj)
        return self.layer.input_layernorm(z), z
