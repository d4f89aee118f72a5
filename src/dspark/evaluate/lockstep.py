"""Full-length rounds of many requests at the price of plain decoding: every pass holds one token of each request.

A round is judged draft by draft from the front, and :func:`dspark.maths.rejection.judge` reads the target's rows only
up to the first rejection. So the drafts behind it need not be run to know their fate: they are refused. Here a request
runs its anchor, is judged by that row, runs the draft that stood, and so on; it costs the target as many tokens as it
commits, where a whole block costs ``block_size`` + 1. Coins and closing draw are taken from the streams when the round
begins, as many as for the whole block, and handed to the same judgement. So the rounds are those of
:mod:`dspark.decode` with whole blocks checked, up to near-ties that another length of a pass rounds otherwise, and
their records say so: ``verify_len`` is the whole block.

Requests need not be at the same place of their rounds. It pays where passes of many requests are the rule and the
rounds matter but not their speed: records for a calibration, acceptance on many prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.evaluate.batched import Drafted, Loop, Seat, commit, draft
from dspark.maths.block_verification import judge_block
from dspark.maths.rejection import Verdict, judge
from dspark.maths.sampling import TargetRows, target_probs, uniforms


class _NotRun(Exception):
    """A judgement asks for a row of the target that has not been run."""


class RowsSoFar(TargetRows):
    """The target's distributions as far as they are known; another row raises :class:`_NotRun`."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, logits: Float[Tensor, "1 vocab"]) -> None:
        """The next row, by its logits."""
        self._rows[len(self)] = target_probs(logits, self._params)[0]

    def __getitem__(self, k: int) -> Float[Tensor, "vocab"]:
        if k not in self._rows:
            raise _NotRun
        return self._rows[k]


@dataclass(kw_only=True)
class _Round:
    """A request's round under way."""

    part: Drafted
    coins: Float[Tensor, "block"]
    closing: Float[Tensor, "1"]
    rows: RowsSoFar
    ran: int = 0  # tokens: the anchor and drafts that stand
    logits: list[Tensor] = field(default_factory=list)  # raw, a row each; for rules that look at the text before them
    features: list[Tensor] = field(default_factory=list)  # a row per token that was run
    verify_seconds: float = 0.0

    @classmethod
    def begun(cls, loop: Loop, seat: Seat) -> _Round:
        """Draft, and toss the coins that the round will be judged by."""
        part = draft(loop, seat)
        drafts = len(part.token_ids) - 1
        if drafts < part.proposal.block:
            raise ConfigError("a scheduler cut a block; requests go in lockstep only where whole blocks are checked")
        return cls(
            part=part,
            coins=uniforms(drafts, seat.streams.accept),
            closing=uniforms(1, seat.streams.residual),
            rows=RowsSoFar(seat.ask.sampling),
        )

    @property
    def next_token(self) -> Tensor:
        """The token to run, of one entry: the anchor, then the drafts that stand so far."""
        return self.part.token_ids[self.ran : self.ran + 1]

    def take(self, seat: Seat, logits: Float[Tensor, "1 vocab"]) -> Verdict | None:
        """Take in the row behind :attr:`next_token`; the verdict, once it needs no further one."""
        drafts, at = self.part.token_ids[1:], self.ran
        self.ran += 1
        if seat.shaper is not None:
            self.logits.append(logits)
            logits = seat.shaper.rows(torch.cat(self.logits), drafts[:at].tolist())[-1:]
        if seat.ask.sampling.greedy:
            chosen = int(logits[0].argmax())
            stands = at < len(drafts) and int(drafts[at]) == chosen
            return None if stands else Verdict(accepted=at, next_token=chosen)
        self.rows.add(logits)
        rule = judge_block if seat.ask.sampling.rule == "block" else judge
        try:
            return rule(drafts, self.part.proposal.distribution, self.rows, self.coins, self.closing)
        except _NotRun:
            return None


class Lockstep:
    """A turn for :func:`dspark.evaluate.batched.play_together`: one token of every request, with the rounds that are
    under way; of one call of it."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}

    def __call__(self, loop: Loop, seats: dict[int, Seat]) -> None:
        for row, seat in seats.items():
            if row not in self._rounds:
                self._rounds[row] = _Round.begun(loop, seat)
        rounds = [self._rounds[row] for row in seats]
        begin = time.perf_counter()
        output = loop.target.forward(
            torch.cat([each.next_token for each in rounds]),
            loop.memory,
            rows=tuple(seats),
            counts=[1] * len(rounds),
            taps=loop.drafter.taps,
        )
        assert output.logits is not None
        features: Iterator[Tensor | None] = iter([None] * len(rounds))
        if output.features is not None:
            features = iter(output.features.split(1))
        share = (time.perf_counter() - begin) / len(rounds)
        for i, ((row, seat), state) in enumerate(zip(seats.items(), rounds, strict=True)):
            self._take(loop, row, seat, state, output.logits[i : i + 1], next(features), share)

    def _take(
        self, loop: Loop, row: int, seat: Seat, state: _Round, logits: Tensor, features: Tensor | None, share: float
    ) -> None:
        begin = time.perf_counter()
        if features is not None:
            state.features.append(features)
        verdict = state.take(seat, logits)
        state.verify_seconds += share + time.perf_counter() - begin
        if verdict is not None:
            del self._rounds[row]
            seen = torch.cat(state.features) if state.features else None
            commit(loop, row, seat, state.part, verdict, seen, verify_seconds=state.verify_seconds)
