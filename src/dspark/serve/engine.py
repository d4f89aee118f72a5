"""The engine: one step is admit, draft, schedule, verify, commit, for all requests together.

The plain loop. The parts of a step are methods, in order; :mod:`dspark.serve.overlapped` runs the same parts with the
target's pass in a thread of its own. What comes out is what :func:`dspark.decode.stream` gives each request alone:
token for token at temperature 0 and with fixed verify lengths, in distribution with a scheduler that looks at the load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from dspark.chat import ChatFormat
from dspark.errors import DsparkError, RequestError
from dspark.maths.batch_verification import BatchVerdict
from dspark.maths.step_costs import StepCosts
from dspark.models.batch_drafter import batched
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.lookup_drafter import LookupDrafter
from dspark.models.target import PagedTarget, Target
from dspark.serve.batch import Step, StepBatch, StepOutput, prompt_chunks
from dspark.serve.commit import Commit, verify
from dspark.serve.confidences import Confidences
from dspark.serve.counters import Counters
from dspark.serve.drafting import make_planner
from dspark.serve.errors import EngineClosed, QueueFull
from dspark.serve.events import EngineStats, StepEvent
from dspark.serve.flight import Flight, open_flight
from dspark.serve.lazy import LazyDrafter
from dspark.serve.outcome import Outcome
from dspark.serve.request import GenerationRequest
from dspark.serve.roster import make_roster
from dspark.serve.settings import EngineConfig

_log = logging.getLogger(__name__)


class Engine:
    """Many requests through one target and one drafter. Not for several threads at once."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        config: EngineConfig | None = None,
        chat: ChatFormat | None = None,
        costs: StepCosts | None = None,
        confidences: Confidences | None = None,
    ) -> None:
        """``chat`` turns ids into text; without it events have none. ``costs`` of a step, which greedy, lagged and the
        draft gate weigh, are measured here if they are missing, a matter of seconds. ``confidences`` are calibrations.

        Raises :class:`ConfigError` for settings that the target cannot serve.
        """
        self.target, self.chat, self.config = target, chat, config or EngineConfig()
        if self.config.scheduler == "none":
            drafter = NoDrafter()
        self.drafter_name, lookup = drafter.name, isinstance(drafter, LookupDrafter)
        inner = batched(drafter.inner if isinstance(drafter, LookupDrafter) else drafter, target)
        self.drafter = LazyDrafter(inner, postpones=self.config.gated and isinstance(target, PagedTarget))
        self.max_len = min(self.config.max_len or target.info.max_len, target.info.max_len)
        self.roster = make_roster(target, self.drafter, self.config, max_len=self.max_len)
        if costs is None and self.config.weighs_costs:
            from dspark.serve.costs import measure_costs  # late: it drives an engine's parts

            costs = measure_costs(target, self.drafter, self.roster, prefill_tokens=self.config.prefill_tokens)
        self.planner = make_planner(
            self.drafter,
            self.config,
            costs=costs,
            confidences=confidences,
            lookup=lookup,
            device=target.info.device,
        )
        self.counters = Counters(self.drafter.block_size)
        self._commit = Commit(self.roster, self.drafter, target.info.device, fail=self._fail)
        self._by_id: dict[str, Flight] = {}
        self._outcomes: list[Outcome] = []  # committed and not yet told
        self._untold: list[Outcome] = []  # of requests that ended outside a step's commit
        self._unsound: list[tuple[Flight, Exception]] = []  # whose text could not be told
        self._next_number = 0
        self._closed = False

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        """Let a request wait for a seat.

        Raises :class:`RequestError` for one that cannot be done or whose id is in use, :class:`QueueFull` when as many
        wait as may, :class:`EngineClosed` after :meth:`close`.
        """
        self.check_queue()
        self.enter(self.open(request))

    def check_queue(self, *, entering: int = 0) -> None:
        """Raise if one more request may not wait now, ``entering`` others being about to."""
        if self._closed:
            raise EngineClosed("the engine is closed; make another")
        free = self.config.seats - len(self.roster.running)
        if len(self.roster.waiting) + entering >= self.config.max_waiting + free:
            raise QueueFull(f"{len(self.roster.waiting) + entering} requests wait and no more may; try again later")

    def open(self, request: GenerationRequest) -> Flight:
        """Check a request against the model and this engine's memory; changes nothing, so any thread may ask."""
        flight = open_flight(
            request,
            info=self.target.info,
            max_len=self.max_len,
            page_size=self.roster.pages.page_size,
            chat=self.chat,
        )
        needed = self.roster.pages.pages_for(flight.room + self.roster.scratch)
        if needed > self.roster.pages.pages:
            raise RequestError(
                f"prompt and output may take {flight.room} tokens, {needed} pages, and there are "
                f"{self.roster.pages.pages}; lower max_new_tokens, or raise the engine's memory"
            )
        return flight

    def enter(self, flight: Flight) -> None:
        """Let an opened request wait behind all others."""
        request_id = flight.request.request_id
        untold = (outcome.flight.request.request_id for outcome in (*self._outcomes, *self._untold))
        if request_id in self._by_id or request_id in untold:
            raise RequestError(f"request_id is {request_id!r}, which is in flight; choose another")
        flight.number, self._next_number = self._next_number, self._next_number + 1
        self._by_id[request_id] = flight
        self.roster.waiting.append(flight)

    def cancel(self, request_id: str) -> bool:
        """End a request at once and free all it holds; its last event comes with the next step. False if there is no
        such request (any more)."""
        flight = self._by_id.get(request_id)
        if flight is None:
            return False
        self._end(flight, "cancelled")
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return bool(self.roster.running or self.roster.waiting or self._outcomes or self._untold)

    def stats(self, *, entering: int = 0) -> EngineStats:
        """Counts and the state of seats and pages; ``entering`` requests are about to wait."""
        return self.counters.stats(self.roster, entering=entering)

    def close(self) -> None:
        """Cancel everything; the engine takes no more requests. What is left to tell comes with one last step."""
        for flight in list(self._by_id.values()):
            self._end(flight, "cancelled")
        self._closed = True

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, early: Callable[[list[StepEvent]], None] | None = None) -> list[StepEvent]:
        """Admit, draft, schedule, verify, commit; what it brought each request. ``early`` is for loops that have
        something to tell before a step has ended; this one has not.

        An error that belongs to one request ends that one; any other ends all that were in the pass. The engine can go
        on in either case.
        """
        step = self._prepared()
        if step is not None:
            batch = step.lay_out()
            self._outcomes += self._finish(step, batch, self._run(batch))
        events = self._tell()
        self._settle()
        return events

    def _tell(self) -> list[StepEvent]:
        """Events of what is untold: what steps committed, and then who ended otherwise."""
        outcomes, self._outcomes, self._untold = [*self._outcomes, *self._untold], [], []
        events: list[StepEvent] = []
        for outcome in outcomes:
            try:
                events.append(outcome.event())
            except Exception as error:
                outcome.text = ""
                events.append(outcome.event())
                self._unsound.append((outcome.flight, error))
        return events

    def _settle(self) -> None:
        """End requests whose text could not be told; not during a pass."""
        unsound, self._unsound = self._unsound, []
        for flight, error in unsound:
            self._fail(flight, error)

    def _prepared(self) -> Step | None:
        """Everything before the target's pass; None if there is nothing to run, or nothing is left after an error."""
        try:
            return self._prepare()
        except Exception as error:
            self._fail_all(self.roster.running, error)
            return None

    def _prepare(self) -> Step | None:
        started = time.perf_counter()
        self.roster.make_room()
        self._admit()
        running = self.roster.running
        decoding = [flight for flight in running if flight.decoding]
        chunks = prompt_chunks(running, self.config.prefill_tokens)
        self.counters.seconds["admit"] += time.perf_counter() - started
        plan = self.planner.plan(decoding, other_tokens=sum(chunks.values()))
        for flight, error in plan.failed:
            self._fail(flight, error)
        self.counters.seconds["draft"] += plan.draft_seconds
        self.counters.seconds["schedule"] += plan.schedule_seconds
        flights = [flight for flight in running if flight.number in chunks] + decoding
        return Step(flights=flights, chunks=chunks, plan=plan) if flights else None

    def _admit(self) -> None:
        for flight in self.roster.admit(self._fail):
            self.planner.open(flight.seat)

    def _run(self, batch: StepBatch) -> StepOutput | Exception:
        """The target's pass; touches nothing of the engine but the memory of the batch's seats."""
        started = time.perf_counter()
        device = self.target.info.device
        try:
            output = self.target.forward(
                torch.tensor(batch.token_ids, dtype=torch.long, device=device),
                self.roster.memory,
                rows=batch.seats,
                counts=batch.counts,
                taps=self.drafter.taps,
                want_logits=False,
            )
            final = output.final
            if batch.rows != list(range(len(batch.token_ids))):  # prompt rows that are told come after the judged
                final = final[torch.tensor(batch.rows, dtype=torch.long, device=device)]
            logits = self.target.logits(final) if batch.rows else None
        except Exception as error:
            return error
        return StepOutput(logits=logits, features=output.features, seconds=time.perf_counter() - started)

    def _finish(self, step: Step, batch: StepBatch, output: StepOutput | Exception) -> list[Outcome]:
        """Verify and commit a pass."""
        if isinstance(output, Exception):
            self._fail_all(batch.flights, output)
            return []
        seconds, started = self.counters.seconds, time.perf_counter()
        seconds["target"] += output.seconds
        try:
            verdict = verify(batch, output)
            verified = time.perf_counter()
            seconds["verify"] += verified - started
            feeding = self._commit.take_in(batch, output, verdict)
            outcomes = self._commit.append(batch, output, verdict)
            self._count(step, batch, verdict)
        except Exception as error:
            self._fail_all(batch.flights, error)
            return []
        seconds["draft"] += feeding  # taking features in is drafting too
        seconds["commit"] += time.perf_counter() - verified - feeding
        for outcome in outcomes:
            self.counters.completion_tokens += len(outcome.token_ids)
            if outcome.finish_reason is not None:
                self._close(outcome.flight, outcome.finish_reason)
        return outcomes

    def _count(self, step: Step, batch: StepBatch, verdict: BatchVerdict | None) -> None:
        counters = self.counters
        counters.steps += 1
        if step.chunks:
            counters.prompt_tokens += sum(step.chunks.get(flight.number, 0) for flight in batch.flights)
        if verdict is None:
            return
        if step.plan.proposal is None:
            counters.count_plain(sum(judged.decoded for judged in batch.judged))
            self.planner.observe(step.plan, {})
            return
        proposed, verified, accepted, by_number = list[int](), list[int](), list[int](), dict[int, int]()
        for judged, count in zip(batch.judged, verdict.accepted.tolist(), strict=True):
            if judged.decoded:
                proposed.append(len(judged.drafts))
                verified.append(judged.verify_len)
                accepted.append(count)
                by_number[judged.flight.number] = count
                if judged.flight.number in step.plan.looked_up:
                    counters.lookup_rounds += 1
                    counters.lookup_accepted += count
        counters.drafted_steps += any(proposed)
        counters.count_rounds(proposed, verified, accepted)
        self.planner.observe(step.plan, by_number)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _fail_all(self, flights: Sequence[Flight], error: Exception) -> None:
        for flight in list(flights):
            self._fail(flight, error)

    def _fail(self, flight: Flight, error: Exception) -> None:
        if not isinstance(error, DsparkError):
            _log.error("request %s failed", flight.request.request_id, exc_info=error)
        self._end(flight, "error", error)

    def _end(self, flight: Flight, reason: str, error: Exception | None = None) -> None:
        """End a request from outside its own commit; its last event comes with the next ones told."""
        if flight.ended:
            return
        self._untold.append(
            Outcome(
                flight=flight,
                finish_reason=reason,
                error=error,
                cached=flight.cached,
                completion_tokens=flight.output_len,
            )
        )
        self._close(flight, reason)

    def _close(self, flight: Flight, reason: str) -> None:
        flight.ended = True
        del self._by_id[flight.request.request_id]
        self.counters.finished[reason] += 1
        try:
            self.roster.release(flight, forget=reason == "error")
        except Exception as error:  # the drafter's own books; the seat is free already
            _log.error("closing the drafter's seat of %s failed", flight.request.request_id, exc_info=error)
