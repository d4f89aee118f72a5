"""Plays prompts at full length, many at a time, and keeps of every round what calibration learns from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark.core import Completion, Proposal, RoundRecord, SamplingParams
from dspark.errors import DataError
from dspark.evaluate.batched import Ask, play_together
from dspark.evaluate.lockstep import Lockstep
from dspark.maths.calibration import RoundOutcomes
from dspark.maths.estimator import FEATURES, draft_features
from dspark.maths.outcomes import outcomes_of
from dspark.maths.scheduling import FixedScheduler
from dspark.models.drafter import Drafter
from dspark.models.target import Target

ROWS = 16  # requests that share target passes; more save little where a pass of 16 tokens is bound by arithmetic


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


def play(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    rows: int = ROWS,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> PlayedRounds:
    """Answer every prompt, each with a seed of its own counted on from ``sampling.seed``, checking whole blocks.

    ``rows`` prompts at a time go in lockstep (:mod:`dspark.evaluate.lockstep`): the rounds that each would have alone.
    ``on_prompt`` hears how many are done. Raises :class:`DataError` if no round drafted anything.
    """
    waiting = deque(
        (number, Ask(prompt_ids=tuple(ids), sampling=replace(sampling, seed=sampling.seed + number)))
        for number, ids in enumerate(prompts)
    )
    features: dict[int, list[Float[np.ndarray, "block features"]]] = {number: [] for number, _ in waiting}
    records: dict[int, tuple[RoundRecord, ...]] = {}

    def proposed(number: int, proposal: Proposal) -> None:
        if proposal.block:
            found = np.zeros((drafter.block_size, len(FEATURES)))
            found[: proposal.block] = draft_features(proposal.distribution, proposal.block)
            features[number].append(found)

    def ended(number: int, ask: Ask, completion: Completion) -> None:
        records[number] = tuple(record for record in completion.rounds if record.draft_tokens)
        on_prompt(len(records))

    play_together(
        target,
        drafter,
        waiting,
        rows=rows,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        scheduler=FixedScheduler(),
        ended=ended,
        proposed=proposed,
        turn=Lockstep(),
    )
    rounds = [record for number in sorted(records) for record in records[number]]
    if not rounds:
        raise DataError("no round drafted anything; give more prompts or tokens")
    # a drafter without a head has confidence 0 throughout, for its estimator to replace
    full = [r if r.confidence else replace(r, confidence=(0.0,) * len(r.draft_tokens)) for r in rounds]
    return PlayedRounds(
        outcomes=outcomes_of(full, block=drafter.block_size),
        features=np.concatenate([features[number] for number in sorted(records) if features[number]]),
        prompt=np.repeat(sorted(records), [len(records[number]) for number in sorted(records)]),
    )
