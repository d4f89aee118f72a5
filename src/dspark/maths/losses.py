"""The training losses (paper equation 12; DeepSpec `dspark/loss.py`), in a plain form and a fast form tied by a test.

Per slot, with z the draft logits (base + bias), p = softmax(z), t the target's distribution at temperature 1, y the
answer's token:

    ce    = -log p(y)                     hard cross-entropy against the answer token
    soft  = -sum_v t(v) log p(v)          soft cross-entropy against the target (zero weight in the paper's recipe)
    l1    = sum_v |p(v) - t(v)|           0..2, not halved
    c*    = 1 - l1 / 2                    acceptance rate, the confidence head's label, detached

Slot k weighs exp(-k / loss_decay), k 0-based, inside the contiguous supervised prefix of its block. The total is
sum(weight * loss) / sum(weight) with one denominator for the whole step.

The fast form differs from the plain one in what it keeps: the target's ``top`` largest probabilities instead of all
of them (the rest of the target's mass counts as unmatched, so c* is a lower bound, exact when all are kept), and the
drafter's own vocabulary. It computes gradients in closed form chunk by chunk: nothing of size slots x vocabulary
outlives a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def slot_weights(supervised: Bool[Tensor, "blocks block"], loss_decay: float) -> Float[Tensor, "blocks block"]:
    """exp(-k / loss_decay) on the contiguous supervised prefix of every block, 0 elsewhere; fp32."""
    prefix = supervised.long().cumprod(1).float()
    decay = torch.exp(-torch.arange(supervised.shape[1], device=supervised.device, dtype=torch.float32) / loss_decay)
    return prefix * decay


@dataclass(frozen=True)
class LossAlphas:
    """Weights of the terms. The paper: ce 0.1, l1 0.9, confidence 1.0, no soft cross-entropy."""

    ce: float = 0.1
    soft: float = 0.0
    l1: float = 0.9


@dataclass(frozen=True)
class SlotLosses:
    """Per-slot values, detached where they are statistics."""

    ce: Float[Tensor, "rows"]
    soft: Float[Tensor, "rows"]
    l1: Float[Tensor, "rows"]

    @property
    def acceptance_rate(self) -> Float[Tensor, "rows"]:
        """c* in [0, 1]."""
        return (1 - self.l1 / 2).clamp(0, 1).detach()

    def weighted(self, alphas: LossAlphas) -> Float[Tensor, "rows"]:
        return alphas.ce * self.ce + alphas.soft * self.soft + alphas.l1 * self.l1


def slot_losses(
    draft_logits: Float[Tensor, "rows draft_vocab"],
    target_probs: Float[Tensor, "rows draft_vocab"],
    labels: Int[Tensor, "rows"],
) -> SlotLosses:
    """The plain form: dense, differentiable, any float dtype.

    ``target_probs`` are the target's probabilities of the draft vocabulary's tokens; what a row lacks to 1 lies
    outside it and counts as unmatched. ``labels`` are draft ids, -1 where the answer's token is outside the draft
    vocabulary (ce is 0 there).
    """
    log_probs = torch.log_softmax(draft_logits, -1)
    known = labels >= 0
    ce = -log_probs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * known
    soft = -(target_probs * log_probs).sum(-1)
    outside = (1 - target_probs.sum(-1)).clamp(min=0)
    l1 = (log_probs.exp() - target_probs).abs().sum(-1) + outside
    return SlotLosses(ce, soft, l1)


@dataclass(frozen=True)
class SparseTarget:
    """The target's largest probabilities per row: ``ids`` in the draft vocabulary, probability 0 where an entry is
    void."""

    ids: Int[Tensor, "rows top"]
    probs: Float[Tensor, "rows top"]


class _ChunkedLoss(torch.autograd.Function):
    """Losses of [hidden ; embedding] against a head, frozen or not, and a trained W2; gradients are computed in the
    forward pass."""

    @staticmethod
    def forward(ctx, hidden, prev, w2, head, target, labels, weights, alphas, soft_cap, chunk, train):  # type: ignore[no-untyped-def]
        rows, compute, wanted = hidden.shape[0], hidden.dtype, train and any(ctx.needs_input_grad)
        master, head = head, head.to(compute)
        matrix = head if w2 is None else torch.cat((head, w2.to(compute)), 1)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_prev = torch.empty_like(prev) if prev is not None and wanted else None
        d_w2 = None
        if w2 is not None and wanted:
            d_w2 = torch.zeros_like(w2, dtype=torch.promote_types(compute, torch.float32))
        wide = torch.promote_types(compute, torch.float32)
        d_head = torch.zeros_like(master, dtype=wide) if train and ctx.needs_input_grad[3] else None
        stats = [torch.empty(rows, dtype=wide, device=hidden.device) for _ in range(3)]
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            x = hidden[part] if prev is None else torch.cat((hidden[part], prev[part]), 1)
            slope = None
            if soft_cap:
                capped = soft_cap * torch.tanh(hidden[part] @ head.T / soft_cap)
                slope = 1 - (capped / soft_cap) ** 2
                logits = capped if prev is None else capped + prev[part] @ matrix[:, head.shape[1] :].T
            else:
                logits = x @ matrix.T
            grad = _chunk_gradient(
                logits, target.ids[part], target.probs[part], labels[part], weights[part], alphas, stats, start
            )
            if d_hidden is None:
                continue
            base_grad = grad if slope is None else grad * slope
            d_hidden[part] = base_grad @ head
            if d_head is not None:
                d_head += base_grad.T @ hidden[part]
            if prev is not None and d_prev is not None:
                d_prev[part] = grad @ matrix[:, head.shape[1] :]
                d_w2 += grad.T @ prev[part]
        ctx.grads = (d_hidden, d_prev, d_w2, d_head)
        ce, soft, l1 = stats
        total = (weights * (alphas.ce * ce + alphas.soft * soft + alphas.l1 * l1)).sum()
        ctx.mark_non_differentiable(ce, soft, l1)
        return total, ce, soft, l1

    @staticmethod
    def backward(ctx, d_total, *_):  # type: ignore[no-untyped-def]
        scaled = [None if g is None else g * d_total.to(g.dtype) for g in ctx.grads]
        return (*scaled, None, None, None, None, None, None, None)


def _chunk_gradient(
    logits: Tensor,
    ids: Tensor,
    top: Tensor,
    labels: Tensor,
    weights: Tensor,
    alphas: LossAlphas,
    stats: list[Tensor],
    start: int,
) -> Tensor:
    """Fill ``stats`` and return d(total)/d(logits) of one chunk in the logits' dtype.

    With s(v) = -2 where p(v) < t(v) and 0 elsewhere, d l1 / d z(u) = p(u) (s(u) - sum_v p(v) s(v)); with T = sum_v
    t(v) inside the draft vocabulary, d soft / d z(u) = T p(u) - t(u). So the dense part of the gradient is a multiple
    of p, and everything else lives on the few kept entries.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    probs = torch.softmax(logits, -1, dtype=wide)
    top, weights = top.to(wide), weights.to(wide)
    kept = probs.gather(1, ids)
    log_kept = kept.clamp(min=1e-30).log()
    known = (labels >= 0).to(wide)
    label_probs = probs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    overlap = torch.where(top > 0, torch.minimum(kept, top), 0.0).sum(1)
    rows = slice(start, start + logits.shape[0])
    stats[0][rows] = -label_probs.clamp(min=1e-30).log() * known
    stats[1][rows] = -(top * log_kept).sum(1)
    stats[2][rows] = 2 - 2 * overlap
    rising = torch.where((top > 0) & (kept < top), kept, 0.0) * -2  # p(v) s(v)
    dense = alphas.ce * known + alphas.soft * top.sum(1) - alphas.l1 * rising.sum(1)
    grad = probs.mul_((dense * weights)[:, None])
    sparse = (alphas.l1 * rising - alphas.soft * top) * weights[:, None]
    grad.scatter_add_(1, ids, sparse)
    grad.scatter_add_(1, labels.clamp(min=0)[:, None], (-alphas.ce * weights * known)[:, None])
    return grad.to(logits.dtype)


