"""A target and a drafter whose every distribution depends on the whole text before it, read back from pages.

A page that is lost, mixed up, shared too far or freed too early changes the numbers at once; and a step costs next to
nothing, so that engines can take thousands. ``next_probs`` states the target's distribution without any memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import jaxtyping
import numpy as np
import torch
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.maths.sampling import target_probs
from dspark.maths.shaping import Shaper, shaped_logits
from dspark.models.batch_drafter import BatchProposal, DraftAsk, stacked
from dspark.models.drafter import EMPTY
from dspark.models.paged_memory import PageTables
from dspark.models.target import KVMemory, Target, TargetInfo, TargetOutput


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the test run's shape and type checks, which take nine tenths of a step like these; other tests have
    them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


CONTEXTS = 61  # a text is one of so many, by a sum over its tokens and their positions


def weight(position: int) -> int:
    return 7 * position + 3


def context_of(text: Sequence[int]) -> int:
    return sum(token * weight(p) for p, token in enumerate(text)) % CONTEXTS


class CellMemory(KVMemory):
    """Token ids by page and place."""

    def __init__(self, tables: PageTables, pages: int, max_len: int) -> None:
        super().__init__(rows=tables.seats, max_len=max_len, shapes=[], dtype=torch.float32, device=torch.device("cpu"))
        self.tables, self.cells = tables, np.full((pages, tables.page_size), -1)

    def check_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        super().check_room(rows, counts)
        self.tables.check(rows, [self.lengths[row] for row in rows], counts, pages=len(self.cells))

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        place = np.arange(start, start + len(token_ids))
        page = self.tables.ids.numpy()[row, place // self.tables.page_size]
        self.cells[page, place % self.tables.page_size] = token_ids

    def read(self, row: int, stop: int) -> list[int]:
        pages = -(-stop // self.tables.page_size)
        return list(self.cells[self.tables.ids.numpy()[row, :pages]].reshape(-1)[:stop].tolist())


class HistoryTarget:
    """Logits are a table's row, by :func:`context_of` everything before; the tap is token and position."""

    def __init__(self, *, vocab_size: int = 5, max_len: int = 60, seed: int = 0, sharpness: float = 1.0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(CONTEXTS, vocab_size, generator=random) * sharpness
        self.info = TargetInfo(
            name="history",
            family="history",
            vocab_size=vocab_size,
            hidden_size=1,
            num_layers=3,
            max_len=max_len,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def new_memory(self, *, rows: int, max_len: int) -> CellMemory:
        tables = PageTables(seats=rows, pages_per_seat=1, page_size=max_len)
        for row in range(rows):
            tables.assign(row, [row])
        return CellMemory(tables, rows, max_len)

    def new_paged_memory(self, tables: PageTables, *, pages: int) -> CellMemory:
        return CellMemory(tables, pages, min(self.info.max_len, tables.max_len))

    def forward(
        self,
        token_ids: Tensor,
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        assert isinstance(memory, CellMemory)
        counts = [len(token_ids)] if counts is None else list(counts)
        memory.check_room(rows, counts)
        contexts, told, begin, ids = list[int](), list[float](), 0, token_ids.tolist()
        last = []
        for row, count in zip(rows, counts, strict=True):
            start, new = memory.lengths[row], ids[begin : begin + count]
            memory.write(row, start, new)
            total = sum(token * weight(p) for p, token in enumerate(memory.read(row, start)))
            for p, token in enumerate(new, start):
                total += token * weight(p)
                contexts.append(total % CONTEXTS)
                told.append(token + 100.0 * p)
            begin += count
            last.append(begin - 1)
        memory.advance(rows, counts)
        final = self.table[contexts]
        logits = (final[last] if last_only else final) if want_logits else None
        return TargetOutput(logits, torch.tensor(told)[:, None] if taps else None, final)

    def logits(self, final: Tensor) -> Tensor:
        return final

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids[..., None].float()

    def head_weight(self) -> Tensor:
        return torch.eye(self.info.vocab_size)

    def next_probs(self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
        """[vocab]: distribution of the token after prompt and output, without any memory."""
        logits = self.table[context_of([*prompt, *output])]
        if params.shapes_logits:
            logits = shaped_logits(logits, prompt, output, params)
        return target_probs(logits[None], params)[0]

    def chances(self, prompt: Sequence[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
        """Probability of every output of ``length`` tokens."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for output, chance in found.items():
                for token, share in enumerate(self.next_probs(prompt, output, params).double().tolist()):
                    if share > 0.0:
                        longer[(*output, token)] = chance * share
            found = longer
        return found


class HistoryDrafter:
    """Near the target's own table, and as far as ``blur`` from it; its confidences are a table of the same prefix."""

    name, taps, has_confidence = "history", (0,), True

    def __init__(self, target: HistoryTarget, *, block_size: int = 3, blur: float = 1.0, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        noise = random.normal(size=tuple(target.table.shape)) * blur
        self.logits = (target.table.numpy() + noise).astype(np.float32)
        self.confidences = random.choice([0.1, 0.3, 0.6, 0.9, 0.97], size=CONTEXTS)
        self.block_size, self.vocab_size = block_size, target.info.vocab_size

    def open(self, *, max_len: int) -> list[int]:
        return []

    def extend(self, state: list[int], token_ids: Tensor, features: Tensor | None) -> None:
        check_features(token_ids.tolist(), features, len(state))
        state += token_ids.tolist()

    def propose(
        self, state: list[int], anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        text = [*state, anchor]
        total, drafts, probs, confidence = context_of(text), list[int](), list[np.ndarray](), list[float]()
        for k in range(min(limit, self.block_size)):
            row = self.logits[total]
            confidence.append(float(self.confidences[total]))
            if sampling.greedy:
                token = int(row.argmax())
            else:
                q = np.exp((row - row.max()) / np.float32(sampling.temperature))
                q = (q / q.sum(dtype=np.float64)).astype(np.float32)
                cdf = q.cumsum(dtype=np.float64)
                u = float(torch.rand(1, dtype=torch.float64, generator=generator))
                token = min(int(np.searchsorted(cdf, u * cdf[-1], side="right")), len(q) - 1)
                probs.append(q)
            drafts.append(token)
            total = (total + token * weight(len(text) + k)) % CONTEXTS
        if not drafts:
            return EMPTY
        distribution = None if sampling.greedy else DraftDistribution(torch.from_numpy(np.stack(probs)))
        return Proposal(torch.tensor(drafts), distribution, torch.tensor(confidence, dtype=torch.float64))

    def batch_form(self, target: Target) -> HistoryBatch:
        return HistoryBatch(self)


class HistoryBatch:
    """The same over shared pages: what it knows of a text it reads from its own cells."""

    def __init__(self, single: HistoryDrafter) -> None:
        self.single = single
        self.name, self.block_size, self.taps = single.name, single.block_size, single.taps
        self.has_confidence = single.has_confidence

    def attach(self, tables: PageTables, *, pages: int, max_len: int) -> None:
        self.memory = CellMemory(tables, pages, tables.max_len)
        self.open_seats: set[int] = set()

    def open(self, seat: int, *, shaper: Shaper | None) -> None:
        assert seat not in self.open_seats
        self.open_seats.add(seat)
        self.memory.lengths[seat] = 0

    def resume(self, seat: int, token_ids: Sequence[int]) -> None:
        self.memory.lengths[seat] = len(token_ids)
        assert self.memory.read(seat, len(token_ids)) == list(token_ids), "the pages do not hold what they should"

    def extend(self, seats: Sequence[int], counts: Sequence[int], token_ids: Tensor, features: Tensor | None) -> None:
        self.memory.check_room(seats, counts)
        begin = 0
        for seat, count in zip(seats, counts, strict=True):
            part = slice(begin, begin + count)
            new, start = token_ids[part].tolist(), self.memory.lengths[seat]
            check_features(new, None if features is None else features[part], start)
            self.memory.write(seat, start, new)
            begin += count
        self.memory.advance(seats, counts)

    def propose(self, asks: Sequence[DraftAsk]) -> BatchProposal:
        proposals = []
        for ask in asks:
            length = self.memory.lengths[ask.seat]
            scratch = np.full(self.block_size + 1, -9)  # a drafter writes behind its context
            self.memory.write(ask.seat, length, scratch.tolist())
            proposals.append(
                self.single.propose(
                    self.memory.read(ask.seat, length),
                    ask.anchor,
                    sampling=ask.sampling,
                    generator=ask.generator,
                    limit=ask.limit,
                )
            )
        return stacked(
            proposals,
            block=self.block_size,
            vocab_size=self.single.vocab_size,
            has_confidence=True,
            device=torch.device("cpu"),
        )

    def close(self, seat: int) -> None:
        self.open_seats.remove(seat)


def check_features(token_ids: Sequence[int], features: Tensor | None, start: int) -> None:
    assert features is not None
    wanted = [token + 100.0 * p for p, token in enumerate(token_ids, start)]
    assert features[:, 0].tolist() == wanted, "features of other tokens or positions"


def marginal(chances: dict[tuple[int, ...], float], part: slice) -> dict[tuple[int, ...], float]:
    """Probability of what stands at some places of the output."""
    found: dict[tuple[int, ...], float] = {}
    for output, chance in chances.items():
        found[output[part]] = found.get(output[part], 0.0) + chance
    return found


def all_outputs(vocab_size: int, length: int) -> list[tuple[int, ...]]:
    return list(product(range(vocab_size), repeat=length))
