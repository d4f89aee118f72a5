"""Steps of training: what they see, and that the packed loss is the mean over the step's slots."""

from __future__ import annotations

import pytest
import torch
from fakes import TableTarget

from dspark.data.anchors import make_blocks
from dspark.data.features import FeatureSource, Sample
from dspark.maths.losses import LossAlphas, slot_losses, slot_weights
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.train.blocks import make_shared, run_blocks, run_states
from dspark.train.config import TrainConfig
from dspark.train.loop import choose_samples, step_parts

VOCAB, HIDDEN = 13, 8


def sample(name: str, length: int, start: int, seed: int) -> Sample:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return Sample(name, "x", ids, torch.arange(length) >= start)


def drafter(target: TableTarget, **changes: object) -> DraftModel:
    fields: dict = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_target_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "block_size": 3,
        "mask_token_id": 2,
        "target_layer_ids": (0, 3),
        "markov_rank": 4,
    }
    torch.manual_seed(0)
    model = DraftModel(DraftConfig(**{**fields, **changes})).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    if model.d2t is not None:
        model.d2t.copy_(torch.tensor([1, 2, 3, 5, 6, 8, 9]) - torch.arange(7))
    return model


@pytest.mark.parametrize("draft_vocab", [None, 7])
def test_the_step_loss_equals_one_block_at_a_time_against_the_dense_target(draft_vocab: int | None) -> None:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    target.embeddings, target.head, target.states = (
        x.double() for x in (target.embeddings, target.head, target.states)
    )
    model = drafter(target, draft_vocab_size=draft_vocab)
    ids = model.draft_token_ids()
    shared = make_shared(target, model, torch.float64)
    features = FeatureSource(target, (0, 3), ids, top=VOCAB)
    samples = [sample("a", 12, 3, 1), sample("b", 9, 0, 2)]
    anchors = [torch.tensor([3, 4, 9, 10]), torch.tensor([0, 7])]
    parts = [
        (s, features.get(s), make_blocks(s.token_ids, s.loss_mask, a, 3)) for s, a in zip(samples, anchors, strict=True)
    ]
    config, alphas = TrainConfig(confidence=True, alpha_confidence=0.0), LossAlphas(0.1, 0.2, 0.9)
    numbers = run_blocks(model, shared, parts, config, block_size=3, alphas=alphas)

    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for s, kept, blocks in parts:
        probs = [target.next_probs(s.token_ids[: i + 1].tolist(), _temperature_one()) for i in range(len(s.token_ids))]
        for b, anchor in enumerate(blocks.anchors.tolist()):
            batch = BlockBatch(
                kept.features[:anchor].double(), [anchor], blocks.anchors[b : b + 1], s.token_ids[anchor][None], [1]
            )
            hidden = model(batch, target.embed(s.token_ids[anchor][None]), target.embed(torch.tensor(2)))[0]
            weights = slot_weights(blocks.supervised[b : b + 1], config.loss_decay)[0]
            for k in range(3):
                if weights[k] == 0:
                    continue
                logits = target.head[ids] @ hidden[k] + model.markov_head(blocks.prev_ids[b, k])
                label = (ids == blocks.labels[b, k]).nonzero().flatten()
                label = label if len(label) else torch.tensor([-1])
                losses = slot_losses(logits[None], probs[anchor + k][ids][None].double(), label)
                total = total + weights[k] * losses.weighted(alphas)[0]
                denominator += float(weights[k])
    torch.testing.assert_close(numbers.loss, total / denominator, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(numbers.loss, model.fc.weight)[0]
    theirs = torch.autograd.grad(total / denominator, model.fc.weight)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _temperature_one():  # type: ignore[no-untyped-def]
    from dspark.core import SamplingParams

    return SamplingParams(temperature=1.0)


def test_confidence_gradients_stop_at_the_head_when_detached() -> None:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    model = drafter(target).float()
    shared = make_shared(target, model, torch.float32)
    features = FeatureSource(target, (0, 3), model.draft_token_ids())
    s = sample("a", 20, 3, 1)
    parts = [(s, features.get(s), make_blocks(s.token_ids, s.loss_mask, torch.tensor([5, 9]), 3))]
    nothing = LossAlphas(0.0, 0.0, 0.0)
    for detach in (True, False):
        model.zero_grad()
        numbers = run_blocks(model, shared, parts, TrainConfig(confidence_detach=detach), block_size=3, alphas=nothing)
        numbers.loss.backward()
        assert float(model.confidence_head.proj.weight.grad.abs().sum()) > 0
        assert (float(model.fc.weight.grad.abs().sum()) == 0) == detach
        assert (float(model.markov_head.markov_w1.weight.grad.abs().sum()) == 0) == detach


def test_steps_take_fresh_samples_in_turn_and_replay_only_seen_ones() -> None:
    samples = [sample(f"s{i}", 8, 0, i) for i in range(20)]
    config = TrainConfig(steps=50, sequences_per_step=4, fresh_per_step=2)
    seen: set[str] = set()
    for step in range(10):
        chosen = choose_samples(samples, step, config)
        fresh = [s.id for s in chosen[:2]]
        assert not seen & set(fresh)
        assert {s.id for s in chosen[2:]} <= seen
        seen |= set(fresh)
    assert len(seen) == 20
    assert [s.id for s in choose_samples(samples, 3, config)] == [s.id for s in choose_samples(samples, 3, config)]


def test_anchors_of_a_step_depend_on_seed_and_step_alone() -> None:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    features = FeatureSource(target, (0, 3), torch.arange(VOCAB))
    samples = [sample("a", 40, 3, 1)]
    config = TrainConfig(slots_per_step=21)

    def anchors(step: int, seed: int) -> list[int]:
        parts = step_parts(samples, features, TrainConfig(slots_per_step=21, seed=seed), step)
        return parts[0][2].anchors.tolist()

    assert len(anchors(0, 1)) == config.slots_per_step // config.block_size
    assert anchors(0, 1) == anchors(0, 1) != anchors(1, 1) != anchors(0, 2)


def test_the_state_loss_is_the_relative_error_of_the_anchors_slot() -> None:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    model = drafter(target).float()
    shared = make_shared(target, model, torch.float32)
    s = sample("a", 20, 3, 1)
    kept = FeatureSource(target, (0, 3), model.draft_token_ids()).get(s)
    parts = [(s, kept, make_blocks(s.token_ids, s.loss_mask, torch.tensor([5, 9]), 1))]
    numbers = run_states(model, shared, parts)
    expected = []
    for anchor in (5, 9):
        ids = s.token_ids[: anchor + 1]
        wanted = target.forward(ids, target.new_memory(rows=1, max_len=20)).final[-1]
        batch = BlockBatch(kept.features[:anchor], [anchor], torch.tensor([anchor]), ids[-1:], [1])
        h = model(batch, target.embed(ids[-1:]), target.embed(torch.tensor(2)), 1)[0, 0]
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


def test_states_come_first_and_take_more_anchors() -> None:
    config = TrainConfig(steps=10, state_steps=2, state_slots=50, slots_per_step=21)
    assert [config.block_at(s) for s in range(4)] == [1, 1, 7, 7]
    assert [config.slots_at(s) for s in range(4)] == [50, 50, 21, 21]
