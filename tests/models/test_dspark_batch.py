"""DSpark for many requests over shared pages: per request what the single form proposes, from the same draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batch_rig import SAMPLINGS, Rig, run
from fakes import TableTarget
from models.test_dspark import GAMMA, HIDDEN, SHAPES, model, target

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.models import native
from dspark.models.batch_drafter import BatchProposal, DraftAsk, batched
from dspark.models.dspark import DsparkDrafter
from dspark.models.dspark_batch import DsparkBatch

SAMPLED = SamplingParams(temperature=1.0)
compiler = pytest.mark.skipif(native._compiler() is None, reason="needs a C compiler")


def rig(candidates: int = 6, *, batch: type[DsparkBatch] = DsparkBatch, wide: bool = False, **changes: object) -> Rig:
    """Requests over a drafter of the tests' shape, or ``wide`` enough for the compiled operations."""
    options = changes.pop("options", {})
    if wide:
        table = TableTarget(vocab_size=60, order=1, hidden_size=32, max_len=4200)
        made = model(vocab_size=60, hidden_size=32, head_dim=32, intermediate_size=48, **changes)
    else:
        table, made = target(), model(**changes)
    drafter = DsparkDrafter(made, table, candidates=candidates)
    assert drafter.native == (wide and native._compiler() is not None)
    return Rig(drafter, batch(drafter), table, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", [0, 6])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_proposes_what_each_request_alone_would(name: str, candidates: int) -> None:
    """Every kind of head and style: random arrivals, pieces, beginnings on others' pages, limits, departures."""
    run(rig(candidates, **SHAPES[name]), steps=8)


@pytest.mark.parametrize("candidates", [0, 6])
def test_a_reduced_vocabulary(candidates: int) -> None:
    run(rig(candidates, draft_vocab_size=17), steps=8)


@compiler
@pytest.mark.parametrize("seed", range(2))
def test_compiled_operations(seed: int) -> None:
    run(rig(wide=True, options={"seed": seed, "seats": 9, "max_len": 60}), steps=15)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_pages_of_any_size(page_size: int) -> None:
    made = rig(options={"page_size": page_size})
    for _ in range(12):
        made.step()
    assert made.compared > 6


def test_it_is_what_an_engine_gets() -> None:
    drafter = DsparkDrafter(model(), target())
    found = batched(drafter, target())
    assert isinstance(found, DsparkBatch)
    assert (found.name, found.block_size, found.taps, found.has_confidence) == ("dspark", GAMMA, (0, 2), True)


def test_a_beginning_on_shared_pages_is_the_same_bits_as_a_fresh_one() -> None:
    """The newcomer's proposal from pages that another request filled, against one that was fed all by itself."""
    made = rig()
    first = made.arrive(share=False, prompt=17, sampling=SAMPLED)
    made.extend([first])
    second = made.arrive(share=True, sampling=SAMPLED)
    assert made.resumed == 1
    made.extend([second])
    pages = made.pages.of(second)
    assert pages[0] == made.pages.of(first)[0]
    one, twins = made.propose([second], [GAMMA])[0], made.live[second]
    fresh = rig()
    seat = fresh.arrive(share=False, prompt=2, sampling=SAMPLED)
    fresh.live[seat].text = list(twins.text)
    fresh.single.open(max_len=40)
    fresh.extend([seat])
    ask = DraftAsk(
        seat=seat, anchor=twins.text[-1], sampling=SAMPLED, generator=torch.Generator().manual_seed(4), limit=GAMMA
    )
    again = replace(ask, seat=second, generator=torch.Generator().manual_seed(4))
    ours, theirs = made.batch.propose([again]), fresh.batch.propose([ask])
    assert ours.probs is not None and theirs.probs is not None and one.block == GAMMA
    assert torch.equal(ours.draft_tokens, theirs.draft_tokens)
    torch.testing.assert_close(ours.probs, theirs.probs)


def test_tokens_past_the_drafters_limit_leave_a_context_that_others_can_share() -> None:
    """A prompt longer than the drafter's context still fills the pages up to it."""
    made = rig(max_position_embeddings=24)
    long = made.arrive(share=False, prompt=31, sampling=SAMPLED)
    made.extend([long])
    assert made.propose([long], [GAMMA])[0].block == 0
    shared, text = made.pages.of(long)[:4], made.live[long].text[:16]
    made._beginning = lambda: (shared, text)  # type: ignore[method-assign]
    short = made.arrive(share=True, prompt=2, sampling=SAMPLED)
    made.extend([short])
    made.propose([short, long], [GAMMA, GAMMA])
    assert made.compared == 1


def test_broken_states_of_one_request_cost_it_its_drafts_alone() -> None:
    made = rig()
    seats = [made.arrive(share=False, prompt=6, sampling=SAMPLED) for _ in range(3)]
    ids = torch.cat([torch.tensor(made.live[seat].text[:5]) for seat in seats])
    features = torch.randn(15, 2 * HIDDEN)
    features[5:10] = float("nan")
    for seat in seats:
        made.pages.grow(seat, 6 + GAMMA + 1)
    made.batch.extend(seats, [5, 5, 5], ids, features)
    asks = [
        DraftAsk(seat=seat, anchor=3, sampling=SAMPLED, generator=torch.Generator().manual_seed(1), limit=GAMMA)
        for seat in seats
    ]
    proposal = made.batch.propose(asks)
    assert proposal.proposed.tolist() == [GAMMA, 0, GAMMA] and proposal.certain.tolist() == [False, True, False]


def test_a_seat_without_pages_is_refused_by_name() -> None:
    made = rig()
    seat = made.arrive(share=False, prompt=6)
    made.tables.clear(seat)
    with pytest.raises(RequestError, match=f"seat {seat} needs"):
        made.batch.extend([seat], [5], torch.zeros(5, dtype=torch.long), torch.zeros(5, 2 * HIDDEN))


def test_nobody_asks() -> None:
    found = rig().batch.propose([])
    assert found.draft_tokens.shape == (0, GAMMA) and found.confidence is not None


class FirstGenerator(DsparkBatch):
    """A planted fault: one request's generator for all."""

    def propose(self, asks: list[DraftAsk]) -> BatchProposal:  # type: ignore[override]
        return super().propose([replace(ask, generator=asks[0].generator) for ask in asks])


class LastSampling(DsparkBatch):
    """A planted fault: one request's temperature for all."""

    def propose(self, asks: list[DraftAsk]) -> BatchProposal:  # type: ignore[override]
        return super().propose([replace(ask, sampling=asks[-1].sampling) for ask in asks])


class WrongPages(DsparkBatch):
    """A planted fault: a newcomer on shared pages is treated as if it had none of their tokens."""

    def resume(self, seat: int, token_ids: object) -> None:
        return None


@pytest.mark.parametrize("flaw", [FirstGenerator, LastSampling, WrongPages])
def test_planted_faults_are_caught(flaw: type[DsparkBatch]) -> None:
    with pytest.raises(AssertionError):
        run(rig(batch=flaw, options={"seed": 3}), steps=20)


def test_the_rig_covers_what_it_should() -> None:
    """Greedy and sampled requests of every kind come up, and several at once."""
    made = rig(options={"seed": 1})
    seen: set[SamplingParams] = set()
    together = 0
    for _ in range(15):
        made.step()
        seen |= {twins.sampling for twins in made.live.values()}
        together = max(together, len(made.live))
    assert len(seen) >= len(SAMPLINGS) - 2 and together >= 4
