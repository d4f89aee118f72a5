"""The training form of Eagle3 and MTP: every step of every chain equals a reference that goes token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark.models.chain import ChainBatch, ChainModel
from dspark.models.eagle3 import Eagle3Config, Eagle3Model
from dspark.models.mtp import MTPConfig, MTPModel

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, STEPS = 23, 8, 4, 2, 4, 3
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_target_layers": 6,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": 12,
    "block_size": STEPS,
    "rope_theta": 100.0,
}
KINDS = ["eagle3", "eagle3 without q/k norms", "mtp"]


def model(kind: str, **changes: object) -> ChainModel:
    made: ChainModel
    if kind == "mtp":
        made = MTPModel(MTPConfig(**{**SHAPE, **changes}))
    else:
        made = Eagle3Model(
            Eagle3Config(**{**SHAPE, "target_layer_ids": (0, 2), "qk_norm": kind == "eagle3", **changes})
        )
    random = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.5 + (1.0 if parameter.dim() == 1 else 0.0)
    return made.double()


def naive_chain(model: ChainModel, embeds: Tensor, features: Tensor, start: int, steps: int) -> Tensor:
    """Normed states of one chain, one token at a time, from the parameters alone; ``embeds`` [tokens, hidden]."""
    p = dict(model.named_parameters())
    eagle = "fc.weight" in p

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + model.config.rms_norm_eps).sqrt() * p[name]

    def rotated(x: Tensor, position: int) -> Tensor:
        half, turned = DIM // 2, []
        for i in range(half):
            angle = position * model.config.rope_theta ** (-2 * i / DIM)
            turned.append(torch.complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle)))
        return torch.cat((torch.stack(turned).real, torch.stack(turned).imag))

    def project(x: Tensor, name: str, heads: int, position: int | None) -> list[Tensor]:
        found = []
        for head in (p[f"layers.0.self_attn.{name}_proj.weight"] @ x).split(DIM):
            if position is not None and f"layers.0.self_attn.{name}_norm.weight" in p:
                head = norm(head, f"layers.0.self_attn.{name}_norm.weight")
            found.append(head if position is None else rotated(head, position))
        assert len(found) == heads
        return found

    def layer_input(e: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if eagle:
            return torch.cat((norm(e, "layers.0.input_layernorm.weight"), norm(u, "layers.0.hidden_norm.weight"))), u
        z = p["eh_proj.weight"] @ torch.cat((norm(e, "enorm.weight"), norm(u, "hnorm.weight")))
        return norm(z, "layers.0.input_layernorm.weight"), z

    def first(i: int) -> Tensor:
        return p["fc.weight"] @ features[i] if eagle else features[i]

    keys, values = [], []
    for i in range(start + 1):
        x, _ = layer_input(embeds[i + 1], first(i))
        keys.append(project(x, "k", KV_HEADS, i))
        values.append(project(x, "v", KV_HEADS, None))
    u, outputs = first(start), []
    for j in range(steps):
        x, residual = layer_input(embeds[start + 1 + j], u)
        if j:
            keys.append(project(x, "k", KV_HEADS, start + j))
            values.append(project(x, "v", KV_HEADS, None))
        mixed = []
        for h, q in enumerate(project(x, "q", HEADS, start + j)):
            kv = h // (HEADS // KV_HEADS)
            weights = torch.stack([(q @ k[kv]) / DIM**0.5 for k in keys]).softmax(0)
            mixed.append(sum(w * v[kv] for w, v in zip(weights, values, strict=True)))
        middle = residual + p["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(middle, "layers.0.post_attention_layernorm.weight")
        gate, up = p["layers.0.mlp.gate_proj.weight"] @ y, p["layers.0.mlp.up_proj.weight"] @ y
        u = middle + p["layers.0.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        outputs.append(norm(u, "norm.weight"))
    return torch.stack(outputs)


def sequences(model: ChainModel) -> list[tuple[Tensor, Tensor, list[int]]]:
    """(embeddings, features, starts) of two sequences; the first has a chain from its first row."""
    random = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(tokens, HIDDEN, generator=random, dtype=torch.float64),
            torch.randn(tokens, model.config.feature_size, generator=random, dtype=torch.float64),
            starts,
        )
        for tokens, starts in ((9, [0, 3, 4]), (7, [2]))
    ]


def batch_of(parts: list[tuple[Tensor, Tensor, list[int]]], steps: int) -> ChainBatch:
    lasts = [starts[-1] for _, _, starts in parts]
    return ChainBatch(
        torch.cat([f[: last + 1] for (_, f, _), last in zip(parts, lasts, strict=True)]),
        torch.cat([e[1 : last + 2] for (e, _, _), last in zip(parts, lasts, strict=True)]),
        [last + 1 for last in lasts],
        torch.tensor([s for _, _, starts in parts for s in starts]),
        torch.stack([e[s + 1 : s + 1 + steps] for e, _, starts in parts for s in starts]),
        [len(starts) for _, _, starts in parts],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_equal_those_of_one_token_at_a_time(kind: str) -> None:
    made = model(kind)
    parts = sequences(made)
    ours = made(batch_of(parts, STEPS))
    theirs = torch.stack([naive_chain(made, e, f, s, STEPS) for e, f, starts in parts for s in starts])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    named = dict(made.named_parameters())
    grads = torch.autograd.grad((ours * pull).sum(), list(named.values()))
    expected = torch.autograd.grad((theirs * pull).sum(), list(named.values()))
    for name, one, other in zip(named, grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        assert float(other.abs().max()) > 1e-6, f"{name} has no part in the result"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_finite_differences(kind: str) -> None:
    made = model(kind)
    parts = [(e, f, starts[-1:]) for e, f, starts in sequences(made)]
    batch = batch_of(parts, 2)

    def states(features: Tensor, embeds: Tensor, steps: Tensor) -> Tensor:
        return made(ChainBatch(features, embeds, batch.row_counts, batch.starts, steps, batch.chain_counts))

    inputs = [t.clone().requires_grad_() for t in (batch.features, batch.next_embeds, batch.step_embeds)]
    assert torch.autograd.gradcheck(states, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_chains_do_not_see_each_other_or_what_comes_later(kind: str) -> None:
    made = model(kind)
    parts = sequences(made)
    together = made(batch_of(parts, STEPS))
    alone = made(batch_of([(parts[0][0], parts[0][1], [3])], STEPS))
    torch.testing.assert_close(together[1], alone[0], rtol=1e-10, atol=1e-12)
    embeds, features, _ = parts[0]
    changed_embeds, changed_features = embeds.clone(), features.clone()
    changed_embeds[6], changed_features[4] = 9.0, 9.0  # the step before last reads token 5; the start is token 3's row
    changed = made(batch_of([(changed_embeds, changed_features, [3])], STEPS))
    torch.testing.assert_close(changed[0, :2], alone[0, :2], rtol=1e-10, atol=1e-12)
    assert float((changed[0, 2] - alone[0, 2]).detach().abs().max()) > 1e-3
