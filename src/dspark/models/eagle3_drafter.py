"""Eagle3 in decoding: what the layer reads, as :mod:`dspark.models.eagle3` has it; the rest is every chain's."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.models import DEFAULT_CANDIDATES
from dspark.models.chain_drafter import ChainDrafter
from dspark.models.eagle3 import Eagle3Model
from dspark.models.target import Target


class Eagle3Drafter(ChainDrafter):
    """Eagle3 in decoding."""

    def __init__(
        self,
        model: Eagle3Model,
        target: Target,
        *,
        candidates: int = DEFAULT_CANDIDATES,
        name: str = "eagle3",
        native: bool = True,
    ) -> None:
        super().__init__(model, target, candidates=candidates, name=name, native=native)
        self.config, self.taps = model.config, model.config.target_layer_ids
        assert model.layer.hidden_norm is not None
        self._fc, self._hidden_norm = self.pack(model.fc.weight), self.norm(model.layer.hidden_norm)
        self._input_norm = None if model.input_norm is None else self.norm(model.input_norm)
        self._tap_norms = [self.norm(norm) for norm in model.tap_norms()]

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        if self._input_norm is not None:
            features = self.normed(features, self._input_norm)
        if self._tap_norms:
            parts = features.split(self.config.hidden_size, 1)
            pairs = zip(parts, self._tap_norms, strict=True)
            features = torch.cat([self.normed(part, norm) for part, norm in pairs], 1)
        return self._fc(features)

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        normed = self.normed(states, self._hidden_norm)
        inputs = torch.cat((self.normed(embeds, self._layer.input_norm), normed), 1)
        return inputs, normed if self.config.norm_before_residual else states

    def next_state(
        self, states: Float[Tensor, "rows hidden"], normed: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        return normed if self.config.norm_output else states
