"""Anchors and blocks on sequences small enough to read."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.anchors import anchor_candidates, make_blocks, sample_anchors


def test_an_anchor_and_its_next_token_must_both_be_supervised() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert anchor_candidates(mask).tolist() == [1, 2, 7]


def test_labels_start_one_after_the_anchor_and_prev_is_the_token_before() -> None:
    ids = torch.tensor([10, 11, 12, 13, 14, 15])
    blocks = make_blocks(ids, torch.ones(6, dtype=torch.bool), torch.tensor([1, 3]), 3)
    assert blocks.labels.tolist() == [[12, 13, 14], [14, 15, 15]]
    assert blocks.prev_ids.tolist() == [[11, 12, 13], [13, 14, 15]]
    assert blocks.supervised.tolist() == [[True, True, True], [True, True, False]]


def test_a_masked_label_hides_the_later_slots() -> None:
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
    blocks = make_blocks(torch.arange(5), mask, torch.tensor([0]), 4)
    assert blocks.supervised.tolist() == [[True, False, False, False]]


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(1, 50), st.integers(0, 5))
def test_sampled_anchors_are_distinct_ascending_candidates(mask: list[bool], count: int, seed: int) -> None:
    loss_mask = torch.tensor(mask)
    candidates = anchor_candidates(loss_mask).tolist()
    anchors = sample_anchors(loss_mask, count, torch.Generator().manual_seed(seed)).tolist()
    assert len(anchors) == min(count, len(candidates))
    assert anchors == sorted(set(anchors)) and set(anchors) <= set(candidates)


def test_anchors_are_uniform() -> None:
    mask = torch.ones(6, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(5)
    for _ in range(2000):
        hits[sample_anchors(mask, 2, generator)] += 1
    assert (hits - 800).abs().max() < 100  # 800 expected, standard deviation 22
