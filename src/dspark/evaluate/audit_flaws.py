"""Loops that are known to be wrong: the positive controls of an audit.

A control breaks the very loop under audit, in place, for as long as it runs: it exchanges one name in
:mod:`dspark.decode`. An audit that does not catch it is too weak to say anything about the intact loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import dspark.decode as loop
from dspark.core import DraftDistribution
from dspark.maths.rejection import Verdict
from dspark.maths.rejection import verify as honest_verify
from dspark.maths.sampling import RequestStreams, draw


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """A fault that changes the output's distribution, and the names in the loop that it replaces."""

    name: str
    says: str  # what is wrong, for the report
    needs_distribution: bool  # whether it is a fault only for drafts that were drawn, not certain
    replaces: Mapping[str, Any] = field(repr=False)  # Any: whatever the loop has under that name


class SharedStreams(RequestStreams):
    """Three streams in one state: coins and closing draws see the very uniforms that drew the drafts."""

    @classmethod
    def from_seed(cls, seed: int) -> SharedStreams:
        one = RequestStreams.from_seed(seed).propose
        return cls(propose=one, accept=one.clone_state(), residual=one.clone_state())


def without_residual(
    honest: Callable[..., Verdict],
) -> Callable[[Tensor, DraftDistribution | None, Any, RequestStreams], Verdict]:
    """``honest`` verification, but a rejected draft's place is filled from the target's own row."""

    def verify(
        draft_tokens: Tensor, distribution: DraftDistribution | None, target_probs: Any, streams: RequestStreams
    ) -> Verdict:  # target_probs is Any: a tensor of rows, or rows computed as they are read
        verdict = honest(draft_tokens, distribution, target_probs, streams)
        if verdict.accepted == len(draft_tokens):
            return verdict
        token = draw(target_probs[verdict.accepted], streams.residual)
        return Verdict(accepted=verdict.accepted, next_token=token)

    return verify


FLAWS = (
    Flaw(
        name="shared streams",
        says="drafts, coins and closing tokens are drawn with the same random numbers",
        needs_distribution=True,
        replaces={"RequestStreams": SharedStreams},
    ),
    Flaw(
        name="no residual",
        says="a rejected draft is replaced from the target's distribution instead of the residual",
        needs_distribution=False,
        replaces={"verify": without_residual(honest_verify)},
    ),
)


@contextmanager
def broken(flaw: Flaw) -> Iterator[None]:
    """Run the block with the flaw in the loop; nothing else may decode in this process meanwhile."""
    intact = {name: getattr(loop, name) for name in flaw.replaces}
    try:
        for name, wrong in flaw.replaces.items():
            setattr(loop, name, wrong)
        yield
    finally:
        for name, right in intact.items():
            setattr(loop, name, right)
