"""Ragged batches: which tokens share an attention call, and which keys each of them sees.

Products do not care which request a token belongs to; attention does. A batch is cut into runs, stretches of
neighbouring memory rows with equal counts: 96 rows with a token each are one run, eight whole sequences are eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import RequestError
from dspark.models.target import KVMemory

CALL_TOKENS = 256  # padded keys that cost as much as one more attention call (some 15 us on the CPUs we measured)
SHORT_COUNT = 32  # tokens per row up to which rows share a run and heads are folded; longer runs use the causal kernel


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What a decoder's attention asks of a plan."""

    group: int  # query heads per key-value head
    window: int | None  # keys that a sliding layer sees, the token's own included; None: no layer slides
    fused: bool  # the attention kernel knows causality by itself
    dtype: torch.dtype  # of masks
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Span:
    """The keys that a run's queries look at, in full layers or in sliding ones."""

    start: int  # first key; above 0 where a window has left earlier ones behind
    stop: int
    mask: Float[Tensor, "*batch queries keys"] | None  # 0 or -inf, to be added to scores; None: nothing is hidden
    causal: bool  # exactly the future is hidden, and the first query is key 0; goes without a mask


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows with equal counts, neighbours in the memory unless it is scattered, which share one attention call."""

    tokens: slice  # in the flat batch
    rows: tuple[int, ...]  # of the memory
    pasts: tuple[int, ...]  # tokens that each row holds
    count: int  # new tokens per row
    folded: bool  # query heads of a key-value head lie on the query axis, as (token, group)
    full: Span
    local: Span  # of sliding layers; the same object as ``full`` where none slides

    def places(self) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
        """Row and position of each token."""
        positions = torch.tensor(self.pasts)[:, None] + torch.arange(self.count)
        return torch.tensor(self.rows).repeat_interleave(self.count), positions.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A batch cut into runs, and the position of every token (a slice where it is one row)."""

    runs: tuple[Run, ...]
    positions: slice | Int[Tensor, "tokens"]


def check_batch(
    token_ids: Int[Tensor, "tokens"], memory: KVMemory, rows: Sequence[int], counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the counts as a tuple; raise :class:`RequestError` unless the batch is well formed and fits the memory."""
    if counts is None:
        rows, counts = rows[:1], (token_ids.shape[0],)
    if len(rows) != len(counts) or sum(counts) != token_ids.shape[0] or min(counts, default=0) < 1:
        raise RequestError(
            f"counts is {list(counts)} for rows {list(rows)} and {token_ids.shape[0]} tokens; "
            "give one positive count per row, with the tokens as their sum"
        )
    if len(set(rows)) != len(rows) or not all(0 <= row < memory.rows for row in rows):
        raise RequestError(f"rows is {list(rows)}; rows must be distinct and lie in 0..{memory.rows - 1}")
    memory.check_room(rows, counts)
    return tuple(counts)


def last_tokens(states: Float[Tensor, "tokens width"], counts: Sequence[int]) -> Float[Tensor, "requests width"]:
    """The states of each request's last token."""
    if len(counts) == 1:
        return states[-1:]
    if len(counts) == states.shape[0]:
        return states
    return states[torch.tensor(counts, device=states.device).cumsum(0) - 1]


def plan_batch(
    memory: KVMemory,
    rows: Sequence[int],
    counts: Sequence[int],
    shape: AttentionShape,
    *,
    causal: bool = True,
    scattered: bool = False,
) -> Plan:
    """Cut a checked batch into runs.

    A row joins the run before it if it is the memory's next row (any row, in a ``scattered`` memory) with the same
    short count, and if the padding it brings to a common number of keys costs less than an attention call of its own.
    With ``causal`` False every token sees all of its row, the pass's later tokens too, as a draft block does.
    """
    pasts = [memory.lengths[row] for row in rows]
    runs: list[Run] = []
    first = begin = longest = 0
    for i in range(len(rows) + 1):
        if first < i < len(rows):
            padding = max(0, pasts[i] - longest) * (i - first) + max(0, longest - pasts[i])
            joins = scattered or rows[i] == rows[i - 1] + 1
            if joins and counts[i] == counts[first] <= SHORT_COUNT and padding <= CALL_TOKENS:
                longest = max(longest, pasts[i])
                continue
        if i > first:
            tokens = slice(begin, begin + counts[first] * (i - first))
            runs.append(_run(tokens, tuple(rows[first:i]), tuple(pasts[first:i]), counts[first], shape, causal))
            begin, first = tokens.stop, i
        longest = pasts[i] if i < len(rows) else 0
    if len(rows) == 1:
        return Plan(runs=tuple(runs), positions=slice(pasts[0], pasts[0] + counts[0]))
    spans = [torch.arange(past, past + count) for past, count in zip(pasts, counts, strict=True)]
    return Plan(runs=tuple(runs), positions=torch.cat(spans).to(shape.device))


def _run(
    tokens: slice, rows: tuple[int, ...], pasts: tuple[int, ...], count: int, shape: AttentionShape, causal: bool
) -> Run:
    folded = len(pasts) > 1 or count <= SHORT_COUNT
    full = _span(count, pasts, folded, None, shape, causal)
    local = full if shape.window is None else _span(count, pasts, folded, shape.window, shape, causal)
    return Run(tokens=tokens, rows=rows, pasts=pasts, count=count, folded=folded, full=full, local=local)


def _span(
    count: int, pasts: tuple[int, ...], folded: bool, window: int | None, shape: AttentionShape, causal: bool
) -> Span:
    """Key range and mask of a run, for full layers (``window`` None) or sliding ones."""
    start = 0 if window is None else max(0, min(pasts) - window + 1)
    stop = max(pasts) + count
    same = min(pasts) == max(pasts)
    reaches = window is None or stop - start <= window  # no query's window ends within the range
    if same and reaches and (count == 1 or not causal):
        return Span(start=start, stop=stop, mask=None, causal=False)
    if stop == count and not folded and reaches and shape.fused:
        return Span(start=start, stop=stop, mask=None, causal=True)
    queries = (torch.tensor(pasts)[:, None] + torch.arange(count))[:, :, None]
    keys = torch.arange(start, stop)
    hidden = keys > (queries if causal else queries[:, -1:])
    if window is not None:
        hidden = hidden | (keys <= queries - window)
    hidden = hidden.expand(-1, count, -1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, float("-inf")).to(shape.device)
    if folded:
        mask = mask.repeat_interleave(shape.group, 1)
    return Span(start=start, stop=stop, mask=mask[:, None], causal=False)
