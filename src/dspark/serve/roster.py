"""Who waits, who has a seat, and whose pages are whose: admission, growth, preemption, release.

First come, first served: the oldest waiting request takes a seat when pages for all its tokens are to be had; those
behind it wait too. When a running request needs a page and there is none, the youngest gives its seat and pages back
and waits again, before all that came after it. The oldest is never the youngest unless it is alone, and alone it has
all pages, so the engine always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from dspark.errors import ConfigError
from dspark.models.paged_memory import PageTables
from dspark.models.target import KVMemory, PagedTarget, Target
from dspark.serve.flight import Flight
from dspark.serve.lazy import LazyDrafter
from dspark.serve.pages import PageManager
from dspark.serve.settings import DEFAULT_MEMORY_MIB, EngineConfig

Fail = Callable[[Flight, Exception], None]


class Roster:
    """Seats and pages of an engine, and the requests on and before them."""

    def __init__(
        self,
        *,
        memory: KVMemory,
        tables: PageTables,
        pages: PageManager,
        drafter: LazyDrafter,
        scratch: int,
        sharing: bool,
    ) -> None:
        """``scratch``: positions behind a request's tokens that a step may write, in target or drafter."""
        self.memory, self.tables, self.pages, self.drafter = memory, tables, pages, drafter
        self.scratch, self.sharing = scratch, sharing
        self.waiting: deque[Flight] = deque()  # oldest first
        self.running: list[Flight] = []  # oldest first
        self.preemptions = self.cached_tokens = 0
        self._seats = list(range(tables.seats - 1, -1, -1))  # free ones; the lowest is taken first

    def __iter__(self) -> Iterator[Flight]:
        yield from self.running
        yield from self.waiting

    def pages_for(self, flight: Flight) -> int:
        """Pages that its tokens and the scratch behind them take."""
        return self.pages.pages_for(len(flight.ids) + self.scratch)

    def admit(self, fail: Fail) -> list[Flight]:
        """Seat as many waiting requests as seats and pages allow, oldest first, and return them. A request that the
        drafter refuses goes to ``fail``."""
        seated: list[Flight] = []
        while self.waiting and self._seats:
            flight = self.waiting[0]
            shared: list[int] = []
            if self.sharing and flight.reads_prefix:
                # never the last token: it must be run, for its logits or as the anchor
                whole = (len(flight.ids) - 1) // self.pages.page_size
                shared = self.pages.match(flight.keys.of(flight.ids, whole))
            fresh = self.pages_for(flight) - len(shared)
            spare = len(self.running)  # a page for each, or the next step would preempt whom this one seats
            if fresh + spare > self.pages.available and self.running:
                break
            page_ids = self.pages.take(fresh, shared=shared)
            if page_ids is None:
                break
            self.waiting.popleft()
            try:
                self._seat(flight, page_ids, shared=len(shared))
                seated.append(flight)
            except Exception as error:
                fail(flight, error)
        return seated

    def _seat(self, flight: Flight, page_ids: list[int], *, shared: int) -> None:
        flight.seat, flight.page_ids = self._seats.pop(), page_ids
        at = next((i for i, other in enumerate(self.running) if other.number > flight.number), len(self.running))
        self.running.insert(at, flight)
        self.tables.assign(flight.seat, page_ids)
        flight.computed = flight.cached = shared * self.pages.page_size
        flight.published = shared
        self.cached_tokens += flight.cached
        self.memory.lengths[flight.seat] = flight.computed
        self.drafter.open(flight.seat, shaper=flight.shaper)
        if flight.computed:
            self.drafter.resume(flight.seat, flight.ids[: flight.computed])

    def grow(self, flight: Flight) -> bool:
        """Give a running request the pages it lacks; False, and none given, if there are too few."""
        missing = self.pages_for(flight) - len(flight.page_ids)
        if missing <= 0:
            return True
        more = self.pages.take(missing)
        if more is None:
            return False
        self.tables.assign(flight.seat, more, start=len(flight.page_ids))
        flight.page_ids += more
        return True

    def make_room(self) -> None:
        """Pages for every running request's next step, oldest first, preempting the youngest where there are none."""
        room = [flight for flight in self.running if self._lacks(flight)]
        for flight in room:
            while flight.seat >= 0 and not self.grow(flight):
                self.preempt(self.running[-1])

    def _lacks(self, flight: Flight) -> bool:
        return len(flight.ids) + self.scratch > len(flight.page_ids) * self.pages.page_size

    def preempt(self, flight: Flight) -> None:
        """Take seat and pages from a running request; it waits as the first of those that are younger."""
        self.release(flight)
        self.preemptions += 1
        at = next((i for i, other in enumerate(self.waiting) if other.number > flight.number), len(self.waiting))
        self.waiting.insert(at, flight)

    def publish(self, flight: Flight) -> None:
        """Offer the whole pages of committed tokens that the target has run, and that are not known yet, for sharing;
        the drafter's part of them is there, or is kept to be taken in."""
        whole = min(flight.computed, len(flight.ids)) // self.pages.page_size
        if whole > flight.published:
            keys = flight.keys.of(flight.ids, whole)
            for i in range(flight.published, whole):
                self.pages.publish(flight.page_ids[i], keys[i])
            flight.published = whole

    def release(self, flight: Flight, *, forget: bool = False) -> None:
        """Free all that a request holds, wherever it is; nothing happens if that is nowhere. ``forget``: what it
        computed is not to be shared."""
        if flight.seat < 0:
            if flight in self.waiting:
                self.waiting.remove(flight)
            return
        seat = flight.seat
        self.running.remove(flight)
        self.pages.give_back(flight.page_ids, forget=forget)
        self.tables.clear(seat)
        self.memory.lengths[seat] = 0
        self._seats.append(seat)
        flight.vacate()
        self.drafter.close(seat)

    def check(self) -> None:
        """Assert that seats, pages, tables and lengths agree. For tests."""
        seats = [flight.seat for flight in self.running]
        assert len(set(seats)) == len(seats) and not set(seats) & set(self._seats), "a seat is owned twice"
        assert len(seats) + len(self._seats) == self.tables.seats, "a seat is lost"
        self.pages.check([flight.page_ids for flight in self.running])
        for flight in self.running:
            row = self.tables.ids[flight.seat].tolist()
            held = len(flight.page_ids)
            assert row[:held] == flight.page_ids and set(row[held:]) <= {-1}, "the table is not what the request holds"
            assert self.memory.lengths[flight.seat] == flight.computed <= len(flight.ids), "lengths disagree"
        assert all(self.memory.lengths[seat] == 0 for seat in self._seats), "a free seat has a length"
        numbers = [[flight.number for flight in group] for group in (self.running, self.waiting)]
        assert all(group == sorted(group) for group in numbers), "out of order"


