"""What the target says about a sample: the right rows, kept or computed again alike."""

from __future__ import annotations

import torch
from fakes import TableTarget

from dspark.core import SamplingParams
from dspark.data.features import FeatureSource, Sample

VOCAB = 11


def make(name: str, length: int = 9, start: int = 4) -> Sample:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(len(name)))
    return Sample(name, "x", ids, torch.arange(length) >= start)


def test_distributions_sit_at_the_position_before_their_label() -> None:
    target, sample = TableTarget(vocab_size=VOCAB, order=2), make("a")
    kept = FeatureSource(target, (1, 2), torch.arange(VOCAB), top=VOCAB).get(sample)
    assert kept.features.shape == (9, 2 * target.info.hidden_size)
    sparse = kept.sparse_target(torch.tensor([4, 6]) - kept.start)
    for row, position in enumerate((4, 6)):
        dense = torch.zeros(VOCAB).scatter_(0, sparse.ids[row], sparse.probs[row])
        expected = target.next_probs(sample.token_ids[: position + 1].tolist(), SamplingParams(temperature=1.0))
        torch.testing.assert_close(dense, expected)


def test_a_draft_vocabulary_keeps_the_targets_own_probabilities() -> None:
    target, sample, ids = TableTarget(vocab_size=VOCAB, order=2), make("a"), torch.tensor([1, 4, 7, 10])
    kept = FeatureSource(target, (1,), ids, top=3).get(sample)
    sparse = kept.sparse_target(torch.tensor([5]) - kept.start)
    expected = target.next_probs(sample.token_ids[:6].tolist(), SamplingParams(temperature=1.0))[ids]
    values, order = expected.topk(3)
    torch.testing.assert_close(sparse.probs[0], values)
    assert torch.equal(sparse.ids[0], order)


def test_what_was_dropped_for_room_is_computed_again_alike() -> None:
    target, names = TableTarget(vocab_size=VOCAB, order=2), ["a", "bb", "ccc"]
    roomy = FeatureSource(target, (1, 2), torch.arange(VOCAB), top=4)
    tight = FeatureSource(target, (1, 2), torch.arange(VOCAB), top=4, memory_bytes=1)
    for _ in range(2):
        for name in names:
            one, two = roomy.get(make(name)), tight.get(make(name))
            assert torch.equal(one.features, two.features) and torch.equal(one.top_probs, two.top_probs)
    assert roomy.computed == 3 and tight.computed == 6
    assert tight.used_bytes == tight.get(make("ccc")).nbytes
