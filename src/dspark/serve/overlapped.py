"""The overlapped loop: what the next step needs and this pass cannot change is done while the target runs.

    thread of the target   |  pass t                                            |  pass t + 1
    thread of the engine   |  text and events of t - 1, admission for t + 1     |  ...
                           |  (seats, pages, cached prefixes, drafter's seats)  |

Between two passes remains what needs the pass: verify, commit, draft, schedule. Drafting cannot be moved: it needs the
anchor. Nobody is preempted during a pass; who needs pages that are not there waits for the pass to end. The lagged
scheduler's capacity is settled during the pass as well, from the confidences of two steps ago.

Same outputs as the plain loop at temperature 0 and with fixed lengths; the same distribution otherwise. Events of a
step are told while the next one runs, so its caller gets them through ``early``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dspark.serve.batch import Step
from dspark.serve.engine import Engine
from dspark.serve.events import StepEvent


class OverlappedEngine(Engine):
    """The same engine with the passes in a thread of their own. Its methods are for one thread, as the plain one's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`Engine`."""
        super().__init__(*args, **kwargs)
        self._passes = ThreadPoolExecutor(1, thread_name_prefix="dspark-target")
        self._next: Step | None = None  # drafted and scheduled, not yet run

    def step(self, early: Callable[[list[StepEvent]], None] | None = None) -> list[StepEvent]:
        """One pass, and beside it what the last one brought; the events of the last one, or what ``early`` leaves."""
        step = self._next or self._prepared()
        self._next = None
        batch = None if step is None else step.lay_out()
        if step is None or batch is None or not batch.flights:
            events = self._tell()
            self._settle()
            return events
        running = self._passes.submit(self._run, batch)
        events = self._tell()
        if early is not None and events:
            early(events)
            events = []
        try:
            self._admit()
            self.planner.foresee([flight for flight in self.roster.running if flight.output_len])
        except Exception as error:
            self._fail_all([flight for flight in self.roster.running if flight not in batch.flights], error)
        self._outcomes += self._finish(step, batch, running.result())
        self._settle()
        self._next = self._prepared()
        return events

    def close(self) -> None:
        """Cancel everything; see :meth:`Engine.close`."""
        super().close()
        self._next = None
        self._passes.shutdown()
