"""Token-level attention of packed blocks: its plain form equals the loop over sequences, and flex its plain form."""

from __future__ import annotations

import pytest
import torch
from tiny_drafter import tiny_config
from torch import Tensor

from dspark.models.backbone import BlockBatch, DraftModel, block_attention
from dspark.models.block_flex import (
    TokenIndices,
    block_mask,
    flex_packed_attention,
    packed_attention,
    sees,
    token_indices,
)

CONTEXTS, BLOCKS, SIZE, HEADS, KV_HEADS, DIM = [7, 3, 11], [2, 1, 3], 3, 4, 2, 16
ANCHORS = torch.tensor([2, 7, 3, 0, 5, 11])
SCALE = 0.3


def packed(dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], TokenIndices]:
    """q, k and v of three sequences with six blocks, keys of the context first."""
    random = torch.Generator().manual_seed(0)
    slots, keys = SIZE * sum(BLOCKS), SIZE * sum(BLOCKS) + sum(CONTEXTS)
    shapes = ((slots, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM))
    tensors = [torch.randn(shape, generator=random, dtype=dtype).to(device).requires_grad_() for shape in shapes]
    return tensors, token_indices(CONTEXTS, BLOCKS, ANCHORS.to(device), SIZE)


def by_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The loop that the backbone runs."""
    outputs, slot, row, block, first = [], 0, 0, 0, sum(CONTEXTS)
    for rows, blocks in zip(CONTEXTS, BLOCKS, strict=True):
        own, seen = slice(slot, slot + blocks * SIZE), slice(row, row + rows)
        later = slice(first + own.start, first + own.stop)
        anchors = ANCHORS[block : block + blocks].to(q.device)
        outputs.append(block_attention(q[own], k[later], v[later], k[seen], v[seen], anchors, SCALE))
        slot, row, block = own.stop, row + rows, block + blocks
    return torch.cat(outputs)


def test_a_slot_sees_the_context_before_its_anchor_and_its_block_alone() -> None:
    indices = token_indices([2, 3], [1, 2], torch.tensor([1, 0, 3]), 2)
    seen = sees(indices, torch.arange(6)[:, None], torch.arange(11)[None])
    expected = [
        "10 000 11 00 00",  # anchor 1 of the first sequence: its row 0, and its own two slots
        "00 000 00 11 00",  # anchor 0 of the second: no row at all
        "00 111 00 00 11",  # anchor 3 of the second: all its rows, and none of the first sequence
    ]
    rows = [[c == "1" for c in text if c != " "] for text in expected for _ in range(2)]
    assert seen.tolist() == rows


def test_the_plain_form_equals_the_loop_over_sequences() -> None:
    (q, k, v), indices = packed(torch.float64)
    ours, theirs = packed_attention(q, k, v, indices, SCALE), by_sequence(q, k, v)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)),
        torch.autograd.grad((theirs * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_the_plain_form() -> None:
    tensors, indices = packed(torch.float32)
    q, k, v = (x.detach() for x in tensors)  # on a CPU, PyTorch has the forward part alone
    ours = flex_packed_attention(q, k, v, block_mask(indices), SCALE)
    torch.testing.assert_close(ours, packed_attention(q, k, v, indices, SCALE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_equals_the_plain_form_on_cuda(dtype: torch.dtype) -> None:
    (q, k, v), indices = packed(dtype, "cuda")
    ours, theirs = flex_packed_attention(q, k, v, block_mask(indices), SCALE), packed_attention(q, k, v, indices, SCALE)
    tolerance = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(ours, theirs, **tolerance)
    for a, b in zip(
        torch.autograd.grad(ours.float().square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.float().square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_drafter_gives_the_same_states_either_way(sample_from_anchor: bool) -> None:
    torch.manual_seed(2)
    config = tiny_config(
        vocab_size=20,
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=24,
        num_hidden_layers=2,
        block_size=SIZE,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        markov_rank=128,
        max_position_embeddings=64,
        sample_from_anchor=sample_from_anchor,
    )
    model = DraftModel(config).requires_grad_(False)
    batch = BlockBatch(torch.randn(sum(CONTEXTS), 48), CONTEXTS, ANCHORS, BLOCKS)
    embeds, mask = torch.randn(sum(BLOCKS), 24), torch.randn(24)
    states = []
    for model.flex in (False, True):
        states.append(model(batch, embeds, mask))
    torch.testing.assert_close(states[0], states[1])
