"""Steps of training: which samples and anchors they see."""

from __future__ import annotations

import torch
from fakes import TableTarget

from dspark.data.features import FeatureSource, Sample
from dspark.train.config import TrainConfig
from dspark.train.loop import choose_samples, step_parts

VOCAB, HIDDEN = 13, 8


def sample(name: str, length: int, start: int, seed: int) -> Sample:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return Sample(name, "x", ids, torch.arange(length) >= start)


def test_steps_take_fresh_samples_in_turn_and_replay_only_seen_ones() -> None:
    samples = [sample(f"s{i}", 8, 0, i) for i in range(20)]
    config = TrainConfig(steps=50, sequences_per_step=4, fresh_per_step=2)
    seen: set[str] = set()
    for step in range(10):
        chosen = choose_samples(samples, step, config)
        fresh = [s.id for s in chosen[:2]]
        assert not seen & set(fresh)
        assert {s.id for s in chosen[2:]} <= seen
        seen |= set(fresh)
    assert len(seen) == 20
    assert [s.id for s in choose_samples(samples, 3, config)] == [s.id for s in choose_samples(samples, 3, config)]


def test_anchors_of_a_step_depend_on_seed_and_step_alone() -> None:
    target = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    features = FeatureSource(target, (0, 3), torch.arange(VOCAB))
    samples = [sample("a", 40, 3, 1)]
    config = TrainConfig(slots_per_step=21)

    def anchors(step: int, seed: int) -> list[int]:
        parts = step_parts(samples, features, TrainConfig(slots_per_step=21, seed=seed), step)
        return parts[0][2].anchors.tolist()

    assert len(anchors(0, 1)) == config.slots_per_step // config.block_size
    assert anchors(0, 1) == anchors(0, 1) != anchors(1, 1) != anchors(0, 2)


def test_states_come_first_and_take_more_anchors() -> None:
    config = TrainConfig(steps=10, state_steps=2, state_slots=50, slots_per_step=21)
    assert [config.block_at(s) for s in range(4)] == [1, 1, 7, 7]
    assert [config.slots_at(s) for s in range(4)] == [50, 50, 21, 21]
