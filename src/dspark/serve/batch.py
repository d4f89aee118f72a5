"""One target pass over many requests: what goes in, and where each request's rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from dspark.models.batch_drafter import BatchProposal
from dspark.serve.drafting import Drafting
from dspark.serve.flight import Flight

NOTHING: tuple[int, list[int], int] = (0, [], 0)  # of a request without drafts; nobody writes to the list


@dataclass(slots=True, kw_only=True, eq=False)
class Judged:
    """A request whose last row, or whose drafts and the row after them, are drawn from in this step. Never changed;
    freezing would cost more than the rest of it, some hundred times a step."""

    flight: Flight
    index: int  # of the request in the batch
    draft_row: int  # of the proposal; 0 for a request without drafts
    drafts: list[int]  # all that were proposed
    verify_len: int  # of them, in the pass
    decoded: bool  # a round of its own; False: the end of a prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """A flat ragged batch: requests in the order of their seats, each with its next tokens.

    ``rows`` are the tokens whose logits are wanted: first those of the judged requests, one after the other, then
    those of prompt chunks that ask for log-probabilities.
    """

    flights: list[Flight]
    counts: list[int]  # tokens of each
    starts: list[int]  # first token of each
    token_ids: list[int]
    judged: list[Judged]
    rows: list[int]
    judged_rows: int  # of ``rows``, those of the judged
    told: list[int]  # indices of the requests whose chunk rows follow
    proposal: BatchProposal | None

    @property
    def seats(self) -> list[int]:
        return [flight.seat for flight in self.flights]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """What the target made of a batch."""

    logits: Float[Tensor, "rows vocab"] | None  # None: no row was wanted
    features: Float[Tensor, "tokens features"] | None
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A pass that is ready to run: who takes part, the prompt tokens of each, and the drafts of the others."""

    flights: list[Flight]
    chunks: dict[int, int]  # by request number
    plan: Drafting

    def lay_out(self) -> StepBatch:
        """The batch, without requests that have ended since."""
        there = [flight for flight in self.flights if flight.seat >= 0]
        return assemble(there, self.chunks, self.plan.drafts, self.plan.proposal)


def prompt_chunks(running: Sequence[Flight], most: int) -> dict[int, int]:
    """Prompt tokens that each request still being read runs next, by its number: ``most`` in all, oldest first."""
    chunks: dict[int, int] = {}
    for flight in running:
        count = min(flight.prefill_end - flight.computed, most)
        if count > 0 and not flight.decoding:
            chunks[flight.number] = count
            most -= count
    return chunks


def assemble(
    flights: Sequence[Flight],
    chunks: dict[int, int],
    drafts: dict[int, tuple[int, list[int], int]],
    proposal: BatchProposal | None,
) -> StepBatch:
    """Lay a step's tokens out. ``chunks`` [request number]: prompt tokens to run; ``drafts`` [request number]: row of
    the proposal, all drafts, and how many of them to verify. A decoding request in neither runs its anchor alone."""
    ordered = sorted(flights, key=lambda flight: flight.seat)
    counts, starts, token_ids, rows, told = list[int](), list[int](), list[int](), list[int](), list[int]()
    judged: list[Judged] = []
    for i, flight in enumerate(ordered):
        start = len(token_ids)
        starts.append(start)
        if flight.number not in chunks:
            row, proposed, verify_len = drafts.get(flight.number, NOTHING)
            token_ids.append(flight.ids[-1])
            rows.append(start)
            if verify_len:
                token_ids += proposed[:verify_len]
                rows += range(start + 1, len(token_ids))
            judged.append(
                Judged(flight=flight, index=i, draft_row=row, drafts=proposed, verify_len=verify_len, decoded=True)
            )
        else:
            end = flight.computed + chunks[flight.number]
            token_ids += flight.ids[flight.computed : end]
            if end == len(flight.ids):  # only a fresh prompt is run to its last token
                judged.append(Judged(flight=flight, index=i, draft_row=0, drafts=[], verify_len=0, decoded=False))
                rows.append(len(token_ids) - 1)
            if flight.output_len == 0 and flight.request.prompt_logprobs is not None:
                told.append(i)
        counts.append(len(token_ids) - start)
    judged_rows = len(rows)
    for i in told:
        rows += range(starts[i], starts[i] + counts[i])
    return StepBatch(
        flights=ordered,
        counts=counts,
        starts=starts,
        token_ids=token_ids,
        judged=judged,
        rows=rows,
        judged_rows=judged_rows,
        told=told,
        proposal=proposal,
    )
