"""Any drafter behind the batched protocol: per request what its single form proposes, whoever sits beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batch_rig import Rig, features_of, run
from fakes import TableTarget

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.maths.skipping import SkipPolicy
from dspark.models.batch_drafter import (
    BatchDrafter,
    BatchProposal,
    DraftAsk,
    LoopingDrafter,
    batched,
    flat_places,
    stacked,
)
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.ngram import NgramDrafter
from dspark.models.skipping_drafter import SkippingDrafter
from models import test_chain_drafter as chains
from models import test_dspark as blocks

SAMPLED = SamplingParams(temperature=1.0)
CPU = torch.device("cpu")


def made(name: str) -> tuple[Drafter, TableTarget]:
    """A drafter of each kind, and its target."""
    if name == "ngram":
        return NgramDrafter(block_size=4, min_match=1), TableTarget(vocab_size=7)
    if name == "none":
        return NoDrafter(), TableTarget(vocab_size=7)
    if name == "dspark":
        table = blocks.target()
        return DsparkDrafter(blocks.model(), table, candidates=6), table
    table = chains.target()
    return chains.drafter(chains.made(name), table, candidates=6), table


@pytest.mark.parametrize("name", ["ngram", "dspark", "eagle3", "eagle3.1", "gemma eagle3", "mtp"])
def test_a_batch_of_any_drafter_proposes_what_each_request_alone_would(name: str) -> None:
    """Random arrivals, lengths, limits and departures; prompts in pieces; beginnings on other requests' pages."""
    drafter, table = made(name)
    run(Rig(drafter, LoopingDrafter(drafter, table), table), steps=10)


def test_a_drafter_that_never_proposes() -> None:
    drafter, table = made("none")
    rig = Rig(drafter, batched(drafter, table), table)
    seats = [rig.arrive(share=False) for _ in range(3)]
    rig.extend(seats)
    assert [proposal.block for proposal in rig.propose(seats, [1, 1, 1])] == [0, 0, 0]


def test_features_of_shared_pages_are_those_the_first_request_brought() -> None:
    """The adapter hands them to the newcomer bit for bit: its proposal is that of a fresh extend."""
    drafter, table = made("eagle3")
    rig = Rig(drafter, LoopingDrafter(drafter, table), table, exact=True)
    first = rig.arrive(share=False, prompt=14, sampling=SAMPLED)
    rig.extend([first])
    second = rig.arrive(share=True, sampling=SAMPLED)
    assert rig.resumed == 1
    rig.extend([second])
    rig.propose([second, first], [4, 4])
    rig.leave(first)
    third = rig.arrive(share=True, sampling=SAMPLED)  # on pages whose first holder is gone
    rig.extend([third])
    rig.propose([third], [3])
    assert rig.resumed == 2


class OneGenerator:
    """The fault that must show: every request draws from the first one's stream."""

    def __init__(self, inner: BatchDrafter) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, asks: list[DraftAsk]) -> BatchProposal:
        return self.inner.propose([replace(ask, generator=asks[0].generator) for ask in asks])


def test_a_shared_generator_is_caught() -> None:
    drafter, table = made("mtp")
    rig = Rig(drafter, OneGenerator(LoopingDrafter(drafter, table)), table)  # type: ignore[arg-type]
    seats = [rig.arrive(share=False, sampling=SAMPLED) for _ in range(2)]
    rig.extend(seats)
    with pytest.raises(AssertionError):
        rig.propose(seats, [2, 2])


def test_places_of_a_ragged_batch() -> None:
    rows, positions = flat_places([2, 0], [3, 2], [2, 5])
    assert rows.tolist() == [2, 2, 0, 0, 0, 0, 0] and positions.tolist() == [3, 4, 2, 3, 4, 5, 6]


def test_proposals_of_unlike_supports_are_stacked_over_the_vocabulary() -> None:
    ids = torch.tensor([[4, 1], [0, 3]])
    sparse = DraftDistribution(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), ids)
    dense = DraftDistribution(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]))
    proposals = [
        Proposal(torch.tensor([1, 0]), sparse, torch.tensor([0.5, 0.25])),
        Proposal(torch.tensor([2])),
        Proposal(torch.tensor([3]), dense, torch.tensor([0.125])),
        Proposal(torch.empty(0, dtype=torch.long)),
    ]
    both = stacked(proposals, block=3, vocab_size=5, has_confidence=True, device=CPU)
    assert both.proposed.tolist() == [2, 1, 1, 0] and both.certain.tolist() == [False, True, False, True]
    assert both.support_ids is None and both.probs is not None and both.probs.shape == (4, 3, 5)
    assert both.confidence is not None and np.allclose(both.confidence.sum(1), [0.75, 0.0, 0.125, 0.0])
    for i, one in enumerate(proposals):
        found = both.of(i)
        assert torch.equal(found.draft_tokens, one.draft_tokens)
        assert (found.distribution is None) == (one.distribution is None)
        for k in range(one.block if one.distribution is not None else 0):
            assert torch.equal(found.distribution.dense(k, 5), one.distribution.dense(k, 5))
    like = stacked([proposals[0]] * 2, block=3, vocab_size=5, has_confidence=False, device=CPU)
    assert like.confidence is None and torch.equal(like.support_ids[1, :2], ids)


def test_past_the_drafters_context_a_request_sits_out_alone() -> None:
    table = blocks.target()
    drafter = DsparkDrafter(blocks.model(max_position_embeddings=20), table, candidates=6)
    for batch in (LoopingDrafter(drafter, table), batched(drafter, table)):
        rig = Rig(drafter, batch, table)
        long, short = rig.arrive(share=False, prompt=18), rig.arrive(share=False, prompt=5)
        rig.extend([long, short])
        assert [one.block for one in rig.propose([long, short], [5, 5])] == [0, 5]


def test_the_pause_of_one_request_is_its_own() -> None:
    """A skipping drafter learns each request's rounds from what that request is fed."""
    inner, table = made("dspark")
    policy = SkipPolicy()
    drafter = SkippingDrafter(inner, policy)
    rig = Rig(drafter, batched(drafter, table), table, max_len=60)
    dead, alive = (rig.arrive(share=False, prompt=4, sampling=SAMPLED) for _ in range(2))
    blocks_of: dict[int, list[int]] = {dead: [], alive: []}
    for _ in range(12):
        rig.extend([dead, alive])
        for seat, proposal in zip((dead, alive), rig.propose([dead, alive], [2, 2]), strict=True):
            blocks_of[seat].append(proposal.block)
            stands = proposal.draft_tokens.tolist() if seat == alive else []
            rig.live[seat].text += [*stands, 3]
    assert 0 in blocks_of[dead] and 0 not in blocks_of[alive]


def test_features_are_needed_by_position_only_where_there_are_taps() -> None:
    drafter, table = made("ngram")
    assert features_of(table, [1, 2], drafter.taps) is None
