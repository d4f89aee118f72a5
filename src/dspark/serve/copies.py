"""Drafts that the requests of a step find in their own texts."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.maths.lookup import worth_checking
from dspark.serve.curves import Curves
from dspark.serve.flight import Flight

Copies = dict[int, tuple[list[int], list[float]]]  # drafts and their c_k, by the request's place among all

PAUSE = 3  # steps without a look into the texts after one whose copies did not pay


class CopyFinder:
    """Looks for copies, for as long as checking them pays."""

    def __init__(self, *, block: int, curves: Curves | None) -> None:
        """``block``: most drafts of a request; ``curves`` None takes everything that is found."""
        self._block, self._curves = block, curves
        self._pause = 0  # steps until the next look

    def find(self, flights: Sequence[Flight], *, other_tokens: int, context: float) -> Copies:
        """What the texts of decoding ``flights`` say; nothing where, by the costs, checking even the likeliest of it
        does not pay."""
        if self._pause > 0:
            self._pause -= 1
            return {}
        found: Copies = {}
        for i, flight in enumerate(flights):
            drafts, confidence = flight.lookup.drafts(min(flight.most_drafts, self._block))
            if drafts:
                found[i] = (drafts, confidence)
        if not found or self._curves is None:
            return found
        seconds, judged = self._curves.by_drafts(len(flights), other_tokens, context)
        chances = (confidence for _, confidence in found.values())
        if worth_checking(chances, requests=len(flights), seconds=seconds, judged=judged):
            return found
        self._pause = PAUSE
        return {}
