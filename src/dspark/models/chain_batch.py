"""Chain drafters (Eagle3, MTP) for many requests at once, over pages that the target's memory and the drafter's share.

Row i of a chain pairs the target's state at token i with token i + 1. So the row lies where token i + 1 does: what a
page holds then follows from the tokens up to its end, and a request that begins on the page of another finds rows that
are its own. The place of token 0 stays empty. Beside the rows every token's first state is kept, in its own place,
because whoever goes on behind it needs it.

    | range of a seat's places (row i at i + 1) | owner                                                              |
    |-------------------------------------------|--------------------------------------------------------------------|
    | pages of a shared beginning               | every seat whose table names them; the first request wrote them    |
    | [shared, length)                          | rows and states of the seat's committed tokens                     |
    | [length, length + block_size)             | the anchor's row and those of the drafts; the next `extend`        |
    |                                           | overwrites them                                                    |

Attention reads rows through a table of single places, because no page of 16 tokens holds 16 rows in a row of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import RequestError
from dspark.maths.sampling import draw_at, uniforms
from dspark.maths.shaping import Shaper
from dspark.models.batch_drafter import BatchProposal, DraftAsk, Seated, flat_places
from dspark.models.paged_memory import PageTables
from dspark.models.sequential import draft_weights

if TYPE_CHECKING:
    from dspark.models.chain_drafter import ChainDrafter


class Chain:
    """The drafts of several requests while they are drawn, position after position.

    ``sizes`` [requests], 1..``block``: drafts of each. Draws one uniform per draft of a sampled request from its own
    generator, whatever the others ask.
    """

    def __init__(self, asks: Sequence[DraftAsk], sizes: Sequence[int], *, block: int, device: torch.device) -> None:
        self._samplings, self._sizes, self._device = [ask.sampling for ask in asks], sizes, device
        self._greedy = all(sampling.greedy for sampling in self._samplings)
        self._tokens = torch.zeros(len(asks), block, dtype=torch.long, device=device)
        self._shares = torch.zeros(len(asks), block, dtype=torch.float64)
        for i, (ask, size) in enumerate(zip(asks, sizes, strict=True)):
            if not ask.sampling.greedy:
                self._shares[i, :size] = uniforms(size, ask.generator)
        self._probs: Tensor | None = None  # [requests, block, support]
        self._supports: Tensor | None = None  # likewise; None: the target's vocabulary in order
        self._failed: set[int] = set()

    def draw(
        self,
        requests: Sequence[int],
        position: int,
        logits: Float[Tensor, "drawn support"],
        support: Int[Tensor, "drawn support"] | None,
    ) -> Int[Tensor, "drawn"]:
        """Draft number ``position`` of ``requests`` from ``logits`` over the target's tokens ``support``."""
        if self._greedy:
            places = logits.argmax(1)
        else:
            weights, failed = draft_weights(logits, [self._samplings[i] for i in requests])
            self._failed.update(requests[i] for i in failed)
            places = draw_at(weights, self._shares[requests, position])
            if self._probs is None:
                size = (*self._tokens.shape, weights.shape[1])
                self._probs = torch.zeros(size, device=self._device)
                self._supports = None if support is None else torch.zeros(size, dtype=torch.long, device=self._device)
            self._probs[requests, position] = weights
            if self._supports is not None and support is not None:
                self._supports[requests, position] = support
        drawn = places if support is None else support.gather(1, places[:, None])[:, 0]
        self._tokens[requests, position] = drawn
        return drawn

    def proposal(self, seconds: float) -> BatchProposal:
        """What was drawn, in ``seconds``."""
        proposed = np.array([0 if i in self._failed else size for i, size in enumerate(self._sizes)], dtype=np.int64)
        if self._failed:
            self._tokens[sorted(self._failed)] = 0
        return BatchProposal(
            draft_tokens=self._tokens,
            proposed=proposed,
            certain=np.array([sampling.greedy for sampling in self._samplings], dtype=np.bool_) | (proposed == 0),
            probs=self._probs,
            support_ids=self._supports,
            sequential_seconds=seconds,
        )


