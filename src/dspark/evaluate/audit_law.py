"""What the target alone would write: the exact joint distribution of the first tokens behind a context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.evaluate.audit_fork import Fork, Tail, TrialSetting
from dspark.maths.sampling import target_probs
from dspark.maths.shaping import shaped_logits

MOST_SUPPORT = 1024  # tokens up to which we remember which ones a position allows


@dataclass(frozen=True, kw_only=True)
class Law:
    """Chances of what a setting's loop may write, as far as they are at least ``floor``.

    ``levels[k - 1]`` holds the outcomes of k tokens; what they miss of 1 belongs to rarer ones. ``supports`` names the
    tokens that may follow an outcome, where a filter leaves few enough of them.
    """

    levels: tuple[dict[Tail, float], ...]
    supports: dict[Tail, frozenset[int]]
    floor: float

    def allows(self, outcome: Tail) -> bool:
        """Whether the outcome has a probability above 0, as far as the supports tell."""
        parents = ((outcome[:k], outcome[k]) for k in range(len(outcome)))
        return all(token in self.supports[parent] for parent, token in parents if parent in self.supports)

    def count(self, outcomes: Iterable[Tail], k: int) -> tuple[Counter[Tail], int]:
        """How often each outcome of k tokens was seen, and how many trials had an impossible one."""
        seen = Counter(outcome[:k] for outcome in outcomes)
        return seen, sum(times for outcome, times in seen.items() if not self.allows(outcome))


def exact_law(fork: Fork, setting: TrialSetting, *, floor: float) -> Law:
    """Follow every continuation with a chance of ``floor`` or more, one pass each, batched.

    The passes are the target's own and know nothing of drafts; a wrong fork shows in :meth:`Fork.recheck`.
    """
    levels: list[dict[Tail, float]] = []
    supports: dict[Tail, frozenset[int]] = {}
    parents: dict[Tail, float] = {(): 1.0}
    for _ in range(setting.length):
        grown: dict[Tail, float] = {}
        for parent, row in _rows(fork, setting, list(parents)):
            chances = row.double() / row.double().sum()
            allowed = chances.nonzero()[:, 0]
            if len(allowed) <= MOST_SUPPORT:
                supports[parent] = frozenset(allowed.tolist())
            share = parents[parent] * chances[allowed]
            for token, chance in zip(allowed[share >= floor].tolist(), share[share >= floor].tolist(), strict=True):
                grown[(*parent, token)] = chance
        levels.append(grown)
        parents = grown
    return Law(levels=tuple(levels), supports=supports, floor=floor)


def _rows(fork: Fork, setting: TrialSetting, parents: Sequence[Tail]) -> Iterable[tuple[Tail, Tensor]]:
    """The distribution [vocab] of the token behind each outcome."""
    given = setting.given
    if not given and () in parents:
        assert fork.prefill.logits is not None
        yield (), _shaped(setting, (), fork.prefill.logits[-1])
    for tail, output in fork.passes([(*given, *parent) for parent in parents if given or parent]):
        assert output.logits is not None
        yield tail[len(given) :], _shaped(setting, tail, output.logits[-1])


def _shaped(setting: TrialSetting, output_ids: Tail, logits: Tensor) -> Tensor:
    sampling = setting.sampling
    if sampling.shapes_logits:
        logits = shaped_logits(logits, setting.prompt_ids, output_ids, sampling)
    with torch.inference_mode():
        return target_probs(logits[None], sampling)[0]
