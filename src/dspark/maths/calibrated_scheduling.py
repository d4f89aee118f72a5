"""Schedulers for one request that read measurements: confidences made true, and costs by context length.

They wrap any :class:`dspark.maths.scheduling.Scheduler`. The rounds' records keep the drafter's raw confidences, so
what is recorded under a calibration can be calibrated again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dspark.core import Proposal, RoundRecord
from dspark.errors import ScheduleError
from dspark.maths.calibration import RoundOutcomes, check_temperatures, fit_temperatures, scaled
from dspark.maths.estimator import Estimator, draft_features
from dspark.maths.outcomes import outcomes_of
from dspark.maths.scheduling import Scheduler, choose_verify_lens, survival

ONLINE_GRID = np.exp(np.linspace(np.log(0.25), np.log(4.0), 49))


@dataclass(frozen=True, eq=False)
class CalibratedScheduler:
    """``inner`` with the confidences of a drafter's head at the temperatures of STS, one per position, or with
    Platt's biases on top."""

    needs_confidence: ClassVar[bool] = True
    inner: Scheduler
    sts_temperatures: Float[np.ndarray, "block"]
    biases: Float[np.ndarray, "block"] | None = None  # None: 0 throughout

    def __post_init__(self) -> None:
        check_temperatures(self.sts_temperatures)

    def choose(self, proposal: Proposal, context_len: int) -> int:
        return self.inner.choose(_scaled_proposal(proposal, self.sts_temperatures, self.biases), context_len)


@dataclass(frozen=True, eq=False)
class EstimatingScheduler:
    """``inner`` for a drafter without confidences: estimated from its distributions, then at STS's temperatures."""

    needs_confidence: ClassVar[bool] = False
    inner: Scheduler
    estimator: Estimator
    sts_temperatures: Float[np.ndarray, "block"]
    biases: Float[np.ndarray, "block"] | None = None  # None: 0 throughout

    def __post_init__(self) -> None:
        check_temperatures(self.sts_temperatures)

    def choose(self, proposal: Proposal, context_len: int) -> int:
        if proposal.looked_up:
            return self.inner.choose(proposal, context_len)
        features = draft_features(proposal.distribution, proposal.block)
        estimated = replace(proposal, confidence=torch.from_numpy(self.estimator.confidence(features)))
        return self.inner.choose(_scaled_proposal(estimated, self.sts_temperatures, self.biases), context_len)


class OnlineScheduler:
    """``inner`` at temperatures that follow what is being served.

    Every ``explore_every``-th round is checked at full length, whatever the confidences say, and only those rounds are
    learned from: a round cut by its own confidences would not say what became of the rest. The last ``window`` of them
    are kept and the temperatures refitted after every ``refit_every`` new ones. Give :meth:`observe` every record;
    rounds of drafts that were looked up neither explore nor teach.
    """

    needs_confidence: ClassVar[bool] = True

    def __init__(
        self,
        inner: Scheduler,
        *,
        sts_temperatures: Float[np.ndarray, "block"],
        explore_every: int = 16,
        window: int = 4096,
        refit_every: int = 256,
    ) -> None:
        for name, value in (("explore_every", explore_every), ("window", window), ("refit_every", refit_every)):
            if value < 1:
                raise ScheduleError(f"{name} is {value}; it must be 1 or more")
        check_temperatures(sts_temperatures)
        self.inner, self.sts_temperatures = inner, sts_temperatures
        self._explore_every, self._refit_every = explore_every, refit_every
        self._window: deque[RoundRecord] = deque(maxlen=window)
        self._rounds = self._new = 0
        self._exploring = False

    def choose(self, proposal: Proposal, context_len: int) -> int:
        self._exploring = not proposal.looked_up and self._rounds % self._explore_every == 0
        self._rounds += not proposal.looked_up
        if self._exploring:
            return proposal.block
        return self.inner.choose(_scaled_proposal(proposal, self.sts_temperatures), context_len)

    def observe(self, record: RoundRecord) -> None:
        """Take in the round just committed; refits when enough explored ones are new."""
        if not self._exploring or not record.draft_tokens:
            return
        self._exploring = False
        self._window.append(record)
        self._new += 1
        if self._new >= self._refit_every:
            self._new = 0
            self.sts_temperatures = fit_temperatures(self.outcomes, grid=ONLINE_GRID)

    @property
    def outcomes(self) -> RoundOutcomes:
        """The explored rounds in the window, for :func:`dspark.maths.calibration.judge`."""
        return outcomes_of(self._window, block=len(self.sts_temperatures))


@dataclass(frozen=True, eq=False)
class ProfiledGreedyScheduler:
    """Algorithm 1 for one request with a curve per context bucket: ``sps[i]`` up to ``contexts[i]`` committed tokens,
    the last beyond."""

    needs_confidence: ClassVar[bool] = True
    contexts: Sequence[int]  # strictly ascending
    sps: Float[Tensor, "buckets max_tokens_plus_1"]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.contexts, self.contexts[1:], strict=False))
        if not ascending or len(self.contexts) != self.sps.shape[0] or not len(self.contexts):
            raise ScheduleError(
                f"contexts is {list(self.contexts)} for {self.sps.shape[0]} curves; give ascending lengths, one each"
            )

    def choose(self, proposal: Proposal, context_len: int) -> int:
        if proposal.block == 0:
            return 0
        if proposal.confidence is None:
            raise ScheduleError(
                "ProfiledGreedyScheduler needs a confidence for each draft and the drafter gives none; calibrate it"
            )
        bucket = next((i for i, most in enumerate(self.contexts) if context_len <= most), len(self.contexts) - 1)
        return int(choose_verify_lens(survival(proposal.confidence[None]), self.sps[bucket])[0])


def _scaled_proposal(
    proposal: Proposal,
    sts_temperatures: Float[np.ndarray, "all_positions"],
    biases: Float[np.ndarray, "all_positions"] | None = None,
) -> Proposal:
    if proposal.block == 0 or proposal.looked_up:
        return proposal
    if proposal.confidence is None:
        raise ScheduleError("the drafter gives no confidences to calibrate; calibrate it with an estimator")
    if proposal.block > len(sts_temperatures):
        raise ScheduleError(
            f"{proposal.block} drafts were proposed and sts_temperatures has {len(sts_temperatures)}; "
            "calibrate this drafter anew"
        )
    raw = proposal.confidence.double().cpu().numpy()
    shift = None if biases is None else biases[: proposal.block]
    return replace(proposal, confidence=torch.from_numpy(scaled(raw, sts_temperatures[: proposal.block], shift)))