class ChainDraftBatch:
    """A :class:`dspark.models.batch_drafter.BatchDrafter` over the weights of ``drafter``."""

    def __init__(self, drafter: ChainDrafter) -> None:
        self._drafter = drafter
        self.name, self.block_size = drafter.name, drafter.block_size
        self.taps, self.has_confidence = drafter.taps, drafter.has_confidence
        self._seats: dict[int, Seated] = {}

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        """See :meth:`BatchDrafter.attach`. Raises :class:`ConfigError` if ``pages`` is less than 1."""
        drafter, places = self._drafter, pages * tables.page_size
        self._tables, self._pages = tables, pages
        self._rows = PageTables(seats=tables.seats, pages_per_seat=drafter.room(max_len), page_size=1)
        self._memory = drafter.paged_memory(self._rows, pages=places, max_len=max_len)
        # not filled: room that nobody writes to costs nothing
        self._states = torch.empty(places, drafter.width, dtype=drafter.dtype, device=drafter.device)

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        """See :meth:`BatchDrafter.open`."""
        assert seat not in self._seats, f"seat {seat} is taken"
        self._seats[seat] = Seated(shaper)

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        """See :meth:`BatchDrafter.resume`."""
        one, count = self._seats[seat], len(token_ids)
        assert one.length == 0, f"seat {seat} has {one.length} tokens; only a fresh request resumes"
        one.length = count
        self._find_rows(*flat_places([seat], [0], [min(count, self._limit)]))

    def extend(
        self,
        seats: Sequence[int],
        counts: Sequence[int],
        token_ids: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """See :meth:`BatchDrafter.extend`; one pass over all tokens.

        Tokens past the drafter's limit are counted and not written. Raises :class:`RequestError` if a seat lacks pages.
        """
        assert features is not None and len(features) == sum(counts)
        drafter = self._drafter
        rows, positions = flat_places(seats, [self._seats[seat].length for seat in seats], counts)
        for seat, count in zip(seats, counts, strict=True):
            self._seats[seat].length += count
        inside = positions < self._limit
        if not bool(inside.all()):
            here = inside.to(features.device)
            rows, positions, token_ids, features = rows[inside], positions[inside], token_ids[here], features[here]
        if not len(rows):
            return
        with torch.inference_mode():
            self._states[self._places(rows, positions)] = drafter.first_state(features.to(drafter.dtype))
            later = positions > 0  # with a token before it
            rows, positions, token_ids = rows[later], positions[later], token_ids[later.to(token_ids.device)]
            self._find_rows(rows, positions)
            before = self._states[self._places(rows, positions - 1)]
            drafter.write_rows(self._memory, rows, positions - 1, token_ids.to(drafter.device), before)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        """See :meth:`BatchDrafter.propose`; one run of the layer per position for all requests.

        A request whose draft logits are broken (nan) sits out like one past the limit. Raises :class:`RequestError` if
        a seat lacks pages.
        """
        lengths = [self._seats[ask.seat].length for ask in asks]
        sizes = [self._drafter.size(ask.limit, n, self._memory) for ask, n in zip(asks, lengths, strict=True)]
        held = [i for i, size in enumerate(sizes) if size]
        if not held:
            return Chain([], [], block=self.block_size, device=self._drafter.device).proposal(0.0).spread([], len(asks))
        fitting, lengths = [asks[i] for i in held], [lengths[i] for i in held]
        seats = [ask.seat for ask in fitting]
        self._find_rows(*flat_places(seats, lengths, [sizes[i] for i in held]))
        last = torch.tensor(lengths) - 1
        states = self._states[self._places(torch.tensor(seats), last)]
        shapers = [self._seats[seat].shaper for seat in seats]
        return self._drafter.draft(self._memory, fitting, lengths, states, shapers).spread(held, len(asks))

    def close(self, seat: int) -> None:
        """See :meth:`BatchDrafter.close`."""
        del self._seats[seat]
        self._rows.clear(seat)

    @property
    def _limit(self) -> int:
        """Tokens of a request that the drafter can take in."""
        return self._memory.max_len - self.block_size

    def _places(self, seats: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"]) -> Int[Tensor, "tokens"]:
        """Where those tokens' states lie, and the rows of the tokens before them; all pages one after the other."""
        size = self._tables.page_size
        pages = self._tables.ids[seats, positions // size]
        wrong = (pages < 0) | (pages >= self._pages)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise RequestError(
                f"seat {int(seats[i])} needs a page for position {int(positions[i])}, and its table names "
                f"{int(pages[i])}; give it one of the pages 0..{self._pages - 1}"
            )
        return (pages * size + positions % size).to(self._drafter.device)

    def _find_rows(self, seats: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"]) -> None:
        """Note where the rows lie that belong to the places of tokens at ``positions``."""
        later = positions > 0
        seats, positions = seats[later], positions[later]
        self._rows.ids[seats, positions - 1] = self._places(seats, positions).cpu()
