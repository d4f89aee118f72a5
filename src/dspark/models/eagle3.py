"""Eagle3: one layer over [embedding of the next token ; state], unrolled over its own states in training.

With u the state of an index i and e the embedding of the token after it, a run of the layer is

    x = [input_layernorm(e) ; hidden_norm(u)]              twice the width, read by q, k and v
    v = u + attention(x);  u' = v + mlp(post_attention_layernorm(v))
    logits of the token after next = head(norm(u'))

The first u is ``fc`` of the target's tapped states; a later one is the u' of the run before, so that drafting writes
one token after the other. Training unrolls the same chain over the answer's own tokens ("training-time test").

Source: EAGLE-3 (Li et al. 2025); DeepSpec ``modeling/eagle3``, whose tensor names these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dspark.errors import ConfigError
from dspark.models.backbone import RMSNorm
from dspark.models.chain import ChainLayer, ChainModel, linear
from dspark.models.chain_config import ChainConfig
from dspark.models.target import FINAL, check_taps


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ChainConfig):
    """Shape of an Eagle3 drafter. DeepSpec calls ``block_size`` ``ttt_length`` in ``config.json``; both are written.

    ``own_head`` False is DeepSpec's choice: logits come from the target's frozen head (its rows of the draft
    vocabulary). True is that of the EAGLE-3 authors, whose files SGLang reads: ``lm_head.weight`` [draft_vocab, hidden]
    is the drafter's own and trained. ``qk_norm`` False leaves the norms on q and k out, as their Llama-shaped layer
    does.
    """

    ARCHITECTURE: ClassVar[str] = "Qwen3Eagle3Model"

    target_layer_ids: tuple[int, ...] = ()  # taps, ascending; the reference takes five
    own_head: bool = False
    qk_norm: bool = True
    step_loss_decay: float = 0.8  # weight of an unrolled step relative to the one before, in training

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty; a drafter needs at least one tapped layer")
        if FINAL in check_taps(self.target_layer_ids, self.num_target_layers):
            raise ConfigError("target_layer_ids holds the final state; Eagle3 taps decoder layers")
        if not 0 < self.step_loss_decay <= 1:
            raise ConfigError(f"step_loss_decay is {self.step_loss_decay}; it must be in (0, 1]")
        if self.own_head and self.final_soft_cap:
            raise ConfigError(
                f"final_soft_cap is {self.final_soft_cap} and own_head is true; only logits of the target's head are "
                "capped, set one of them off"
            )

    @property
    def feature_size(self) -> int:
        """Width of one row of features: number of taps times the hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"ttt_length": self.block_size, "draft_num_hidden_layers": 1}

    @classmethod
    def read_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        values = super().read_fields(data)
        if "block_size" not in values and "ttt_length" in data:
            values["block_size"] = data["ttt_length"]
        if "num_target_layers" not in values and "draft_num_hidden_layers" in data and "num_hidden_layers" in data:
            values["num_target_layers"] = data["num_hidden_layers"]  # the rest of the file is the target's config
        return values


class Eagle3Layer(ChainLayer):
    """The layer, and the norm of the state that it reads beside the embedding."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, inputs=2 * config.hidden_size, qk_norm=config.qk_norm)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Model(ChainModel):
    """All parameters of an Eagle3 drafter under DeepSpec's tensor names."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, Eagle3Layer(config))
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.output_size, bias=False) if config.own_head else None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """fc . F, of all taps at once."""
        return linear(features, self.fc)

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """[input_layernorm(e) ; hidden_norm(u)], and u before its norm as the residual."""
        layer = self.layer
        assert isinstance(layer, Eagle3Layer)
        return torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(states)), 1), states

    def own_head(self) -> nn.Linear | None:
        return self.lm_head