def make_roster(target: Target, drafter: LazyDrafter, config: EngineConfig, *, max_len: int) -> Roster:
    """Seats, pages, tables and memory for ``config``, with the drafter attached.

    A target without paged memory gets one page per seat, as long as a request can be, and shares nothing. Raises
    :class:`ConfigError` where not even one seat could be used.
    """
    scratch = drafter.block_size + 1
    paged = isinstance(target, PagedTarget)
    page_size = config.page_size if paged else max_len + scratch
    tables = PageTables(seats=config.seats, pages_per_seat=-(-(max_len + scratch) // page_size), page_size=page_size)
    memory: KVMemory
    if isinstance(target, PagedTarget):
        pages = _count_pages(target, tables, config, least=scratch + 2)
        memory = target.new_paged_memory(tables, pages=pages)
    else:
        pages = config.seats
        memory = target.new_memory(rows=config.seats, max_len=max_len)
    drafter.attach(tables, pages=pages, max_len=max_len)
    return Roster(
        memory=memory,
        tables=tables,
        pages=PageManager(pages=pages, page_size=page_size),
        drafter=drafter,
        scratch=scratch,
        sharing=config.prefix_sharing and paged,
    )


def _count_pages(target: Target, tables: PageTables, config: EngineConfig, *, least: int) -> int:
    """Pages as configured, and no more than all seats together can fill; ``least``: tokens of the smallest request."""
    if config.pages is not None:
        pages = config.pages
    else:
        page = target.new_memory(rows=1, max_len=min(tables.page_size, target.info.max_len))
        mib = config.memory_mib or DEFAULT_MEMORY_MIB
        pages = mib * 2**20 // max(1, page.nbytes)
    if pages < tables.pages_for(least):
        raise ConfigError(
            f"the engine's memory holds {pages} pages of {tables.page_size} tokens, too few for any request; "
            "raise memory_mib or pages"
        )
    return min(pages, tables.seats * tables.pages_per_seat)
