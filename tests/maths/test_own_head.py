"""The losses of a trained head: values and gradients of the dense form, with the logits capped and not."""

from __future__ import annotations

import pytest
import torch

from dspark.maths.losses import LossAlphas, SparseTarget, slot_losses
from dspark.maths.own_head import own_head_losses

ALPHAS = LossAlphas(0.1, 0.7, 0.9)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_a_trained_head_has_the_gradients_of_the_dense_loss(soft_cap: float) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 5, generator=random).double().requires_grad_() for n in (6, 9))
    probs = torch.randn(6, 12, generator=random).double().softmax(1)[:, :9]  # some mass lies outside the vocabulary
    labels, weights = torch.tensor([0, -1, 3, 8, 2, 2]), torch.rand(6, generator=random).double()
    sparse = SparseTarget(torch.arange(9).expand(6, -1), probs)
    loss, slots = own_head_losses(hidden, head, sparse, labels, weights, alphas=ALPHAS, soft_cap=soft_cap, chunk=4)
    logits = hidden @ head.T
    dense = slot_losses(soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits, probs, labels)
    expected = (weights * dense.weighted(ALPHAS)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slots.acceptance_rate, dense.acceptance_rate)
    ours, theirs = (torch.autograd.grad(x, (hidden, head)) for x in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_an_fp32_master_gets_fp32_gradients_from_products_in_bfloat16() -> None:
    hidden = torch.randn(4, 5).bfloat16().requires_grad_()
    head = torch.randn(7, 5, requires_grad=True)
    sparse = SparseTarget(torch.arange(7).expand(4, -1), torch.full((4, 7), 1 / 7))
    loss, _ = own_head_losses(hidden, head, sparse, torch.arange(4), torch.full((4,), 0.25), alphas=ALPHAS)
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head))
    assert d_hidden.dtype == torch.bfloat16 and d_head.dtype == torch.float32 and float(d_head.abs().max()) > 0
    with torch.no_grad():
        frozen, _ = own_head_losses(hidden, head, sparse, torch.arange(4), torch.full((4,), 0.25), alphas=ALPHAS)
    assert not frozen.requires_grad
    torch.testing.assert_close(frozen, loss.detach())
