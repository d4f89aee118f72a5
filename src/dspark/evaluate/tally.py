"""What each conversation adds to a cell's figures, as arrays, and the figures of any draw of conversations.

Sums first, ratios last: every figure but the speeds is a ratio of sums over conversations, so that the figures of
thousands of draws are two matrix products. Definitions of positions are those of :mod:`dspark.evaluate.figures`:

    acceptance_length        committed / rounds
    committed_per_verified   committed / (drafts checked + one anchor a round): 1 for plain decoding
    prefix[k]                rounds with accepted > k / rounds with proposed > k
    conditional[k]           rounds with accepted > k / rounds with accepted >= k and proposed > k
    tokens_per_second        median over conversations of (tokens after the first) / seconds, all turns together
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dspark.evaluate.figures import proposed
from dspark.evaluate.records import AnswerRecord

SUMS = ("rounds", "committed", "verified", "draft", "sequential", "verify", "host")  # columns of Tally.sums
Weights = Float[np.ndarray, "draws prompts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tally:
    """One set of one cell, a row per conversation, in the order of ``prompts``."""

    prompts: tuple[str, ...]
    answers: int
    sums: Float[np.ndarray, "prompts 7"]  # named by SUMS; the last four in seconds
    survived: Float[np.ndarray, "prompts block"]  # rounds with accepted > k
    checked: Float[np.ndarray, "prompts block"]  # rounds with proposed > k
    reached: Float[np.ndarray, "prompts block"]  # of those, the rounds whose earlier drafts were accepted
    speed: Float[np.ndarray, "prompts"]  # tokens per second; nan where an answer ended at its first token

    @property
    def block(self) -> int:
        return self.survived.shape[1]


def tally(answers: Sequence[AnswerRecord], *, block: int) -> Tally:
    """Count the answers of one set; ``block`` is the drafter's."""
    prompts = tuple(dict.fromkeys(answer.prompt for answer in answers))
    row = {prompt: i for i, prompt in enumerate(prompts)}
    sums = np.zeros((len(prompts), len(SUMS)))
    survived, checked, reached = np.zeros((3, len(prompts), block))
    tokens, seconds = np.zeros((2, len(prompts)))
    for answer in answers:
        i = row[answer.prompt]
        for r in answer.rounds:
            known, drafting = proposed(r), r.draft_seconds - r.sequential_seconds
            sums[i, :3] += (1, len(r.committed), known + 1)
            sums[i, 3:] += (drafting, r.sequential_seconds, r.verify_seconds, r.host_seconds)
            survived[i, : r.accepted] += 1
            checked[i, :known] += 1
            reached[i, : min(known, r.accepted + 1)] += 1
        if answer.rounds:
            tokens[i] += len(answer.token_ids) - 1
            seconds[i] += answer.decode_seconds
    speed = np.divide(tokens, seconds, out=np.full(len(prompts), np.nan), where=seconds > 0)
    return Tally(
        prompts=prompts,
        answers=len(answers),
        sums=sums,
        survived=survived,
        checked=checked,
        reached=reached,
        speed=speed,
    )


def column(name: str) -> int:
    return SUMS.index(name)


def ratio(over: Float[np.ndarray, "*rest"], under: Float[np.ndarray, "*rest"]) -> Float[np.ndarray, "*rest"]:
    """``over`` / ``under``, nan where nothing was counted."""
    return np.divide(over, under, out=np.full_like(over, np.nan), where=under > 0)


def sum_ratio(found: Tally, weights: Weights, over: str, under: str) -> Float[np.ndarray, "draws"]:
    """A ratio of two of the sums, in every draw."""
    drawn = weights @ found.sums[:, [column(over), column(under)]]
    return ratio(drawn[:, 0], drawn[:, 1])


def position_ratio(found: Tally, weights: Weights, under: str) -> Float[np.ndarray, "draws block"]:
    """``survived`` over ``checked`` (prefix acceptance) or ``reached`` (conditional), in every draw."""
    return ratio(weights @ found.survived, weights @ getattr(found, under))


def median_speed(found: Tally, chosen: Int[np.ndarray, "draws prompts"]) -> Float[np.ndarray, "draws"]:
    """Median speed of the conversations of each draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a draw without any speed, which is nan
        return np.nanmedian(found.speed[chosen], axis=1)
