"""Attention of packed blocks by token-level indices: one call for all sequences, where the loop of
:func:`dspark.models.backbone.block_attention` makes one for each.

Every key, context rows of all sequences first and then all slots, knows its sequence, its position or its block; every
query knows its sequence, its anchor and its block. Who sees whom follows from these numbers alone, so sequences of any
lengths lie side by side without padding.

| form                       | where          | what exists at a time                    |
|----------------------------|----------------|------------------------------------------|
| `block_attention`          | everywhere     | scores of one sequence                   |
| `packed_attention`         | the plain form | scores of all slots and all keys         |
| `flex_packed_attention`    | CUDA           | tiles; those that nobody sees are skipped |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

CONTEXT = -1  # block of a key that is a context row


@dataclass(frozen=True)
class TokenIndices:
    """Who everybody is, in a batch of packed blocks. Positions count within their own sequence."""

    slot_sequence: Int[Tensor, "slots"]
    slot_block: Int[Tensor, "slots"]  # over the whole batch: blocks are never told apart by position
    slot_anchor: Int[Tensor, "slots"]
    key_sequence: Int[Tensor, "keys"]
    key_block: Int[Tensor, "keys"]  # CONTEXT where the key is a context row
    key_position: Int[Tensor, "keys"]  # of context rows; 0 for slots, which are seen by their block


def token_indices(
    context_counts: Sequence[int], block_counts: Sequence[int], anchors: Int[Tensor, "blocks"], block_size: int
) -> TokenIndices:
    """Indices of a batch: sequence s owns ``context_counts[s]`` rows and ``block_counts[s]`` blocks of ``block_size``
    slots."""
    device = anchors.device
    sequences = torch.arange(len(context_counts), device=device)
    of_row = sequences.repeat_interleave(torch.tensor(list(context_counts), device=device))
    of_block = sequences.repeat_interleave(torch.tensor(list(block_counts), device=device))
    slot_sequence = of_block.repeat_interleave(block_size)
    slot_block = torch.arange(anchors.shape[0], device=device).repeat_interleave(block_size)
    rows = torch.cat([torch.arange(count, device=device) for count in context_counts])
    return TokenIndices(
        slot_sequence,
        slot_block,
        anchors.repeat_interleave(block_size),
        torch.cat((of_row, slot_sequence)),
        torch.cat((torch.full_like(of_row, CONTEXT), slot_block)),
        torch.cat((rows, torch.zeros_like(slot_block))),
    )


@no_type_check  # PyTorch traces through this, and could not through a checked function
def sees(indices: TokenIndices, slot: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether slots see keys: a context row of the own sequence strictly before the anchor, or a slot of the own
    block."""
    block = indices.key_block[key]
    before = indices.key_position[key] < indices.slot_anchor[slot]
    same = indices.key_sequence[key] == indices.slot_sequence[slot]
    return ((block == CONTEXT) & same & before) | (block == indices.slot_block[slot])


def packed_attention(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "keys kv_heads head_dim"],
    v: Float[Tensor, "keys kv_heads head_dim"],
    indices: TokenIndices,
    scale: float,
) -> Float[Tensor, "slots width"]:
    """The plain form: all scores, those of keys that a slot does not see at minus infinity."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q * scale, k)
    slots, keys = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[0]))
    seen = sees(indices, slots[:, None], keys[None, :])
    wide = torch.promote_types(q.dtype, torch.float32)
    probs = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1, dtype=wide).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1)


def block_mask(indices: TokenIndices) -> BlockMask:
    """What :func:`flex_packed_attention` skips; made once for all layers of a pass."""

    slots, keys = indices.slot_block.shape[0], indices.key_block.shape[0]
    # a lambda, since PyTorch counts the parameters of what it is given, and checked functions hide theirs
    seen = lambda _batch, _head, slot, key: sees(indices, slot, key)  # noqa: E731
    return create_block_mask(seen, None, None, slots, keys, device=str(indices.slot_block.device))


def flex_packed_attention(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "keys kv_heads head_dim"],
    v: Float[Tensor, "keys kv_heads head_dim"],
    mask: BlockMask,
    scale: float,
) -> Float[Tensor, "slots width"]:
    """:func:`packed_attention` by PyTorch's flex_attention: compiled on CUDA; elsewhere as it is, forward only."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attend = _compiled() if q.is_cuda else cast(Callable[..., Tensor], flex_attention)
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@cache
def _compiled() -> Callable[..., Tensor]:
    """flex_attention for lengths that change from step to step; without compilation it would hold all scores."""
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True))
