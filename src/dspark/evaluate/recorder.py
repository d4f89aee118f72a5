"""Plays prompts at full length and keeps, of every round, what calibration learns from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark.core import Proposal, RoundRecord, SamplingParams
from dspark.decode import generate
from dspark.errors import DataError
from dspark.maths.calibration import RoundOutcomes
from dspark.maths.estimator import FEATURES, draft_features
from dspark.maths.outcomes import outcomes_of
from dspark.models.drafter import Drafter
from dspark.models.target import Target


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedRounds:
    """Full-length rounds with the features of their drafts and the prompt each belongs to."""

    outcomes: RoundOutcomes  # confidence 0 where the drafter gives none
    features: Float[np.ndarray, "rounds block features"]
    prompt: Int[np.ndarray, "rounds"]

    def take(self, rounds: Bool[np.ndarray, "rounds"]) -> PlayedRounds:
        return PlayedRounds(
            outcomes=self.outcomes.take(rounds), features=self.features[rounds], prompt=self.prompt[rounds]
        )


class ConfidenceRecorder:
    """A scheduler that lets everything through, and remembers what each proposal looked like before it was judged.

    Give :meth:`observe` every record of the request that it schedules.
    """

    needs_confidence: ClassVar[bool] = False

    def __init__(self, *, block: int) -> None:
        self._block = block
        self._pending: Float[np.ndarray, "proposed features"] = np.zeros((0, len(FEATURES)))
        self._records: list[RoundRecord] = []
        self._features: list[Float[np.ndarray, "block features"]] = []
        self._prompts: list[int] = []

    def choose(self, proposal: Proposal, context_len: int) -> int:
        self._pending = draft_features(proposal.distribution, proposal.block)
        return proposal.block

    def observe(self, record: RoundRecord, prompt: int) -> None:
        """Take in a committed round of ``prompt``; rounds without drafts say nothing and are passed over."""
        if not record.draft_tokens:
            return
        features = np.zeros((self._block, len(FEATURES)))
        features[: len(self._pending)] = self._pending
        self._records.append(record)
        self._features.append(features)
        self._prompts.append(prompt)

    @property
    def played(self) -> PlayedRounds:
        """Everything observed. Raises :class:`DataError` if no round drafted anything."""
        if not self._records:
            raise DataError("no round drafted anything; give more prompts or tokens")
        # a drafter without a head has confidence 0 throughout, for its estimator to replace
        full = [r if r.confidence else replace(r, confidence=(0.0,) * len(r.draft_tokens)) for r in self._records]
        return PlayedRounds(
            outcomes=outcomes_of(full, block=self._block),
            features=np.stack(self._features),
            prompt=np.array(self._prompts),
        )


def play(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    on_prompt: Callable[[int], None] = lambda done: None,
) -> PlayedRounds:
    """Answer every prompt, each with a seed of its own counted on from ``sampling.seed``, checking whole blocks.

    ``on_prompt`` hears how many are done. Raises :class:`DataError` if no round drafted anything.
    """
    recorder = ConfidenceRecorder(block=drafter.block_size)
    for number, ids in enumerate(prompts):

        def keep(record: RoundRecord, prompt: int = number) -> None:
            recorder.observe(record, prompt)

        generate(
            target,
            drafter,
            ids,
            sampling=replace(sampling, seed=sampling.seed + number),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            scheduler=recorder,
            on_round=keep,
        )
        on_prompt(number + 1)
    return recorder.played
