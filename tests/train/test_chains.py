"""Steps of Eagle3 and MTP: loss and gradients are those of one chain at a time against the dense target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import TableTarget
from models.test_chain import SHAPE, model, naive_chain
from torch import Tensor

from dspark.core import SamplingParams
from dspark.data.anchors import make_blocks
from dspark.data.features import FeatureSource, Sample
from dspark.errors import DataError
from dspark.maths.losses import LossAlphas, slot_losses
from dspark.models.chain import ChainModel
from dspark.train.chains import chain_batch, run_chain_states, run_chains, usable
from dspark.train.config import TrainConfig, drafter_defaults
from dspark.train.slots import FrozenHead, Part, freeze_head

VOCAB, HIDDEN, STEPS = SHAPE["vocab_size"], SHAPE["hidden_size"], 3
CONFIG = TrainConfig(**{**drafter_defaults("eagle3"), "drafter": "eagle3", "block_size": STEPS})
ALPHAS = LossAlphas(0.1, 0.7, 0.9)


def table() -> TableTarget:
    made = TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN)
    made.embeddings, made.head, made.states = (x.double() for x in (made.embeddings, made.head, made.states))
    return made


def prepared(kind: str, **changes: object) -> tuple[TableTarget, ChainModel, FrozenHead, list[Part]]:
    """A target, a drafter, and chains of two samples; the second sample is supervised from its first token on."""
    target, made = table(), model(kind, **changes)
    if made.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[: len(made.d2t)].sort().values
        made.d2t.copy_(ids - torch.arange(len(ids)))
    features = FeatureSource(target, made.taps, made.draft_token_ids(), top=VOCAB)
    parts = []
    for name, length, begin, anchors in (("a", 12, 3, [3, 4, 9, 10]), ("b", 9, 0, [2, 7])):
        ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))
        sample = Sample(name, "x", ids, torch.arange(length) >= begin)
        blocks = make_blocks(sample.token_ids, sample.loss_mask, torch.tensor(anchors), STEPS)
        parts.append((sample, features.get(sample), blocks))
    return target, made, freeze_head(target, made.draft_token_ids(), torch.float64), parts


def one_chain_at_a_time(target: TableTarget, made: ChainModel, parts: list[Part]) -> tuple[Tensor, list[list[float]]]:
    """The step's mean loss, and c* of every supervised slot, from naive states and whole distributions."""
    ids, total, denominator, rates = made.draft_token_ids(), torch.zeros((), dtype=torch.float64), 0.0, []
    head = made.own_head()
    embed = target.embed if made.own_embedding() is None else made.embed
    for sample, kept, blocks in parts:
        embeds = torch.cat((embed(sample.token_ids), torch.zeros(STEPS, HIDDEN).double()))
        for b, anchor in enumerate(blocks.anchors.tolist()):
            states = naive_chain(made, embeds, kept.features.double(), anchor - 1, STEPS)
            rates.append([])
            for k in range(STEPS):
                if not blocks.supervised[b, k]:
                    break
                logits = (target.head[ids] if head is None else head.weight) @ states[k]
                if cap := made.config.final_soft_cap:
                    logits = cap * torch.tanh(logits / cap)
                prefix = sample.token_ids[: anchor + k + 1].tolist()
                probs = target.next_probs(prefix, SamplingParams(temperature=1.0))[ids].double()
                label = (ids == sample.token_ids[anchor + k + 1]).nonzero().flatten()
                label = label if len(label) else torch.tensor([-1])
                losses = slot_losses(logits[None], probs[None], label)
                total = total + 0.8**k * losses.weighted(ALPHAS)[0]
                denominator += 0.8**k
                rates[-1].append(float(losses.acceptance_rate))
    return total / denominator, rates


CASES = [
    ("eagle3", {}),
    ("eagle3", {"draft_vocab_size": 11}),
    ("eagle3", {"own_head": True, "draft_vocab_size": 11}),
    ("eagle3 without q/k norms", {"final_soft_cap": 0.8}),
    ("eagle3.1", {"own_head": True, "final_soft_cap": 0.8}),
    ("eagle3 with its own embedding and head", {"draft_vocab_size": 11}),
    ("gemma eagle3 with values and embedding of its own", {}),
    ("mtp", {}),
    ("mtp", {"draft_vocab_size": 11, "final_soft_cap": 0.8}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_the_step_equals_one_chain_at_a_time(kind: str, changes: dict[str, object]) -> None:
    target, made, frozen, parts = prepared(kind, **changes)
    numbers = run_chains(made, frozen, parts, CONFIG, block_size=STEPS, alphas=ALPHAS)
    expected, rates = one_chain_at_a_time(target, made, parts)
    torch.testing.assert_close(numbers.loss, expected, rtol=1e-6, atol=1e-8)
    named = dict(made.named_parameters())
    ours = torch.autograd.grad(numbers.loss, list(named.values()))
    theirs = torch.autograd.grad(expected, list(named.values()))
    for name, one, other in zip(named, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    lengths = [1 + sum(torch.tensor(r).cumprod(0).tolist()) for r in rates]
    assert numbers.acceptance_length == pytest.approx(sum(lengths) / len(lengths), rel=1e-5)
    assert numbers.blocks == len(rates)
    first = [r[0] for r in rates]
    assert float(numbers.acceptance_rate[0]) == pytest.approx(sum(first) / len(first), rel=1e-5)


def test_state_regression_is_the_first_steps_relative_error() -> None:
    target, made, frozen, parts = prepared("mtp")
    numbers = run_chain_states(made, frozen, parts)
    expected = []
    for sample, kept, blocks in parts:
        for anchor in blocks.anchors.tolist():
            h = naive_chain(made, target.embed(sample.token_ids), kept.features.double(), anchor - 1, 1)[0]
            wanted = target.forward(sample.token_ids[: anchor + 1], target.new_memory(rows=1, max_len=20)).final[-1]
            expected.append(((h - wanted) ** 2).sum() / (wanted**2).sum())
    torch.testing.assert_close(numbers.loss, torch.stack(expected).mean())
    with_states = run_chains(
        made, frozen, parts, replace(CONFIG, alpha_state=2.0), block_size=STEPS, alphas=LossAlphas(0.0, 0.0, 0.0)
    )
    torch.testing.assert_close(with_states.loss, 2 * numbers.loss)


def test_a_block_without_a_row_before_it_is_left_out() -> None:
    _, _, _, parts = prepared("mtp")
    sample, kept, _ = parts[1]
    blocks = make_blocks(sample.token_ids, sample.loss_mask, torch.tensor([0, 2, 7]), STEPS)
    (found,) = usable([(sample, kept, blocks)])
    names = ("anchors", "prev_ids", "labels", "supervised")
    assert all(torch.equal(getattr(found[2], name), getattr(parts[1][2], name)) for name in names)
    with pytest.raises(DataError, match="prompts must not be empty"):
        usable([(sample, kept, make_blocks(sample.token_ids, sample.loss_mask, torch.tensor([0]), STEPS))])


def test_rows_end_with_the_last_start() -> None:
    _, _, frozen, parts = prepared("eagle3")
    batch = chain_batch(frozen, parts)
    assert batch.row_counts == [10, 7] and batch.starts.tolist() == [2, 3, 8, 9, 1, 6]
    sample = parts[0][0]
    torch.testing.assert_close(batch.next_embeds[9], frozen.target.embed(sample.token_ids[10]))
    torch.testing.assert_close(batch.step_embeds[3, 0], frozen.target.embed(sample.token_ids[10]))
    torch.testing.assert_close(batch.step_embeds[0, 2], frozen.target.embed(sample.token_ids[5]))
