"""Rounds that a drafter plays in training: what decoding would do, and what a step learns from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import TableTarget
from tiny_rounds import Tabled, played_texts

from dspark.core import SamplingParams
from dspark.data.answers import job_seed
from dspark.data.features import FeatureSource, Sample
from dspark.decode import generate
from dspark.errors import DataError
from dspark.maths.losses import expected_acceptance_length, slot_worths
from dspark.train.config import TrainConfig
from dspark.train.played import PlayedRounds, keep_played, played_for, played_pieces, read_played, write_played
from dspark.train.rounds import PlayedText, play_step

VOCAB = 5
PROMPTS = [
    Sample(f"p{i}", "x", torch.tensor(ids), torch.arange(len(ids)) >= start)
    for i, (ids, start) in enumerate([([1, 2, 3, 4], 2), ([4, 0, 1, 1, 1], 3), ([2, 2], 1)])
]
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


def played(
    temperature: float, *, stops: tuple[int, ...] = (), tokens: int = 12
) -> tuple[TableTarget, Tabled, list[PlayedText]]:
    target = TableTarget(vocab_size=VOCAB)
    return target, *played_texts(target, PROMPTS, temperature=temperature, stops=stops, tokens=tokens)


@TEMPERATURES
@pytest.mark.parametrize("stops", [(), (0,)])
def test_what_is_played_is_what_decoding_does(temperature: float, stops: tuple[int, ...]) -> None:
    """Token for token and round for round: texts, anchors, drafts and what stood of them."""
    _, drafter, texts = played(temperature, stops=stops)
    by_prompt = {text.sample.id: text for text in texts}
    for prompt in PROMPTS:
        start = int(prompt.loss_mask.nonzero()[0])
        sampling = SamplingParams(temperature=temperature, seed=job_seed(3, prompt.id, 7))
        target = TableTarget(vocab_size=VOCAB)
        done = generate(
            target,
            drafter,
            prompt.token_ids[:start].tolist(),
            sampling=sampling,
            max_new_tokens=12,
            stop_token_ids=stops,
        )
        rounds = [r for r in done.rounds if r.draft_tokens]
        if not rounds:
            assert f"{prompt.id}@7" not in by_prompt
            continue
        text = by_prompt[f"{prompt.id}@7"]
        assert text.sample.token_ids[start:].tolist() == list(done.token_ids)
        assert text.committed == sum(len(r.committed) for r in rounds)
        position = start
        for number, r in enumerate(rounds):
            assert int(text.blocks.anchors[number]) == position
            before = [int(text.sample.token_ids[position]), *r.draft_tokens]
            count = len(r.draft_tokens)
            assert text.blocks.prev_ids[number, :count].tolist() == before[:count]
            assert text.blocks.labels[number, : len(r.committed)].tolist()[:count] == list(r.committed)[:count]
            position += len(r.committed)


@TEMPERATURES
def test_slots_are_held_against_the_target_behind_the_drafts(temperature: float) -> None:
    """Row by row: the target's distribution after text, anchor and the drafts before the slot, stood or not."""
    target, _, texts = played(temperature)
    for text in texts:
        blocks, tokens = text.blocks, text.sample.token_ids.tolist()
        assert blocks.rows is not None
        for b, anchor in enumerate(blocks.anchors.tolist()):
            for k in range(3):
                if not bool(blocks.supervised[b, k]):
                    continue
                prefix = tokens[:anchor] + blocks.prev_ids[b, : k + 1].tolist()
                kept = text.features.sparse_target(blocks.rows[b, k : k + 1])
                dense = torch.zeros(VOCAB).scatter_(0, kept.ids[0], kept.probs[0])
                torch.testing.assert_close(dense, target.next_probs(prefix, SamplingParams(temperature=1.0)))
            state = text.features.states[anchor - text.features.start]
            expected = target.next_probs(tokens[: anchor + 1], SamplingParams(temperature=1.0))
            torch.testing.assert_close(torch.softmax(target.logits(state), -1), expected)


def test_features_are_of_the_written_text() -> None:
    """Rows of drafts that fell are not among them."""
    target, _, texts = played(1.0)
    for text in texts:
        ids = text.sample.token_ids[:-1]
        output = target.forward(ids, target.new_memory(rows=1, max_len=len(ids)), taps=(1, 2))
        assert output.features is not None
        torch.testing.assert_close(text.features.features, output.features)


def test_worths_by_hand() -> None:
    """Two slots: E = 1 + a + ab, so the first is worth 1 + b and the second a; behind a certain rejection nothing."""
    both = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(slot_worths(torch.tensor([[0.5, 0.25]]), both), torch.tensor([[1.25, 0.5]]))
    torch.testing.assert_close(slot_worths(torch.tensor([[0.0, 1.0]]), both), torch.tensor([[2.0, 0.0]]))
    one = torch.tensor([[True, False]])
    torch.testing.assert_close(slot_worths(torch.tensor([[0.5, 0.25]]), one), torch.tensor([[1.0, 0.0]]))


