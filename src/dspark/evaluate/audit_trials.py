"""Thousands of runs of the real loop behind one context, at the price of a few passes.

What an audit repeats is :func:`dspark.decode.stream` itself, unchanged, with a seed per trial. Two stand-ins behind the
loop's own protocols make it cheap, for the target is a fixed function of the text:

    RecalledTarget   answers from a :class:`Fork`: a context run once, copied to every row of one KV memory, and the
                     logits of every continuation seen so far. What is not there yet raises :class:`Missing`; the trial
                     is given up, the missing passes of many trials run as one batch, and the trial starts again from
                     its seed, to the same end.
    ForkedDrafter    opens every request with a copy of the drafter's state behind the context.

The memory and its rollback are therefore not what these trials try: :func:`plain_trial` is the same run on the target
itself, and an audit compares the two on its first seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.decode import stream
from dspark.evaluate.audit_fork import Fork, Missing, RecalledTarget, Tail, TrialSetting, given_first
from dspark.maths.shaping import Shaper
from dspark.models.drafter import Drafter
from dspark.models.target import Target, TargetOutput

MOST_WAVE = 256  # trials under way at a time


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: its first tokens, and what drafting did for them."""

    outcome: Tail
    verified: int  # drafts that the target checked in the rounds that wrote the outcome
    accepted: int


def run_trial(target: Target, drafter: Drafter, setting: TrialSetting, seed: int) -> Trial:
    """Run the loop until the outcome is there. ``target`` must give the setting's anchor (:func:`given_first`)."""
    rounds = stream(
        target,
        drafter,
        setting.prompt_ids,
        sampling=replace(setting.sampling, seed=seed),
        max_new_tokens=setting.max_new_tokens,
        scheduler=setting.scheduler,
    )
    tokens: list[int] = []
    skip, verified, accepted = len(setting.given), 0, 0
    for record in rounds:
        tokens += record.committed
        verified, accepted = verified + record.verify_len, accepted + record.accepted
        if len(tokens) >= skip + setting.length:
            break
    rounds.close()
    outcome = tuple(tokens[skip : skip + setting.length])
    assert len(outcome) == setting.length and tuple(tokens[:skip]) == setting.given
    return Trial(outcome=outcome, verified=verified, accepted=accepted)


def plain_trial(target: Target, drafter: Drafter, setting: TrialSetting, seed: int) -> Trial:
    """:func:`run_trial` with nothing remembered: prefill, KV memory and rollback are the target's own."""
    return run_trial(given_first(target, setting.anchor), drafter, setting, seed)


class Trials:
    """Trials of one setting from a shared context."""

    def __init__(self, target: Target, drafter: Drafter, setting: TrialSetting) -> None:
        self.setting, self.fork = setting, Fork(target, setting, taps=drafter.taps)
        self.drafter = ForkedDrafter.of(drafter, setting, self.fork.prefill)
        self._target = given_first(RecalledTarget(target, self.fork), setting.anchor)
        self.wave = max(1, min(MOST_WAVE, self.fork.capacity // (2 * setting.max_new_tokens)))

    def run(self, seeds: Sequence[int]) -> list[Trial]:
        """The trials of ``seeds``, in order; equal to :func:`plain_trial` up to the target's rounding."""
        found: dict[int, Trial] = {}
        for start in range(0, len(seeds), self.wave):
            pending = list(seeds[start : start + self.wave])
            for _ in range(2 * self.setting.max_new_tokens + 1):  # every pass lets a trial get a round further
                pending = self._advance(pending, found)
            assert not pending, "trials wait for passes that are forgotten at once"
        return [found[seed] for seed in seeds]

    def _advance(self, pending: list[int], found: dict[int, Trial]) -> list[int]:
        """Run every trial as far as what is known carries it, then learn what was missing."""
        missing: dict[Tail, None] = {}
        again: list[int] = []
        for seed in pending:
            try:
                found[seed] = run_trial(self._target, self.drafter, self.setting, seed)
            except Missing as gap:
                missing[gap.tail] = None
                again.append(seed)
        self.fork.learn(missing)
        return again


@dataclass
class _Copy:
    """A request's own copy of the drafter's state behind the context."""

    state: Any  # the drafter's own type
    has_context: bool = False  # whether the loop has handed the context in, which the state already knows


class ForkedDrafter:
    """A drafter whose requests all begin with one context, which it took in once."""

    def __init__(self, inner: Drafter, setting: TrialSetting, prefill: TargetOutput) -> None:
        self.name, self.block_size, self.taps = inner.name, inner.block_size, inner.taps
        self.has_confidence = inner.has_confidence
        self.certain = False  # whether any proposal came without a distribution
        self._inner, self._room = inner, len(setting.prompt_ids) + setting.max_new_tokens
        self._prompt = torch.tensor(setting.prompt_ids, device=prefill.final.device)
        self._state = inner.open(max_len=self._room)
        inner.extend(self._state, self._prompt, prefill.features)

    @classmethod
    def of(cls, inner: Drafter, setting: TrialSetting, prefill: TargetOutput) -> ForkedDrafter:
        """A fork that mirrors the request's rules if ``inner`` does."""
        return (_MirroringFork if hasattr(inner, "mirror") else cls)(inner, setting, prefill)

    def open(self, *, max_len: int) -> _Copy:
        assert max_len == self._room
        return _Copy(copy.deepcopy(self._state))

    def extend(
        self, state: _Copy, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        if state.has_context:
            self._inner.extend(state.state, token_ids, features)
            return
        assert torch.equal(token_ids, self._prompt)
        state.has_context = True

    def propose(
        self, state: _Copy, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        proposal = self._inner.propose(state.state, anchor, sampling=sampling, generator=generator, limit=limit)
        self.certain |= proposal.block > 0 and proposal.distribution is None
        return proposal


class _MirroringFork(ForkedDrafter):
    def mirror(self, state: _Copy, shaper: Shaper) -> None:
        self._inner.mirror(state.state, shaper)  # type: ignore[attr-defined]
