"""Chain drafters for many requests over shared pages: per request the single form's proposals, from the same draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batch_rig import SAMPLINGS, Rig, features_of, run
from fakes import TableTarget
from models.test_chain import KINDS
from models.test_chain_drafter import GAMMA, HIDDEN, NATIVE_SHAPE, SAMPLED, VOCAB, drafter, made, target

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.models import native
from dspark.models.batch_drafter import BatchProposal, DraftAsk, batched
from dspark.models.chain_batch import ChainDraftBatch

compiler = pytest.mark.skipif(native._compiler() is None, reason="needs a C compiler")


def rig(
    kind: str = "eagle3",
    candidates: int = 6,
    *,
    batch: type[ChainDraftBatch] = ChainDraftBatch,
    wide: bool = False,
    options: dict | None = None,
    **changes: object,
) -> Rig:
    """Requests over a drafter of the tests' shape, or ``wide`` enough for the compiled operations."""
    if wide:
        table = TableTarget(vocab_size=VOCAB, order=2, hidden_size=32, max_len=4200)
        changes |= NATIVE_SHAPE
    else:
        table = target()
    one = drafter(made(kind, **changes), table, candidates=candidates)
    assert one.native == (wide and native._compiler() is not None)
    return Rig(one, batch(one), table, **(options or {}))


