"""Starts: copied layers are the target's, and the bigram fit beats the frequencies of single tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_drafter import tiny_config

from dspark.errors import ModelError
from dspark.models.backbone import DraftModel
from dspark.models.initialise import fit_bigram, fresh, from_target

CONFIG = tiny_config(
    vocab_size=20, num_hidden_layers=2, target_layer_ids=(1, 3), block_size=7, mask_token_id=0, markov_rank=8
)


def target_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {"model.norm.weight": torch.rand(8)}
    shapes = {
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8),
    }
    shapes |= {"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
    for i in range(6):
        tensors |= {f"model.layers.{i}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{i}.{n}.weight": torch.rand(8) for n in ("input_layernorm", "post_attention_layernorm")
        }
    return tensors


def test_the_last_layers_are_copied_in_order() -> None:
    model, tensors = DraftModel(CONFIG), target_tensors()
    fresh(model, seed=0)
    from_target(model, tensors)
    for i, source in ((0, 4), (1, 5)):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            ours = model.get_parameter(f"layers.{i}.{name}.weight")
            assert torch.equal(ours, tensors[f"model.layers.{source}.{name}.weight"])
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    rows = torch.randn(3, 16)
    passed = torch.nn.functional.linear(rows, model.fc.weight)
    assert torch.cosine_similarity(passed, rows[:, 8:]).min() > 0.99  # the last tap comes through


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    tensors = target_tensors()
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ModelError, match=r"layers\.5\.mlp\.up_proj"):
        from_target(DraftModel(CONFIG), tensors)
    del tensors["model.layers.5.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match="initialise='fresh'"):
        from_target(DraftModel(CONFIG), tensors)


def test_fresh_starts_are_reproducible_and_small() -> None:
    one, two, other = DraftModel(CONFIG), DraftModel(CONFIG), DraftModel(CONFIG)
    fresh(one, seed=3)
    fresh(two, seed=3)
    fresh(other, seed=4)
    assert torch.equal(one.fc.weight, two.fc.weight) and not torch.equal(one.fc.weight, other.fc.weight)
    assert float(one.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert float(one.confidence_head.proj.bias.detach()) == 0.0


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_bigram_fit_learns_transitions(kind: str) -> None:
    model = DraftModel(replace(CONFIG, markov_head_type=kind))
    fresh(model, seed=0)
    prev = torch.randint(20, (4000,), generator=torch.Generator().manual_seed(0))
    following = (prev * 7 + 1) % 20  # certain, while single tokens are uniform: log 20 = 3.0 nats without the head
    nats = fit_bigram(model, prev, following, passes=30.0, rows=400, dtype=torch.float32)
    assert nats < 0.7
    latents = model.markov_head.latents(torch.zeros(20, 1, 8), torch.arange(20)[:, None])
    right = model.markov_head.bias(latents)[:, 0].argmax(-1) == (torch.arange(20) * 7 + 1) % 20
    assert float(right.float().mean()) >= (0.85 if kind == "rnn" else 1.0)  # its rank of 8 is bounded by tanh


def test_a_gemma_layer_takes_all_of_its_counterpart() -> None:
    model = DraftModel(replace(CONFIG, layer_style="gemma4", attention_k_eq_v=True, num_hidden_layers=1))
    fresh(model, seed=0)
    tensors = {
        f"model.{name.replace('layers.0', 'layers.5')}": torch.rand(t.shape) for name, t in model.state_dict().items()
    }
    tensors["model.layers.5.input_layernorm.weight"] = torch.rand(8)
    from_target(model, tensors)
    copied = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("layers.")}
    assert "layers.0.layer_scalar" in copied and "layers.0.post_feedforward_layernorm.weight" in copied
    for name, tensor in copied.items():
        assert torch.equal(tensor, tensors[f"model.{name.replace('layers.0', 'layers.5')}"]), name
