"""From the records of rounds to what calibration learns from: which drafts of a full-length round were accepted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dspark.core import RoundRecord
from dspark.errors import DataError
from dspark.maths.calibration import RoundOutcomes


def slots_of(record: RoundRecord) -> int:
    """Slots of a round that count: all that was proposed, or up to the stop token if it is among the accepted drafts.

    Raises :class:`DataError` if the round was truncated: the fate of the unchecked drafts is unknown, and leaving them
    out would keep the confident ones only.
    """
    proposed = len(record.draft_tokens)
    if record.verify_len < proposed:
        raise DataError(
            f"a round checked {record.verify_len} of {proposed} drafts; calibration needs rounds of full length "
            "(record with the fixed scheduler)"
        )
    stopped = record.accepted == len(record.committed)  # no token of the target's own: the last draft ended the answer
    return record.accepted if stopped else proposed


def outcomes_of(records: Iterable[RoundRecord], *, block: int) -> RoundOutcomes:
    """Gather the rounds in which the drafter drafted; those without a proposal (a prefill, an n-gram that found
    nothing) say nothing of it, nor do those whose drafts were looked up.

    Raises :class:`DataError` for a truncated round, one without confidences, or one of more than ``block`` drafts.
    """
    rounds = [record for record in records if record.draft_tokens and not record.looked_up]
    confidence = np.zeros((len(rounds), block))
    lengths, accepted = np.zeros((2, len(rounds)), dtype=np.int64)
    for i, record in enumerate(rounds):
        lengths[i], accepted[i] = slots_of(record), record.accepted
        if len(record.draft_tokens) > block:
            raise DataError(f"a round has {len(record.draft_tokens)} drafts; the drafter's block_size is {block}")
        if len(record.confidence) != len(record.draft_tokens):
            raise DataError("a round has no confidences; this drafter needs an estimator")
        confidence[i, : len(record.confidence)] = record.confidence
    return RoundOutcomes(confidence=confidence, lengths=lengths, accepted=accepted)
