"""What an engine counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from dspark.serve.events import EngineStats
from dspark.serve.roster import Roster

STAGES = ("admit", "draft", "schedule", "target", "verify", "commit")


class Counters:
    """Totals since the engine was made."""

    def __init__(self, block_size: int) -> None:
        self.steps = self.drafted_steps = self.rounds = self.prompt_tokens = self.completion_tokens = 0
        self.lookup_rounds = self.lookup_accepted = 0  # those with drafts from their own text
        self.proposed, self.verified, self.accepted = ([0] * (block_size + 1) for _ in range(3))
        # rounds by number of drafts, 0..block_size
        self.finished: Counter[str] = Counter()
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def count_rounds(self, proposed: Sequence[int], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Committed rounds of a step, an entry each."""
        self.rounds += len(proposed)
        for totals, numbers in ((self.proposed, proposed), (self.verified, verified), (self.accepted, accepted)):
            for number in numbers:
                totals[number] += 1

    def count_plain(self, rounds: int) -> None:
        """So many committed rounds without a draft."""
        self.rounds += rounds
        for totals in (self.proposed, self.verified, self.accepted):
            totals[0] += rounds

    def stats(self, roster: Roster, *, entering: int = 0) -> EngineStats:
        """A picture of now; ``entering`` requests are about to wait."""
        return EngineStats(
            running=len(roster.running),
            waiting=len(roster.waiting) + entering,
            seats=roster.tables.seats,
            pages_used=roster.pages.used,
            pages_cached=roster.pages.idle,
            pages_total=roster.pages.pages,
            steps=self.steps,
            drafted_steps=self.drafted_steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=roster.cached_tokens,
            completion_tokens=self.completion_tokens,
            preemptions=roster.preemptions,
            rounds=self.rounds,
            lookup_rounds=self.lookup_rounds,
            lookup_accepted=self.lookup_accepted,
            proposed_at=_at_least(self.proposed),
            verified_at=_at_least(self.verified),
            accepted_at=_at_least(self.accepted),
            verify_lens=tuple(self.verified),
            finished=dict(self.finished),
            stage_seconds=dict(self.seconds),
        )


def _at_least(by_number: Sequence[int]) -> tuple[int, ...]:
    """From rounds by number of drafts to rounds that reached each position."""
    return tuple(accumulate(by_number[:0:-1]))[::-1]
