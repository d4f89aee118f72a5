"""What a simulated step costs: measured curves of a profile, or a curve of a GPU's shape made of named numbers.

A step's seconds are ``host`` + drafting + the target's pass. The pass depends on its tokens and on the committed tokens
behind them (keys and values to read).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from dspark.errors import ConfigError
from dspark.maths.step_costs import StepCosts
from dspark.schedule_files import Profile

Seconds = Float[np.ndarray, "sizes"]


@runtime_checkable
class Costs(Protocol):
    """What a step of a simulated engine costs."""

    @property
    def host_seconds(self) -> float:
        """Seconds of a step beside the target and the drafter."""
        ...

    def target_seconds(self, first: int, last: int, *, requests: int, context: int) -> Seconds:
        """Seconds of a target pass over ``first``..``last`` tokens of ``requests`` requests, with ``context`` committed
        tokens behind them, all requests together."""
        ...

    def draft_seconds(self, requests: int, depth: int) -> float:
        """Seconds to draft ``depth`` tokens for each of ``requests`` requests; 0 for none."""
        ...

    def mtp_seconds(self, requests: int) -> float:
        """Seconds to draft one token for each of ``requests`` requests with an MTP-1 module."""
        ...

    def describe(self) -> dict[str, Any]:
        """The numbers behind it, for the file of results."""
        ...


@dataclass(frozen=True, kw_only=True)
class SyntheticCosts:
    """A curve of a GPU's shape: flat while reading the weights bounds a pass, then rising with its tokens, in steps.

    The defaults are round numbers for a dense model of 8 billion parameters in bfloat16 on a card that reads 3.3 TB/s
    and computes 600 TFLOP/s, with a drafter of a few layers. They are no measurement: give a profile for one.
    """

    floor_ms: float = 5.0  # reading the weights once; > 0
    us_per_token: float = 27.0  # computing, per token of a pass; >= 0
    tile: int = 16  # a pass computes whole tiles of so many tokens: the jags of the curve; >= 1
    ns_per_context_token: float = 40.0  # reading keys and values, per committed token; >= 0
    host_ms: float = 0.3  # everything beside the target and the drafter, per step; >= 0
    draft_floor_ms: float = 0.8  # reading the drafter's weights once; >= 0
    draft_us_per_slot: float = 3.0  # computing, per slot of the blocks; >= 0
    mtp_share: float = 1 / 3  # of the two numbers before, what an MTP-1 module of one layer has; >= 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"floor_ms": 1e-9, "tile": 1}.get(name, 0)
            if not least <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be a finite number, {least:g} or more")

    def target_seconds(self, first: int, last: int, *, requests: int, context: int) -> Seconds:
        tokens = np.arange(first, last + 1)
        computing = self.us_per_token * 1e-6 * self.tile * -(-tokens // self.tile)
        return np.maximum(self.floor_ms * 1e-3, computing) + self.ns_per_context_token * 1e-9 * context

    @property
    def host_seconds(self) -> float:
        return self.host_ms * 1e-3

    def draft_seconds(self, requests: int, depth: int) -> float:
        return self._drafting(requests * depth) if requests * depth else 0.0

    def mtp_seconds(self, requests: int) -> float:
        return self.mtp_share * self._drafting(requests) if requests else 0.0

    def _drafting(self, slots: int) -> float:
        return self.draft_floor_ms * 1e-3 + self.draft_us_per_slot * 1e-6 * slots

    def describe(self) -> dict[str, Any]:
        return {"source": "synthetic", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ProfileCosts:
    """Costs from the file of ``dspark profile``; ``host_seconds`` per step come on top.

    A context between two measured ones lies on the line between their curves, one outside takes the nearest. The
    profile deals a step's tokens to as few requests as hold them, so plain steps of many requests are priced with less
    attention than they have, and a block costs the same however many of its drafts are asked for. Tokens past the
    profile's end are refused unless ``extrapolate``: then they follow the line through its last half.
    """

    profile: Profile
    path: str = ""  # where it was read, for the record
    extrapolate: bool = False
    host_seconds: float = 0.0
    mtp_profile: Profile | None = None  # of an MTP-1 drafter; None: its drafting takes ``mtp_share`` of the block's
    mtp_share: float = 1 / 3
    _curves: list[Float[np.ndarray, "contexts sizes"]] = field(default_factory=list, repr=False)  # grown as needed

    def __post_init__(self) -> None:
        for name in ("host_seconds", "mtp_share"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a finite number, 0 or more")

    def target_seconds(self, first: int, last: int, *, requests: int, context: int) -> Seconds:
        curves, behind = self._up_to(last), context / max(requests, 1)
        lengths = self.profile.contexts
        upper = next((i for i, length in enumerate(lengths) if length >= behind), len(lengths) - 1)
        if upper == 0 or behind >= lengths[upper]:
            return curves[upper, first : last + 1]
        share = (behind - lengths[upper - 1]) / (lengths[upper] - lengths[upper - 1])
        low, high = curves[upper - 1 : upper + 1, first : last + 1]
        return low + share * (high - low)

    def _up_to(self, tokens: int) -> Float[np.ndarray, "contexts sizes"]:
        """Seconds at 0 (unused), 1, ... at least ``tokens`` tokens, a row per context."""
        if not self._curves:
            rates = np.array(self.profile.sps)[:, 1:]
            self._curves.append(np.pad(1.0 / rates, ((0, 0), (1, 0))))
        have = self._curves[0].shape[1] - 1
        if tokens <= have:
            return self._curves[0]
        measured = self.profile.max_tokens
        if not self.extrapolate:
            raise ConfigError(
                f"the profile covers {measured} tokens and a step of this load carries {tokens}; measure with "
                f"dspark profile --max-tokens {tokens}, or accept a straight line beyond its end with --extrapolate"
            )
        sizes, more = np.arange(measured // 2 + 1, measured + 1), np.arange(have + 1, 2 * tokens + 1)
        rows = []
        for curve in self._curves[0]:
            slope = max(0.0, float(np.polyfit(sizes, curve[sizes], 1)[0])) if len(sizes) > 1 else 0.0
            rows.append(np.concatenate((curve, curve[sizes].mean() + slope * (more - sizes.mean()))))
        self._curves[0] = np.array(rows)
        return self._curves[0]

    def draft_seconds(self, requests: int, depth: int) -> float:
        return self.profile.drafting(requests) if depth else 0.0

    def mtp_seconds(self, requests: int) -> float:
        if self.mtp_profile is not None:
            return self.mtp_profile.drafting(requests)
        return self.mtp_share * self.profile.drafting(requests)

    def describe(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "source": self.path or "profile",
            "model": profile.model,
            "drafter": profile.drafter,
            "setting": asdict(profile.setting),
            "contexts": list(profile.contexts),
            "measured_tokens": profile.max_tokens,
            "extrapolated": self.extrapolate
            and bool(self._curves)
            and self._curves[0].shape[1] - 1 > profile.max_tokens,
            "host_seconds": self.host_seconds,
            "mtp": "profile" if self.mtp_profile is not None else {"share": self.mtp_share},
        }


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """The costs that an engine measured of itself and goes by (:class:`dspark.maths.step_costs.StepCosts`)."""

    table: StepCosts
    host_seconds: float = 0.0
    mtp_share: float = 1 / 3

    def target_seconds(self, first: int, last: int, *, requests: int, context: int) -> Seconds:
        if last > self.table.max_tokens:
            raise ConfigError(
                f"the engine's costs cover {self.table.max_tokens} tokens and a step of this load carries {last}; "
                "measure them with more seats"
            )
        return self.table.curve(context / max(requests, 1))[first : last + 1]

    def draft_seconds(self, requests: int, depth: int) -> float:
        return self.table.drafting(requests, depth)

    def mtp_seconds(self, requests: int) -> float:
        return self.mtp_share * self.table.drafting(requests, self.table.drafts.shape[1] - 1)

    def describe(self) -> dict[str, Any]:
        return {"source": "engine", "contexts": list(self.table.contexts), "host_seconds": self.host_seconds}
