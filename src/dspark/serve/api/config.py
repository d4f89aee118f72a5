"""What the server allows: every limit on what comes in, each with its unit, and what is told about the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.chat import ChatFormat
from dspark.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """Limits of the HTTP surface. What lies beyond one is refused by name, before any work is done for it."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # one of them opens everything but /health and the page
    live_text: bool = False  # whether the live page may show what is generated to whoever may open it
    max_requests: int = 128  # answers in flight, running or waiting; beyond it 429; >= 1
    max_connections: int = 1024  # open sockets; beyond it 503; >= 1
    max_live_clients: int = 16  # open streams of /live/events; >= 0
    max_body_bytes: int = 2 * 2**20
    body_seconds: float = 30.0  # from a request's head to the end of its body
    head_seconds: float = 30.0  # from the opening of a connection to the end of a request's head
    request_seconds: float = 600.0  # from the end of a body to the end of the answer, waiting included
    drain_seconds: float = 30.0  # that a stopping server gives the requests under way
    retry_seconds: int = 2  # that a refused client is asked to wait
    max_completion_tokens: int | None = None  # of one answer; None: what the context leaves
    max_messages: int = 1024  # of a conversation
    max_parts: int = 64  # of one message
    max_prompts: int = 64  # of one request to /v1/completions
    max_choices: int = 64  # prompts times n
    max_n: int = 32
    max_stop: int = 16  # stop strings
    max_stop_chars: int = 512  # of one
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024  # tokens with a bias
    max_top_logprobs: int = 20

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_connections", "max_body_bytes", "max_n", "max_choices", "max_messages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("body_seconds", "head_seconds", "request_seconds"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")
        if not 0.0 <= self.drain_seconds < float("inf"):
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more seconds")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise ConfigError(f"max_completion_tokens is {self.max_completion_tokens}; it must be 1 or more")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("api_keys holds a key that is empty or not printable ASCII; give another")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the server says of the model, and what it needs to turn texts into ids."""

    name: str  # as clients call it
    chat: ChatFormat
    max_len: int  # tokens of a prompt and its answer together
    vocab_size: int
    drafter: str = "none"  # as told to people
    scheduler: str = "fixed"
    block_size: int = 0  # most drafts of a round
    created: int = 0  # seconds since 1970, when serving began
