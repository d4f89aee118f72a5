"""Where parameters, gradients and moments lie when several processes train one drafter.

| `parallel`   | parameters and moments     | gradients of a step                                    |
|--------------|----------------------------|--------------------------------------------------------|
| one process  | whole                      | as backward leaves them                                |
| ddp          | whole, in every process    | summed over the processes during the last backward     |
| fsdp         | shards, one per process    | summed and scattered during the last backward (FSDP2)  |

Gradients are sums, never means: every pass's loss is already its share of the step's. All processes run as many passes
in a step, at least one, since what they exchange they exchange inside a pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dspark.errors import ConfigError
from dspark.models.backbone import DraftModel
from dspark.train.methods import Method
from dspark.train.ranks import Ranks, peers
from dspark.train.shards import whole
from dspark.train.slots import StepNumbers

Measure = Callable[[], StepNumbers]  # the forward part of one pass


@runtime_checkable
class Parallel(Protocol):
    """How the processes of a run share one method's parameters."""

    method: Method

    def backward(self, measure: Measure, *, last: bool, idle: bool = False) -> StepNumbers:
        """Run a pass and add to the gradients; with the ``last`` one of a step they are exchanged.

        An ``idle`` pass stands for none: it adds nothing, and takes part in the exchange.
        """
        ...

    def plain(self) -> Method:
        """The method with all parameters whole, as of now, in process 0; all processes must ask."""
        ...


def make_parallel(kind: str, method: Method, ranks: Ranks) -> Parallel:
    """Share out a method whose parameters are whole; process 0's count.

    ``kind`` is ddp or fsdp and matters where there are several processes. The optimizer is made
    afterwards: fsdp replaces the parameters.
    """
    if ranks.size == 1:
        return OneProcess(method)
    return Ddp(method, ranks) if kind == "ddp" else Fsdp(method, ranks)


class OneProcess:
    """All in one place."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def backward(self, measure: Measure, *, last: bool, idle: bool = False) -> StepNumbers:
        numbers = measure()
        numbers.loss.backward()
        return numbers

    def plain(self) -> Method:
        return self.method


class Ddp:
    """Every process has the whole model; DistributedDataParallel sums the gradients while backward still runs."""

    def __init__(self, method: Method, ranks: Ranks) -> None:
        self.method, self._size = method, ranks.size
        # Parameters that a phase does not train (the heads, while states are learned) keep no gradient, as in one
        # process. It also keeps DDP from regrouping its buckets after the first step, which would change the order of
        # sums between a run and its resumption.
        self._ddp = DistributedDataParallel(_Pass(method.model), find_unused_parameters=True)

    def backward(self, measure: Measure, *, last: bool, idle: bool = False) -> StepNumbers:
        with nullcontext() if last else self._ddp.no_sync(), peers():
            loss, numbers = self._ddp(measure)
            (loss * (0 if idle else self._size)).backward()  # DDP takes the mean
        return numbers

    def plain(self) -> Method:
        return self.method


class Fsdp:
    """Every process keeps its shard; layers are gathered as the passes reach them.

    Process 0 also keeps a whole copy of the parameters, fp32, for evaluations and checkpoints.
    """

    def __init__(self, method: Method, ranks: Ranks) -> None:
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(
                f"parallel is fsdp; torch {torch.__version__} is too old for it, take ddp or a newer torch"
            )
        self.method, model = method, method.model
        with peers():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        self._copy = method.twin() if ranks.leads else None
        # nothing that a model returns is changed in place here
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
        for module in [*(model.draft_layers() if isinstance(model, DraftModel) else ()), model]:
            fully_shard(module, mesh=mesh)  # a chain calls parts of its layer, so it is gathered as one
        for module in self._shards():
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)

    def _shards(self) -> Iterator[Any]:  # Any: the type that fully_shard gives to modules cannot be named
        return (module for module in self.method.model.modules() if isinstance(module, FSDPModule))

    def backward(self, measure: Measure, *, last: bool, idle: bool = False) -> StepNumbers:
        for module in self._shards():
            module.set_requires_gradient_sync(last, recurse=False)
        with peers():
            numbers = measure()
            (numbers.loss * 0 if idle else numbers.loss).backward()
        return numbers

    def plain(self) -> Method:
        found = whole(self.method.model.state_dict(), keep=self._copy is not None)
        if self._copy is None:
            return self.method
        self._copy.model.load_state_dict(found)
        return self._copy


def gradient_norm(parameters: Iterator[nn.Parameter], most: float) -> float:
    """Scale the gradients down to a norm of at most ``most`` over all processes; returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    if isinstance(norm, DTensor):
        with peers():
            norm = norm.full_tensor()
    return float(norm)


class _Pass(nn.Module):
    """What DDP wraps: a forward that is whatever pass it is given, over the parameters of one model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, measure: Measure) -> tuple[Tensor, StepNumbers]:
        numbers = measure()
        return numbers.loss, numbers