@pytest.mark.parametrize("candidates", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_proposes_what_each_request_alone_would(kind: str, candidates: int) -> None:
    """Every shape: random arrivals, pieces, beginnings on others' pages, limits, departures."""
    run(rig(kind, candidates), steps=8)


@pytest.mark.parametrize("candidates", [0, 6])
def test_a_reduced_vocabulary(candidates: int) -> None:
    run(rig("mtp", candidates, draft_vocab_size=17), steps=8)


@compiler
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_compiled_operations(kind: str) -> None:
    run(rig(kind, wide=True, options={"seats": 9, "max_len": 60}), steps=15)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_pages_of_any_size(page_size: int) -> None:
    found = rig(options={"page_size": page_size})
    for _ in range(12):
        found.step()
    assert found.compared > 6


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_it_is_what_an_engine_gets(kind: str) -> None:
    one = drafter(made(kind), target())
    found = batched(one, target())
    assert isinstance(found, ChainDraftBatch)
    assert (found.name, found.block_size, found.taps, found.has_confidence) == (kind, GAMMA, one.taps, False)


def test_requests_that_part_behind_a_shared_page_have_rows_of_their_own_from_there() -> None:
    """The row of a page's last token depends on the token behind the page, which is each request's own. Three requests
    share two pages and go three ways; a fourth goes on behind the third page of the second one."""
    found = rig(options={"seats": 4, "page_size": 4, "seed": 5})
    first = found.arrive(share=False, prompt=10, sampling=SAMPLED)
    found.extend([first])
    text = found.live[first].text
    pages, ways = found.pages.of(first)[:2], []
    for _ in range(2):
        found._beginning = lambda: (pages, text[:8])  # type: ignore[method-assign]
        ways.append(found.arrive(share=True, prompt=6, sampling=SAMPLED))
    assert len({tuple(found.live[seat].text[8:10]) for seat in (first, *ways)}) == 3
    found.extend(ways)
    second = found.live[ways[0]].text
    found._beginning = lambda: (found.pages.of(ways[0])[:3], second[:12])  # type: ignore[method-assign]
    last = found.arrive(share=True, prompt=3, sampling=SAMPLED)
    found.extend([last])
    found.propose([last, first, *ways], [GAMMA] * 4)
    assert found.compared == 4 and found.resumed == 3


def test_a_beginning_may_end_within_a_page() -> None:
    """A drafter that is fed late may know less of a shared page than is there; it is fed the rest, over the same."""
    found = rig(options={"page_size": 8})
    first = found.arrive(share=False, prompt=14, sampling=SAMPLED)
    found.extend([first])
    held, text = found.pages.of(first)[:1], found.live[first].text[:8]
    found._beginning = lambda: (held, text)  # type: ignore[method-assign]
    second = found.arrive(share=True, prompt=4, sampling=SAMPLED)
    found.batch.close(second)
    found.batch.open(second, shaper=None)
    found.batch.resume(second, text[:5])
    rest = features_of(found.table, text, found.single.taps, 5)
    found.batch.extend([second], [3], torch.tensor(text[5:]), rest)
    found.extend([second])
    found.propose([second, first], [GAMMA, GAMMA])
    assert found.compared == 2


def test_past_the_drafters_limit_a_request_drafts_less_and_then_sits_out_alone() -> None:
    found = rig("mtp", max_position_embeddings=20)
    seats = [found.arrive(share=False, prompt=n + 1, sampling=SAMPLED) for n in (21, 19, 18, 5)]
    found.extend(seats)
    assert [one.block for one in found.propose(seats, [GAMMA] * 4)] == [0, 2, 3, GAMMA]


def test_tokens_past_the_drafters_limit_leave_rows_that_others_can_share() -> None:
    found = rig(max_position_embeddings=24)
    long = found.arrive(share=False, prompt=31, sampling=SAMPLED)
    found.extend([long])
    assert found.propose([long], [GAMMA])[0].block == 0
    shared, text = found.pages.of(long)[:4], found.live[long].text[:16]
    found._beginning = lambda: (shared, text)  # type: ignore[method-assign]
    short = found.arrive(share=True, prompt=2, sampling=SAMPLED)
    found.extend([short])
    found.propose([short, long], [GAMMA, GAMMA])
    assert found.compared == 1


def test_broken_states_of_one_request_cost_it_its_drafts_alone() -> None:
    found = rig()
    seats = [found.arrive(share=False, prompt=6, sampling=SAMPLED) for _ in range(3)]
    ids = torch.cat([torch.tensor(found.live[seat].text[:5]) for seat in seats])
    features = torch.randn(15, 2 * HIDDEN)
    features[5:10] = float("nan")
    for seat in seats:
        found.pages.grow(seat, 6 + GAMMA + 1)
    found.batch.extend(seats, [5, 5, 5], ids, features)
    asks = [
        DraftAsk(seat=seat, anchor=3, sampling=SAMPLED, generator=torch.Generator().manual_seed(1), limit=GAMMA)
        for seat in seats
    ]
    proposal = found.batch.propose(asks)
    assert proposal.proposed.tolist() == [GAMMA, 0, GAMMA] and proposal.certain.tolist() == [False, True, False]
    assert not proposal.draft_tokens[1].any()


def test_a_seat_without_pages_is_refused_by_name() -> None:
    found = rig()
    seat = found.arrive(share=False, prompt=6)
    found.tables.clear(seat)
    with pytest.raises(RequestError, match=f"seat {seat} needs a page for position 0"):
        found.batch.extend([seat], [5], torch.zeros(5, dtype=torch.long), torch.zeros(5, 2 * HIDDEN))


def test_nobody_asks() -> None:
    found = rig().batch.propose([])
    assert found.draft_tokens.shape == (0, GAMMA) and found.confidence is None


class FirstGenerator(ChainDraftBatch):
    """A planted fault: one request's generator for all."""

    def propose(self, asks: list[DraftAsk]) -> BatchProposal:  # type: ignore[override]
        return super().propose([replace(ask, generator=asks[0].generator) for ask in asks])


class LastSampling(ChainDraftBatch):
    """A planted fault: one request's temperature for all."""

    def propose(self, asks: list[DraftAsk]) -> BatchProposal:  # type: ignore[override]
        return super().propose([replace(ask, sampling=asks[-1].sampling) for ask in asks])


class RowsWhereTheirStatesAre(ChainDraftBatch):
    """A planted fault: row i in the place of token i, so that the last row of a shared page is the last writer's."""

    def _find_rows(self, seats: torch.Tensor, positions: torch.Tensor) -> None:
        later = positions > 0
        seats, positions = seats[later], positions[later]
        self._rows.ids[seats, positions - 1] = self._places(seats, positions - 1)


@pytest.mark.parametrize("flaw", [FirstGenerator, LastSampling, RowsWhereTheirStatesAre])
def test_planted_faults_are_caught(flaw: type[ChainDraftBatch]) -> None:
    with pytest.raises(AssertionError):
        run(rig(batch=flaw, options={"seed": 3}), steps=20)


def test_the_rig_covers_what_it_should() -> None:
    """Greedy and sampled requests of every kind come up, and several at once."""
    found = rig(options={"seed": 1})
    seen: set[SamplingParams] = set()
    together = 0
    for _ in range(15):
        found.step()
        seen |= {twins.sampling for twins in found.live.values()}
        together = max(together, len(found.live))
    assert len(seen) >= len(SAMPLINGS) - 2 and together >= 4
