"""The parts of a target that training itself reads: embedding, final norm and head, without any layer.

With features from a cache nothing else is needed, and a target larger than the device can be trained for. It cannot
decode, and says so when it is asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.decoder_config import from_transformers
from dspark.models.lean import LeanTarget
from dspark.models.lean_memory import LeanMemory
from dspark.models.loading import choose_device, choose_dtype
from dspark.models.target import KVMemory, TargetOutput
from dspark.models.weights import load_tensors, read_config


class FrozenTarget(LeanTarget):
    """A target without its layers; its ``info`` is the whole model's."""

    def new_memory(self, *, rows: int, max_len: int) -> LeanMemory:
        raise self._refusal()

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        raise self._refusal()

    def _refusal(self) -> ModelError:
        return ModelError(f"whole_target is false, so {self.info.name} has no layers here; set it to true to decode")


def load_frozen_target(spec: str, folder: Path, *, dtype: str) -> FrozenTarget:
    """Embedding, final norm and head of the model in ``folder``, on this machine's device.

    Raises :class:`ModelError` for families that the lean decoder does not cover.
    """
    device = choose_device("auto")
    config = from_transformers(read_config(folder))
    chosen: torch.dtype = choose_dtype(dtype, device)
    parts = replace(config, num_layers=0, slides=())
    target = FrozenTarget(parts, load_tensors(folder), name=spec, dtype=chosen, device=device, native=False)
    target.info = replace(target.info, num_layers=config.num_layers)
    return target
