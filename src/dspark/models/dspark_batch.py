"""DSpark for many requests at once, over pages that the target's memory and the drafter's context share.

    | range of a seat                 | owner                                                                        |
    |---------------------------------|------------------------------------------------------------------------------|
    | pages of a shared beginning     | every seat whose table names them; the first request wrote them              |
    | [shared, length)                | keys and values of the seat's committed tokens, one each                     |
    | [length, length + block_inputs) | the block being drafted; the next `extend` overwrites it                     |

The context of a token depends on that token's features and position alone, so a shared page needs nothing done to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from dspark.maths.shaping import Shaper
from dspark.models.batch_drafter import BatchProposal, DraftAsk, Seated, flat_places
from dspark.models.paged_memory import PageTables

if TYPE_CHECKING:
    from dspark.models.dspark import DsparkDrafter


class DsparkBatch:
    """A :class:`dspark.models.batch_drafter.BatchDrafter` over the weights of ``drafter``."""

    def __init__(self, drafter: DsparkDrafter) -> None:
        self._drafter = drafter
        self.name, self.block_size = drafter.name, drafter.block_size
        self.taps, self.has_confidence = drafter.taps, drafter.has_confidence
        self._seats: dict[int, Seated] = {}

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :meth:`BatchDrafter.attach`. Raises :class:`ConfigError` if ``pages`` is less than 1."""
        self._memory = self._drafter.paged_memory(tables, pages=pages, max_len=max_len)

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """See :meth:`BatchDrafter.open`."""
        assert seat not in self._seats, f"seat {seat} is taken"
        self._seats[seat] = Seated(shaper)
        self._memory.lengths[seat] = 0

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :meth:`BatchDrafter.resume`."""
        assert self._seats[seat].length == 0, f"seat {seat} has tokens; only a fresh request resumes"
        self._advance(seat, len(token_ids))

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """See :meth:`BatchDrafter.extend`; one projection for all tokens.

        Tokens past the drafter's limit are counted and not written. Raises :class:`RequestError` if a seat lacks pages.
        """
        assert features is not None and features.shape[0] == sum(counts)
        rows, positions = flat_places(seats, [self._seats[seat].length for seat in seats], counts)
        before = [self._memory.lengths[seat] for seat in seats]
        for seat, count in zip(seats, counts, strict=True):
            self._advance(seat, count)
        fitting = [self._memory.lengths[seat] - past for seat, past in zip(seats, before, strict=True)]
        written = sum(fitting)
        if written < features.shape[0]:
            inside = positions < self._memory.max_len
            rows, positions, features = rows[inside], positions[inside], features[inside.to(features.device)]
        if written:
            self._memory.tables.check(seats, before, fitting, pages=self._memory.pages)
            self._drafter.project(self._memory, rows, positions, features)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :meth:`BatchDrafter.propose`; one pass over all blocks.

        A request whose draft logits are broken (nan) sits out like one past the limit. Raises :class:`RequestError` if
        a seat lacks pages.
        """
        places = [i for i, ask in enumerate(asks) if self._drafter.fits(self._seats[ask.seat].length, self._memory)]
        fitting = [asks[i] for i in places]
        if not fitting:
            return self._drafter.nothing(len(asks))
        seats = [ask.seat for ask in fitting]
        self._memory.check_room(seats, [self._drafter.config.block_inputs] * len(seats))
        proposal = self._drafter.draft(self._memory, fitting, [self._seats[seat].shaper for seat in seats])
        return proposal.spread(places, len(asks))

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`."""
        del self._seats[seat]
        self._memory.lengths[seat] = 0

    def _advance(self, seat: int, count: int) -> None:
        one = self._seats[seat]
        one.length += count
        self._memory.lengths[seat] = min(one.length, self._memory.max_len)
