"""A request in flight: what stays the same over its life, and the states that its steps mutate."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.chat import ChatFormat
from dspark.decode import check_shaping
from dspark.errors import RequestError
from dspark.maths.lookup import Lookup
from dspark.maths.sampling import RequestStreams
from dspark.maths.shaping import Shaper
from dspark.models.target import TargetInfo
from dspark.serve.events import TokenLogprobs
from dspark.serve.pages import PrefixKeys
from dspark.serve.request import GenerationRequest
from dspark.serve.text import AnswerText


@dataclass(eq=False, kw_only=True)
class Flight:
    """A request from its arrival to its end.

    | tokens                  | state                                                                        |
    |-------------------------|------------------------------------------------------------------------------|
    | [0, computed)           | run by the target and taken in by the drafter, in the pages of the seat      |
    | [computed, len(ids))    | known and to be run: the rest of the prompt, or after it the anchor alone    |

    Preemption takes seat and pages away and sets ``computed`` back to 0; everything else stays, the random streams
    above all, so that the request goes on as if nothing had happened.
    """

    request: GenerationRequest
    ids: list[int]  # prompt, then output
    prompt_len: int
    room: int  # most tokens of prompt and output together
    stops: frozenset[int]
    streams: RequestStreams
    shaper: Shaper | None  # penalties, biases, bans and grammar; None where no rule looks at the text before a position
    text: AnswerText | None  # None without a tokenizer
    keys: PrefixKeys
    lookup: Lookup  # drafts from ``ids``
    number: int = -1  # of arrival; lower is older
    seat: int = -1  # -1: waiting
    page_ids: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0  # whole pages that were offered for sharing
    cached: int = 0  # prompt tokens that came from a cached prefix when it was admitted last
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def prefill_end(self) -> int:
        """Tokens to run before the request is decoded: the whole prompt, whose last row gives the first token; after a
        preemption all but the anchor."""
        return self.prompt_len if len(self.ids) == self.prompt_len else len(self.ids) - 1

    @property
    def decoding(self) -> bool:
        """Whether the anchor is all that is left to run."""
        return len(self.ids) > self.prompt_len and self.computed == len(self.ids) - 1

    @property
    def most_drafts(self) -> int:
        """Drafts of the next round that can still be committed: the target's own token takes the last place."""
        return self.room - len(self.ids) - 1

    @property
    def reads_prefix(self) -> bool:
        """Whether cached rows will do: not while the logits of every prompt token are wanted."""
        return self.request.prompt_logprobs is None or self.output_len > 0

    def vacate(self) -> None:
        """Forget the seat and what was computed on it."""
        self.seat, self.page_ids, self.computed, self.published, self.cached = -1, [], 0, 0, 0
        if self.output_len == 0:
            self.prompt_logprobs = []


def open_flight(
    request: GenerationRequest,
    *,
    info: TargetInfo,
    max_len: int,
    page_size: int,
    chat: ChatFormat | None,
) -> Flight:
    """Check a request against the model and make everything it needs but a seat.

    Raises :class:`RequestError` for a prompt that fills the context or holds an id outside the vocabulary, for rules
    that name such an id or leave no token, and for stop strings where there is no tokenizer.
    """
    prompt = request.prompt_ids
    if len(prompt) >= max_len:
        raise RequestError(f"the prompt has {len(prompt)} tokens; {info.name} takes {max_len} here, answer included")
    if not 0 <= min(prompt) <= max(prompt) < info.vocab_size:
        raise RequestError(f"the prompt holds a token id outside 0..{info.vocab_size - 1}; use this model's tokenizer")
    if request.stop and chat is None:
        raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
    stops = sorted({token for token in request.stop_token_ids if 0 <= token < info.vocab_size})
    check_shaping(request.sampling, stops, vocab_size=info.vocab_size)
    shaper: Shaper | None = None
    if request.constraint is not None:
        shaper = request.constraint.shaper(request.sampling, prompt, stop_token_ids=stops)
    elif request.sampling.shapes_logits:
        shaper = Shaper(request.sampling, prompt, stop_token_ids=stops)
    text = None
    if chat is not None:
        text = AnswerText(chat, stop=request.stop, skip_special_tokens=request.skip_special_tokens)
    ids = list(prompt)
    return Flight(
        request=request,
        ids=ids,
        prompt_len=len(prompt),
        room=min(len(prompt) + request.max_new_tokens, max_len),
        stops=frozenset(request.stop_token_ids),
        streams=RequestStreams.from_seed(request.sampling.seed),
        shaper=shaper,
        text=text,
        keys=PrefixKeys(page_size=page_size, salt=request.salt),
        lookup=Lookup(ids, temperature=0.0 if request.sampling.greedy else request.sampling.temperature),
    )
