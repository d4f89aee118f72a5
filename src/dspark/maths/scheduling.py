"""How many drafts of each request the target checks: the hardware-aware prefix scheduler and its simple relatives.

A draft is worth checking if the tokens it is expected to add outweigh the time it costs. With ``survival`` a_k of every
draft and SPS(B), target steps per second with B tokens in the batch, the throughput of a choice of lengths is

    throughput = expected_tokens x SPS(B),   expected_tokens = sum over requests of 1 + a_0 + ... + a_(l-1),
                                             B               = sum over requests of 1 + l

Survival never rises along a request, so the greedy order, most likely draft first, admits prefixes only.

Non-anticipation is what keeps the output exact: whether draft k is admitted may depend on its own confidence, which
depends on x_<k, and never on anything computed from x_k, such as the confidence of k + 1. Each function below stops
at the first draft it refuses and looks no further. Looking further and coming back (the retrospective search) biases
the output: Appendix A, in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal
from dspark.errors import ScheduleError


def survival(confidence: Float[Tensor, "requests block"]) -> Float[Tensor, "requests block"]:
    """Chance that drafts 0..k all survive: the cumulative product of ``confidence`` c_k, in its own dtype.

    Never rises along a row. Raises :class:`ScheduleError` if a confidence is nan or outside [0, 1].
    """
    check_confidence(confidence)
    product = confidence.cumprod(1)
    # A parallel prefix product may round upwards from one position to the next; a product of chances may not.
    return product.cummin(1).values if confidence.shape[1] else product


def choose_verify_lens(
    survival: Float[Tensor, "requests block"], sps: Float[Tensor, "max_tokens_plus_1"]
) -> Int[Tensor, "requests"]:
    """Decide how many draft tokens of each request the target checks in the next step.

    ``survival`` [requests, block]: chance that drafts 0..k all survive; in [0, 1], never rises along a row. ``sps``
    [max_tokens + 1]: steps per second when a step carries B tokens; entry 0 unused. Returns ``verify_len``
    [requests], 0..block. Raises :class:`ScheduleError` if a row rises, a survival is not in [0, 1], or ``sps`` is too
    short for a full batch or has an entry that is not positive and finite. Equal survivals go in draft order, and
    among equal positions in request order, so no prefix is skipped; they are compared in the dtype they came in. A
    draft of survival 0 is never admitted. Source: DSpark Algorithm 1; it stops at the first non-gain, which keeps the
    output distribution exact (Appendix A).
    """
    _check_inputs(survival, sps)
    requests, block = survival.shape
    chances, speed = survival.tolist(), sps.tolist()
    candidates = [(k, r) for k in range(block) for r in range(requests) if chances[r][k] > 0.0]
    candidates.sort(key=lambda kr: -chances[kr[1]][kr[0]])  # stable

    verify_len = [0] * requests
    expected_tokens, batch_tokens = float(requests), requests
    best = expected_tokens * speed[batch_tokens]
    for k, r in candidates:
        expected_tokens += chances[r][k]
        batch_tokens += 1
        throughput = expected_tokens * speed[batch_tokens]
        if throughput <= best:
            break
        best, verify_len[r] = throughput, k + 1
    return torch.tensor(verify_len, dtype=torch.int64)


def choose_verify_lens_vectorised(
    survival: Float[Tensor, "requests block"], sps: Float[Tensor, "max_tokens_plus_1"]
) -> Int[Tensor, "requests"]:
    """:func:`choose_verify_lens` without a loop, for large batches; the same result, ties and rounding included."""
    _check_inputs(survival, sps)
    requests = len(survival)
    chances = survival.cpu().double().numpy()  # exact from any float type, so the order is that of the dtype given
    in_draft_order = chances.T.reshape(-1)
    order = np.argsort(-in_draft_order, kind="stable")[: np.count_nonzero(in_draft_order)]
    expected_tokens = np.cumsum(np.concatenate(([float(requests)], in_draft_order[order])))
    throughput = expected_tokens * sps.cpu().double().numpy()[requests : requests + len(expected_tokens)]
    no_gain = np.flatnonzero(throughput[1:] <= throughput[:-1])
    admitted = order[: no_gain[0]] if len(no_gain) else order
    return torch.from_numpy(np.bincount(admitted % max(requests, 1), minlength=requests).astype(np.int64))


def threshold_verify_len(confidence: Float[Tensor, "block"], threshold: float) -> int:
    """Number of drafts before the first whose ``confidence`` is under ``threshold``; the whole block if none is.

    The conditional c_k is compared, not the survival: that is the reference's rule. 0 admits everything. Raises
    :class:`ScheduleError` if a confidence is nan or outside [0, 1].
    """
    check_confidence(confidence[None])
    return int((confidence >= threshold).cumprod(0).sum())


def check_confidence(confidence: Float[Tensor, "requests block"]) -> None:
    """Raise :class:`ScheduleError` naming the first confidence that is no probability."""
    _complain_at(
        ~((confidence >= 0) & (confidence <= 1)),  # nan fails both
        lambda r, k: f"confidence[{r}, {k}] is {float(confidence[r, k])}; it must be in [0, 1] (apply the sigmoid)",
    )


def _check_inputs(survival: Float[Tensor, "requests block"], sps: Float[Tensor, "max_tokens_plus_1"]) -> None:
    requests, block = survival.shape
    full = requests * (1 + block)
    if len(sps) <= full:
        raise ScheduleError(
            f"sps covers up to {len(sps) - 1} tokens; {requests} requests with {block} drafts each need {full}: "
            "profile more tokens, or limit the batch"
        )
    first = max(requests, 1)
    used = sps[first : full + 1]
    _complain_at(
        ~((used > 0) & used.isfinite())[None],
        lambda _, i: f"sps[{first + i}] is {float(used[i])}; steps per second must be positive and finite",
    )
    _complain_at(
        ~((survival >= 0) & (survival <= 1)),
        lambda r, k: f"survival[{r}, {k}] is {float(survival[r, k])}; it must be in [0, 1]",
    )
    _complain_at(
        survival[:, 1:] > survival[:, :-1],
        lambda r, k: (
            f"survival[{r}] rises from {float(survival[r, k])} at position {k} to {float(survival[r, k + 1])}; "
            "it must be the cumulative product of the confidences"
        ),
    )


def _complain_at(wrong: Tensor, message: Callable[[int, int], str]) -> None:
    """Raise :class:`ScheduleError` with the message of the first True of a two-dimensional mask."""
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ScheduleError(message(row, column))


@runtime_checkable
class Scheduler(Protocol):
    """Chooses the verify length of a single request, for the loop at batch size 1.

    ``needs_confidence`` lets the loop refuse a drafter without a confidence head before any work is done.
    """

    needs_confidence: ClassVar[bool]

    def choose(self, proposal: Proposal, context_len: int) -> int:
        """``verify_len``, 0..block, for a request with ``context_len`` committed tokens."""
        ...


@dataclass(frozen=True)
class FixedScheduler:
    """The first ``length`` drafts (fewer if the drafter proposed fewer); None takes all that was proposed."""

    needs_confidence: ClassVar[bool] = False
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ScheduleError(f"length is {self.length}; it must be 0 or more, or None for the whole block")

    def choose(self, proposal: Proposal, context_len: int) -> int:
        return proposal.block if self.length is None else min(self.length, proposal.block)


@dataclass(frozen=True)
class ThresholdScheduler:
    """All drafts before the first with a confidence under ``threshold``, in [0, 1]; 0 takes the whole block."""

    needs_confidence: ClassVar[bool] = True
    threshold: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ScheduleError(f"threshold is {self.threshold}; it must be in [0, 1]")

    def choose(self, proposal: Proposal, context_len: int) -> int:
        return threshold_verify_len(_confidence_of(proposal, self), self.threshold)


@dataclass(frozen=True, eq=False)
class GreedyScheduler:
    """Algorithm 1 for one request, against a measured table: ``sps[B]``, steps per second with B tokens in a step.

    ``sps`` needs block + 2 entries (entry 0 is unused). It is one curve for every ``context_len``.
    """

    needs_confidence: ClassVar[bool] = True
    sps: Float[Tensor, "max_tokens_plus_1"]

    def choose(self, proposal: Proposal, context_len: int) -> int:
        confidence = _confidence_of(proposal, self)
        return int(choose_verify_lens(survival(confidence[None]), self.sps)[0])


def _confidence_of(proposal: Proposal, scheduler: Scheduler) -> Float[Tensor, "block"]:
    if proposal.confidence is not None:
        return proposal.confidence
    if proposal.block == 0:  # nothing to be confident about: the drafter sat this round out
        return torch.empty(0)
    raise ScheduleError(
        f"{type(scheduler).__name__} needs a confidence for each draft and the drafter gives none; "
        "use a drafter with a confidence head, or FixedScheduler"
    )
