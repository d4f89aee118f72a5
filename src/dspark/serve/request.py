"""What a caller asks of the engine: one prompt, and how it is to be continued."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.core import SamplingParams
from dspark.errors import RequestError

MAX_LOGPROBS = 128  # most alternatives per token that a request may ask for
MAX_STOPS = 64  # most stop strings of a request
MAX_STOP_CHARS = 1024  # of one stop string


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request. The engine treats ``n`` answers to a prompt as n requests with seeds of their own.

    Ids and limits are checked against the model when the request is added; what can be judged without one is judged
    here, by :class:`RequestError`. Log-probabilities are of the model's own distribution: natural logarithm of the
    softmax of its logits before bias, penalties, bans, grammar, temperature and filters (:mod:`dspark.maths.logprobs`
    says why).
    """

    request_id: str  # not empty; unique among those in flight
    prompt_ids: tuple[int, ...]  # 1 or more
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 16  # >= 1; the context limit may end the output sooner
    stop_token_ids: tuple[int, ...] = ()  # the first of them ends the output and is its last token, without text
    stop: tuple[str, ...] = ()  # strings, none empty; the text ends before the first that comes up
    logprobs: int | None = None  # alternatives per output token, 0..MAX_LOGPROBS; 0: its own only; None: none at all
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens from the second on; reads no cached prefix
    constraint: Any | None = None  # dspark.serve.constraint.Constraint; Any, so that llguidance stays optional
    salt: str = ""  # requests share cached prefixes only with requests of the same salt
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("request_id is empty; give each request a name of its own")
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise RequestError(f"{name} is {value}; it must be 0 to {MAX_LOGPROBS}, or None for none")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are watched for")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"a stop string has {len(text)} characters; give 1 to {MAX_STOP_CHARS}")


def seed_of_answer(seed: int, i: int) -> int:
    """Seed of the ``i``-th of several answers to one request: ``seed`` itself for the first, unrelated ones after it,
    so that they do not meet the answers of a request whose seed is one more."""
    if i == 0:
        return seed
    high, low = np.random.SeedSequence((seed % 2**128, i)).generate_state(2, np.uint64).tolist()
    return int(high) << 64 | int(low)
