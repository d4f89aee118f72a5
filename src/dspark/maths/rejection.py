"""Verification: which drafts stand, and which token the target puts after them, so that the output is the target's own.

The token-wise rule. Draft x_k, drawn with ``draft_probs`` q, stands with probability min(1, p/q), p being the
target's probability of it after the prefix x_<k. The first that does not stand ends the round: in its place comes a
token from the residual max(p - q, 0), normalised. If all stand, the target's last row gives a bonus token. Either way
the committed tokens are distributed exactly as if the target had drawn each of them alone:

    q(x) min(1, p(x)/q(x)) + P(rejected) residual(x) = min(p, q) + max(p - q, 0) = p(x)

A drafter that chose a token with certainty (greedy, n-gram lookup) has q = 1 there and 0 elsewhere: the draft stands
with probability p(x), and the residual is p without x.

:func:`acceptance_probs` and :func:`residual_probs` state the rule and are deterministic; :func:`verify` tosses the
coins, and looks at no row of the target that it does not need; :func:`judge` is the same with the coins given. The
other rule is :mod:`dspark.maths.block_verification`. Source: DSpark section 3; DeepSpec ``verify_draft_tokens``, from
which we differ in dividing by q itself instead of max(q, 1e-8), and in dividing in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution
from dspark.maths.sampling import RequestStreams, TargetRows, draw_at, uniforms

# Below this mass a residual is rounding noise. It is reached only after a rejection whose probability was as small, so
# drawing from the target's row instead moves the output by less than fp32 can express.
MIN_RESIDUAL_MASS = 1e-8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verification commits: the first ``accepted`` drafts, then ``next_token``, the anchor of the next round."""

    accepted: int  # 0..verify_len
    next_token: int  # residual or bonus token


def verify(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"] | TargetRows,
    streams: RequestStreams,
) -> Verdict:
    """Accept a prefix of ``draft_tokens`` and draw the token after it.

    ``draft_tokens`` are the scheduled drafts only, 0 or more; ``distribution`` may have further rows, which are
    ignored; None means each draft was certain. Row k of ``target_probs`` follows the anchor and the first k drafts;
    every transformation of the target's distribution has been applied. Rows after the first rejection are not read.

    Advances ``streams.accept`` by one uniform per draft whatever the outcome, and ``streams.residual`` by one. Fixed
    counts rather than draws as needed: the coin of a draft then depends on its number in the request's history of
    verified drafts alone, so all coins of a step can be drawn before its outcome is known, for a whole batch at once,
    and with fixed verify lengths a request is reproduced whoever shares its batch and whichever loop runs it.
    """
    coins = uniforms(len(draft_tokens), streams.accept)
    return judge(draft_tokens, distribution, target_probs, coins, uniforms(1, streams.residual))


def judge(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"] | TargetRows,
    coins: Float[Tensor, "block"],
    closing: Float[Tensor, "1"],
) -> Verdict:
    """:func:`verify` with its uniforms given: ``coins``, one per draft, and ``closing`` for the token after them."""
    chances = draft_probs_of(draft_tokens, distribution).tolist()
    accepted = 0
    for token, chance, coin in zip(draft_tokens.tolist(), chances, coins.tolist(), strict=True):
        # strictly: `<=` would accept probability 0 on a coin of 0; without min(1, p/q), which no coin can tell from p/q
        if not coin < float(target_probs[accepted][token]) / chance:
            break
        accepted += 1
    row = target_probs[accepted]
    if accepted < len(draft_tokens):
        row = residual_weights(row, accepted, draft_tokens, distribution)
    return Verdict(accepted=accepted, next_token=int(draw_at(row[None], closing)))


def verify_greedy(draft_tokens: Int[Tensor, "block"], target_argmax: Int[Tensor, "block+1"]) -> Verdict:
    """:func:`verify` for a greedy target, from its argmax per row; uses no randomness, and no vocabulary-sized memory.

    Holds for any draft distribution: p is 1 or 0, so a draft stands iff it is the argmax, and the residual is the
    argmax.
    """
    accepted = int((draft_tokens == target_argmax[: len(draft_tokens)]).cumprod(0).sum())
    return Verdict(accepted=accepted, next_token=int(target_argmax[accepted]))


def acceptance_probs(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"],
) -> Float[Tensor, "block"]:
    """Chance that each draft stands given that all before it did: min(1, p/q), in float64; 0 where p is 0."""
    return acceptance_ratios(draft_tokens, distribution, target_probs).clamp(max=1.0)


def acceptance_ratios(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"],
) -> Float[Tensor, "block"]:
    """p/q of each draft, in float64; for a certain draft it may exceed 1 by a rounding error of p."""
    chosen = target_probs[: len(draft_tokens)].gather(1, draft_tokens[:, None])[:, 0].double()
    return chosen / draft_probs_of(draft_tokens, distribution)


def residual_probs(
    target_row: Float[Tensor, "vocab"], draft_row: Float[Tensor, "vocab"], *, share: float = 1.0
) -> Float[Tensor, "vocab"]:
    """Distribution of the token that replaces a rejected draft: max(share p - q, 0), normalised, in float64.

    ``share``, in [0, 1], is 1 in the token-wise rule. The target's own row where the difference has a mass of at most
    ``MIN_RESIDUAL_MASS``.
    """
    target = target_row.double()
    residual = (share * target - draft_row.double()).clamp_(min=0.0)
    mass = residual.sum()
    return residual.div_(mass) if float(mass) > MIN_RESIDUAL_MASS else target / target.sum()


def residual_weights(
    target_row: Float[Tensor, "vocab"],
    k: int,
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    *,
    share: float = 1.0,
) -> Float[Tensor, "vocab"]:
    """:func:`residual_probs` of position ``k`` as it is drawn from: not normalised, fp32, and the draft's distribution
    not spread over the vocabulary. The target's own row again where nothing is left."""
    weights = target_row.clone() if share == 1.0 else target_row * share
    if distribution is None:
        weights[draft_tokens[k]] = 0.0  # q = 1
    elif distribution.token_ids is None:
        weights.sub_(distribution.probs[k]).clamp_(min=0.0)  # rounds off a 2**-24 part of its own result
    else:
        ids = distribution.token_ids[k]
        weights[ids] = (weights[ids] - distribution.probs[k]).clamp_(min=0.0)
    return weights if float(weights.sum(dtype=torch.float64)) > MIN_RESIDUAL_MASS else target_row


def draft_row(
    k: int, draft_tokens: Int[Tensor, "block"], distribution: DraftDistribution | None, *, vocab_size: int
) -> Float[Tensor, "vocab"]:
    """Draft distribution of position ``k`` over the whole vocabulary; one-hot for a draft that was certain."""
    if distribution is not None:
        return distribution.dense(k, vocab_size)
    one_hot = torch.zeros(vocab_size, device=draft_tokens.device)
    one_hot[draft_tokens[k]] = 1.0
    return one_hot


def draft_probs_of(
    draft_tokens: Int[Tensor, "block"], distribution: DraftDistribution | None
) -> Float[Tensor, "block"]:
    """q of each scheduled draft, in float64; 1 where it was certain. ``distribution`` may have further rows."""
    if distribution is None:
        return torch.ones(len(draft_tokens), dtype=torch.float64, device=draft_tokens.device)
    count, ids = len(draft_tokens), distribution.token_ids
    scheduled = DraftDistribution(distribution.probs[:count], None if ids is None else ids[:count])
    draft_probs = scheduled.of(draft_tokens).double()
    assert bool((draft_probs > 0).all()), "a draft has probability 0 in the distribution it is said to be drawn from"
    return draft_probs
