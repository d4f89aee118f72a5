"""A decoder layer over whichever small operations serve: what target and drafters run between their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from dspark.models.decoder_config import Rope
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Layer
from dspark.models.norm import RMSNorm

AngleTables = Callable[[Rope], tuple[Tensor, Tensor]]  # cosines and sines, fp32 [positions, head_dim / 2]
Attend = Callable[[int, Tensor], Tensor]  # layer index and [tokens, q, k and v] to [tokens, heads * head_dim]


@runtime_checkable
class Ops(Protocol):
    """What lies between the products of a layer: :class:`dspark.models.plain.PlainOps` or
    :class:`dspark.models.native.NativeOps`."""

    def norm(self, x: Float[Tensor, "tokens hidden"], norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """RMSNorm of ``x``."""
        ...

    def add_norm(
        self, x: Float[Tensor, "tokens hidden"], added: Float[Tensor, "tokens hidden"], norm: RMSNorm
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
        """x + added, and the RMSNorm of that."""
        ...

    def gate(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens width"]:
        """activation(gate) * up; may write into ``gate_up``."""
        ...

    def attention(
        self,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[Layer],
        tables: AngleTables,
        *,
        causal: bool = True,
    ) -> Attend:
        """Self-attention for one pass over ``counts`` new tokens of memory rows ``rows``.

        The function returned rotates, writes the new keys and values into the memory and attends; it does not advance
        lengths. A token sees its row's keys up to its own; with ``causal`` False up to the last of its row in the pass.
        """
        ...


def feed_forward(
    ops: Ops, layer: Layer, x: Float[Tensor, "tokens hidden"], attended: Float[Tensor, "tokens heads"]
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
    """The rest of a layer behind its attention: the residual stream ``x`` with what attention adds to it, and what the
    feed-forward part adds. The caller adds that up, for the norm that follows differs between the models' last layers.
    """
    h = layer.o(attended)
    if layer.attention_out_norm is not None:
        h = ops.norm(h, layer.attention_out_norm)
    x, h = ops.add_norm(x, h, layer.feedforward_norm)
    h = layer.down(ops.gate(layer.gate_up(h)))
    if layer.feedforward_out_norm is not None:
        h = ops.norm(h, layer.feedforward_out_norm)
    return x, h
