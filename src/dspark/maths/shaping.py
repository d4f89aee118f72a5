"""What a request's rules make of the target's logits at one position, given the text before that position.

The rules look at the history, so each position of a block has its own: prompt, output so far, and the drafts before
the position. They are applied to the target's rows before verification, and nothing else is needed for exactness: a
target that is shaped by its history is a target like any other.

Order, the one of vLLM's sampler: banned tokens and min_tokens (logit -inf), logit_bias (added), repetition_penalty,
frequency_penalty, presence_penalty; then, in :mod:`dspark.maths.sampling`, temperature, top_k, top_p, min_p.
repetition_penalty is that of transformers (and of CTRL, Keskar et al. 2019): a positive logit is divided by it, another
multiplied, for every token in prompt or output. frequency and presence penalties are those of OpenAI's API: over the
output only, subtracted per occurrence and once.

:func:`shaped_logits` states the rules for one row; :class:`Shaper` gives the same numbers, bit for bit, for all rows of
a block, from counts that it keeps from round to round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dspark.core import SamplingParams

IntArray = NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)

NEVER = float("-inf")
FIRST_CAPACITY = 256  # distinct tokens that a shaper makes room for at first; doubled when full


def shaped_logits(
    logits: Float[Tensor, "vocab"],
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    *,
    stop_token_ids: Collection[int] = (),
) -> Float[Tensor, "vocab"]:
    """fp32 logits of the token after ``prompt_ids`` and ``output_ids``, by all rules of ``params``.

    ``stop_token_ids`` are what min_tokens holds back. The plain version; ``logits`` is left alone.
    """
    shaped = logits.float().clone()
    for token, bias in params.logit_bias:
        shaped[token] += bias
    for token in {*prompt_ids, *output_ids}:
        logit = shaped[token]
        shaped[token] = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    for token, count in Counter(output_ids).items():
        shaped[token] -= params.frequency_penalty * count
        shaped[token] -= params.presence_penalty
    for token in params.banned_token_ids:
        shaped[token] = NEVER
    if len(output_ids) < params.min_tokens:
        for token in stop_token_ids:
            shaped[token] = NEVER
    return shaped


@dataclass(frozen=True, kw_only=True)
class ShapingTables:
    """What :meth:`Shaper.rows` does to the rows of a block, for code that does the same where it reads them.

    Row k: an entry's logit plus its ``bias``; if ``penalises``, the penalties of ``params``, ``counts`` and ``seen``
    being as they are after the first k drafts, whose entries are ``places``; then -inf for ``never``, for ``held`` in
    the first ``early`` rows, and where the row's bit in ``mask`` is 0. Views of the shaper's arrays, good until it
    changes.
    """

    params: SamplingParams
    ids: IntArray  # [entries]
    bias: NDArray[np.float32]  # [entries]
    seen: NDArray[np.bool_]  # [entries] in prompt or output
    counts: IntArray  # [entries] in the output
    places: IntArray  # [drafts], if penalises
    penalises: bool
    never: IntArray
    held: IntArray
    early: int
    mask: NDArray[np.uint8] | None = None  # [rows, bytes] a bit a token, lowest first, up to a multiple of 16 tokens


class Shaper:
    """:func:`shaped_logits` over a request's life, for all rows of a block at once, touching no other tokens' logits.

    Arrays in lockstep, one entry per distinct token that a rule looks at: ``_ids``, ``_bias``, ``_seen`` (in prompt or
    output), ``_counts`` (in the output). A draft gets an entry too; if it is rejected the entry stays, and changes
    nothing.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, stop_token_ids: Collection[int] = ()
    ) -> None:
        self._params, self._banned, self._stops = params, list(params.banned_token_ids), sorted(stop_token_ids)
        self._never: IntArray = np.array(self._banned, dtype=np.int64)
        self._held: IntArray = np.array(self._stops, dtype=np.int64)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._has_penalties = penalties != (1.0, 0.0, 0.0)
        self._places: dict[int, int] = {}
        self._ids: IntArray = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._bias: NDArray[np.float32] = np.zeros(FIRST_CAPACITY, dtype=np.float32)
        self._counts: IntArray = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._seen: NDArray[np.bool_] = np.zeros(FIRST_CAPACITY, dtype=np.bool_)
        self._output_len = 0
        for token, bias in params.logit_bias:
            place = self._place(token)
            self._bias[place] = bias
        if self._has_penalties:
            for token in prompt_ids:
                place = self._place(token)
                self._seen[place] = True

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the output."""
        self._output_len += len(token_ids)
        if self._has_penalties:
            for token in token_ids:
                place = self._place(token)
                self._seen[place] = True
                self._counts[place] += 1

    def rows(self, logits: Float[Tensor, "rows vocab"], draft_tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Shaped fp32 logits; row k follows the committed text and the first k of ``draft_tokens``, which are one
        fewer than the rows. ``logits`` is left alone."""
        assert len(logits) == len(draft_tokens) + 1, "one row per draft, and one after the last"
        return self._shaped(logits, draft_tokens, None)

    def tables(self, draft_tokens: Sequence[int]) -> ShapingTables:
        """What :meth:`rows` does, as tables; may raise :class:`dspark.errors.RequestError` where it may."""
        places = [self._place(token) for token in draft_tokens] if self._has_penalties else []
        count = len(self._places)
        return ShapingTables(
            params=self._params,
            ids=self._ids[:count],
            bias=self._bias[:count],
            seen=self._seen[:count],
            counts=self._counts[:count],
            places=np.array(places, dtype=np.int64),
            penalises=self._has_penalties,
            never=self._never,
            held=self._held,
            early=max(0, self._params.min_tokens - self._output_len),
        )

    def mirrored(
        self, draft_logits: Float[Tensor, "block draft_vocab"], columns: Int[Tensor, "vocab"] | None = None
    ) -> Float[Tensor, "block draft_vocab"]:
        """A drafter's logits under the same rules, as far as the committed text decides them; fp32.

        It raises acceptance and nothing else. A row of which nothing would be left stays as it is. ``columns``
        [vocab]: the column of each of the target's tokens, -1 for none; None where they are the target's vocabulary in
        order.
        """
        shaped = self._shaped(draft_logits, (), columns)
        if len(self._banned) + len(self._stops) >= shaped.shape[1]:
            empty = shaped.isneginf().all(1, keepdim=True)
            shaped = torch.where(empty, draft_logits.float(), shaped)
        return shaped

    def _shaped(self, logits: Tensor, draft_tokens: Sequence[int], columns: Tensor | None) -> Tensor:
        shaped = logits.to(torch.float32, copy=True)
        places = [self._place(token) for token in draft_tokens] if self._has_penalties else []
        if count := len(self._places):
            ids, chosen = self._columns(self._ids[:count], columns, shaped.device)
            part = shaped[:, ids] + _tensor(self._bias[:count], shaped.device)[chosen]
            if self._has_penalties:
                part = self._penalised(part, places, chosen)
            shaped[:, ids] = part
        if self._banned:
            shaped[:, self._columns(np.array(self._banned), columns, shaped.device)[0]] = NEVER
        early = max(0, self._params.min_tokens - self._output_len)
        if early and self._stops:
            shaped[:early, self._columns(np.array(self._stops), columns, shaped.device)[0]] = NEVER
        return shaped

    def _penalised(self, part: Tensor, places: Sequence[int], chosen: Tensor) -> Tensor:
        """The three penalties on the entries ``chosen``; row k counts the first k of the drafts at ``places``."""
        params, count, rows = self._params, len(self._places), len(part)
        seen, counts = np.tile(self._seen[:count], (rows, 1)), np.tile(self._counts[:count], (rows, 1))
        for k, place in enumerate(places):
            seen[k + 1 :, place] = True
            counts[k + 1 :, place] += 1
        seen_here = _tensor(seen, part.device)[:, chosen]
        counts_here = _tensor(counts, part.device)[:, chosen].double()
        repeated = torch.where(part > 0, part / params.repetition_penalty, part * params.repetition_penalty)
        part = torch.where(seen_here, repeated, part)
        part = part - (counts_here * params.frequency_penalty).float()
        return part - ((counts_here > 0).double() * params.presence_penalty).float()

    def _place(self, token: int) -> int:
        """Entry of ``token``, a new one if it has none; may replace the arrays by longer ones."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids, self._bias = _doubled(self._ids), _doubled(self._bias)
            self._counts, self._seen = _doubled(self._counts), _doubled(self._seen)
        self._ids[place] = token
        return place

    @staticmethod
    def _columns(token_ids: IntArray, columns: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Columns of those of ``token_ids`` that have one, and which these are."""
        ids = _tensor(token_ids, device)
        if columns is None:
            return ids, torch.arange(len(ids), device=device)
        found = columns[ids]
        return found[found >= 0], (found >= 0).nonzero()[:, 0]


def _doubled(array: NDArray[Scalar]) -> NDArray[Scalar]:
    return np.concatenate((array, np.zeros_like(array)))


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
