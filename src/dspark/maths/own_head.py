"""Draft losses of a drafter whose head is its own and trained (EAGLE-3's files), beside :mod:`dspark.maths.losses`.

There the head is the target's and frozen, and a sequential head adds W2 . latent. A trained head is the same product
with nothing frozen beside it: latent is the state itself, and W2 the head.
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
    chunk: int = 256,
) -> tuple[Float[Tensor, ""], SlotLosses]:
    """:func:`chunked_losses` of logits ``head`` . ``hidden``, differentiable in both; ``head`` is an fp32 master."""
    nothing, frozen = hidden[:, :0], head.detach()[:, :0].to(hidden.dtype)
    return chunked_losses(nothing, hidden, head, frozen, target, labels, weights, alphas=alphas, chunk=chunk)
