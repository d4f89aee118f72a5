"""The training form of Eagle3 and MTP: every step of every chain equals a reference that goes token by token."""

from __future__ import annotations

import math

import pytest
import tiny_drafter
import torch
from tiny_drafter import fill, tiny_eagle3_config, tiny_mtp_config
from torch import Tensor

from dspark.models.chain import ChainBatch, ChainModel
from dspark.models.eagle3 import Eagle3Model
from dspark.models.mtp import MTPModel

VOCAB, HEADS, KV_HEADS = 23, 4, 2
HIDDEN, DIM, STEPS = (tiny_drafter.SHAPE[name] for name in ("hidden_size", "head_dim", "block_size"))
SHAPE = {
    **tiny_drafter.SHAPE,
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rope_theta": 100.0,
}
GEMMA = {"layer_style": "gemma4", "partial_rotary_factor": 0.5}
VARIANTS: dict[str, dict[str, object]] = {  # what differs from the plain drafter of the method
    "eagle3": {},
    "eagle3 without q/k norms": {"qk_norm": False},
    "eagle3 of speculators": {"qk_norm": False, "norm_before_residual": True, "norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "eagle3 with its own embedding and head": {"own_embedding": True, "own_head": True},
    "gemma eagle3": {**GEMMA, "attention_k_eq_v": True, "final_soft_cap": 0.8},
    "gemma eagle3 with values and embedding of its own": {**GEMMA, "own_embedding": True, "norm_output": True},
    "mtp": {},
    "gemma mtp": {**GEMMA, "attention_k_eq_v": True},
}
KINDS = list(VARIANTS)


def model(kind: str, **changes: object) -> ChainModel:
    made: ChainModel
    if "mtp" in kind:
        made = MTPModel(tiny_mtp_config(**{**SHAPE, **VARIANTS[kind], **changes}))
    else:
        made = Eagle3Model(tiny_eagle3_config(**{**SHAPE, **VARIANTS[kind], **changes}))
    fill(made, torch.Generator().manual_seed(0), norms=1.0)
    if "layers.0.layer_scalar" in dict(made.named_buffers()):
        made.get_buffer("layers.0.layer_scalar").fill_(0.7)
    return made.double()


def naive_chain(model: ChainModel, embeds: Tensor, features: Tensor, start: int, steps: int) -> Tensor:
    """Normed states of one chain, one token at a time, from the parameters alone; ``embeds`` [tokens, hidden]."""
    p, config = dict(model.named_parameters()), model.config
    eagle, gemma = "fc.weight" in p, config.layer_style == "gemma4"

    def norm(x: Tensor, name: str = "") -> Tensor:
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * (p[name] if name else 1.0)

    def rotated(x: Tensor, position: int) -> Tensor:
        half, turned = DIM // 2, []
        for i in range(half):
            turns = i < int(config.partial_rotary_factor * half)
            angle = position * config.rope_theta ** (-2 * i / DIM) if turns else 0.0
            turned.append(torch.complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle)))
        return torch.cat((torch.stack(turned).real, torch.stack(turned).imag))

    def project(x: Tensor, name: str, heads: int, position: int) -> list[Tensor]:
        found, shared = [], name == "v" and config.attention_k_eq_v
        for head in (p[f"layers.0.self_attn.{'k' if shared else name}_proj.weight"] @ x).split(DIM):
            if name == "v":
                found.append(norm(head) if gemma else head)
                continue
            if f"layers.0.self_attn.{name}_norm.weight" in p:
                head = norm(head, f"layers.0.self_attn.{name}_norm.weight")
            found.append(rotated(head, position))
        assert len(found) == heads
        return found

    def layer_input(e: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if eagle:
            normed = norm(u, "layers.0.hidden_norm.weight")
            residual = normed if config.norm_before_residual else u
            return torch.cat((norm(e, "layers.0.input_layernorm.weight"), normed)), residual
        z = p["eh_proj.weight"] @ torch.cat((norm(e, "enorm.weight"), norm(u, "hnorm.weight")))
        return norm(z, "layers.0.input_layernorm.weight"), z

    def first(i: int) -> Tensor:
        taps = features[i]
        if not eagle:
            return taps
        if config.norm_before_fc:
            taps = norm(taps, "input_norm.weight")
        if config.fc_norm:
            taps = torch.cat([norm(tap, f"fc_norm.{t}.weight") for t, tap in enumerate(taps.split(HIDDEN))])
        return p["fc.weight"] @ taps

    def layer_end(residual: Tensor, attended: Tensor) -> Tensor:
        if gemma:
            attended = norm(attended, "layers.0.post_attention_layernorm.weight")
        middle = residual + attended
        y = norm(middle, f"layers.0.{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight")
        gate, up = p["layers.0.mlp.gate_proj.weight"] @ y, p["layers.0.mlp.up_proj.weight"] @ y
        if not gemma:
            return middle + p["layers.0.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        gelu = gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        added = norm(p["layers.0.mlp.down_proj.weight"] @ (gelu * up), "layers.0.post_feedforward_layernorm.weight")
        return (middle + added) * model.get_buffer("layers.0.layer_scalar")

    keys, values = [], []
    for i in range(start + 1):
        x, _ = layer_input(embeds[i + 1], first(i))
        keys.append(project(x, "k", KV_HEADS, i))
        values.append(project(x, "v", KV_HEADS, i))
    u, outputs = first(start), []
    for j in range(steps):
        x, residual = layer_input(embeds[start + 1 + j], u)
        if j:
            keys.append(project(x, "k", KV_HEADS, start + j))
            values.append(project(x, "v", KV_HEADS, start + j))
        mixed = []
        for h, q in enumerate(project(x, "q", HEADS, start + j)):
            kv = h // (HEADS // KV_HEADS)
            weights = torch.stack([(q @ k[kv]) * (1.0 if gemma else DIM**-0.5) for k in keys]).softmax(0)
            mixed.append(sum(w * v[kv] for w, v in zip(weights, values, strict=True)))
        u = layer_end(residual, p["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed))
        outputs.append(norm(u, "norm.weight"))
        if eagle and config.norm_output:
            u = outputs[-1]
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
    outside = ("embed_tokens.weight", "lm_head.weight")  # before and behind the states
    named = {name: parameter for name, parameter in made.named_parameters() if name not in outside}
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


def test_an_embedding_of_its_own_is_scaled_in_gemmas_style_alone() -> None:
    ids = torch.tensor([[3, 4], [0, VOCAB - 1]])
    for kind, scale in (
        ("eagle3 with its own embedding and head", 1.0),
        ("gemma eagle3 with values and embedding of its own", HIDDEN**0.5),
    ):
        made = model(kind)
        torch.testing.assert_close(made.embed(ids), made.get_parameter("embed_tokens.weight")[ids] * scale)


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
