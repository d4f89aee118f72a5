"""The target: a frozen model behind one small protocol, and the KV memory that we own.

Two implementations stand behind the protocol: :class:`dspark.models.lean.LeanTarget` (our decoder for Llama-shaped
families, where speed comes from) and :class:`dspark.models.transformers_target.TransformersTarget` (any causal model of
the library). A forward pass takes a flat ragged batch: ``counts[i]`` new tokens for row ``rows[i]`` of the memory, all
requests one after the other in ``token_ids``. Positions continue from the row's length; lengths advance by the counts.

Layer ids: id k is the output of decoder layer k (``hidden_states[k + 1]`` of transformers); the last layer is refused,
because there the library stores the normed state. Source: DeepSpec's ``assert_no_final_target_layer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from dspark.models.paged_memory import PagedMemory, PageTables

# A "tap" behind every layer: the state after the final norm, which the head reads. MTP drafters draw on it.
FINAL = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What the rest of the program may know about a target."""

    name: str  # as the user named it
    family: str  # model_type of its config
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int  # context limit in tokens
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class TargetOutput:
    """Result of a forward pass over a flat ragged batch.

    ``logits`` are fp32-convertible (soft-caps already applied), one row per token or, with ``last_only``, one per
    request. ``features`` concatenates the tapped layers in id order; None when no taps were asked for. ``final`` is
    the state after the final norm, what the head reads; one row per token.
    """

    logits: Float[Tensor, "rows vocab"] | None
    features: Float[Tensor, "tokens features"] | None
    final: Float[Tensor, "tokens hidden"]


class KVMemory:
    """Keys and values of committed and in-flight tokens, preallocated, with rollback by length.

    | range of a row        | owner                                                     |
    |-----------------------|-----------------------------------------------------------|
    | [0, length)           | tokens that the caller stands by                          |
    | [length, max_len)     | scratch: whatever an undone pass left; the next overwrites |

    ``keys`` and ``values`` are lists per layer of [rows, kv_heads, max_len, head_dim]. ``lengths`` holds one int per
    row.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_len: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``shapes`` gives (kv_heads, head_dim) of each layer; ``max_len`` in tokens per row."""
        if rows < 1 or max_len < 1:
            raise ConfigError(f"rows is {rows} and max_len is {max_len}; both must be 1 or more")
        self.rows, self.max_len = rows, max_len
        self.keys = [torch.zeros(rows, h, max_len, d, dtype=dtype, device=device) for h, d in shapes]
        self.values = [torch.zeros(rows, h, max_len, d, dtype=dtype, device=device) for h, d in shapes]
        self.lengths = [0] * rows

    def check_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Raise :class:`RequestError` if a row cannot take its new tokens."""
        for row, count in zip(rows, counts, strict=True):
            if self.lengths[row] + count > self.max_len:
                raise RequestError(
                    f"row {row} holds {self.lengths[row]} tokens and {count} more exceed max_len {self.max_len}; "
                    "shorten the prompt or raise max_len"
                )

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Count tokens just written; called by a target at the end of its pass."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def rollback(self, row: int, length: int) -> None:
        """Forget everything of ``row`` from position ``length`` on."""
        if not 0 <= length <= self.lengths[row]:
            raise RequestError(f"cannot roll row {row} back to {length}; it holds {self.lengths[row]} tokens")
        self.lengths[row] = length

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@runtime_checkable
class Target(Protocol):
    """A frozen model that decides."""

    info: TargetInfo

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each."""
        ...

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        """Run new tokens of one or several rows. ``counts`` None means that all tokens belong to ``rows[0]``.

        ``last_only`` computes logits of each request's last token alone; ``want_logits`` False skips the head. Mutates
        ``memory`` (writes keys and values, advances lengths). Raises :class:`RequestError` when a row is full.
        """
        ...

    def logits(self, final: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits of final-norm states, soft-cap applied: the head alone."""
        ...

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Input embeddings as the first layer receives them (scaled where the family scales)."""
        ...

    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """Weight of the language-model head, which drafters share."""
        ...


@runtime_checkable
class PagedTarget(Target, Protocol):
    """A target whose requests can share one pool of pages. Its ``forward`` takes that memory like any other."""

    def new_paged_memory(self, tables: PageTables, *, pages: int) -> PagedMemory:
        """KV memory of ``pages`` pages for the seats of ``tables``; never longer than the target's context."""
        ...


def check_max_len(max_len: int, info: TargetInfo) -> None:
    """Raise :class:`RequestError` if a memory is asked for more tokens than the target's context holds."""
    if not 1 <= max_len <= info.max_len:
        raise RequestError(f"max_len is {max_len}; {info.name} takes 1 to {info.max_len} tokens, answer included")


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return ``taps`` as a tuple; raise :class:`ConfigError` unless strictly ascending in [-1, num_layers - 2], with
    ``FINAL`` allowed behind them."""
    taps = tuple(int(t) for t in taps)
    if list(taps) != sorted(set(taps)):
        raise ConfigError(f"target_layer_ids is {list(taps)}; ids must be strictly ascending")
    layers = [tap for tap in taps if tap != FINAL]
    if layers and not (-1 <= layers[0] and layers[-1] <= num_layers - 2):
        raise ConfigError(
            f"target_layer_ids is {list(taps)}; ids of a model with {num_layers} layers lie in -1..{num_layers - 2} "
            "(-1 is the embedding; the last layer is refused, its stored state is already normed)"
        )
    return taps
