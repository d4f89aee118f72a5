"""Verification of a batch by compiled C: :func:`dspark.maths.batch_verification.verify_batch`, in a tenth of the time.

Verdicts are those of the plain form to the last bit. ``verify.c`` computes in fp32 what the plain form does, with other
roundings, and knows how far the two can lie apart; a request whose coin or draw falls so near an edge that they could
disagree (about one request in a hundred, mostly in the draw of a residual's unlikely tokens) is handed to the plain
form, with the same uniforms. Where there is no compiler, or the logits are on another device, the plain form does it
all.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.maths import batch_verification
from dspark.maths.batch_verification import (
    BatchDrafts,
    BatchVerdict,
    RowShaper,
    drafts_of,
    judge_rows,
    no_distribution,
)
from dspark.maths.sampling import RequestStreams
from dspark.maths.shaping import Shaper, ShapingTables
from dspark.models.native import compiled, native_wanted

SOURCE = Path(__file__).with_name("verify.c")
SURE, UNSURE, BAD, NO_MEMORY = range(4)  # a request's status, as in verify.c
REQUEST = np.dtype(  # struct request of verify.c, field by field
    [
        *((name, np.uint64) for name in ("logits", "drafts", "probs", "support", "coins")),
        *((name, np.uint64) for name in ("ids", "counts", "places", "bias", "seen", "never", "held", "mask")),
        *((name, np.float64) for name in ("closing", "top_p", "frequency", "presence")),
        *((name, np.int64) for name in ("stride", "verify_len", "support_len", "probs_stride", "support_stride")),
        *((name, np.int64) for name in ("top_k", "accepted", "next_token")),
        *((name, np.int64) for name in ("entries", "nevers", "helds", "early", "mask_stride")),
        *((name, np.float32) for name in ("temperature", "min_p", "repetition")),
        *((name, np.int32) for name in ("bf16", "greedy", "joint", "shaped", "penalises", "status", "bad_row")),
    ],
    align=True,
)

# fields of a request, and those of its ShapingTables and their params that they come from
ADDRESSES = {name: name for name in ("ids", "counts", "places", "bias", "seen", "never", "held", "mask")}
LENGTHS = {"entries": "ids", "nevers": "never", "helds": "held"}
RULES = {"repetition": "repetition_penalty", "frequency": "frequency_penalty", "presence": "presence_penalty"}


def verify_batch(
    logits: Float[Tensor, "rows vocab"],
    verify_lens: Sequence[int],
    drafts: BatchDrafts | None,
    sampling: Sequence[SamplingParams],
    streams: Sequence[RequestStreams],
    shapers: Sequence[RowShaper | None] | None = None,
    *,
    draft_rows: Sequence[int] | None = None,
    native: bool = True,
) -> BatchVerdict:
    """:func:`dspark.maths.batch_verification.verify_batch`, the same to the last bit; ``native`` False is that one."""
    library = library_for(logits) if native else None
    if library is None:
        return batch_verification.verify_batch(
            logits, verify_lens, drafts, sampling, streams, shapers, draft_rows=draft_rows
        )
    if all(params.greedy for params in sampling) and all(shaper is None for shaper in shapers or ()):
        return _verify_greedy(library, logits, verify_lens, drafts, draft_rows)
    step = _Step(logits, verify_lens, drafts, sampling, draft_rows)
    step.throw(streams)
    step.shape(shapers)
    library.verify_requests(step.requests.ctypes.data, len(step.requests), logits.shape[1])
    return step.verdict()


def library_for(logits: Tensor) -> ctypes.CDLL | None:
    """verify.c if it covers ``logits``."""
    covered = logits.is_cpu and logits.dtype in (torch.bfloat16, torch.float32) and logits.numel() > 0
    return _wanted() if covered else None


@functools.cache
def _wanted() -> ctypes.CDLL | None:
    """verify.c, unless nothing compiled is wanted; asked once, for looking into the environment takes its time."""
    return _library() if native_wanted() else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """verify.c; None without a working compiler."""
    library = compiled(SOURCE, ())
    if library is not None:
        library.verify_requests.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        library.verify_requests.restype = None
        library.verify_weights.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        library.verify_weights.restype = None
        library.verify_shape.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        library.verify_shape.restype = None
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        batch, found = (pointer, size, ctypes.c_int32, size, size, pointer, pointer, pointer, size), (pointer,) * 3
        library.verify_greedy.argtypes = [*batch, *found]
        rows, top = (pointer, size, ctypes.c_int32, size, size), (size, pointer, pointer)
        library.verify_logprobs.argtypes = [*rows, pointer, pointer, *top]
    return library


def _verify_greedy(
    library: ctypes.CDLL,
    logits: Tensor,
    verify_lens: Sequence[int],
    drafts: BatchDrafts | None,
    draft_rows: Sequence[int] | None,
) -> BatchVerdict:
    """Requests that are all greedy and without rules: nothing is thrown, nothing unsure, and a few numbers say it all.

    What :class:`_Step` gives, and for a single request a quarter of its time, which is mostly that of starting small
    operations whose code the target's pass has driven out of the caches.
    """
    count, (rows, vocab) = len(verify_lens), logits.shape
    assert sum(verify_lens) + count == rows, "one row per draft, and one after the last, of every request"
    assert drafts is not None or not any(verify_lens), "drafts to verify, but none given"
    stride, apart = logits.stride()
    if apart != 1:
        logits, stride = logits.contiguous(), vocab
    address = block = 0
    if drafts is not None:
        tokens = drafts.draft_tokens
        if tokens.dtype != torch.int64 or tokens.stride(1) != 1:
            tokens = tokens.to(torch.int64).contiguous()
        address, block = tokens.data_ptr(), tokens.stride(0)
    numbers = ctypes.c_int64 * count
    places = numbers(*(range(count) if draft_rows is None else draft_rows))
    accepted, next_tokens, bad_rows = numbers(), numbers(), numbers()
    if library.verify_greedy(
        *(logits.data_ptr(), stride, logits.dtype == torch.bfloat16, vocab, count, numbers(*verify_lens), places),
        *(address, block, accepted, next_tokens, bad_rows),
    ):
        raise MemoryError("no memory to verify drafts; lower the number of seats")
    errors = {i: no_distribution(row) for i, row in enumerate(bad_rows) if row >= 0}
    found, following = np.array(accepted[:], dtype=np.int64), np.array(next_tokens[:], dtype=np.int64)
    return BatchVerdict(accepted=found, next_tokens=following, errors=errors)


class _Step:
    """The requests of one call as verify.c sees them, and everything that their addresses point to."""

    def __init__(
        self,
        logits: Tensor,
        verify_lens: Sequence[int],
        drafts: BatchDrafts | None,
        sampling: Sequence[SamplingParams],
        draft_rows: Sequence[int] | None,
    ) -> None:
        self.logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self.lens: NDArray[np.int64] = np.asarray(verify_lens, dtype=np.int64)
        self.sampling, self.drafts = sampling, drafts
        count = len(self.lens)
        rows = np.arange(count) if draft_rows is None else np.asarray(draft_rows, dtype=np.int64)
        self.draft_rows: NDArray[np.int64] = rows
        self.starts = np.cumsum(self.lens + 1) - self.lens - 1
        assert int(self.lens.sum()) + count == len(logits), (
            "one row per draft, and one after the last, of every request"
        )
        self.requests = np.zeros(count, dtype=REQUEST)
        self.errors: dict[int, RequestError] = {}
        self.shapers: dict[int, RowShaper] = {}
        self._token_lists: list[list[int]] | None = None
        self.kept: list[object] = []  # what addresses point to
        self._describe_rows()
        self._describe_drafts()

    def _describe_rows(self) -> None:
        requests, logits = self.requests, self.logits
        requests["stride"], requests["bf16"] = logits.stride(0), logits.dtype == torch.bfloat16
        requests["logits"] = logits.data_ptr() + self.starts * (logits.stride(0) * logits.element_size())
        requests["verify_len"] = self.lens
        fields = [(p.temperature, p.min_p, p.top_p, p.top_k, p.greedy, p.rule == "block") for p in self.sampling]
        columns = np.array(fields, dtype=np.float64).reshape(-1, 6).T
        for name, column in zip(("temperature", "min_p", "top_p", "top_k", "greedy", "joint"), columns, strict=True):
            requests[name] = column

    def _describe_drafts(self) -> None:
        if self.drafts is None:
            assert not self.lens.any(), "drafts to verify, but none given"
            return
        requests, drafts = self.requests, self.drafts
        some = self.lens > 0
        rows = np.where(some, self.draft_rows, 0)
        self.tokens = drafts.draft_tokens.to(torch.int64).contiguous()
        requests["drafts"] = np.where(some, self.tokens.data_ptr() + rows * (self.tokens.shape[1] * 8), 0)
        if drafts.probs is None:
            return
        uncertain = some & ~drafts.certain[rows]
        self.probs = drafts.probs.float().contiguous()
        block, support = self.probs.shape[1:]
        requests["support_len"] = requests["probs_stride"] = requests["support_stride"] = support
        requests["probs"] = np.where(uncertain, self.probs.data_ptr() + rows * (block * support * 4), 0)
        if drafts.support_ids is not None:
            self.ids = drafts.support_ids.to(torch.int64).contiguous()
            requests["support"] = np.where(uncertain, self.ids.data_ptr() + rows * (block * support * 8), 0)

    def throw(self, streams: Sequence[RequestStreams]) -> None:
        """Draw all coins and the uniforms of the closing tokens; greedy requests take none."""
        sampled = self.requests["greedy"] == 0
        self.coins = torch.zeros(int(self.lens.sum()) + 1, dtype=torch.float64)
        self.coin_starts = np.cumsum(self.lens) - self.lens
        self.closing = torch.zeros(len(self.lens), dtype=torch.float64)
        for i in np.flatnonzero(sampled).tolist():
            start, length = int(self.coin_starts[i]), int(self.lens[i])
            if length:
                torch.rand(length, generator=streams[i].accept, out=self.coins[start : start + length])
            torch.rand(1, generator=streams[i].residual, out=self.closing[i : i + 1])
        self.requests["coins"] = self.coins.data_ptr() + self.coin_starts * 8
        self.requests["closing"] = self.closing.numpy()

    def shape(self, shapers: Sequence[RowShaper | None] | None) -> None:
        """Have the rows of requests with a shaper judged as it shapes them."""
        self.shapers = {i: shaper for i, shaper in enumerate(shapers or ()) if shaper is not None}
        found: dict[int, ShapingTables] = {}
        for i, shaper in self.shapers.items():
            drafts = self._drafts(i)
            try:
                if isinstance(shaper, Shaper):
                    found[i] = shaper.tables(drafts)
                else:
                    self._replace(i, shaper.rows(self._own_rows(i), drafts).float().contiguous())
            except RequestError as error:
                self.errors[i] = error
        if found:
            self._tabulate(list(found), list(found.values()))

    def _replace(self, i: int, rows: Tensor) -> None:
        request = self.requests[i]
        request["logits"], request["stride"], request["bf16"] = rows.data_ptr(), rows.stride(0), 0
        self.kept.append(rows)

    def _tabulate(self, places: list[int], tables: list[ShapingTables]) -> None:
        """Tables of the requests ``places``, a field of all of them at a time."""
        self.kept.append(tables)
        requests = self.requests
        requests["shaped"][places] = 1
        for name, field in ADDRESSES.items():
            requests[name][places] = [_address(getattr(table, field)) for table in tables]
        for name, field in LENGTHS.items():
            requests[name][places] = [len(getattr(table, field)) for table in tables]
        for name, field in RULES.items():
            requests[name][places] = [getattr(table.params, field) for table in tables]
        requests["penalises"][places] = [table.penalises for table in tables]
        requests["early"][places] = [table.early for table in tables]
        requests["mask_stride"][places] = [0 if table.mask is None else table.mask.shape[1] for table in tables]

    def verdict(self) -> BatchVerdict:
        """What the C code found, completed by the plain form where it could not tell."""
        requests = self.requests
        for i in np.flatnonzero(requests["status"] != SURE).tolist():
            request = requests[i]
            if request["status"] == NO_MEMORY:
                raise MemoryError("no memory to verify drafts; lower the number of seats")
            if request["status"] == BAD:
                self.errors.setdefault(i, no_distribution(int(request["bad_row"])))
            elif i not in self.errors:
                self._decide(i)
        for i in self.errors:
            requests["accepted"][i], requests["next_token"][i] = 0, -1
        return BatchVerdict(
            accepted=requests["accepted"].copy(), next_tokens=requests["next_token"].copy(), errors=self.errors
        )

    def _decide(self, i: int) -> None:
        """Judge request ``i`` by the plain form, with the uniforms that were drawn for it."""
        start, length = int(self.coin_starts[i]), int(self.lens[i])
        tokens, distribution = drafts_of(self.drafts, int(self.draft_rows[i]), length)
        rows = self._own_rows(i)
        try:
            if i in self.shapers:
                rows = self.shapers[i].rows(rows, self._drafts(i))
            verdict = judge_rows(
                rows,
                tokens,
                distribution,
                self.sampling[i],
                self.coins[start : start + length],
                self.closing[i : i + 1],
            )
        except RequestError as error:
            self.errors[i] = error
            return
        self.requests["accepted"][i], self.requests["next_token"][i] = verdict.accepted, verdict.next_token

    def _own_rows(self, i: int) -> Tensor:
        start = int(self.starts[i])
        return self.logits[start : start + int(self.lens[i]) + 1]

    def _drafts(self, i: int) -> list[int]:
        if not self.lens[i]:
            return []
        if self._token_lists is None:
            self._token_lists = self.tokens.tolist()
        return self._token_lists[self.draft_rows[i]][: self.lens[i]]


def _address(array: NDArray[Any] | None) -> int:  # Any: of each kind of number
    return 0 if array is None else array.__array_interface__["data"][0]
