"""The loss of packed blocks is the mean over their slots, one block at a time, for every head and shape of drafter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fakes import TableTarget
from tiny_drafter import tiny_drafter
from tiny_rounds import played_texts
from torch import Tensor

from dspark.core import SamplingParams
from dspark.data.anchors import Blocks, make_blocks
from dspark.data.features import FeatureSource, Sample, SampleFeatures
from dspark.maths.losses import LossAlphas, slot_losses, slot_weights
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.heads import sequential_logits
from dspark.train.blocks import make_shared, run_blocks, run_states
from dspark.train.config import TrainConfig

VOCAB, HIDDEN, BLOCK, MASK = 13, 8, 3, 2
DRAFTERS: dict[str, dict] = {
    "vanilla": {},
    "reduced vocabulary": {"draft_vocab_size": 7},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence of the state alone": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "dflash, anchor's slot given": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
    "gemma4, soft-capped": {"layer_style": "gemma4", "attention_k_eq_v": True, "final_soft_cap": 2.0},
    "gemma4, soft-capped, rnn, no head": {
        "layer_style": "gemma4",
        "final_soft_cap": 2.0,
        "markov_head_type": "rnn",
        "draft_vocab_size": 7,
    },
}
Part = tuple[Sample, SampleFeatures, Blocks]


def sample(name: str, length: int, start: int, seed: int) -> Sample:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return Sample(name, "x", ids, torch.arange(length) >= start)


def table(dtype: torch.dtype = torch.float64) -> TableTarget:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    target.embeddings, target.head, target.states = (
        x.to(dtype) for x in (target.embeddings, target.head, target.states)
    )
    return target


def drafter(**changes: object) -> DraftModel:
    model = tiny_drafter(dtype=torch.float64, **changes)
    if model.d2t is not None:
        model.d2t.copy_(torch.tensor([1, 2, 3, 5, 6, 8, 9]) - torch.arange(7))
    return model


def parts_of(target: TableTarget, model: DraftModel) -> list[Part]:
    """Two samples; the last block of each runs past the end or the loss mask."""
    features = FeatureSource(target, (0, 3), model.draft_token_ids(), top=VOCAB)
    samples = [sample("a", 12, 3, 1), sample("b", 9, 0, 2)]
    anchors = [torch.tensor([3, 4, 9, 10]), torch.tensor([0, 7])]
    return [
        (s, features.get(s), make_blocks(s.token_ids, s.loss_mask, a, BLOCK))
        for s, a in zip(samples, anchors, strict=True)
    ]


def played_parts(target: TableTarget, model: DraftModel, temperature: float) -> list[Part]:
    """The same prompts, continued in rounds that a table of drafts has played."""
    _, texts = played_texts(
        target,
        [sample("a", 12, 3, 1), sample("b", 9, 1, 2)],
        temperature=temperature,
        draft_ids=model.draft_token_ids(),
    )
    return [(text.sample, text.features, text.blocks) for text in texts]


def block_logits(model: DraftModel, target: TableTarget, part: Part, b: int) -> tuple[Tensor, Tensor]:
    """States and dense draft logits of one block, computed alone."""
    s, kept, blocks = part
    anchor = int(blocks.anchors[b])
    batch = BlockBatch(kept.features[:anchor].double(), [anchor], blocks.anchors[b : b + 1], [1])
    hidden = model(batch, target.embed(s.token_ids[anchor][None]), target.embed(torch.tensor(MASK)))
    base = hidden @ target.head[model.draft_token_ids()].T
    if cap := model.config.final_soft_cap:
        base = cap * (base / cap).tanh()
    return hidden[0], sequential_logits(base, hidden, blocks.prev_ids[b : b + 1], model.markov_head)[0]


def dense_loss(
    model: DraftModel, target: TableTarget, parts: list[Part], config: TrainConfig, alphas: LossAlphas
) -> Tensor:
    """The loss slot by slot against the target's dense distribution."""
    ids = model.draft_token_ids()
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for s, kept, blocks in parts:
        for b, anchor in enumerate(blocks.anchors.tolist()):
            hidden, logits = block_logits(model, target, (s, kept, blocks), b)
            weights = slot_weights(blocks.supervised[b : b + 1], config.loss_decay)[0]
            if blocks.worth is not None:
                weights = blocks.worth[b] * blocks.supervised[b]
            for k, weight in enumerate(weights.tolist()):
                if weight == 0:
                    continue
                prefix = s.token_ids[:anchor].tolist() + blocks.prev_ids[b, : k + 1].tolist()
                probs = target.next_probs(prefix, SamplingParams(temperature=1.0)).double()
                label = (ids == blocks.labels[b, k]).nonzero().flatten()
                label = label if len(label) else torch.tensor([-1])
                losses = slot_losses(logits[k][None], probs[ids][None], label)
                total = total + weight * losses.weighted(alphas)[0]
                if model.confidence_head is not None:
                    total = total + weight * confidence_term(
                        model, hidden[k], blocks.prev_ids[b, k], losses.acceptance_rate[0], config
                    )
                denominator += weight
    return total / denominator


