"""The engine's step without a model: admit, draft, schedule, verify, commit, on a clock that costs move.

A request takes a seat, has its prompt worked off in chunks beside the others' steps, gets its first token when the last
chunk is done, and from then on a round in every step: 1 + accepted tokens, never more than its answer has left.

    seat's arrays    owner
    number           the request's number, -1 on a free seat; `_admit` and `_finish`
    prompt_left      prompt tokens not yet worked off; `_prefill`
    output_left      answer tokens still to come; `_commit`
    context          committed tokens; `_prefill` and `_commit`
    got              answer tokens so far; `_commit`
    first            when the first of them came; `_commit`
    since, lead      when decoding began, and how many tokens were there by then: the prompt's, or none
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from dspark.errors import ConfigError
from dspark.maths.batch_schedulers import StepDrafts
from dspark.maths.skipping import break_even
from dspark.maths.step_costs import StepCosts, convex_from, own_seconds
from dspark.simulate.acceptance import RoundSource
from dspark.simulate.arrivals import Arrivals
from dspark.simulate.costs import Costs
from dspark.simulate.decider import Decider, Outcome, Weights
from dspark.simulate.log import Log
from dspark.simulate.ways import Way

Seats = Int[np.ndarray, "requests"]
NOBODY = -1  # the number on a free seat


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What the simulated engine can hold and do in a step."""

    seats: int = 256  # most requests in flight, >= 1
    prefill_tokens: int = 512  # most prompt tokens in a step, >= 1
    prefill_elsewhere: bool = False  # prompts come worked off, by other machines

    def __post_init__(self) -> None:
        for name in ("seats", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class Engine:
    """A simulated engine that decodes in one :class:`Way`. :meth:`step` until it says that nothing is left to do."""

    def __init__(
        self,
        way: Way,
        *,
        source: RoundSource,
        costs: Costs,
        arrivals: Arrivals,
        shape: EngineShape,
        rng: np.random.Generator,
    ) -> None:
        """Raises :class:`ConfigError` if the way weighs confidences and ``source`` has none."""
        if way.needs_confidence and not source.has_confidence:
            raise ConfigError(
                f"scheduler {way.name} needs a confidence for each draft and the records hold none; use the records "
                "of a drafter with a confidence head, or fixed"
            )
        self.way, self.log, self.now = way, Log(block_size=source.block_size), 0.0
        self._source, self._costs, self._arrivals, self._shape, self._rng = source, costs, arrivals, shape, rng
        self._decider = Decider(way, seats=shape.seats, block_size=source.block_size)
        self._draft_table = _drafting(way, costs, seats=shape.seats, block_size=source.block_size)
        self._number = np.full(shape.seats, NOBODY)
        self._prompt_left, self._output_left, self._context, self._got = np.zeros((4, shape.seats), dtype=np.int64)
        self._lead = np.zeros(shape.seats, dtype=np.int64)
        self._arrival, self._first, self._since = np.zeros((3, shape.seats))
        self._met, self._admitted = np.zeros(shape.seats, dtype=bool), 0

    def step(self) -> bool:
        """One step; False, and nothing done, if no request is there or will come."""
        self._admit()
        taken = np.flatnonzero(self._number != NOBODY)
        if not len(taken):
            then = self._arrivals.next_after(self.now)
            if then is None:
                return False
            self.log.idle(then - self.now)
            self.now = then
            self._admit()
            taken = np.flatnonzero(self._number != NOBODY)
        decoding = taken[self._prompt_left[taken] == 0]
        chunk_seats, chunks = self._chunks(taken)
        begun = int((chunks == self._prompt_left[chunk_seats]).sum())
        self._round(decoding, chunk_tokens=int(chunks.sum()), begun=begun, in_flight=len(taken))
        self._prefill(chunk_seats, chunks)
        self._finish(taken)
        return True

    def close(self) -> None:
        """Count the answers under way for what they have come to."""
        for seat in np.flatnonzero(self._number != NOBODY):
            self._note(int(seat), finished=False)

    def _admit(self) -> None:
        """Waiting requests take the free seats, the lowest first."""
        free = np.flatnonzero(self._number == NOBODY)
        new = self._arrivals.take(self.now, len(free))
        seats = free[: len(new.arrival)]
        if not len(seats):
            return
        self._number[seats] = self._admitted + np.arange(len(seats))
        self._admitted += len(seats)
        worked_off = new.under_way or self._shape.prefill_elsewhere
        self._prompt_left[seats] = 0 if worked_off else new.prompt_tokens
        self._context[seats] = new.prompt_tokens if worked_off else 0
        self._output_left[seats], self._arrival[seats] = new.output_tokens, new.arrival
        self._got[seats], self._met[seats] = 0, new.under_way
        self._since[seats], self._lead[seats] = self.now, 0
        self._source.open(seats, self._rng)
        self._decider.open(seats)

    def _chunks(self, taken: Int[np.ndarray, "taken"]) -> tuple[Int[np.ndarray, "reading"], Int[np.ndarray, "reading"]]:
        """Seats whose prompts are worked on in this step, the longest there first, and tokens of each."""
        seats = taken[self._prompt_left[taken] > 0]
        seats = seats[np.argsort(self._number[seats])]
        left = self._prompt_left[seats]
        ahead = np.cumsum(left) - left
        chunks = np.minimum(left, np.maximum(0, self._shape.prefill_tokens - ahead))
        return seats[chunks > 0], chunks[chunks > 0]

    def _round(self, seats: Seats, *, chunk_tokens: int, begun: int, in_flight: int) -> None:
        """Draft, schedule, verify and commit for ``seats``, beside ``chunk_tokens`` tokens of prompts, of which
        ``begun`` answers get their first tokens."""
        pass_seconds = self._pass_seconds(in_flight)
        weights = self._weights(len(seats), pass_seconds, chunk_tokens) if self._decider.weighs and len(seats) else None
        # a round's last token is the target's own: no draft past the answer's end is asked for
        limits = np.minimum(self._source.block_size, self._output_left[seats] - 1)
        asked = self._decider.ask(seats, limits, weights)
        drafts, would_accept = self._drafts(seats, asked)
        drafted, plain = int((drafts.proposed > 0).sum()), len(seats) + chunk_tokens
        drafting = float(self._draft_table[np.count_nonzero(asked), asked.max(initial=0)])
        beside = drafting + self._costs.host_seconds
        if weights is not None:
            drafts = replace(drafts, sps=weights.sps(drafting))
        lens = self._decider.choose(drafts)
        accepted = np.minimum(would_accept, lens)
        tokens = plain + int(lens.sum())
        target = float(pass_seconds(tokens, tokens)[0])
        # all of the step waited for the drafts of those that were drafted for
        undrafted = float(pass_seconds(plain, plain)[0]) + self._costs.host_seconds
        paid = break_even(draft_seconds=beside, verify_seconds=target, plain_seconds=undrafted)
        self._decider.observe(
            Outcome(
                seats=seats,
                asked=asked,
                drafts=drafts,
                verify_lens=lens,
                accepted=accepted,
                break_even=paid * len(seats) / max(1, drafted),
            )
        )
        self.log.step(
            seconds=beside + target,
            draft_seconds=drafting,
            target_seconds=target,
            decoding=len(seats),
            drafted=drafted,
            checked=int(lens.sum()),
            accepted=int(accepted.sum()),
            prompt_tokens=chunk_tokens,
            begun=begun,
            in_flight=in_flight,
            waiting=self._arrivals.waiting(self.now),
        )
        self.now += beside + target
        self._commit(seats, accepted + 1)

    def _pass_seconds(self, in_flight: int) -> Callable[[int, int], Float[np.ndarray, "sizes"]]:
        """The target's pass of this step, for ranges of tokens."""
        context = int(self._context.sum())
        return lambda first, last: self._costs.target_seconds(first, last, requests=in_flight, context=context)

    def _weights(
        self, requests: int, pass_seconds: Callable[[int, int], Float[np.ndarray, "sizes"]], chunk_tokens: int
    ) -> Weights:
        """What the decoding tokens of this step cost, by their number, beside its prompts."""
        most = requests * (1 + self._source.block_size)
        seconds = pass_seconds(1, chunk_tokens + most) + self._costs.host_seconds
        curve = np.concatenate((seconds[:1], seconds))  # at no token something positive, which nobody asks for
        passes = own_seconds(curve, other_tokens=chunk_tokens, requests=requests)
        judged = convex_from(passes, requests) if self.way.convex else None
        return Weights(costs=StepCosts(contexts=(1,), passes=passes[None], drafts=self._draft_table), judged=judged)

    def _drafts(
        self, seats: Seats, asked: Int[np.ndarray, "requests"]
    ) -> tuple[StepDrafts, Int[np.ndarray, "requests"]]:
        """What is proposed for ``seats``, at most what is ``asked``, and how much of it would be accepted."""
        places, block = np.flatnonzero(asked), self._source.block_size
        rounds = self._source.draw(seats[places], self._rng)
        proposed, accepted = np.zeros((2, len(seats)), dtype=np.int64)
        proposed[places] = np.minimum(rounds.proposed, asked[places])
        accepted[places] = np.minimum(rounds.accepted, proposed[places])
        confidence = np.zeros((len(seats), block))
        confidence[places] = np.where(np.arange(block) < proposed[places, None], rounds.confidence, 0.0)
        return StepDrafts(request_ids=self._number[seats], proposed=proposed, confidence=confidence), accepted

    def _commit(self, seats: Seats, tokens: Int[np.ndarray, "requests"]) -> None:
        self._first[seats] = np.where(self._got[seats] == 0, self.now, self._first[seats])
        self._context[seats] += tokens
        self._output_left[seats] -= tokens
        self._got[seats] += tokens

    def _prefill(self, seats: Seats, chunks: Int[np.ndarray, "requests"]) -> None:
        """Prompts after this step; one that is worked off gives the answer's first token at once."""
        self._prompt_left[seats] -= chunks
        self._context[seats] += chunks
        done = seats[self._prompt_left[seats] == 0]
        self._commit(done, np.ones(len(done), dtype=np.int64))
        self._since[done], self._lead[done] = self.now, 1

    def _finish(self, taken: Seats) -> None:
        for seat in taken[self._output_left[taken] <= 0]:
            self._note(int(seat), finished=True)
            self._number[seat], self._context[seat] = NOBODY, 0

    def _note(self, seat: int, *, finished: bool) -> None:
        begun = self._got[seat] > 0 and not self._met[seat]
        self.log.request(
            finished=finished,
            first_token=float(self._first[seat] - self._arrival[seat]) if begun else float("nan"),
            seconds=float(self.now - self._since[seat]),
            tokens=int(self._got[seat] - self._lead[seat]),
        )


def _drafting(
    way: Way, costs: Costs, *, seats: int, block_size: int
) -> Float[np.ndarray, "requests_plus_1 block_plus_1"]:
    """Seconds to draft, by requests and depth."""
    if way.drafts == "mtp":
        return np.array([[0.0, *(costs.mtp_seconds(n) for _ in range(block_size))] for n in range(seats + 1)])
    return np.array([[costs.draft_seconds(n, k) for k in range(block_size + 1)] for n in range(seats + 1)])
