"""What the engine tells of a request, step by step; together a request's events are its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.maths.logprobs import RowLogprobs

FINISH_REASONS = ("stop", "length", "context", "cancelled", "error")


TokenLogprobs = RowLogprobs  # (token_id, logprob, top), the model's own distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """What one step brought one request. The last event of a request, and only that, has a ``finish_reason``.

    ``text`` holds back what may still turn out to be the beginning of a stop string or of a character; pieces join to
    the whole text, which ends before the stop string. A stop token is in ``token_ids`` and has no text. Tokens behind
    a stop string's first character are in ``token_ids`` of the events although their text is cut, for they were
    generated.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()  # new ones; empty while a prompt is being read, or when text alone came free
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per new token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the second prompt token on; once, if asked for
    drafted: int = 0  # drafts proposed in this step
    verify_len: int = 0  # of these, checked by the target
    accepted: int = 0  # of these, committed
    rejected_ids: tuple[int, ...] = ()  # drafts that were checked and not committed
    cached_tokens: int = 0  # prompt tokens that came from a cached prefix, so far
    prompt_tokens: int = 0
    completion_tokens: int = 0  # so far
    finish_reason: str | None = None  # one of FINISH_REASONS
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    error: str | None = None  # what went wrong, where the reason is "error"
    error_kind: str = "internal"  # "request": the request's own fault; "internal": ours; of an error only


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A picture of the engine. Counts are totals since it was made; stages are seconds."""

    running: int = 0  # requests with a seat
    waiting: int = 0
    seats: int = 0
    pages_used: int = 0  # referenced by a request
    pages_cached: int = 0  # referenced by none, kept for their prefix
    pages_total: int = 0
    steps: int = 0
    drafted_steps: int = 0  # steps that drafted for at least one request
    prompt_tokens: int = 0  # run through the target; cached ones are not
    cached_tokens: int = 0  # prompt tokens taken from cached prefixes
    completion_tokens: int = 0
    preemptions: int = 0
    rounds: int = 0  # draft-verify-commit rounds of single requests, undrafted ones included
    lookup_rounds: int = 0  # of them, those whose drafts were from the request's own text
    lookup_accepted: int = 0  # drafts committed in those
    proposed_at: tuple[int, ...] = ()  # rounds that proposed a draft at each position
    verified_at: tuple[int, ...] = ()  # rounds that checked the draft at each position
    accepted_at: tuple[int, ...] = ()  # rounds that committed it
    verify_lens: tuple[int, ...] = ()  # rounds by verify length, 0..block_size
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason
    stage_seconds: dict[str, float] = field(default_factory=dict)  # admit, draft, schedule, target, verify, commit

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included; nan before the first round."""
        return 1.0 + sum(self.accepted_at) / self.rounds if self.rounds else float("nan")
