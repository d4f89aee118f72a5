"""The small form: smaller, and everything that a block can read is there, bit for bit where the encoding is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_fakes import TAPS, VOCAB, table_build, table_form, table_samples, table_target

from dspark.data.anchors import anchor_candidates, make_blocks
from dspark.data.cache_features import CachedFeatureSource
from dspark.data.cache_reader import FeatureCache
from dspark.data.features import FeatureSource, Sample
from dspark.train.slots import slot_targets

IDS = torch.tensor([1, 2, 4, 5, 7, 8, 10])


def sources(
    folder: Path, encoding: str, samples: list[Sample], **request: object
) -> tuple[CachedFeatureSource, FeatureSource]:
    assert table_build(folder, table_form("small", encoding), samples).run(table_target())
    given = {"taps": TAPS, "draft_ids": IDS, "top": 5, **request}
    return CachedFeatureSource(FeatureCache(folder), table_target(), **given), FeatureSource(table_target(), **given)


def test_every_block_of_every_sample_reads_the_same(tmp_path: Path) -> None:
    """All anchors, all slots: context, distributions and final states, as the training steps take them."""
    samples = table_samples()
    cached, online = sources(tmp_path / "cache", "float32", samples)
    for sample in samples:
        ours, theirs = cached.get(sample), online.get(sample)
        anchors = anchor_candidates(sample.loss_mask)
        blocks = make_blocks(sample.token_ids, sample.loss_mask, anchors, 4)
        rows = int(anchors[-1])
        assert torch.equal(ours.features[:rows], theirs.features[:rows])
        keep = blocks.supervised.flatten().nonzero().squeeze(1)
        mine, exact = (slot_targets([(sample, kept, blocks)], 4, keep) for kept in (ours, theirs))
        assert torch.equal(mine.ids, exact.ids) and torch.equal(mine.probs, exact.probs)
        assert torch.equal(ours.states[anchors - ours.start], theirs.states[anchors - theirs.start])


def test_a_later_prompt_is_left_out_and_the_context_before_it_kept() -> None:
    form, mask = table_form("small", "bfloat16"), torch.zeros(30, dtype=torch.bool)
    mask[4:8] = mask[20:24] = True
    assert form.sizes(mask) == (120, 30, 22 * 2 * 12, 6 * 12, 6 * 5 * (2 + 2))
    mask[20:24] = False
    assert form.sizes(mask) == (120, 30, 6 * 2 * 12, 3 * 12, 3 * 5 * (2 + 2))
    mask[:] = False
    mask[9] = True
    assert form.sizes(mask) == (120, 30, 0, 0, 0)


def test_samples_without_an_anchor_are_stored_and_read(tmp_path: Path) -> None:
    ids = torch.arange(6)
    lone = [Sample("last#0", "a", ids, ids == 5), Sample("none#0", "a", ids, ids > 9)]
    cached, online = sources(tmp_path / "cache", "bfloat16", lone)
    for sample in lone:
        assert cached.get(sample).top_ids.shape == online.get(sample).top_ids.shape


def test_fewer_taps_and_probabilities_than_stored(tmp_path: Path) -> None:
    cached, online = sources(tmp_path / "cache", "float32", table_samples(), taps=(2,), top=3)
    for sample in table_samples()[:2]:
        ours, theirs = cached.get(sample), online.get(sample)
        assert torch.equal(ours.features, theirs.features[: ours.features.shape[0]])
        assert torch.equal(ours.top_ids, theirs.top_ids) and torch.equal(ours.top_probs, theirs.top_probs)


@pytest.mark.parametrize(("encoding", "most"), [("bfloat16", 2**-8), ("float8_e4m3", 2**-4), ("int8", 0.02)])
def test_the_loss_is_bounded_and_the_distributions_are_hardly_touched(
    tmp_path: Path, encoding: str, most: float
) -> None:
    cached, online = sources(tmp_path / "cache", encoding, table_samples())
    for sample in table_samples():
        ours, theirs = cached.get(sample), online.get(sample)
        exact = theirs.features[: ours.features.shape[0]].view(-1, 6)
        error = (ours.features.float().view(-1, 6) - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(error.max()) < most
        rows = anchor_candidates(sample.loss_mask) - ours.start
        torch.testing.assert_close(ours.top_probs[rows].float(), theirs.top_probs[rows], atol=0.0, rtol=2**-8)


def test_ids_of_a_large_vocabulary_take_four_bytes() -> None:
    mask = torch.ones(9, dtype=torch.bool)
    small = table_form("small", draft_ids=torch.arange(1 << 16)).sizes(mask)
    large = table_form("small", draft_ids=torch.arange((1 << 16) + 1)).sizes(mask)
    assert large[4] - small[4] == 8 * 5 * 2 and VOCAB < 1 << 16
