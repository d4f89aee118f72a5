"""Tensors of which every process of a run may hold a part: put together for the disk, and cut up again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dspark.train.ranks import peers


def whole(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """``tensors`` on the CPU, shards put together one after another; nothing is returned unless ``keep``, but all
    processes must ask alike."""
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            with peers():
                tensor = tensor.full_tensor()
        if keep:
            found[name] = tensor.contiguous().cpu()
    return found


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of ``value``, which all processes hold, where ``parameter`` lies: this process's shard where that is one.
    Single numbers, such as a count of steps, stay whole."""
    copied = value.clone().to(parameter.device)
    if not isinstance(parameter, DTensor) or value.dim() == 0:
        return copied
    return distribute_tensor(copied, parameter.device_mesh, parameter.placements, src_data_rank=None)
