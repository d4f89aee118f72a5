"""The three sequential heads against brute force, position by position, and their decoding step against training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.models.heads import SequentialHead, make_head, sequential_logits

KINDS = ("vanilla", "gated", "rnn")
VOCAB, DRAFT_VOCAB, RANK, HIDDEN, BLOCK = 11, 7, 4, 6, 5


def head(kind: str, seed: int = 0) -> SequentialHead:
    torch.manual_seed(seed)
    made = make_head(kind, vocab_size=VOCAB, output_size=DRAFT_VOCAB, rank=RANK, hidden_size=HIDDEN).double()
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.6
    return made


def block(blocks: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(blocks, BLOCK, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(VOCAB, (blocks, BLOCK))


def brute_force(made: SequentialHead, kind: str, hidden: Tensor, prev_ids: Tensor) -> Tensor:
    """Latents of one block from the formulas, row by row of the projections as DeepSpec stores them."""
    state, latents = [0.0] * RANK, []
    for h, prev in zip(hidden, prev_ids.tolist(), strict=True):
        e = made.markov_w1.weight[prev]
        if kind == "vanilla":
            latents.append(e)
        elif kind == "gated":
            weight, bias = made.gate_proj.weight, made.gate_proj.bias
            gates = [(weight[i, :HIDDEN] @ h + weight[i, HIDDEN:] @ e + bias[i]).sigmoid() for i in range(RANK)]
            latents.append(torch.stack([gate * x for gate, x in zip(gates, e, strict=True)]))
        else:
            inputs = [*state, *e, *h]
            joint = [
                sum(w * x for w, x in zip(row, inputs, strict=True)) + b
                for row, b in zip(made.joint_proj.weight, made.joint_proj.bias, strict=True)
            ]
            g, c, o = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            latents.append(torch.stack([x.tanh() for x in o]))  # of the state before this position
            state = [g[i].sigmoid() * state[i] + (1 - g[i].sigmoid()) * c[i].tanh() for i in range(RANK)]
    return torch.stack(latents)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_gradients_equal_brute_force(kind: str) -> None:
    ours, theirs = head(kind), head(kind)
    hidden, prev_ids = block()
    twin = hidden.detach().clone().requires_grad_()
    latents = ours.latents(hidden, prev_ids)
    expected = torch.stack([brute_force(theirs, kind, h, p) for h, p in zip(twin, prev_ids, strict=True)])
    torch.testing.assert_close(latents, expected, rtol=1e-12, atol=1e-12)
    logits, base = ours.bias(latents), torch.randn(3, BLOCK, DRAFT_VOCAB, dtype=torch.float64)
    torch.testing.assert_close(logits, torch.einsum("vr,...r->...v", theirs.markov_w2.weight, expected))
    torch.testing.assert_close(sequential_logits(base, hidden, prev_ids, ours), base + logits)
    logits.sin().sum().backward()
    torch.einsum("vr,...r->...v", theirs.markov_w2.weight, expected).sin().sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float(other.grad.abs().max()) > 0, name
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12, msg=name)
    if kind == "vanilla":
        assert hidden.grad is None
    else:
        torch.testing.assert_close(hidden.grad, twin.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    made = head(kind)
    hidden, prev_ids = block(2)
    names = [name for name, _ in made.named_parameters()]

    def bias(h: Tensor, *parameters: Tensor) -> Tensor:
        own = dict(zip(names, parameters, strict=True))
        latents = torch.func.functional_call(Latents(made), {f"head.{n}": p for n, p in own.items()}, (h, prev_ids))
        return latents @ own["markov_w2.weight"].T

    assert torch.autograd.gradcheck(bias, (hidden, *(p.detach().clone().requires_grad_() for p in made.parameters())))


class Latents(torch.nn.Module):
    """``latents`` as a module's forward, which ``functional_call`` wants."""

    def __init__(self, made: SequentialHead) -> None:
        super().__init__()
        self.head = made

    def forward(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        return self.head.latents(hidden, prev_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_unroll_to_the_teacher_forced_latents(kind: str) -> None:
    made = head(kind)
    hidden, prev_ids = block()
    with torch.no_grad():
        whole = made.latents(hidden, prev_ids)
        state = None
        for k in range(BLOCK):
            latents, state = made.step(prev_ids[:, k], hidden[:, k], state)
            torch.testing.assert_close(latents, whole[:, k], rtol=1e-12, atol=1e-12)
        assert (state is not None) == (kind == "rnn")


def test_only_the_recurrent_head_looks_back_past_the_previous_token() -> None:
    for kind in KINDS:
        made = head(kind)
        hidden, prev_ids = block(1)
        other = prev_ids.clone()
        other[0, 0] = (other[0, 0] + 1) % VOCAB
        with torch.no_grad():
            changed = (made.latents(hidden, prev_ids) != made.latents(hidden, other)).any(-1)[0]
        assert changed.tolist() == [True] + [kind == "rnn"] * (BLOCK - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_and_shapes_of_deepspec(kind: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in head(kind).state_dict().items()}
    expected = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (DRAFT_VOCAB, RANK)}
    if kind == "gated":
        expected |= {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)}
    if kind == "rnn":
        expected |= {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)}
    assert shapes == expected


@pytest.mark.parametrize("kind", KINDS)
def test_latents_take_the_dtype_of_the_states(kind: str) -> None:
    made = head(kind).float()
    hidden, prev_ids = block()
    assert made.latents(hidden.bfloat16(), prev_ids).dtype == torch.bfloat16
    assert made.bias(made.latents(hidden.bfloat16(), prev_ids)).dtype == torch.bfloat16
