"""Block verification: the drafts of a block are judged jointly, so that at least as many stand as one by one.

The token-wise rule of :mod:`dspark.maths.rejection` caps p/q at 1 for each draft by itself and so forgets how far an
earlier draft fell short of what the target would have liked. Here the ratio is carried along. With p the target's and
q the draft's distribution after the prefix x_<k, and r_0 = 1,

    r_k   = min(r_(k-1) p(x_k) / q(x_k), 1)           chance that at least k drafts stand, given the first k drafts
    s_k   = sum over x of max(r_k p(x) - q(x), 0)     what the target still lacks after k drafts; here p and q follow
                                                      x_1..x_k, q being what draft k+1 was drawn from
    h_k   = s_k / (s_k + 1 - r_k)                     chance of the coin of draft k; h = r for the last scheduled draft

Every draft has its own coin, and as many drafts stand as the number of the last one whose coin stands: an early draft
is kept if a later one is. The token after k < verify_len drafts comes from max(r_k p - q, 0), normalised, and after all
of them from p.

Why it is exact. By induction from the last draft backwards, P(at least k stand | x_1..x_k) = r_k. It is the definition
at the end; before, the chance that draft k+1 or a later one is the last to stand is
sum of q(x) r_(k+1) = sum of min(r_k p(x), q(x)) = r_k - s_k, and otherwise the coin decides:
(r_k - s_k) + (1 - r_k + s_k) h_k = r_k. So exactly k stand with chance s_k, and then y follows with chance
max(r_k p(y) - q(y), 0); more than k stand and the next is y with chance q(y) r_(k+1) = min(r_k p(y), q(y)). Together
that is r_k p(y): wherever the first k drafts stand, the next token is the target's. Whether draft k is the last
scheduled one may depend on x_1..x_k, as a causal scheduler makes it, for the step above fixes x_1..x_k; it must not
depend on what comes later. Where a draft was certain (q = 1), s_k = r_k (1 - p(x_(k+1))), and as many drafts stand as
token by token.

Counted from 1 as in the paper; in code entry k - 1 belongs to draft k. Source: Sun et al. 2024, "Block Verification
Accelerates Speculative Decoding", Algorithm 2 (its M_b is our p, M_s our q). That a draft never stands
with a smaller chance than token by token is seen from r_k >= r_(k-1) min(p/q, 1).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution
from dspark.maths.rejection import (
    Verdict,
    acceptance_ratios,
    draft_probs_of,
    draft_row,
    residual_weights,
)
from dspark.maths.sampling import RequestStreams, TargetRows, draw_at, uniforms


def verify_block(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"] | TargetRows,
    streams: RequestStreams,
) -> Verdict:
    """:func:`dspark.maths.rejection.verify` by the joint rule: the same arguments, and the same use of the streams.

    Coins are looked at from the last draft backwards up to the first that stands, and s_k is computed for those alone;
    rows after a draft of target probability 0 are not read.
    """
    coins = uniforms(len(draft_tokens), streams.accept)
    return judge_block(draft_tokens, distribution, target_probs, coins, uniforms(1, streams.residual))


def judge_block(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"] | TargetRows,
    coins: Float[Tensor, "block"],
    closing: Float[Tensor, "1"],
) -> Verdict:
    """:func:`verify_block` with its uniforms given, as :func:`dspark.maths.rejection.judge` takes them."""
    drafts, verify_len, thrown = draft_tokens.tolist(), len(draft_tokens), coins.tolist()
    chances = draft_probs_of(draft_tokens, distribution).tolist()
    ratios = [1.0]
    while len(ratios) <= verify_len and ratios[-1] > 0.0:
        k = len(ratios) - 1
        ratios.append(min(ratios[k] * (float(target_probs[k][drafts[k]]) / chances[k]), 1.0))
    accepted = len(ratios) - 1
    while accepted > 0:
        stand = ratio = ratios[accepted]
        if ratio > 0.0 and accepted < verify_len:
            missing = missing_mass(target_probs[accepted], accepted, draft_tokens, distribution, share=ratio)
            stand = coin_chance(ratio, missing)
        if thrown[accepted - 1] < stand:
            break
        accepted -= 1
    row = target_probs[accepted]
    if accepted < verify_len:
        row = residual_weights(row, accepted, draft_tokens, distribution, share=ratios[accepted])
    return Verdict(accepted=accepted, next_token=int(draw_at(row[None], closing)))


def missing_mass(
    target_row: Float[Tensor, "vocab"],
    k: int,
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    *,
    share: float,
) -> float:
    """s of position ``k``: the sum of max(share p - q, 0), q being what draft k was drawn from.

    As share - sum of min(share p, q), for p sums to 1 up to fp32 rounding; so the draft's own support is all that is
    read.
    """
    if distribution is None:
        return max(share - share * float(target_row[draft_tokens[k]]), 0.0)  # q = 1
    ids, probs = distribution.token_ids, distribution.probs[k]
    at_support = target_row if ids is None else target_row[ids[k]]
    return max(share - float(torch.minimum(at_support * share, probs).sum(dtype=torch.float64)), 0.0)


def coin_chance(ratio: float, missing: float) -> float:
    """h_k of a draft that is not the last, from r_k and s_k. 1 at r_k = 1 and s_k = 0, where k+1 stands anyway."""
    return missing / (missing + 1.0 - ratio) if missing > 0.0 or ratio < 1.0 else 1.0


def joint_ratios(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"],
) -> Float[Tensor, "block"]:
    """r_k of every draft, float64: the chance that it and all before it stand."""
    ratios, last = [], 1.0
    for ratio in acceptance_ratios(draft_tokens, distribution, target_probs).tolist():
        last = min(last * ratio, 1.0)
        ratios.append(last)
    return torch.tensor(ratios, dtype=torch.float64, device=draft_tokens.device)


def block_coin_chances(
    draft_tokens: Int[Tensor, "block"],
    distribution: DraftDistribution | None,
    target_probs: Float[Tensor, "block+1 vocab"],
) -> Float[Tensor, "block"]:
    """h_k of every draft, float64; the plain form, in which the draft's distributions are spread over the vocabulary.

    As many drafts stand as the number of the last one whose coin, a uniform, is under h_k.
    """
    vocab_size = target_probs.shape[1]
    chances = joint_ratios(draft_tokens, distribution, target_probs)
    for k in range(1, len(draft_tokens)):
        ratio = float(chances[k - 1])
        drawn_from = draft_row(k, draft_tokens, distribution, vocab_size=vocab_size).double()
        missing = (ratio * target_probs[k].double() - drawn_from).clamp(min=0.0).sum()
        chances[k - 1] = coin_chance(ratio, float(missing))
    return chances
