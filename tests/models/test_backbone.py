"""The packed training forward equals a brute-force forward per block, gradients included, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark.data.anchors import make_blocks
from dspark.maths.losses import slot_losses, slot_weights
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.draft_config import DraftConfig

V, D, GAMMA = 23, 16, 4


def tiny_config(**changes: object) -> DraftConfig:
    fields: dict = {
        "vocab_size": V,
        "hidden_size": D,
        "num_target_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "block_size": GAMMA,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2, 4),
        "markov_rank": 5,
        "max_position_embeddings": 64,
    }
    return DraftConfig(**{**fields, **changes})


def random_model(config: DraftConfig, seed: int = 0) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 + (1.0 if parameter.dim() == 1 else 0.0)
    return model


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one vector, pair by pair: (x_i, x_{i + d/2}) turns by position * theta^(-2i/d)."""
    half = len(x) // 2
    out = []
    angles = [position * theta ** (-2 * i / len(x)) for i in range(half)]
    for i, angle in enumerate(angles):
        out.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
    for i, angle in enumerate(angles):
        out.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(out)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def brute_force(model: DraftModel, features: Tensor, anchor: int, embeds: Tensor) -> Tensor:
    """One block alone, token by token and head by head: context strictly before the anchor, then the block itself."""
    c = model.config
    groups = c.num_attention_heads // c.num_key_value_heads
    context = [rms(model.fc.weight @ row, model.hidden_norm.weight, c.rms_norm_eps) for row in features[:anchor]]
    x = [embeds[k] for k in range(len(embeds))]
    places = list(range(anchor)) + [anchor + k for k in range(len(x))]
    for layer in model.layers:
        attn, normed = layer.self_attn, [rms(t, layer.input_layernorm.weight, c.rms_norm_eps) for t in x]

        def heads(weight: Tensor, source: Tensor) -> Tensor:
            return (weight @ source).view(-1, c.head_dim)

        keys, values = [], []
        for source, place in zip([*context, *normed], places, strict=True):
            raw = heads(attn.k_proj.weight, source)
            keys.append([turn(rms(k, attn.k_norm.weight, c.rms_norm_eps), place, c.rope_theta) for k in raw])
            values.append(heads(attn.v_proj.weight, source))
        new = []
        for k, (residual, source) in enumerate(zip(x, normed, strict=True)):
            outputs = []
            for h, raw in enumerate(heads(attn.q_proj.weight, source)):
                q = turn(rms(raw, attn.q_norm.weight, c.rms_norm_eps), anchor + k, c.rope_theta)
                scores = torch.stack([q @ key[h // groups] for key in keys]) / math.sqrt(c.head_dim)
                outputs.append(sum(p * v[h // groups] for p, v in zip(scores.softmax(0), values, strict=True)))
            mixed = residual + attn.o_proj.weight @ torch.cat(outputs)
            inner = rms(mixed, layer.post_attention_layernorm.weight, c.rms_norm_eps)
            gate = layer.mlp.gate_proj.weight @ inner
            new.append(
                mixed + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ inner))
            )
        x = new
    return torch.stack([rms(t, model.norm.weight, c.rms_norm_eps) for t in x])


@pytest.fixture
def two_sequences() -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(1)
    features = [torch.randn(n, 3 * D, dtype=torch.float64) for n in (9, 6)]
    ids = [torch.randint(V, (n,)) for n in (9, 6)]
    anchors = [torch.tensor([0, 3, 4, 7]), torch.tensor([2, 4])]  # neighbours, one without context, one near the end
    return features, ids, anchors, torch.randn(V, D, dtype=torch.float64)


def packed(features: list[Tensor], ids: list[Tensor], anchors: list[Tensor]) -> BlockBatch:
    counts = [int(a[-1]) for a in anchors]
    return BlockBatch(
        torch.cat([f[:n] for f, n in zip(features, counts, strict=True)]),
        counts,
        torch.cat(anchors),
        torch.cat([i[a] for i, a in zip(ids, anchors, strict=True)]),
        [len(a) for a in anchors],
    )


def test_packed_forward_and_gradients_equal_brute_force(two_sequences: tuple) -> None:
    features, ids, anchors, embedding = two_sequences
    model, twin = random_model(tiny_config()), random_model(tiny_config())
    head, target = torch.randn(V, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    batch = packed(features, ids, anchors)

    hidden = model(batch, embedding[batch.anchor_ids], embedding[3])
    expected = []
    for f, i, chosen in zip(features, ids, anchors, strict=True):
        for anchor in chosen.tolist():
            block = torch.stack([embedding[i[anchor]], *[embedding[3]] * (GAMMA - 1)])
            expected.append(brute_force(twin, f, anchor, block))
    torch.testing.assert_close(hidden, torch.stack(expected), rtol=1e-9, atol=1e-9)

    blocks = [make_blocks(i, torch.ones(len(i), dtype=torch.bool), a, GAMMA) for i, a in zip(ids, anchors, strict=True)]
    labels, prev = torch.cat([b.labels for b in blocks]), torch.cat([b.prev_ids for b in blocks])
    weights = slot_weights(torch.cat([b.supervised for b in blocks]), 4.0).double().flatten()

    def loss(which: DraftModel, h: Tensor) -> Tensor:
        logits = (h @ head.T + which.markov_head(prev)).flatten(0, 1)
        losses = slot_losses(logits, torch.softmax(h.detach().flatten(0, 1) @ target.T, -1), labels.flatten())
        return (weights * (0.1 * losses.ce + 0.9 * losses.l1)).sum() / weights.sum()

    loss(model, hidden).backward()
    loss(twin, torch.stack(expected)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.startswith("confidence_head"):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_context_is_strictly_before_the_anchor(two_sequences: tuple) -> None:
    features, ids, anchors, embedding = two_sequences
    model = random_model(tiny_config())
    batch = packed(features, ids, anchors)
    before = model(batch, embedding[batch.anchor_ids], embedding[3])
    features[0][3:] += 1.0  # the state at the anchor of block 1 and all later ones
    batch = packed(features, ids, anchors)
    after = model(batch, embedding[batch.anchor_ids], embedding[3])
    assert torch.equal(before[1], after[1])  # anchor 3 sees 0..2
    assert not torch.allclose(before[2], after[2])  # anchor 4 sees 3


def test_blocks_do_not_see_each_other(two_sequences: tuple) -> None:
    features, ids, anchors, embedding = two_sequences
    model = random_model(tiny_config())
    batch = packed(features, ids, anchors)
    before = model(batch, embedding[batch.anchor_ids], embedding[3])
    changed = embedding.clone()
    embeds = changed[batch.anchor_ids]
    embeds[1] += 1.0  # the anchor embedding of block 1, whose positions overlap those of blocks 0 and 2
    after = model(batch, embeds, embedding[3])
    for block in (0, 2, 3, 4, 5):
        assert torch.equal(before[block], after[block])
    assert not torch.allclose(before[1], after[1])


def test_a_shorter_block_is_a_block_of_its_own(two_sequences: tuple) -> None:
    features, ids, anchors, embedding = two_sequences
    batch = packed(features, ids, anchors)
    embeds = embedding[batch.anchor_ids]
    short = random_model(tiny_config())(batch, embeds, embedding[3], 2)
    assert torch.equal(short, random_model(tiny_config(block_size=2))(batch, embeds, embedding[3]))
