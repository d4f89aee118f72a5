"""A batched drafter around another one: what :class:`SkippingBatch` and the engine's lazy drafter are built on."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from dspark.maths.shaping import Shaper
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.paged_memory import PageTables


class ForwardingBatch:
    """A :class:`BatchDrafter` that hands every call on to ``inner``; a subclass writes the methods in which it differs,
    and calls the inherited ones where ``inner`` must hear of it too."""

    def __init__(self, inner: BatchDrafter) -> None:
        self.inner = inner
        self.name, self.block_size = inner.name, inner.block_size
        self.taps, self.has_confidence = inner.taps, inner.has_confidence

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :meth:`BatchDrafter.attach`."""
        self.inner.attach(tables, pages=pages, max_len=max_len)

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """See :meth:`BatchDrafter.open`."""
        self.inner.open(seat, shaper=shaper)

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :meth:`BatchDrafter.resume`."""
        self.inner.resume(seat, token_ids)

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """See :meth:`BatchDrafter.extend`."""
        self.inner.extend(seats, counts, token_ids, features)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :meth:`BatchDrafter.propose`."""
        return self.inner.propose(asks)

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`."""
        self.inner.close(seat)
