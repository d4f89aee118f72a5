"""A step's confidences made true: by temperature scaling, or estimated where a drafter gives none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from dspark.core import DraftDistribution
from dspark.errors import ScheduleError
from dspark.maths.estimator import Estimator, draft_features
from dspark.models.batch_drafter import BatchProposal
from dspark.schedule_files import Calibration


@dataclass(frozen=True, eq=False)
class Confidences:
    """Calibrations of a drafter, one for greedy requests and one for sampled ones; either may be missing."""

    greedy: Calibration | None = None
    sampled: Calibration | None = None

    def of(self, proposal: BatchProposal, greedy: Sequence[bool]) -> Float[np.ndarray, "requests block"] | None:
        """c_k of every draft, in float64; ``greedy``: which requests are. None if the drafter gives no confidences
        and no calibration estimates them for all. Entries behind a request's last draft say nothing."""
        raw = proposal.confidence
        if all(greedy) or not any(greedy):  # of one kind: no need to pick rows
            only = self.greedy if all(greedy) else self.sampled
            if raw is not None and only is not None and only.estimator is None and only.block_size == raw.shape[1]:
                return only.scaling(raw)
        requests, block = proposal.draft_tokens.shape
        confidence = np.zeros((requests, block)) if raw is None else raw.astype(np.float64)
        for calibration, kind in ((self.greedy, True), (self.sampled, False)):
            rows = np.flatnonzero(np.asarray(greedy, dtype=np.bool_) == kind)
            if not len(rows):
                continue
            if calibration is None:
                if raw is None:
                    return None
                continue
            if calibration.block_size != block:
                raise ScheduleError(
                    f"the calibration is for block_size {calibration.block_size} and the drafter's is {block}; "
                    "calibrate it anew"
                )
            if calibration.estimator is not None:
                confidence[rows] = Estimator(np.array(calibration.estimator)).confidence(_features(proposal)[rows])
            elif raw is None:
                return None
            confidence[rows] = calibration.scaling(confidence[rows])
        return confidence


def _features(proposal: BatchProposal) -> Float[np.ndarray, "requests block features"]:
    """:func:`dspark.maths.estimator.draft_features` of every position; of certain drafts, the constant alone."""
    requests, block = proposal.draft_tokens.shape
    if proposal.probs is None:
        return draft_features(None, requests * block).reshape(requests, block, -1)
    flat = draft_features(DraftDistribution(proposal.probs.reshape(requests * block, -1)), requests * block)
    features = flat.reshape(requests, block, -1)
    features[proposal.certain, :, 1:] = 0.0
    return torch.from_numpy(features).nan_to_num_().numpy()