def test_a_slot_is_worth_the_slope_of_the_expected_length() -> None:
    chances = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    supervised = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)).ge(0.2).long().cumprod(1).bool()
    expected_acceptance_length(chances * 1.0, supervised).sum().backward()
    assert chances.grad is not None
    torch.testing.assert_close(slot_worths(chances.detach(), supervised), chances.grad)


def test_worths_are_of_the_drafts_own_chances() -> None:
    """min(1, p / q) of each draft behind those before it, whatever side its coin fell on."""
    target, drafter, texts = played(1.0)
    for text in texts:
        blocks, tokens, room = text.blocks, text.sample.token_ids.tolist(), text.features.start + 12
        assert blocks.worth is not None
        for b, anchor in enumerate(blocks.anchors.tolist()):
            if anchor + 4 > room - 1:  # the text's end left less than a whole block
                continue
            prefix, chances = tokens[: anchor + 1], []
            for draft in blocks.prev_ids[b, 1:].tolist():
                p = target.next_probs(prefix, SamplingParams(temperature=1.0))[draft]
                (q,) = drafter.table.distribution_of(prefix, [draft]).probs[:, draft]  # type: ignore[union-attr]
                chances.append(min(1.0, float(p / q)))
                prefix = [*prefix, draft]
            first, second = chances
            third = float(blocks.worth[b, 1]) / first - 1 if first else 0.0  # 1 + a_2 is what slot 1 has ahead of it
            assert -1e-5 <= third <= 1 + 1e-5
            expected = [1 + second * (1 + third), first * (1 + third), first * second]
            torch.testing.assert_close(blocks.worth[b], torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_nothing_is_learned_behind_a_stop_token() -> None:
    _, _, texts = played(1.0, stops=(0,), tokens=20)
    stopped = 0
    for text in texts:
        for previous, supervised in zip(text.blocks.prev_ids, text.blocks.supervised, strict=True):
            after = (previous == 0).long().cumsum(0) > 0  # short rounds are padded with 0, unsupervised
            assert not bool((after & supervised).any())
            stopped += int(after.any())
    assert stopped


@TEMPERATURES
def test_a_playing_comes_back_from_the_disk_as_it_was(tmp_path: Path, temperature: float) -> None:
    _, _, texts = played(temperature)
    config = TrainConfig(played_from=0.0, played_steps=4, block_size=3, slots_per_step=12)
    for step in (0, 4, 8):
        write_played(tmp_path, step, texts)
    assert [played_for(tmp_path, step, config) for step in (0, 3, 4, 11, 12)] == [0, 0, 4, 8, None]
    keep_played(tmp_path, first=4, last=7)
    assert [played_for(tmp_path, step, config) for step in (0, 5, 8)] == [None, 4, None]
    found, ours = read_played(tmp_path, 4, torch.device("cpu")), PlayedRounds(4, tuple(texts))
    assert found.figures() == ours.figures() and found.figures()["acceptance_length"] > 1
    for step in (4, 5):
        drawn = [played_pieces(p, config, step, torch.Generator().manual_seed(step)) for p in (found, ours)]
        assert sum(blocks.anchors.shape[0] for _, blocks in drawn[0]) == 4
        for (a, mine), (b, theirs) in zip(*drawn, strict=True):
            assert a.id == b.id and torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(found.get(a).features, ours.get(b).features)
            for name in ("anchors", "prev_ids", "labels", "supervised", "worth", "rows"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))


def test_a_playing_passes_over_samples_without_a_prompt() -> None:
    target, drafter = TableTarget(vocab_size=VOCAB), Tabled("certain", VOCAB)
    source = FeatureSource(target, drafter.taps, torch.arange(VOCAB), top=VOCAB)
    bare = Sample("bare", "x", torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.bool))
    config = TrainConfig(played_from=0.0, played_texts=3, played_tokens=8)
    for step in range(3):
        texts = play_step(drafter, source, [bare, *PROMPTS], config, step, stop_token_ids=())
        assert {text.sample.id for text in texts} == {f"{prompt.id}@{step}" for prompt in PROMPTS}
    with pytest.raises(DataError, match="none of 0 prompts"):
        play_step(drafter, source, [bare], config, 0, stop_token_ids=())


def test_steps_take_rounds_without_replacement_and_all_in_turn() -> None:
    _, _, texts = played(0.0)
    rounds = PlayedRounds(0, tuple(texts))
    config = TrainConfig(played_from=0.0, block_size=3, slots_per_step=3 * rounds.rounds)
    pieces = played_pieces(rounds, config, 0, torch.Generator().manual_seed(0))
    for (sample, blocks), text in zip(pieces, texts, strict=True):
        assert sample.id == text.sample.id and torch.equal(blocks.anchors, text.blocks.anchors)
    short = played_pieces(rounds, replace(config, curriculum=((1.0, 2),)), 0, torch.Generator().manual_seed(0))
    assert short[0][1].labels.shape[1] == 2
