"""The processes of a run: who leads, what they must agree on, and how one learns that another died.

`torchrun` starts them and tells each its number through the environment; a run without it is :data:`ALONE`. Process 0
leads: it alone writes, evaluates, and decides by its clock. All that is exchanged here is small and on the CPU, over
gloo; gradients are the matter of :mod:`dspark.train.parallel`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from dspark.errors import ConfigError, DsparkError, RunError

Found = TypeVar("Found")
PATIENCE = timedelta(hours=2)  # the longest that others wait for process 0: its evaluations, fits and measurements


@dataclass(frozen=True)
class Ranks:
    """One process's place among the ``size`` of a run."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def add(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum of all processes' ``values``, which lie on the CPU."""
        if self.size == 1:
            return values
        total = values.clone()
        with peers():
            dist.all_reduce(total)
        return total

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether any process raised it; they all get the same answer."""
        return (self.add(torch.tensor(flags, dtype=torch.int64)) > 0).tolist()

    def first(self, work: Callable[[], Found]) -> Found:
        """What process 0 finds, for all of them; what it raises for bad input, all of them raise.

        The finding travels pickled between the processes of one run.
        """
        if self.size == 1:
            return work()
        answer: list[Found | DsparkError | None] = [None]
        if self.leads:
            try:
                answer = [work()]
            except DsparkError as error:
                answer = [error]
        with peers():
            dist.broadcast_object_list(answer, 0)
        if isinstance(answer[0], DsparkError):
            raise answer[0]
        return answer[0]  # type: ignore[return-value]  # None only where work found it

    def in_turn(self, work: Callable[[], Found]) -> Found:
        """``work`` of process 0, and then of all others: they may find what it left on the disk."""
        if self.size == 1:
            return work()
        if self.leads:
            try:
                return work()
            finally:
                with peers():
                    dist.barrier()
        with peers():
            dist.barrier()
        return work()


ALONE = Ranks()


@contextmanager
def peers() -> Iterator[None]:
    """Turn what a collective operation raises when another process is gone into a :class:`RunError`."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL know no finer type
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"a process of the run failed, so all of them end ({reason}); its own message says why. What was saved is "
            "whole: the same command goes on from it"
        ) from error


@contextmanager
def joined(environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The processes that `torchrun` started this one among, for as long as the block lasts; :data:`ALONE` without it.

    On CUDA each process takes the device of its number on its machine, and gradients travel over NCCL. Raises
    :class:`ConfigError` if the environment is not as `torchrun` leaves it.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size == 1:
        yield ALONE
        return
    rank = _number(environment, "RANK", None)
    backend = "gloo"
    if torch.cuda.is_available():
        local = _number(environment, "LOCAL_RANK", None)
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"LOCAL_RANK is {local}; this machine has {torch.cuda.device_count()} GPUs, start one process for each"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name, default)
    try:
        value = int(text if text is not None else "")
    except ValueError:
        value = -1
    if value < (1 if name == "WORLD_SIZE" else 0):
        raise ConfigError(f"{name} is {text!r}; it must be a number as `torchrun` sets it, or unset for one process")
    return value
