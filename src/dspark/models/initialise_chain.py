"""Where the parameters of Eagle3 and MTP start beside a target: in its last layer.

The layer that a chain runs is of the target's own kind, so that the last one is a start: norms on q and k have no
counterpart in Llama-shaped targets and stay at one. What comes before the layer starts so that the layer reads about
what it read in the target; the rest keeps a tenth of its random start, lest its gradients be alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.chain import ChainModel
from dspark.models.eagle3 import Eagle3Model
from dspark.models.mtp import MTPModel

NOISE = 0.1  # share of the random start that stays where the target says nothing


def chain_from_target(model: ChainModel, tensors: dict[str, Tensor]) -> None:
    """Copy the last layer and the final norm of a Llama-shaped target into ``model``, in place.

    ``tensors`` are the target's under transformers' names. Eagle3: the state's half of q, k and v gets the target's
    weights, the embedding's half none; ``fc`` passes the last tap through. MTP: ``eh_proj`` adds the normed embedding
    and state. Raises :class:`ModelError` if a needed tensor is missing or has another shape than the drafter's.
    """
    own, d = dict(model.named_parameters()), model.config.hidden_size
    last = f"model.layers.{model.config.num_target_layers - 1}"
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        _copy(own[f"layers.0.{name}.weight"].data, tensors, f"{last}.{name}.weight")
    for name in ("q_norm", "k_norm"):
        ours, source = f"layers.0.self_attn.{name}.weight", f"{last}.self_attn.{name}.weight"
        if ours in own and source in tensors:
            _copy(own[ours].data, tensors, source)
    _copy(own["norm.weight"].data, tensors, "model.norm.weight")
    eagle = isinstance(model, Eagle3Model)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = own[f"layers.0.self_attn.{name}.weight"].data
        if eagle:
            weight[:, :d] *= NOISE
        _copy(weight[:, -d:], tensors, f"{last}.self_attn.{name}.weight")
    norm = "layers.0.hidden_norm.weight" if eagle else "layers.0.input_layernorm.weight"
    _copy(own[norm].data, tensors, f"{last}.input_layernorm.weight")
    if eagle:
        weight = own["fc.weight"].data.mul_(NOISE)
    else:
        assert isinstance(model, MTPModel)
        weight = own["eh_proj.weight"].data.mul_(NOISE)
        weight[:, :d] += torch.eye(d, device=weight.device)
    weight[:, -d:] += torch.eye(d, device=weight.device)


def _copy(place: Tensor, tensors: dict[str, Tensor], name: str) -> None:
    if name not in tensors:
        raise ModelError(f"the target has no tensor {name}; train with initialise='fresh'")
    if tensors[name].shape != place.shape:
        raise ModelError(f"{name} has shape {list(tensors[name].shape)}, the drafter wants {list(place.shape)}")
    place.copy_(tensors[name])
