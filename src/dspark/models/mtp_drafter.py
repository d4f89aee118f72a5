"""MTP in decoding: what the layer reads, as :mod:`dspark.models.mtp` has it; the rest is every chain's."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.models import DEFAULT_CANDIDATES
from dspark.models.chain_drafter import ChainDrafter
from dspark.models.mtp import MTPModel
from dspark.models.target import Target


class MTPDrafter(ChainDrafter):
    """MTP in decoding."""

    def __init__(
        self,
        model: MTPModel,
        target: Target,
        *,
        candidates: int = DEFAULT_CANDIDATES,
        name: str = "mtp",
        native: bool = True,
    ) -> None:
        super().__init__(model, target, candidates=candidates, name=name, native=native)
        self.config, self.taps = model.config, model.config.target_layer_ids
        self._enorm, self._hnorm = self.norm(model.enorm), self.norm(model.hnorm)
        self._eh_proj = self.pack(model.eh_proj.weight)

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        return features

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        z = self._eh_proj(torch.cat((self.normed(embeds, self._enorm), self.normed(states, self._hnorm)), 1))
        return self.normed(z, self._layer.input_norm), z
