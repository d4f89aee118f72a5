"""The end of a step: verify a pass and commit what stands, request by request."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.maths.batch_verification import BatchVerdict
from dspark.maths.logprobs import row_logprobs
from dspark.models.native_verification import verify_batch
from dspark.serve.batch import Judged, StepBatch, StepOutput
from dspark.serve.flight import Flight
from dspark.serve.lazy import LazyDrafter
from dspark.serve.outcome import Outcome, take_in
from dspark.serve.roster import Roster


def verify(batch: StepBatch, output: StepOutput) -> BatchVerdict | None:
    """What stands of the drafts of a pass, and the token after it, per judged request; None if nobody is judged."""
    if output.logits is None or not batch.judged:
        return None
    flights = [judged.flight for judged in batch.judged]
    return verify_batch(
        output.logits if batch.judged_rows == len(batch.rows) else output.logits[: batch.judged_rows],
        [judged.verify_len for judged in batch.judged],
        batch.proposal,
        [flight.request.sampling for flight in flights],
        [flight.streams for flight in flights],
        [flight.shaper for flight in flights],
        draft_rows=[judged.draft_row for judged in batch.judged],
    )


class Commit:
    """Writes a pass's outcome into the books of an engine: memory, drafter, texts, pages."""

    def __init__(
        self,
        roster: Roster,
        drafter: LazyDrafter,
        device: torch.device,
        *,
        fail: Callable[[Flight, Exception], None],
    ) -> None:
        """``fail`` ends a request whose own part of a commit went wrong."""
        self.roster, self.drafter, self._device, self._fail = roster, drafter, device, fail

    def take_in(self, batch: StepBatch, output: StepOutput, verdict: BatchVerdict | None) -> float:
        """Keep the rows of prompts, anchors and accepted drafts, in the target's memory and in the drafter's; seconds
        that the drafter took."""
        kept = list(batch.counts)
        if verdict is not None and batch.proposal is not None:
            for judged, accepted in zip(batch.judged, verdict.accepted.tolist(), strict=True):
                if judged.decoded:
                    kept[judged.index] = accepted + 1
        for flight, count, ran in zip(batch.flights, kept, batch.counts, strict=True):
            flight.computed += count
            if count < ran:
                self.roster.memory.rollback(flight.seat, flight.computed)
        if self.drafter.block_size == 0:
            return 0.0
        token_ids = torch.from_numpy(np.array(batch.token_ids, dtype=np.int64)).to(self._device)
        started = time.perf_counter()
        self.drafter.keep(batch.seats, batch.counts, kept, token_ids, output.features)
        return time.perf_counter() - started

    def append(self, batch: StepBatch, output: StepOutput, verdict: BatchVerdict | None) -> list[Outcome]:
        """Append the new tokens, and offer whole pages for sharing; who ended in an outcome still has its seat."""
        outcomes: list[Outcome] = []
        self._tell_prompts(batch, output)
        row = 0
        drawn = [] if verdict is None else zip(verdict.accepted.tolist(), verdict.next_tokens.tolist(), strict=True)
        for i, (judged, (accepted, next_token)) in enumerate(zip(batch.judged, drawn, strict=True)):
            assert verdict is not None
            first, row = row, row + judged.verify_len + 1
            if i in verdict.errors:
                self._fail(judged.flight, verdict.errors[i])
                continue
            try:
                outcomes.append(self._append_one(judged, accepted, next_token, output.logits, first))
            except Exception as error:
                self._fail(judged.flight, error)
        roster, size = self.roster, self.roster.pages.page_size
        if roster.sharing:
            for flight in batch.flights:
                if flight.computed // size > flight.published and flight.seat >= 0:
                    roster.publish(flight)
        return outcomes

    def _append_one(self, judged: Judged, accepted: int, next_token: int, logits: Tensor | None, first: int) -> Outcome:
        """A round's new tokens; ``first`` is the request's first row of ``logits``."""
        flight, drafts = judged.flight, judged.drafts
        outcome = take_in(flight, (*drafts[:accepted], next_token))
        run = outcome.token_ids
        if flight.shaper is not None:
            flight.shaper.commit(run)
        if (top := flight.request.logprobs) is not None:
            assert logits is not None
            outcome.logprobs = tuple(row_logprobs(logits[first : first + len(run)], run, top=top))
        if flight.request.prompt_logprobs is not None and flight.output_len == len(run):
            outcome.prompt_logprobs = tuple(flight.prompt_logprobs)
        if drafts:
            outcome.drafted, outcome.verify_len = len(drafts), judged.verify_len
            outcome.accepted = min(accepted, len(run))
            outcome.rejected_ids = tuple(drafts[outcome.accepted : judged.verify_len])
        return outcome

    def _tell_prompts(self, batch: StepBatch, output: StepOutput) -> None:
        """Log-probabilities of the prompt tokens that the rows of this step's chunks predict."""
        row = batch.judged_rows
        for i in batch.told:
            flight, count = batch.flights[i], batch.counts[i]
            following = flight.ids[flight.computed - count + 1 : min(flight.computed + 1, flight.prompt_len)]
            assert output.logits is not None and flight.request.prompt_logprobs is not None
            rows = output.logits[row : row + len(following)]
            if following:
                flight.prompt_logprobs += row_logprobs(rows, following, top=flight.request.prompt_logprobs)
            row += count
