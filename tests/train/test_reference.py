"""The reference's dense formulation and ours are one loss with one gradient, where ours keeps every probability."""

from __future__ import annotations

import pytest
import torch
from fakes import TableTarget
from tiny_drafter import tiny_drafter

from dspark.data.anchors import make_blocks
from dspark.data.features import FeatureSource, Sample, target_states
from dspark.maths.losses import LossAlphas
from dspark.train.blocks import make_shared, run_blocks
from dspark.train.config import TrainConfig
from dspark.train.reference import dense_loss

VOCAB, BLOCK, TAPS = 13, 3, (0, 3)
SHAPES: dict[str, dict] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "soft-capped": {"layer_style": "gemma4", "final_soft_cap": 2.0},
}


def table() -> TableTarget:
    target = TableTarget(vocab_size=VOCAB, hidden_size=8)
    target.embeddings, target.head, target.states = (
        x.double() for x in (target.embeddings, target.head, target.states)
    )
    return target


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_formulations_give_one_loss_and_one_gradient(shape: str, detach: bool) -> None:
    target, model = table(), tiny_drafter(dtype=torch.float64, **SHAPES[shape])
    config = TrainConfig(confidence_detach=detach, alpha_confidence=0.7)
    if cap := model.config.final_soft_cap:  # the table target has none of its own
        target.logits = lambda final: cap * torch.tanh(final @ target.head.T / cap)  # type: ignore[method-assign]
    features = FeatureSource(target, TAPS, torch.arange(VOCAB), top=VOCAB)
    fast, plain = [], []
    for seed, (length, start, anchors) in enumerate([(12, 3, [3, 4, 9, 10]), (9, 0, [0, 7])]):
        ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
        sample = Sample(f"s{seed}", "x", ids, torch.arange(length) >= start)
        blocks = make_blocks(ids, sample.loss_mask, torch.tensor(anchors), BLOCK)
        fast.append((sample, features.get(sample), blocks))
        plain.append((sample, target_states(target, sample, TAPS), blocks))
    shared, alphas = make_shared(target, model, torch.float64), LossAlphas()
    ours = run_blocks(model, shared, fast, config, block_size=BLOCK, alphas=alphas).loss
    theirs = dense_loss(model, shared, plain, config, alphas=alphas)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
