"""The ways to decode that are compared under load: what is drafted, whom for, and the rule that cuts the drafts.

none              plain decoding
mtp-1             one draft per round from an MTP-1 module, always checked
fixed, fixed:3    whole blocks, or their first three drafts
threshold:0.7     drafts before the first with a confidence under 0.7
greedy            Algorithm 1 against the costs of the step at hand
lagged            the step's size from confidences two steps old, filled with the likeliest drafts
skip              whole blocks, but none for a while for a request whose drafts keep dying (maths.skipping)
skip:greedy       the same with another rule for those that are drafted for
gate:lagged       nobody is drafted for, or only the most promising, where costs say so (maths.draft_gate): what the
                  engine does by default with greedy and lagged
gate:greedy       likewise, and greedy goes by the convex hull of the costs (maths.step_costs), over which the first
                  non-gain is the best stop
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.errors import ConfigError, ScheduleError
from dspark.maths.batch_schedulers import BatchScheduler, FixedBatch, GreedyBatch, LaggedBatch, ThresholdBatch
from dspark.maths.global_scheduling import NUMPY, Arithmetic

ALL = ("none", "mtp-1", "fixed", "threshold:0.7", "greedy", "lagged", "skip", "gate:greedy", "gate:lagged")
RULES = ("fixed", "threshold", "greedy", "lagged")
GUARDS = ("skip", "gate")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode, as :func:`read_way` makes it."""

    name: str
    drafts: str = "block"  # "none", "mtp" or "block"
    rule: str = "fixed"  # one of RULES
    setting: int | float | None = None  # verify length of fixed, or threshold
    guard: str | None = None  # one of GUARDS: decides before drafting whom to draft for; None: everyone

    @property
    def needs_confidence(self) -> bool:
        return self.rule != "fixed"

    @property
    def weighs_costs(self) -> bool:
        """Whether its rule weighs drafts against the cost of a step."""
        return self.rule in ("greedy", "lagged")

    @property
    def convex(self) -> bool:
        """Whether its rule goes by the convex hull of the costs."""
        return self.rule == "greedy" and self.guard == "gate"

    def scheduler(self, *, block_size: int, arithmetic: Arithmetic = NUMPY) -> BatchScheduler:
        """Its rule, made anew. What it weighs comes with every step's drafts."""
        nothing = np.zeros(0)
        if self.rule == "threshold":
            return ThresholdBatch(1.0 if self.setting is None else self.setting)
        if self.rule == "fixed":
            return FixedBatch(None if self.setting is None else int(self.setting))
        if self.rule == "greedy":
            return GreedyBatch(nothing, arithmetic)
        return LaggedBatch(nothing, block_size=block_size, arithmetic=arithmetic)


def read_way(name: str) -> Way:
    """The way called ``name``; raises :class:`ConfigError` for another than those above."""
    if name == "none":
        return Way(name=name, drafts="none")
    if name == "mtp-1":
        return Way(name=name, drafts="mtp", setting=1)
    first, colon, rest = name.partition(":")
    guard = first if first in GUARDS else None
    if guard is not None and colon and not rest:
        raise _unknown(name)
    rule, number = _rule(name, (rest or "fixed") if guard else name)
    way = Way(name=name, rule=rule, setting=number, guard=guard)
    try:
        way.scheduler(block_size=1)  # refuses a number that is out of range
    except ScheduleError as error:
        raise ConfigError(f"scheduler is {name!r}: {error}") from None
    return way


def _rule(name: str, text: str) -> tuple[str, int | float | None]:
    """A rule and its number, of "threshold:0.7"."""
    rule, colon, number = text.partition(":")
    if rule not in RULES:
        raise _unknown(name)
    if colon and rule not in ("fixed", "threshold"):
        raise ConfigError(f"scheduler is {name!r}; {rule} takes no number")
    if rule == "threshold" and not colon:
        raise ConfigError(f"scheduler is {name!r}; it needs the least confidence, as in threshold:0.7")
    try:
        return rule, (int(number) if rule == "fixed" else float(number)) if colon else None
    except ValueError:
        raise ConfigError(f"scheduler is {name!r}; {number!r} is no number") from None


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"scheduler is {name!r}; it must be one of {', '.join(ALL)}, or the like with other numbers")
