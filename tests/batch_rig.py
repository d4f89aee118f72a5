"""Requests that come and go on seats and pages, each held against the single form of its drafter.

The text is random and the features are the table target's; what is under test is the drafter alone. Every request has
a twin: a state of the single form, fed the same tokens in the same pieces, with streams of the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fakes import TableTarget
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.sampling import RequestStreams
from dspark.maths.shaping import Shaper
from dspark.models.batch_drafter import BatchDrafter, DraftAsk
from dspark.models.drafter import Drafter, MirrorsShaping
from dspark.models.paged_memory import PageTables

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.02),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias=((4, 2.0),), banned_token_ids=(5, 6)),
    SamplingParams(frequency_penalty=0.6, presence_penalty=0.3),
)


def features_of(table: TableTarget, text: list[int], taps: tuple[int, ...], start: int = 0) -> Tensor | None:
    """The target's tapped states of ``text`` from ``start`` on; they depend on its last ``order`` tokens alone."""
    if not taps:
        return None
    known = text[max(0, start - table.order) :]
    memory = table.new_memory(rows=1, max_len=len(known))
    features = table.forward(torch.tensor(known), memory, taps=taps, want_logits=False).features
    assert features is not None
    return features[len(known) - len(text) + start :]


class Pages:
    """A page manager of the simplest kind: a shuffled free list and reference counts."""

    def __init__(self, tables: PageTables, count: int, seed: int) -> None:
        self.tables, self.holders = tables, [0] * count
        self._random = random.Random(seed)
        self._owned: dict[int, list[int]] = {}

    def open(self, seat: int, shared: list[int]) -> None:
        self._owned[seat] = []
        for page in shared:
            self._take(seat, page)

    def grow(self, seat: int, tokens: int) -> None:
        """Pages for ``tokens`` tokens of the seat."""
        while len(self._owned[seat]) < self.tables.pages_for(tokens):
            self._take(seat, self._random.choice([page for page, held in enumerate(self.holders) if not held]))

    def close(self, seat: int) -> list[int]:
        """Give the pages back; they keep what they hold until someone takes them."""
        for page in self._owned[seat]:
            self.holders[page] -= 1
        self.tables.clear(seat)
        return self._owned.pop(seat)

    def of(self, seat: int) -> list[int]:
        return self._owned[seat]

    def _take(self, seat: int, page: int) -> None:
        self.holders[page] += 1
        self._owned[seat].append(page)
        self.tables.assign(seat, [page], start=len(self._owned[seat]) - 1)


@dataclass
class Twins:
    """A request in the batched form, and beside it in the single one."""

    text: list[int]  # committed tokens, the anchor last
    sampling: SamplingParams
    streams: RequestStreams
    twin_streams: RequestStreams
    twin: Any  # state of the single form
    shapers: tuple[Shaper, Shaper] | None
    run: int = 0  # tokens that the target has run: all but the anchor


