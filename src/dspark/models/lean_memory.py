"""The lean decoder's KV memory: one tensor, so that a pass takes its views of all layers in a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models import huge_pages
from dspark.models.decoder_config import DecoderConfig
from dspark.models.ragged import Run
from dspark.models.target import KVMemory


@runtime_checkable
class Views(Protocol):
    """What the plain operations do with a run's part of a memory."""

    def write(self, i: int, new: Float[Tensor, "tokens 2 kv_heads head_dim"]) -> None:
        """Put a run's new keys and values into layer ``i``."""
        ...

    def read(
        self, i: int, slides: bool
    ) -> tuple[Float[Tensor, "rows kv_heads keys head_dim"], Float[Tensor, "rows kv_heads keys head_dim"]]:
        """Keys and values of layer ``i`` in the run's local span, if the layer slides, or its full one."""
        ...


class LeanMemory(KVMemory):
    """KV memory as one tensor ``both`` [layers, 2, pages, kv_heads, page_size, head_dim].

    Here a row is one page of ``max_len`` tokens; :class:`dspark.models.paged_memory.PagedMemory` has many small ones.
    ``keys`` and ``values`` are views of it. A pass takes the views that it needs of all layers in one operation each.
    """

    scattered = False  # a row's tokens may lie in several pages, so that neighbouring rows are no neighbours in memory

    def __init__(
        self, config: DecoderConfig, *, rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(rows=rows, max_len=max_len, shapes=(), dtype=dtype, device=device)
        self._allocate(config, rows, max_len, dtype, device)
        self._table = torch.arange(rows)[:, None]

    def _allocate(
        self, config: DecoderConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (config.num_layers, 2, pages, config.num_kv_heads, page_size, config.head_dim)
        self.pages, self.page_size = pages, page_size
        self.both = torch.empty(size, dtype=dtype, device=device)
        if self.both.device.type == "cpu":
            huge_pages.before_use(self.both.data_ptr(), self.both.nbytes)
        self.both.zero_()
        self.keys, self.values = list(self.both[:, 0]), list(self.both[:, 1])

    @property
    def table(self) -> Int[Tensor, "rows pages_per_row"]:
        """Page of each stretch of ``page_size`` positions of a row, on the CPU."""
        return self._table

    def slots(
        self, rows: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"]
    ) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
        """Where tokens lie, as indices for ``both[layer, :, page, :, offset]``: page and offset, on its device."""
        page = self.table[rows, positions // self.page_size]
        return page.to(self.both.device), (positions % self.page_size).to(self.both.device)

    def views(self, run: Run) -> Views:
        """What a run reads and writes, of every layer."""
        both, row, end = self.both, run.rows[0], run.pasts[0] + run.count
        rows = slice(row, row + len(run.rows))
        scatter = None
        if len(run.rows) > 1:
            slots, scatter = both.unbind(0), self.slots(*run.places())
        else:
            slots = both[:, :, row, :, run.pasts[0] : end].unbind(0)
        full = both[:, :, rows, :, run.full.start : run.full.stop]
        local = full if run.local is run.full else both[:, :, rows, :, run.local.start : run.local.stop]
        keys, values = full[:, 0].unbind(0), full[:, 1].unbind(0)
        if local is full:
            return _RowViews(slots, scatter, keys, values, keys, values)
        return _RowViews(slots, scatter, keys, values, local[:, 0].unbind(0), local[:, 1].unbind(0))


class _RowViews(NamedTuple):
    """Views of neighbouring rows, a tensor per layer."""

    slots: Sequence[Tensor]  # where new keys and values go
    scatter: tuple[Tensor, Tensor] | None  # row and position of each token, if several rows
    keys: Sequence[Tensor]  # [rows, kv_heads, keys, head_dim]
    values: Sequence[Tensor]
    local_keys: Sequence[Tensor]  # the same for sliding layers
    local_values: Sequence[Tensor]

    def write(self, i: int, new: Tensor) -> None:
        if self.scatter is None:
            self.slots[i].copy_(new.permute(1, 2, 0, 3))
        else:
            self.slots[i][:, self.scatter[0], :, self.scatter[1]] = new

    def read(self, i: int, slides: bool) -> tuple[Tensor, Tensor]:
        return (self.local_keys[i], self.local_values[i]) if slides else (self.keys[i], self.values[i])