def chunked_losses(
    hidden: Float[Tensor, "rows hidden"],
    prev: Float[Tensor, "rows rank"] | None,
    w2: Float[Tensor, "draft_vocab rank"] | None,
    head: Float[Tensor, "draft_vocab hidden"],
    target: SparseTarget,
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    alphas: LossAlphas,
    soft_cap: float = 0.0,
    chunk: int = 256,
) -> tuple[Float[Tensor, ""], SlotLosses]:
    """The fast form. Returns sum(weights * loss), differentiable in ``hidden``, ``prev``, ``w2`` and ``head``, and the
    per-slot values; without autograd (``torch.no_grad``) the gradients are not computed.

    ``prev`` is W1[previous token], ``w2`` the Markov head's output matrix (fp32 master; cast to the compute dtype
    here), ``head`` the frozen head's rows of the draft vocabulary in the compute dtype, or the fp32 master of a head of
    the drafter's own, which is trained. ``weights`` already carry the step's denominator. At most ``chunk`` x
    draft_vocab logits exist at a time.
    """
    train = torch.is_grad_enabled()  # asked here: inside the function it is always off
    total, ce, soft, l1 = _ChunkedLoss.apply(
        hidden, prev, w2, head, target, labels, weights, alphas, soft_cap, chunk, train
    )
    return total, SlotLosses(ce, soft, l1)


def expected_acceptance_length(
    acceptance_rate: Float[Tensor, "blocks block"], supervised: Bool[Tensor, "blocks block"]
) -> Float[Tensor, "blocks"]:
    """1 + sum_k prod_{j<=k} c*_j over the supervised prefix: the analytic acceptance length of each block (bonus
    included)."""
    return 1 + (acceptance_rate * supervised).cumprod(1).sum(1)


def slot_worths(
    chances: Float[Tensor, "blocks block"], supervised: Bool[Tensor, "blocks block"]
) -> Float[Tensor, "blocks block"]:
    """What each slot of a played round is worth: d(expected tokens) / d(chance that its draft stands).

    ``chances`` [blocks, block]: chance of draft k to stand given that all before it did, in [0, 1]. With E = 1 + a_0 +
    a_0 a_1 + ... over the supervised prefix, slot k is worth (chance that it is reached) x (1 + what is expected to
    stand behind it): a_0 ... a_{k-1} (1 + a_{k+1} + a_{k+1} a_{k+2} + ...). So a slot behind a draft that never stands
    is worth nothing, and the first one most. 0 where a slot is not supervised.
    """
    prefix = supervised.long().cumprod(1)
    chances = chances * prefix
    reached = torch.cat((torch.ones_like(chances[:, :1]), chances[:, :-1].cumprod(1)), 1)
    ahead = torch.ones_like(chances)
    for k in range(chances.shape[1] - 2, -1, -1):
        ahead[:, k] = 1 + chances[:, k + 1] * ahead[:, k + 1]
    return reached * ahead * prefix
