"""The packed training forward equals a brute-force forward per block, gradients included, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_drafter import tiny_config
from torch import Tensor

from dspark.models.backbone import BlockBatch, DraftModel, GemmaDraftLayer, rope_table
from dspark.models.draft_config import DraftConfig

V, D, GAMMA = 23, 16, 4
SHAPES: dict[str, dict] = {
    "qwen3": {},
    "anchor's slot given": {"sample_from_anchor": False},
    "gemma4": {"layer_style": "gemma4", "head_dim": 8, "partial_rotary_factor": 0.25},
    "gemma4, keys as values": {"layer_style": "gemma4", "attention_k_eq_v": True, "sample_from_anchor": False},
}


def small(**changes: object) -> DraftConfig:
    fields: dict = {
        "vocab_size": V,
        "hidden_size": D,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "block_size": GAMMA,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2, 4),
        "markov_rank": 5,
        "max_position_embeddings": 64,
    }
    return tiny_config(**{**fields, **changes})


def random_model(config: DraftConfig, seed: int = 0) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config).double()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 + (1.0 if parameter.dim() == 1 else 0.0)
    for i, layer in enumerate(model.layers):
        if isinstance(layer, GemmaDraftLayer):
            layer.layer_scalar.fill_(0.7 + i)
    return model


def turn(x: Tensor, position: int, theta: float, partial: float = 1.0) -> Tensor:
    """Rotary embedding of one vector, pair by pair: (x_i, x_{i + d/2}) turns by position * theta^(-2i/d)."""
    half = len(x) // 2
    out = []
    angles = [position * theta ** (-2 * i / len(x)) if i < partial * half else 0.0 for i in range(half)]
    for i, angle in enumerate(angles):
        out.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
    for i, angle in enumerate(angles):
        out.append(x[i + half] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(out)


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def activation(x: Tensor, gemma: bool) -> Tensor:
    if not gemma:
        return x * x.sigmoid()
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def brute_force(model: DraftModel, features: Tensor, anchor: int, embeds: Tensor) -> Tensor:
    """One block alone, token by token and head by head: context strictly before the anchor, then the block itself."""
    c = model.config
    gemma, eps, partial = c.layer_style == "gemma4", c.rms_norm_eps, c.partial_rotary_factor
    groups = c.num_attention_heads // c.num_key_value_heads
    context = [rms(model.fc.weight @ row, model.hidden_norm.weight, eps) for row in features[:anchor]]
    x = [embeds[k] for k in range(len(embeds))]
    places = list(range(anchor)) + [anchor + k for k in range(len(x))]
    for layer in model.layers:
        attn, normed = layer.self_attn, [rms(t, layer.input_layernorm.weight, eps) for t in x]

        def heads(weight: Tensor, source: Tensor) -> Tensor:
            return (weight @ source).view(-1, c.head_dim)

        keys, values = [], []
        for source, place in zip([*context, *normed], places, strict=True):
            raw = heads(attn.k_proj.weight, source)
            keys.append([turn(rms(k, attn.k_norm.weight, eps), place, c.rope_theta, partial) for k in raw])
            value = raw if c.attention_k_eq_v else heads(attn.v_proj.weight, source)
            values.append([rms(v, 1.0, eps) for v in value] if gemma else value)
        new = []
        for k, (residual, source) in enumerate(zip(x, normed, strict=True)):
            outputs = []
            for h, raw in enumerate(heads(attn.q_proj.weight, source)):
                q = turn(rms(raw, attn.q_norm.weight, eps), anchor + k, c.rope_theta, partial)
                scores = torch.stack([q @ key[h // groups] for key in keys])
                scores = scores if gemma else scores / math.sqrt(c.head_dim)
                outputs.append(sum(p * v[h // groups] for p, v in zip(scores.softmax(0), values, strict=True)))
            added = attn.o_proj.weight @ torch.cat(outputs)
            mixed = residual + (rms(added, layer.post_attention_layernorm.weight, eps) if gemma else added)
            before = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
            inner = rms(mixed, before.weight, eps)
            gate = activation(layer.mlp.gate_proj.weight @ inner, gemma)
            added = layer.mlp.down_proj.weight @ (gate * (layer.mlp.up_proj.weight @ inner))
            if gemma:
                new.append((mixed + rms(added, layer.post_feedforward_layernorm.weight, eps)) * layer.layer_scalar)
            else:
                new.append(mixed + added)
        x = new
    given = 0 if c.sample_from_anchor else 1
    return torch.stack([rms(t, model.norm.weight, eps) for t in x[given:]])


@pytest.fixture
def two_sequences() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Features and anchors of two sequences, and the anchors' embeddings."""
    torch.manual_seed(1)
    features = [torch.randn(n, 3 * D, dtype=torch.float64) for n in (9, 6)]
    anchors = [torch.tensor([0, 3, 4, 7]), torch.tensor([2, 4])]  # neighbours, one without context, one near the end
    return features, anchors, torch.randn(6, D, dtype=torch.float64)


