"""Verification of a step's requests together: each gets the verdict that it would get alone.

A step of an engine verifies blocks of several lengths, greedy and sampled, shaped and not, by either rule. What a
request gets depends on its own rows, drafts and streams alone (:mod:`dspark.maths.rejection`,
:mod:`dspark.maths.block_verification`), so a batch is nothing but its members, and :func:`verify_batch` says so: it
goes through them one by one. It is the reference of the compiled form in :mod:`dspark.models.native_verification`,
which has the same signature.

One bad request must not take the others down: where rows that a decision reads hold no distribution (nan, an infinite
logit, a mask that leaves no token), that request has an error and no verdict, and the rest go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, SamplingParams
from dspark.errors import RequestError
from dspark.maths.block_verification import judge_block
from dspark.maths.rejection import Verdict, judge, verify_greedy
from dspark.maths.sampling import RequestStreams, TargetRows, uniforms


@runtime_checkable
class BatchDrafts(Protocol):
    """Drafts of several requests, as far as verification reads them (a ``BatchProposal`` of the drafters is one).

    Row i holds one request's drafts, in order; entries behind those that are verified say nothing.
    """

    @property
    def draft_tokens(self) -> Int[Tensor, "requests block"]:
        """The drafts."""
        ...

    @property
    def certain(self) -> Bool[np.ndarray, "requests"]:
        """Whether each draft of a request was chosen with certainty given its prefix."""
        ...

    @property
    def probs(self) -> Float[Tensor, "requests block support"] | None:
        """What the drafts of the others were drawn from; None if all are certain."""
        ...

    @property
    def support_ids(self) -> Int[Tensor, "requests block support"] | None:
        """Tokens of the support, distinct in a row; None: the target's vocabulary in order."""
        ...