def confidence_term(model: DraftModel, h: Tensor, prev: Tensor, label: Tensor, config: TrainConfig) -> Tensor:
    with_markov = model.config.confidence_head_with_markov
    inputs = torch.cat((h, model.markov_head.markov_w1.weight[prev])) if with_markov else h
    inputs = inputs.detach() if config.confidence_detach else inputs
    logit = model.confidence_head.proj.weight[0] @ inputs + model.confidence_head.proj.bias[0]
    return config.alpha_confidence * F.binary_cross_entropy_with_logits(logit, label)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("name", DRAFTERS)
def test_loss_and_all_gradients_equal_one_block_at_a_time(name: str, detach: bool) -> None:
    target, model = table(), drafter(**DRAFTERS[name])
    assert_alike(target, model, parts_of(target, model), TrainConfig(alpha_confidence=0.7, confidence_detach=detach))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["vanilla", "reduced vocabulary", "rnn", "dflash, anchor's slot given"])
def test_the_loss_of_played_rounds_too(name: str, temperature: float) -> None:
    """Previous tokens are the drafts, distributions those behind the drafts, and weights what the slots are worth."""
    target, model = table(), drafter(**DRAFTERS[name])
    parts = played_parts(target, model, temperature)
    strayed = [
        bool((blocks.prev_ids[:, 1] != s.token_ids[blocks.anchors + 1])[blocks.supervised[:, 1]].any())
        for s, _, blocks in parts
    ]
    assert any(strayed) == (temperature > 0), "a greedy round ends for learning at the first draft that fell"
    assert_alike(target, model, parts, TrainConfig(alpha_confidence=0.7, confidence_detach=False))


def assert_alike(target: TableTarget, model: DraftModel, parts: list[Part], config: TrainConfig) -> None:
    """The packed loss and its gradients are those of :func:`dense_loss`."""
    alphas = LossAlphas(0.1, 0.2, 0.9)
    shared = make_shared(target, model, torch.float64)
    ours = run_blocks(model, shared, parts, config, block_size=BLOCK, alphas=alphas).loss
    theirs = dense_loss(model, target, parts, config, alphas)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    names = [name for name, _ in model.named_parameters()]
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs))
    for parameter, mine, other in zip(names, *gradients, strict=True):
        assert float(other.abs().max()) > 0, parameter
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=parameter)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_confidence_gradients_stop_at_the_head_when_detached(kind: str) -> None:
    target, model = table(torch.float32), drafter(markov_head_type=kind).float()
    shared, parts = make_shared(target, model, torch.float32), parts_of(target, model)
    nothing = LossAlphas(0.0, 0.0, 0.0)
    for detach in (True, False):
        model.zero_grad()
        config = TrainConfig(confidence_detach=detach)
        run_blocks(model, shared, parts, config, block_size=BLOCK, alphas=nothing).loss.backward()
        assert float(model.confidence_head.proj.weight.grad.abs().sum()) > 0
        assert (float(model.fc.weight.grad.abs().sum()) == 0) == detach
        assert (float(model.markov_head.markov_w1.weight.grad.abs().sum()) == 0) == detach
        for parameter in (model.markov_head.get_parameter(n) for n in PROJECTIONS[kind]):
            assert float(parameter.grad.abs().sum()) == 0  # the confidence reads W1 itself, whatever the head


PROJECTIONS = {"vanilla": (), "gated": ("gate_proj.weight",), "rnn": ("joint_proj.weight",)}


@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_state_loss_is_the_relative_error_of_the_first_prediction(from_anchor: bool) -> None:
    target, model = table(torch.float32), drafter(sample_from_anchor=from_anchor).float()
    shared = make_shared(target, model, torch.float32)
    s = sample("a", 20, 3, 1)
    kept = FeatureSource(target, (0, 3), model.draft_token_ids()).get(s)
    parts = [(s, kept, make_blocks(s.token_ids, s.loss_mask, torch.tensor([5, 9]), 1))]
    numbers = run_states(model, shared, parts)
    expected = []
    for anchor in (5, 9):
        ids = s.token_ids[: anchor + 1]
        wanted = target.forward(ids, target.new_memory(rows=1, max_len=20)).final[-1]
        batch = BlockBatch(kept.features[:anchor], [anchor], torch.tensor([anchor]), [1])
        h = model(batch, target.embed(ids[-1:]), target.embed(torch.tensor(MASK)), 1)[0, 0]
        expected.append(((h - wanted) ** 2).sum() / (wanted**2).sum())
    torch.testing.assert_close(numbers.loss, torch.stack(expected).mean())

    longer = [(s, kept, make_blocks(s.token_ids, s.loss_mask, torch.tensor([5, 9]), 3))]
    alphas = LossAlphas(0.0, 0.0, 0.0)
    alone, aux = (
        run_blocks(model, shared, longer, TrainConfig(alpha_state=a), block_size=3, alphas=alphas).loss
        for a in (0.0, 0.5)
    )
    states = run_blocks(
        model, shared, parts, TrainConfig(alpha_state=1.0, alpha_confidence=0.0), block_size=1, alphas=alphas
    )
    torch.testing.assert_close(states.loss, torch.stack(expected).mean())  # of the anchor's slot, on top of the others
    assert aux > alone
