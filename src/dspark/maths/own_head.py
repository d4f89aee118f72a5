"""Draft losses of a drafter whose head is its own and trained (EAGLE-3's files), beside :mod:`dspark.maths.losses`.

There the head is mostly the target's and frozen, and a sequential head corrects it; here nothing is frozen and nothing
corrected.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from dspark.maths.losses import LossAlphas, SlotLosses, SparseTarget, chunked_losses


def own_head_losses(
    hidden: Float[Tensor, "rows hidden"],
    head: Float[Tensor, "draft_vocab hidden"],
    target: SparseTarget,
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    alphas: LossAlphas,
    soft_cap: float = 0.0,
    chunk: int = 256,
) -> tuple[Float[Tensor, ""], SlotLosses]:
    """:func:`chunked_losses` of logits ``head`` . ``hidden``, capped by ``soft_cap`` (0 is off) and differentiable in
    both; ``head`` is an fp32 master."""
    return chunked_losses(
        hidden, None, None, head, target, labels, weights, alphas=alphas, soft_cap=soft_cap, chunk=chunk
    )
