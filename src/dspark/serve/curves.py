"""What a step of an engine costs, as its gate, its scheduler and its copies are to see it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from dspark.maths.step_costs import StepCosts, convex_from

Sps = Float[np.ndarray, "more_tokens_plus_1"]

MOST_CURVES = 512  # convex curves that are kept, one per number of requests and other tokens


class Curves:
    """Measured costs by what shares a step; ``convex`` for Algorithm 1, which stops at the first draft that does not
    pay (:func:`dspark.maths.step_costs.convex_from`)."""

    def __init__(self, costs: StepCosts, *, block: int, convex: bool) -> None:
        self.costs, self._block, self._convex = costs, block, convex
        self._kept: dict[tuple[float, int, int], Float[np.ndarray, "tokens_plus_1"]] = {}

    def judged(self, requests: int, other_tokens: int, context: float) -> Float[np.ndarray, "tokens_plus_1"] | None:
        """Seconds of a pass by the tokens on top of the others, as Algorithm 1 is to see them; None for other rules."""
        if not self._convex:
            return None
        key = (float(self.costs.curve(context)[-1]), other_tokens, requests)
        if key not in self._kept:
            if len(self._kept) >= MOST_CURVES:
                self._kept.clear()
            own = self.costs.own(context=context, other_tokens=other_tokens, requests=requests)
            self._kept[key] = convex_from(own[: requests * (1 + self._block) + 1], requests)
        return self._kept[key]

    def by_drafts(self, requests: int, other_tokens: int, context: float) -> tuple[list[float], list[float]]:
        """Seconds of a pass by drafts, 0 to all that ``requests`` may have: as measured, and as the scheduler sees
        them."""
        own = self.costs.own(context=context, other_tokens=other_tokens, requests=requests)
        judged, sizes = self.judged(requests, other_tokens, context), slice(requests, requests * (1 + self._block) + 1)
        seconds = own[sizes].tolist()
        return seconds, seconds if judged is None else judged[sizes].tolist()

    def sps(self, requests: int, drafted: int, depth: int, other_tokens: int, context: float) -> Sps:
        """Steps per second by anchors and drafts, with ``drafted`` requests drafted for."""
        spent = self.costs.drafting(drafted, depth)
        judged = self.judged(requests, other_tokens, context)
        if judged is None:
            return self.costs.sps(context=context, other_tokens=other_tokens, requests=requests, draft_seconds=spent)
        seconds = judged + spent
        seconds[:1] = np.inf
        return 1.0 / seconds
