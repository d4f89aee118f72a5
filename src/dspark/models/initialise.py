"""Where a drafter's parameters start. A few million blocks are all that a small machine can train on, so the start
decides.

``fresh`` is the reference's: N(0, 0.02) for matrices and embeddings, ones for norms, zero biases. ``from_target``
copies the target's last layers into the draft layers, lets ``fc`` pass the last tap through, and takes the target's
norms; the per-head norms of q and k have no counterpart in Llama-shaped targets and start at one. ``fit_bigram`` then
gives the Markov head the bigram statistics of the answers.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dspark.errors import ModelError
from dspark.maths.losses import LossAlphas, SparseTarget, chunked_losses
from dspark.models.backbone import DraftModel


def fresh(model: nn.Module, *, seed: int, std: float = 0.02) -> None:
    """DeepSpec's initialisation, in place."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


def from_target(model: DraftModel, tensors: dict[str, Tensor]) -> None:
    """Copy the last layers, the final norm and the last tap of a Llama-shaped target into ``model``, in place.

    ``tensors`` are the target's under transformers' names. Raises :class:`ModelError` if a needed tensor is missing
    or has another shape than the drafter's.
    """
    config = model.config
    first = config.num_target_layers - config.num_hidden_layers
    if first < 0:
        raise ModelError(
            f"the target has {config.num_target_layers} layers; {config.num_hidden_layers} cannot be copied"
        )
    own = model.state_dict()
    for name, tensor in own.items():
        if not name.startswith("layers."):
            continue
        _, i, part = name.split(".", 2)
        source = f"model.layers.{first + int(i)}.{part}"
        if source in tensors or not part.endswith(("q_norm.weight", "k_norm.weight")):
            _copy(tensor, tensors, source)
    _copy(own["norm.weight"], tensors, "model.norm.weight")
    _copy(own["hidden_norm.weight"], tensors, f"model.layers.{first}.input_layernorm.weight")
    fc = model.fc.weight.data.mul_(0.1)
    fc[:, -config.hidden_size :] += torch.eye(config.hidden_size, device=fc.device)


def _copy(parameter: Tensor, tensors: dict[str, Tensor], name: str) -> None:
    if name not in tensors:
        raise ModelError(f"the target has no tensor {name}; train with initialise='fresh'")
    if tensors[name].shape != parameter.shape:
        raise ModelError(f"{name} has shape {list(tensors[name].shape)}, the drafter wants {list(parameter.shape)}")
    parameter.data.copy_(tensors[name])


def fit_bigram(
    model: DraftModel,
    prev_ids: Int[Tensor, "pairs"],
    next_draft_ids: Int[Tensor, "pairs"],
    *,
    passes: float = 1.0,
    rows: int = 2048,
    learning_rate: float = 1e-2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> float:
    """Fit the sequential head alone to the answers' bigrams, in place; returns the last tenth's mean cross-entropy in
    nats.

    The base logits are frozen at the log-frequencies of single tokens and the backbone's states at zero, so the head
    learns only what the previous token adds; heads that read states or more tokens learn that later. Pairs whose next
    token lies outside the draft vocabulary carry -1 and teach nothing.
    """
    head = model.markov_head
    if head is None or prev_ids.shape[0] == 0:
        return float("nan")
    counts = torch.bincount(next_draft_ids[next_draft_ids >= 0], minlength=model.config.output_size).float() + 1.0
    base = (counts / counts.sum()).log()[:, None].to(dtype)
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, int(passes * prev_ids.shape[0] / rows))
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    device = head.markov_w1.weight.device
    one, base = torch.ones(rows, 1, dtype=dtype, device=device), base.to(device)
    nothing = torch.zeros(rows, 1, model.config.hidden_size, dtype=dtype, device=device)  # states that say nothing
    void = SparseTarget(torch.zeros(rows, 1, dtype=torch.long, device=device), torch.zeros(rows, 1, device=device))
    tail: list[float] = []
    for step in range(steps):
        picked = torch.randint(prev_ids.shape[0], (rows,), generator=generator)
        labels = next_draft_ids[picked].to(device)
        weights = (labels >= 0).float()
        weights /= weights.sum().clamp(min=1)
        latents = head.latents(nothing, prev_ids[picked][:, None].to(device))[:, 0]
        total, _ = chunked_losses(
            one, latents, head.markov_w2.weight, base, void, labels, weights, alphas=LossAlphas(1.0, 0.0, 0.0)
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        optimizer.step()
        if step >= min(steps - 1, steps * 0.9):
            tail.append(float(total.detach()))
    return sum(tail) / len(tail)
