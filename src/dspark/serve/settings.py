"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.errors import ConfigError

SCHEDULERS = ("none", "fixed", "threshold", "greedy", "lagged")  # none: plain decoding, whatever the drafter
DEFAULT_MEMORY_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much an engine takes on at once, and how it decides what to verify."""

    seats: int = 64  # most requests in flight; >= 1
    max_len: int | None = None  # most tokens of a request, prompt and output; None: the target's context limit
    page_size: int = 16  # tokens per page of KV memory; >= 1
    pages: int | None = None  # pages of KV memory; None: by memory_mib
    memory_mib: int | None = None  # KV memory of the target in MiB; None: DEFAULT_MEMORY_MIB, less if seats fill less
    prefill_tokens: int = 256  # most prompt tokens in one step; >= 1
    max_waiting: int = 1024  # requests waiting for a seat, beyond which one more is refused; >= 0
    prefix_sharing: bool = True  # requests that begin alike share pages (where the target's memory is paged)
    overlap: bool = False  # prepare the next step while the target runs this one
    scheduler: str = "fixed"  # one of SCHEDULERS
    verify_len: int | None = None  # of the fixed scheduler: drafts per request and step; None: the whole block
    threshold: float | None = None  # of the threshold scheduler: least confidence, [0, 1]
    draft_gate: bool | None = None  # leave drafting out where it does not pay; None: with greedy and lagged

    def __post_init__(self) -> None:
        for name, least in (("seats", 1), ("page_size", 1), ("prefill_tokens", 1), ("max_waiting", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        for name in ("max_len", "pages", "memory_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more, or None")
        if self.pages is not None and self.memory_mib is not None:
            raise ConfigError("pages and memory_mib are both given; choose one")
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(f"scheduler is {self.scheduler!r}; it must be one of {', '.join(SCHEDULERS)}")
        if self.verify_len is not None and (self.scheduler != "fixed" or self.verify_len < 0):
            raise ConfigError(f"verify_len is {self.verify_len}; it must be 0 or more and is the fixed scheduler's")
        if (self.threshold is not None) != (self.scheduler == "threshold"):
            given = "is missing" if self.threshold is None else f"is {self.threshold}"
            raise ConfigError(f"threshold {given}; the threshold scheduler needs one in [0, 1] and no other takes one")
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold is {self.threshold}; it must be in [0, 1]")

    @property
    def gated(self) -> bool:
        """Whether drafting is left out where it does not pay."""
        return self.scheduler in ("greedy", "lagged") if self.draft_gate is None else self.draft_gate

    @property
    def weighs_costs(self) -> bool:
        """Whether measured costs of a step are looked at."""
        return self.gated or self.scheduler in ("greedy", "lagged")
