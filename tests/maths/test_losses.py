"""Losses by hand, by finite differences, and fast against plain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark.maths.losses import (
    LossAlphas,
    SparseTarget,
    chunked_losses,
    expected_acceptance_length,
    slot_losses,
    slot_weights,
)


def test_weights_decay_from_slot_zero_and_stop_at_the_first_unsupervised_slot() -> None:
    supervised = torch.tensor([[True, True, False, True], [False, True, True, True]])
    weights = slot_weights(supervised, 4.0)
    torch.testing.assert_close(weights[0], torch.tensor([1.0, math.exp(-0.25), 0.0, 0.0]))
    assert weights[1].sum() == 0


def test_losses_on_two_tokens_by_hand() -> None:
    draft, target = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.7, 0.3]])
    losses = slot_losses(draft.log(), target, torch.tensor([0]))
    torch.testing.assert_close(losses.ce, torch.tensor([math.log(2)]))
    torch.testing.assert_close(losses.soft, torch.tensor([math.log(2)]))
    torch.testing.assert_close(losses.l1, torch.tensor([0.4]))  # not halved
    torch.testing.assert_close(losses.acceptance_rate, torch.tensor([0.8]))  # halved


def test_target_mass_outside_the_draft_vocabulary_is_unmatched() -> None:
    losses = slot_losses(torch.zeros(1, 2), torch.tensor([[0.4, 0.4]]), torch.tensor([-1]))
    torch.testing.assert_close(losses.acceptance_rate, torch.tensor([0.8]))
    assert float(losses.ce) == 0


def random_case(rows: int = 19, vocab: int = 31, hidden: int = 6, rank: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "hidden": matrix(rows, hidden).requires_grad_(),
        "prev": matrix(rows, rank).requires_grad_(),
        "w2": matrix(vocab, rank).requires_grad_(),
        "head": matrix(vocab, hidden),
        "probs": torch.softmax(2 * matrix(rows, vocab), -1) * 0.9,
        "labels": torch.randint(-1, vocab, (rows,)),
        "weights": torch.rand(rows, dtype=torch.float64),
    }


def plain_logits(case: dict[str, Tensor], soft_cap: float) -> Tensor:
    base = case["hidden"] @ case["head"].T
    base = soft_cap * torch.tanh(base / soft_cap) if soft_cap else base
    return base + case["prev"] @ case["w2"].T


@pytest.mark.parametrize("soft_cap", [0.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunked_equals_plain_when_all_probabilities_are_kept(soft_cap: float, chunk: int) -> None:
    case, alphas = random_case(), LossAlphas(ce=0.3, soft=0.4, l1=0.9)
    top, ids = case["probs"].topk(31, -1)
    inputs = (case["hidden"], case["prev"], case["w2"])
    total, slots = chunked_losses(
        *inputs,
        case["head"],
        SparseTarget(ids, top),
        case["labels"],
        case["weights"],
        alphas=alphas,
        soft_cap=soft_cap,
        chunk=chunk,
    )
    plain = slot_losses(plain_logits(case, soft_cap), case["probs"], case["labels"])
    expected = (case["weights"] * plain.weighted(alphas)).sum()
    torch.testing.assert_close(total, expected)
    for name in ("ce", "soft", "l1"):
        torch.testing.assert_close(getattr(slots, name), getattr(plain, name).detach())
    ours = torch.autograd.grad(3 * total, inputs)
    theirs = torch.autograd.grad(3 * expected, inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_chunked_gradient_by_finite_differences_with_few_kept_probabilities() -> None:
    case = random_case(rows=4, vocab=9)
    top, ids = case["probs"].topk(3, -1)
    target, alphas = SparseTarget(ids, top), LossAlphas(ce=0.2, soft=0.5, l1=0.9)

    def total(hidden: Tensor, prev: Tensor, w2: Tensor) -> Tensor:
        return chunked_losses(
            hidden, prev, w2, case["head"], target, case["labels"], case["weights"], alphas=alphas, chunk=3
        )[0]

    assert torch.autograd.gradcheck(total, (case["hidden"], case["prev"], case["w2"]), atol=1e-6)


def test_few_kept_probabilities_bound_the_acceptance_rate_from_below() -> None:
    case = random_case()
    plain = slot_losses(plain_logits(case, 0.0), case["probs"], case["labels"]).acceptance_rate
    inputs = (case["hidden"], case["prev"], case["w2"], case["head"])
    previous = torch.zeros_like(plain)
    for kept in (1, 4, 12, 31):
        top, ids = case["probs"].topk(kept, -1)
        _, slots = chunked_losses(
            *inputs, SparseTarget(ids, top), case["labels"], case["weights"], alphas=LossAlphas(), chunk=8
        )
        assert (slots.acceptance_rate <= plain + 1e-12).all()
        assert (slots.acceptance_rate >= previous - 1e-12).all()
        previous = slots.acceptance_rate
    torch.testing.assert_close(previous, plain)


def test_without_a_markov_head_the_loss_is_that_of_base_logits() -> None:
    case = random_case()
    top, ids = case["probs"].topk(31, -1)
    total, _ = chunked_losses(
        case["hidden"],
        None,
        None,
        case["head"],
        SparseTarget(ids, top),
        case["labels"],
        case["weights"],
        alphas=LossAlphas(),
    )
    plain = slot_losses(case["hidden"] @ case["head"].T, case["probs"], case["labels"])
    torch.testing.assert_close(total, (case["weights"] * plain.weighted(LossAlphas())).sum())


def test_expected_acceptance_length_by_hand() -> None:
    rate = torch.tensor([[0.5, 0.5, 0.9], [1.0, 1.0, 1.0]])
    supervised = torch.tensor([[True, True, False], [True, True, True]])
    torch.testing.assert_close(expected_acceptance_length(rate, supervised), torch.tensor([1.75, 4.0]))


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    target = SparseTarget(torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1))
    arguments = (hidden, None, None, head, target, torch.zeros(5, dtype=torch.long), torch.ones(5))
    with torch.no_grad():
        total, slots = chunked_losses(*arguments, alphas=LossAlphas())
    trained, _ = chunked_losses(*arguments, alphas=LossAlphas())
    assert not total.requires_grad and trained.requires_grad
    torch.testing.assert_close(total, trained.detach())
    assert slots.l1.shape == (5,)
