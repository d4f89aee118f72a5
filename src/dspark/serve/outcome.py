"""What a step made of one request: its new tokens cut where the answer ends, and the event that tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.errors import DsparkError
from dspark.serve.events import StepEvent, TokenLogprobs
from dspark.serve.flight import Flight


@dataclass(slots=True, kw_only=True, eq=False)
class Outcome:
    """New tokens of a request and how it ended, if it did. ``text`` is there early only where stop strings are watched
    for; else :meth:`event` makes it, which may be later and elsewhere, in the order of a request's outcomes."""

    flight: Flight
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    drafted: int = 0
    verify_len: int = 0
    accepted: int = 0
    rejected_ids: tuple[int, ...] = ()
    cached: int = 0
    completion_tokens: int = 0
    error: Exception | None = field(default=None, repr=False)

    def event(self) -> StepEvent:
        """The event, with the text that became certain."""
        request = self.flight.request
        return StepEvent(
            request_id=request.request_id,
            token_ids=self.token_ids,
            text=self._text() if self.text is None else self.text,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            drafted=self.drafted,
            verify_len=self.verify_len,
            accepted=self.accepted,
            rejected_ids=self.rejected_ids,
            cached_tokens=self.cached,
            prompt_tokens=self.flight.prompt_len,
            completion_tokens=self.completion_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=None if self.error is None else str(self.error) or type(self.error).__name__,
            error_kind="request" if isinstance(self.error, DsparkError) else "internal",
        )

    def _text(self) -> str:
        text = self.flight.text
        if text is None:
            return ""
        ended_by_token = self.finish_reason == "stop" and isinstance(self.stop_reason, int)
        new = text.push(*(self.token_ids[:-1] if ended_by_token else self.token_ids))
        return new + text.finish() if self.finish_reason is not None else new


def take_in(flight: Flight, run: Sequence[int]) -> Outcome:
    """Append what a round committed to the request's tokens, up to the token that ends it.

    That is the first stop token, the token that completes a stop string, or the last that there is room for. A stop
    string that is complete before ``min_tokens`` counts no more than a stop token does.
    """
    outcome = Outcome(flight=flight)
    watched = flight.text if flight.text is not None and flight.text.watches else None
    kept, pieces, stops = list(run), list[str](), flight.stops
    before, least = flight.output_len, flight.request.sampling.min_tokens
    for i, token in enumerate(run, start=1):
        if token in stops:
            outcome.finish_reason, outcome.stop_reason = "stop", token
        elif watched is not None:
            push = watched.push_unwatched if before + i < least else watched.push
            pieces.append(push(token))
            if watched.stopped is not None:
                outcome.finish_reason, outcome.stop_reason = "stop", watched.stopped
        if outcome.finish_reason is not None:
            del kept[i:]
            break
    flight.ids += kept
    assert len(flight.ids) <= flight.room, "more tokens than there is room for"
    if outcome.finish_reason is None and len(flight.ids) == flight.room:
        full = before + len(kept) == flight.request.max_new_tokens
        outcome.finish_reason = "length" if full else "context"
    if watched is not None:
        if outcome.finish_reason is not None and watched.stopped is None:
            pieces.append(watched.finish())
            if watched.stopped is not None:
                outcome.finish_reason, outcome.stop_reason = "stop", watched.stopped
        outcome.text = "".join(pieces)
    outcome.token_ids, outcome.completion_tokens, outcome.cached = tuple(kept), before + len(kept), flight.cached
    return outcome
