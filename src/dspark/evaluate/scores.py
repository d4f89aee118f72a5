"""Figures of every draw of prompts: of one set, and of several sets together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dspark.evaluate.figures import StageTimes, stage_times
from dspark.evaluate.intervals import mean_over, resamples, weights_of
from dspark.evaluate.records import AnswerRecord
from dspark.evaluate.tally import median_speed, position_ratio, sum_ratio, tally

Drawn = Float[np.ndarray, "draws"]
STAGES = ("draft", "sequential", "verify", "host", "round")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Figures of every draw; draw 0 is the sample itself."""

    least_prompts: int  # of the smallest set
    prompts: int
    answers: int
    length: Drawn
    per_verified: Drawn
    prefix: Float[np.ndarray, "draws block"]
    conditional: Float[np.ndarray, "draws block"]
    speed: Drawn
    times: StageTimes  # of the sample
    share: float  # of the sample's seconds that were sequential


def set_scores(answers: Sequence[AnswerRecord], name: str, *, block: int, draws: int, seed: int) -> Scores:
    """Scores of the answers of the set ``name``; the draws are the same for every drafter that answered its prompts."""
    found = tally(answers, block=block)
    count = len(found.prompts)
    chosen = np.concatenate([np.arange(count)[None], resamples(count, name, draws=draws, seed=seed)])
    weights = weights_of(chosen)
    rounds = [r for answer in answers for r in answer.rounds]
    seconds = found.sums[:, 3:].sum(0)  # draft, sequential, verify, host
    return Scores(
        least_prompts=count,
        prompts=count,
        answers=found.answers,
        length=sum_ratio(found, weights, "committed", "rounds"),
        per_verified=sum_ratio(found, weights, "committed", "verified"),
        prefix=position_ratio(found, weights, "checked"),
        conditional=position_ratio(found, weights, "reached"),
        speed=median_speed(found, chosen),
        times=stage_times(rounds),
        share=float(seconds[1] / seconds.sum()) if rounds else float("nan"),
    )


def mean_scores(parts: Sequence[Scores]) -> Scores:
    """The mean over sets, every set counting alike."""

    def over(name: str) -> np.ndarray:
        return mean_over(np.stack([getattr(part, name) for part in parts]))

    times = {stage: float(mean_over(np.array([[getattr(p.times, stage)] for p in parts]))[0]) for stage in STAGES}
    return Scores(
        least_prompts=min(part.least_prompts for part in parts),
        prompts=sum(part.prompts for part in parts),
        answers=sum(part.answers for part in parts),
        length=over("length"),
        per_verified=over("per_verified"),
        prefix=over("prefix"),
        conditional=over("conditional"),
        speed=over("speed"),
        times=StageTimes(**times),
        share=float(mean_over(np.array([[part.share] for part in parts]))[0]),
    )