@dataclass
class Rig:
    """Many requests over one batched drafter. Every proposal is compared as it is made."""

    single: Drafter
    batch: BatchDrafter
    table: TableTarget
    seats: int = 5
    page_size: int = 4
    max_len: int = 40
    seed: int = 0
    exact: bool = False  # whether the numbers must be the same bits
    live: dict[int, Twins] = field(default_factory=dict)
    compared: int = 0
    resumed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        stretches = -(-(self.max_len + self.single.block_size + 1) // self.page_size)
        self.tables = PageTables(seats=self.seats, pages_per_seat=stretches, page_size=self.page_size)
        pages = self.seats * stretches
        self.pages = Pages(self.tables, pages, self.seed)
        self.batch.attach(self.tables, pages=pages, max_len=self.max_len)

    def arrive(self, *, share: bool, sampling: SamplingParams | None = None, prompt: int | None = None) -> int:
        """A request takes a free seat, on another one's first pages if ``share`` finds any; its prompt is run."""
        seat = self.random.choice([seat for seat in range(self.seats) if seat not in self.live])
        shared, text = self._beginning() if share else ([], [])
        room = self.max_len - len(text)
        count = prompt or self.random.randint(2, max(2, min(12, room - 2)))
        text = text + [self.random.randrange(self.table.info.vocab_size) for _ in range(count)]
        if sampling is None:
            sampling = self.random.choice(SAMPLINGS)
        seed = self.random.randrange(10**6)
        shapers = None
        if sampling.shapes_logits:
            shapers = (Shaper(sampling, text[:-1]), Shaper(sampling, text[:-1]))
            for shaper in shapers:
                shaper.commit(text[-1:])
        twins = Twins(
            text=text,
            sampling=sampling,
            streams=RequestStreams.from_seed(seed),
            twin_streams=RequestStreams.from_seed(seed),
            twin=self.single.open(max_len=self.max_len),
            shapers=shapers,
        )
        if shapers is not None and isinstance(self.single, MirrorsShaping):
            self.single.mirror(twins.twin, shapers[1])
        self.live[seat] = twins
        self.pages.open(seat, shared)
        self.batch.open(seat, shaper=None if shapers is None else shapers[0])
        if shared:
            self.resumed += 1
            twins.run = len(shared) * self.page_size
            self.batch.resume(seat, text[: twins.run])
            known = text[: twins.run]
            self.single.extend(twins.twin, torch.tensor(known), features_of(self.table, known, self.single.taps))
        return seat

    def _beginning(self) -> tuple[list[int], list[int]]:
        """Whole pages of a live request's committed beginning, and the tokens in them."""
        for seat, twins in self.random.sample(sorted(self.live.items()), len(self.live)):
            whole = twins.run // self.page_size
            if whole:
                kept = self.random.randint(1, whole)
                return self.pages.of(seat)[:kept], twins.text[: kept * self.page_size]
        return [], []

    def extend(self, seats: list[int], *, most: int = 99) -> None:
        """Run up to ``most`` of the tokens that the target has not run yet, the anchor excepted, in one flat batch."""
        counts = [min(most, len(self.live[seat].text) - 1 - self.live[seat].run) for seat in seats]
        pairs = [(seat, count) for seat, count in zip(seats, counts, strict=True) if count > 0]
        if not pairs:
            return
        ids, parts = [], []
        for seat, count in pairs:
            twins = self.live[seat]
            self.pages.grow(seat, twins.run + count + self.single.block_size + 1)
            span = slice(twins.run, twins.run + count)
            new = torch.tensor(twins.text[span])
            part = features_of(self.table, twins.text[: span.stop], self.single.taps, span.start)
            self.single.extend(twins.twin, new, part)
            ids.append(new)
            parts.append(part)
            twins.run += count
        flat = torch.cat(parts) if self.single.taps else None
        self.batch.extend([seat for seat, _ in pairs], [count for _, count in pairs], torch.cat(ids), flat)

    def propose(self, seats: list[int], limits: list[int] | None = None) -> list[Proposal]:
        """Ask for blocks of these seats; each is held against the single form's."""
        asks, expected = [], []
        for i, seat in enumerate(seats):
            twins = self.live[seat]
            assert twins.run == len(twins.text) - 1
            self.pages.grow(seat, twins.run + self.single.block_size + 1)
            limit = self.random.randint(1, max(1, self.single.block_size)) if limits is None else limits[i]
            anchor = twins.text[-1]
            asks.append(
                DraftAsk(
                    seat=seat, anchor=anchor, sampling=twins.sampling, generator=twins.streams.propose, limit=limit
                )
            )
            options: dict[str, Any] = {"sampling": twins.sampling, "generator": twins.twin_streams.propose}
            expected.append(self.single.propose(twins.twin, anchor, limit=limit, **options))
        proposal = self.batch.propose(asks)
        assert proposal.draft_tokens.shape == (len(seats), self.single.block_size)
        for i, (seat, wanted) in enumerate(zip(seats, expected, strict=True)):
            found, twins = proposal.of(i), self.live[seat]
            self.compare(found, wanted, twins.sampling)
            behind = int(proposal.proposed[i])
            assert not proposal.draft_tokens[i, behind:].any()
            assert proposal.confidence is None or not proposal.confidence[i, behind:].any()
            left = [streams.propose.get_state() for streams in (twins.streams, twins.twin_streams)]
            assert torch.equal(*left), "not as many uniforms of the request's own stream"
        return [proposal.of(i) for i in range(len(seats))]

    def compare(self, found: Proposal, wanted: Proposal, sampling: SamplingParams) -> None:
        self.compared += wanted.block > 0
        assert found.draft_tokens.tolist() == wanted.draft_tokens.tolist()
        assert (found.distribution is None) == (wanted.distribution is None)
        assert (found.confidence is None) == (wanted.confidence is None)
        close: Callable[..., None] = torch.testing.assert_close
        tight = {"rtol": 0.0, "atol": 0.0} if self.exact else {"rtol": 1e-3, "atol": 1e-5}
        if found.distribution is not None and wanted.distribution is not None:
            vocab = self.table.info.vocab_size
            for k in range(wanted.block):
                close(found.distribution.dense(k, vocab), wanted.distribution.dense(k, vocab), **tight)
            assert bool((found.distribution.of(found.draft_tokens) > 0).all())
        if found.confidence is not None and wanted.confidence is not None:
            close(found.confidence.float(), wanted.confidence.float(), **tight)

    def commit(self, seat: int, proposal: Proposal) -> None:
        """Some of the drafts stand, and the target adds a token."""
        twins = self.live[seat]
        new = proposal.draft_tokens[: self.random.randint(0, proposal.block)].tolist()
        new.append(self.random.randrange(self.table.info.vocab_size))
        twins.text += new
        for shaper in twins.shapers or ():
            shaper.commit(new)

    def leave(self, seat: int) -> None:
        del self.live[seat]
        self.pages.close(seat)
        self.batch.close(seat)

    def step(self) -> None:
        """Arrivals, then what a step of an engine does for some of the requests, then departures."""
        while len(self.live) < self.seats and self.random.random() < 0.5:
            self.arrive(share=self.random.random() < 0.5)
        seats = self.random.sample(sorted(self.live), len(self.live))
        self.extend(seats, most=self.random.choice((3, 99)))
        ready = [seat for seat in seats if self.live[seat].run == len(self.live[seat].text) - 1]
        ready = ready[: self.random.randint(1, self.seats)]
        for seat, proposal in zip(ready, self.propose(ready), strict=True):
            self.commit(seat, proposal)
        for seat in list(self.live):
            full = len(self.live[seat].text) + self.single.block_size + 1 > self.max_len
            if full or self.random.random() < 0.08:
                self.leave(seat)


def run(rig: Rig, steps: int) -> Rig:
    """So many random steps; something must have been compared, and something resumed."""
    for _ in range(steps):
        rig.step()
    assert rig.compared > steps // 2 and rig.resumed > 0
    return rig