@runtime_checkable
class RowShaper(Protocol):
    """What makes of a request's rows those it is verified against: :class:`dspark.maths.shaping.Shaper`, a grammar."""

    def rows(self, logits: Float[Tensor, "rows vocab"], draft_tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Shaped logits; row k follows the committed text and the first k drafts. ``logits`` is left alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchVerdict:
    """What a step commits, by request. Entries of requests with an error are 0 and -1."""

    accepted: Int[np.ndarray, "requests"]  # 0..verify_len
    next_tokens: Int[np.ndarray, "requests"]  # residual or bonus token, the next round's anchor
    errors: Mapping[int, RequestError] = field(default_factory=dict)  # by index of the request

    def of(self, i: int) -> Verdict:
        """The verdict of request ``i``; raises its error if it has one."""
        if i in self.errors:
            raise self.errors[i]
        return Verdict(accepted=int(self.accepted[i]), next_token=int(self.next_tokens[i]))


def verify_batch(
    logits: Float[Tensor, "rows vocab"],
    verify_lens: Sequence[int],
    drafts: BatchDrafts | None,
    sampling: Sequence[SamplingParams],
    streams: Sequence[RequestStreams],
    shapers: Sequence[RowShaper | None] | None = None,
    *,
    draft_rows: Sequence[int] | None = None,
) -> BatchVerdict:
    """Accept a prefix of each request's drafts and draw the token after it.

    ``logits`` are the target's own, bf16 or fp32, all requests one after the other: ``verify_lens[i]`` + 1 rows of
    request i, row k of which follows its anchor and its first k drafts. Its drafts are the first ``verify_lens[i]`` of
    row ``draft_rows[i]`` of ``drafts`` (row i without ``draft_rows``; any number for a request without drafts). A
    request with a shaper is judged by its shaped rows, by the filters and the rule of its ``sampling`` in any case.

    Per request exactly what :func:`dspark.maths.rejection.verify_greedy`, :func:`dspark.maths.rejection.verify` or
    :func:`dspark.maths.block_verification.verify_block` give, to the same use of its ``streams``, which are advanced:
    one uniform per draft and one for the closing token, none by a greedy request. Rows that the verdict does not need
    are not looked at. A request whose rows hold no distribution where it is needed fails alone.
    """
    accepted, next_tokens = np.zeros(len(verify_lens), dtype=np.int64), np.full(len(verify_lens), -1, dtype=np.int64)
    errors: dict[int, RequestError] = {}
    start = 0
    for i, verify_len in enumerate(verify_lens):
        rows = logits[start : start + verify_len + 1]
        start += verify_len + 1
        tokens, distribution = drafts_of(drafts, i if draft_rows is None else draft_rows[i], verify_len)
        shaper = None if shapers is None else shapers[i]
        try:
            verdict = verify_rows(rows, tokens, distribution, sampling[i], streams[i], shaper)
        except RequestError as error:
            errors[i] = error
            continue
        accepted[i], next_tokens[i] = verdict.accepted, verdict.next_token
    assert start == len(logits), "one row per draft, and one after the last, of every request"
    return BatchVerdict(accepted=accepted, next_tokens=next_tokens, errors=errors)


def drafts_of(
    drafts: BatchDrafts | None, row: int, verify_len: int
) -> tuple[Int[Tensor, "block"], DraftDistribution | None]:
    """The scheduled drafts of one request and what they were drawn from, None if each was certain."""
    if drafts is None or verify_len == 0:
        assert verify_len == 0, "drafts to verify, but none given"
        return torch.empty(0, dtype=torch.long), None
    tokens = drafts.draft_tokens[row, :verify_len]
    if drafts.certain[row]:
        return tokens, None
    assert drafts.probs is not None, "uncertain drafts without a distribution"
    ids = None if drafts.support_ids is None else drafts.support_ids[row, :verify_len]
    return tokens, DraftDistribution(drafts.probs[row, :verify_len], ids)


def verify_rows(
    logits: Float[Tensor, "rows vocab"],
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    sampling: SamplingParams,
    streams: RequestStreams,
    shaper: RowShaper | None,
) -> Verdict:
    """One request's verdict. Raises :class:`RequestError` where a row that is needed holds no distribution."""
    count = 0 if sampling.greedy else len(draft_tokens)
    coins = uniforms(count, streams.accept)
    closing = uniforms(0 if sampling.greedy else 1, streams.residual)
    if shaper is not None:
        logits = shaper.rows(logits, draft_tokens.tolist())
    return judge_rows(logits, draft_tokens, distribution, sampling, coins, closing)


def judge_rows(
    logits: Float[Tensor, "rows vocab"],
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    sampling: SamplingParams,
    coins: Float[Tensor, "coins"],
    closing: Float[Tensor, "closing"],
) -> Verdict:
    """One request's verdict on shaped rows, its uniforms given; none to a greedy request."""
    if not sampling.greedy:
        rule = judge_block if sampling.rule == "block" else judge
        return rule(draft_tokens, distribution, CheckedRows(logits, sampling), coins, closing)
    verdict = verify_greedy(draft_tokens, logits.argmax(-1))
    for k in range(verdict.accepted + 1):
        check_row(logits[k], k)
    return verdict


class CheckedRows(TargetRows):
    """Rows that raise :class:`RequestError` when one without a distribution is asked for."""

    def __getitem__(self, k: int) -> Float[Tensor, "vocab"]:
        if k not in self._rows:
            check_row(self._logits[k], k)
        return super().__getitem__(k)


def check_row(row: Float[Tensor, "vocab"], k: int) -> None:
    """Raise :class:`RequestError` unless the largest logit of row ``k`` is finite and none is nan."""
    if not bool(row.amax().isfinite()):  # nan if any is
        raise no_distribution(k)


def no_distribution(k: int) -> RequestError:
    """The error of a request whose row ``k`` cannot be drawn from."""
    return RequestError(
        f"the target's logits after {k} of the step's drafts hold no distribution: a nan, an infinity, or none that "
        "a mask leaves (check the model in fp32, and that bans and grammar leave a token)"
    )
