"""The start of Eagle3 and MTP in the target's last layer: tensor by tensor, and as a layer that computes the same."""

from __future__ import annotations

import pytest
import torch
from models.test_chain import HIDDEN, SHAPE
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.chain import ChainModel
from dspark.models.eagle3 import Eagle3Config, Eagle3Model
from dspark.models.initialise import fresh
from dspark.models.initialise_chain import chain_from_target
from dspark.models.mtp import MTPConfig, MTPModel

LAST = "model.layers.5"


def made(kind: str) -> ChainModel:
    shape = {**SHAPE, "rms_norm_eps": 1e-12}
    shape |= {"layer_style": "gemma4", "attention_k_eq_v": True} if kind.startswith("gemma") else {}
    model = (
        MTPModel(MTPConfig(**shape)) if "mtp" in kind else Eagle3Model(Eagle3Config(**shape, target_layer_ids=(0, 4)))
    )
    fresh(model, seed=1)
    return model


def tensors(model: ChainModel) -> dict[str, Tensor]:
    """A target's last layer of the drafter's shape, with norms on q and k as Qwen3 has them."""
    random, own = torch.Generator().manual_seed(2), model.state_dict()
    found = {}
    for name, parameter in own.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            shape = list(parameter.shape)
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                shape[1] = HIDDEN
            found[name.replace("layers.0", LAST)] = torch.randn(shape, generator=random)
    return {**found, "model.norm.weight": torch.randn(HIDDEN, generator=random)}


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "gemma eagle3", "gemma mtp"])
def test_what_the_target_has_is_copied(kind: str) -> None:
    model = made(kind)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    source = tensors(model)
    chain_from_target(model, source)
    own = model.state_dict()
    assert torch.equal(own["norm.weight"], source["model.norm.weight"])
    for name in ("o_proj", "q_norm", "k_norm"):
        assert torch.equal(own[f"layers.0.self_attn.{name}.weight"], source[f"{LAST}.self_attn.{name}.weight"])
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(own[f"layers.0.{name}.weight"], source[f"{LAST}.{name}.weight"])
    if kind.startswith("gemma"):
        for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar"):
            assert torch.equal(own[f"layers.0.{name}"], source[f"{LAST}.{name}"])
    for name in ("q_proj", "k_proj") if kind.startswith("gemma") else ("q_proj", "k_proj", "v_proj"):
        ours, theirs = own[f"layers.0.self_attn.{name}.weight"], source[f"{LAST}.self_attn.{name}.weight"]
        assert torch.equal(ours[:, -HIDDEN:], theirs)
        if "eagle3" in kind:
            torch.testing.assert_close(ours[:, :HIDDEN], before[f"layers.0.self_attn.{name}.weight"][:, :HIDDEN] / 10)
    norm = "layers.0.hidden_norm.weight" if "eagle3" in kind else "layers.0.input_layernorm.weight"
    assert torch.equal(own[norm], source[f"{LAST}.input_layernorm.weight"])


def test_first_states_are_about_the_last_tap_or_the_sum_of_what_goes_in() -> None:
    eagle, mtp = made("eagle3"), made("mtp")
    for model in (eagle, mtp):
        chain_from_target(model, tensors(model))
    features = torch.randn(5, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(eagle.first_state(features), features[:, HIDDEN:], atol=0.1, rtol=0.1)
        embeds, states = features.split(HIDDEN, 1)
        _, z = mtp.mix(embeds, states)
        expected = sum(x / x.square().mean(1, keepdim=True).sqrt() for x in (embeds, states))
        torch.testing.assert_close(z, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_does_not_fit_is_named(kind: str) -> None:
    model = made(kind)
    source = tensors(model)
    name = f"{LAST}.mlp.up_proj.weight"
    with pytest.raises(ModelError, match="up_proj"):
        chain_from_target(model, {k: v for k, v in source.items() if k != name})
    with pytest.raises(ModelError, match="up_proj"):
        chain_from_target(model, {**source, name: source[name][1:]})
