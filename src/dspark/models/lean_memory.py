"""The lean decoder's KV memory: one tensor, so that a pass takes its views of all layers in a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.models.decoder_config import DecoderConfig
from dspark.models.ragged import Run
from dspark.models.target import KVMemory


class LeanMemory(KVMemory):
    """KV memory as one tensor [layers, 2, rows, kv_heads, max_len, head_dim].

    ``keys`` and ``values`` are views of it. A pass takes the views that it needs of all layers in one operation each.
    """

    def __init__(
        self, config: DecoderConfig, *, rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(rows=rows, max_len=max_len, shapes=(), dtype=dtype, device=device)
        size = (config.num_layers, 2, rows, config.num_kv_heads, max_len, config.head_dim)
        self.both = torch.zeros(size, dtype=dtype, device=device)
        self.keys, self.values = list(self.both[:, 0]), list(self.both[:, 1])

    def views(self, run: Run) -> MemoryViews:
        """What a run reads and writes, of every layer."""
        both, row, end = self.both, run.rows.start, run.past + run.count
        slots = both.unbind(0) if run.scatter else both[:, :, row, :, run.past : end].unbind(0)
        full = both[:, :, run.rows, :, run.full.start : run.full.stop]
        local = full if run.local is run.full else both[:, :, run.rows, :, run.local.start : run.local.stop]
        keys, values = full[:, 0].unbind(0), full[:, 1].unbind(0)
        if local is full:
            return MemoryViews(slots, keys, values, keys, values)
        return MemoryViews(slots, keys, values, local[:, 0].unbind(0), local[:, 1].unbind(0))


class MemoryViews(NamedTuple):
    """Views of a memory for one run, a tensor per layer."""

    slots: Sequence[Tensor]  # where new keys and values go
    keys: Sequence[Tensor]  # [rows, kv_heads, keys, head_dim]
    values: Sequence[Tensor]
    local_keys: Sequence[Tensor]  # the same for sliding layers
    local_values: Sequence[Tensor]

    def write(self, i: int, new: Tensor, run: Run) -> None:
        """Put a run's new keys and values [tokens, 2, kv_heads, head_dim] into layer ``i``."""
        if run.scatter is None:
            self.slots[i].copy_(new.permute(1, 2, 0, 3))
        else:
            self.slots[i][:, run.scatter[0], :, run.scatter[1]] = new
