"""Where the parameters of Eagle3 and MTP start beside a target: in its last layer.

The layer that a chain runs is of the target's own kind or nearly so (Llama's, Qwen3's, Gemma 4's), which makes the last
one a start: norms on q and k have no counterpart in Llama-shaped targets and stay at one. What comes before the layer
starts so that the layer reads about what it read in the target; the rest keeps a tenth of its random start, lest its
gradients be alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.chain import ChainModel
from dspark.models.eagle3 import Eagle3Model

NOISE = 0.1  # share of the random start that stays where the target says nothing


def chain_from_target(model: ChainModel, tensors: dict[str, Tensor]) -> None:
    """Copy the last layer and the final norm of a target into ``model``, in place.

    ``tensors`` are the target's under transformers' names; its layers must be of the drafter's style, without regard to
    norms on q and k. Eagle3: the state's half of q, k and v gets the target's weights, the embedding's half none;
    ``fc`` passes the last tap through. MTP: ``eh_proj`` adds the normed embedding and state. Raises
    :class:`ModelError` if a needed tensor is missing or has another shape than the drafter's.
    """
    own, d = model.state_dict(), model.config.hidden_size
    last = f"model.layers.{model.config.num_target_layers - 1}"
    eagle = isinstance(model, Eagle3Model)
    for name, tensor in own.items():
        if not name.startswith("layers.0.") or name.endswith(("hidden_norm.weight", "input_layernorm.weight")):
            continue
        source = name.replace("layers.0", last, 1)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            if eagle:
                tensor[:, :d] *= NOISE
            _copy(tensor[:, -d:], tensors, source)
        elif source in tensors or not name.endswith(("q_norm.weight", "k_norm.weight")):
            _copy(tensor, tensors, source)
    _copy(own["norm.weight"], tensors, "model.norm.weight")
    norm = "layers.0.hidden_norm.weight" if eagle else "layers.0.input_layernorm.weight"
    _copy(own[norm], tensors, f"{last}.input_layernorm.weight")
    weight = own["fc.weight" if eagle else "eh_proj.weight"].mul_(NOISE)
    if not eagle:
        weight[:, :d] += torch.eye(d, device=weight.device)
    weight[:, -d:] += torch.eye(d, device=weight.device)


def _copy(place: Tensor, tensors: dict[str, Tensor], name: str) -> None:
    if name not in tensors:
        raise ModelError(f"the target has no tensor {name}; train with initialise='fresh'")
    if tensors[name].shape != place.shape:
        raise ModelError(f"{name} has shape {list(tensors[name].shape)}, the drafter wants {list(place.shape)}")
    place.copy_(tensors[name])