MASK = torch.linspace(-1, 1, D, dtype=torch.float64)


def packed(features: list[Tensor], anchors: list[Tensor]) -> BlockBatch:
    counts = [int(a[-1]) for a in anchors]
    return BlockBatch(
        torch.cat([f[:n] for f, n in zip(features, counts, strict=True)]),
        counts,
        torch.cat(anchors),
        [len(a) for a in anchors],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_forward_and_gradients_equal_brute_force(shape: str, two_sequences: tuple) -> None:
    features, anchors, embeds = two_sequences
    config = small(**SHAPES[shape], enable_confidence_head=False, markov_rank=0)
    model, twin = random_model(config), random_model(config)
    hidden = model(packed(features, anchors), embeds, MASK)
    assert hidden.shape == (6, GAMMA, D)
    expected = []
    places = [(f, int(a)) for f, chosen in zip(features, anchors, strict=True) for a in chosen]
    for (f, anchor), first in zip(places, embeds, strict=True):
        block = torch.stack([first, *[MASK] * (config.block_inputs - 1)])
        expected.append(brute_force(twin, f, anchor, block))
    torch.testing.assert_close(hidden, torch.stack(expected), rtol=1e-9, atol=1e-9)

    direction = torch.randn(hidden.shape, dtype=torch.float64)
    ((hidden * direction).sum() + hidden.pow(3).sum()).backward()
    ((torch.stack(expected) * direction).sum() + torch.stack(expected).pow(3).sum()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float(theirs.grad.abs().max()) > 0, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-8, msg=name)


def test_context_is_strictly_before_the_anchor(two_sequences: tuple) -> None:
    features, anchors, embeds = two_sequences
    model = random_model(small())
    before = model(packed(features, anchors), embeds, MASK)
    features[0][3:] += 1.0  # the state at the anchor of block 1 and all later ones
    after = model(packed(features, anchors), embeds, MASK)
    assert torch.equal(before[1], after[1])  # anchor 3 sees 0..2
    assert not torch.allclose(before[2], after[2])  # anchor 4 sees 3


def test_blocks_do_not_see_each_other(two_sequences: tuple) -> None:
    features, anchors, embeds = two_sequences
    model = random_model(small())
    batch = packed(features, anchors)
    before = model(batch, embeds, MASK)
    changed = embeds.clone()
    changed[1] += 1.0  # the anchor embedding of block 1, whose positions overlap those of blocks 0 and 2
    after = model(batch, changed, MASK)
    for block in (0, 2, 3, 4, 5):
        assert torch.equal(before[block], after[block])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_shorter_block_is_a_block_of_its_own(from_anchor: bool, two_sequences: tuple) -> None:
    features, anchors, embeds = two_sequences
    batch = packed(features, anchors)
    whole, cut = (small(sample_from_anchor=from_anchor, block_size=size) for size in (GAMMA, 2))
    short = random_model(whole)(batch, embeds, MASK, 2)
    assert torch.equal(short, random_model(cut)(batch, embeds, MASK))


def test_predictions_after_a_given_anchor_are_the_masks_of_a_longer_block(two_sequences: tuple) -> None:
    """The conventions differ in which slots predict, not in what a slot sees: position and visibility are the same."""
    features, anchors, embeds = two_sequences
    batch = packed(features, anchors)
    given = random_model(small(sample_from_anchor=False))(batch, embeds, MASK)
    longer = random_model(small(block_size=GAMMA + 1))(batch, embeds, MASK)
    assert torch.equal(given, longer[:, 1:])


def test_gemma_layers_have_the_tensors_of_deepspec() -> None:
    names = set(random_model(small(layer_style="gemma4", attention_k_eq_v=True)).state_dict())
    mine = {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert mine == {
        "layer_scalar",
        *(f"{name}_layernorm.weight" for name in norms),
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_rotary_tables_are_those_of_transformers(partial: float) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    turning = {"rope_type": "proportional", "partial_rotary_factor": partial, "rope_theta": 1e6}
    text = Gemma4TextConfig(
        num_hidden_layers=1,
        layer_types=["full_attention"],
        global_head_dim=32,
        rope_parameters={"full_attention": turning, "sliding_attention": turning},
    )
    positions = torch.tensor([0, 1, 77, 900])
    cos, sin = Gemma4TextRotaryEmbedding(text)(torch.zeros(1), positions[None], "full_attention")
    ours = rope_table(positions, 32, 1e6, partial)
    torch.testing.assert_close(ours.float(), torch.stack((cos[0], sin[0])), rtol=1e-4, atol=1e-4)
