"""A context that a target runs once, and targets that answer from it.

:class:`Fork` holds the context on every row of one KV memory and remembers what the target said behind every
continuation. :class:`RecalledTarget` answers a request's passes from it; :class:`GivenFirst` fixes the prefill's token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import SamplingParams
from dspark.maths.scheduling import Scheduler
from dspark.models.target import KVMemory, Target, TargetOutput

Tail = tuple[int, ...]  # tokens behind a context

MEMORY_BYTES = 1 << 30  # of a fork's KV memory, and again of the logits it remembers
MOST_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class TrialSetting:
    """What all trials of one test have in common."""

    prompt_ids: tuple[int, ...]
    anchor: int | None  # token that the prefill is made to give, so that all that follows is drafted; None: it draws
    sampling: SamplingParams  # its seed is replaced by the trial's
    scheduler: Scheduler
    drafts: int  # most drafts of a round; >= 1
    length: int  # tokens of an outcome, the anchor not among them; >= 1

    @property
    def max_new_tokens(self) -> int:
        """Just enough that the first round may draft ``drafts`` tokens."""
        return max(self.drafts + 2, self.length + len(self.given))

    @property
    def given(self) -> Tail:
        """What stands between the prompt and the outcome."""
        return () if self.anchor is None else (self.anchor,)


class Missing(Exception):
    """The loop asked for a continuation that the fork does not know yet."""

    def __init__(self, tail: Tail) -> None:
        super().__init__(tail)
        self.tail = tail


@dataclass(frozen=True)
class _Node:
    """What the target said at the last token of a tail."""

    logits: Tensor  # [vocab]
    features: Tensor | None  # [features]
    final: Tensor  # [hidden]


class Fork:
    """A context run once on every row of one KV memory, and what the target said behind its continuations.

    | range of a row                | owner                                           |
    |-------------------------------|-------------------------------------------------|
    | [0, prompt)                   | the context, equal in all rows, never undone    |
    | [prompt, prompt + longest)    | the continuation being run; undone after a pass |
    """

    def __init__(self, target: Target, setting: TrialSetting, *, taps: Sequence[int] = ()) -> None:
        self.target, self.taps = target, tuple(taps)
        self.prompt = torch.tensor(setting.prompt_ids, device=target.info.device)
        room = len(setting.prompt_ids) + setting.max_new_tokens
        one = target.new_memory(rows=1, max_len=room).nbytes
        self.rows = max(1, min(MOST_ROWS, MEMORY_BYTES // max(1, one)))
        self.memory = target.new_memory(rows=self.rows, max_len=room)
        self.prefill = target.forward(self.prompt, self.memory, taps=self.taps, last_only=True)
        self._spread()
        self.known: OrderedDict[Tail, _Node] = OrderedDict()
        self.capacity = max(4 * setting.max_new_tokens, MEMORY_BYTES // (4 * target.info.vocab_size))

    def _spread(self) -> None:
        """Copy row 0 to the others."""
        length, others = len(self.prompt), range(1, self.rows)
        for layer in (*self.memory.keys, *self.memory.values):
            layer[1:, :, :length] = layer[:1, :, :length]
        self.memory.advance(others, [length] * len(others))

    def passes(self, tails: Sequence[Tail]) -> Iterator[tuple[Tail, TargetOutput]]:
        """Run continuations in batches; yield each tail with its own part of the output, one row per token."""
        ordered = sorted(tails, key=len)  # rows of equal counts share an attention call
        for start in range(0, len(ordered), self.rows):
            batch = ordered[start : start + self.rows]
            flat = torch.tensor([token for tail in batch for token in tail], device=self.prompt.device)
            rows, counts = range(len(batch)), [len(tail) for tail in batch]
            output = self.target.forward(flat, self.memory, rows=rows, counts=counts, taps=self.taps)
            for row in rows:
                self.memory.rollback(row, len(self.prompt))
            assert output.logits is not None
            parts = (output.logits.split(counts), output.final.split(counts))
            tapped = [None] * len(batch) if output.features is None else output.features.split(counts)
            for tail, logits, features, final in zip(batch, parts[0], tapped, parts[1], strict=True):
                yield tail, TargetOutput(logits, features, final)

    def learn(self, tails: Iterable[Tail]) -> None:
        """Run ``tails`` and remember the output at each of their tokens; the longest unused are forgotten."""
        for tail, output in self.passes(list(tails)):
            for i in range(len(tail)):
                assert output.logits is not None
                features = None if output.features is None else output.features[i].clone()
                node = _Node(output.logits[i].clone(), features, output.final[i].clone())
                self.known.setdefault(tail[: i + 1], node)
                self.known.move_to_end(tail[: i + 1])
        while len(self.known) > self.capacity:
            self.known.popitem(last=False)

    def recall(self, tail: Tail, count: int) -> TargetOutput:
        """Output at the last ``count`` tokens of ``tail``; raises :class:`Missing` if any is not known."""
        nodes = []
        for end in range(len(tail) - count + 1, len(tail) + 1):
            if tail[:end] not in self.known:
                raise Missing(tail)
            self.known.move_to_end(tail[:end])
            nodes.append(self.known[tail[:end]])
        tapped = [node.features for node in nodes if node.features is not None]
        return TargetOutput(
            torch.stack([node.logits for node in nodes]),
            torch.stack(tapped) if tapped else None,
            torch.stack([node.final for node in nodes]),
        )

    def recheck(self, tail: Tail) -> float:
        """Largest difference between the logits behind ``tail`` here and in one fresh pass over the whole text."""
        ids = torch.cat((self.prompt, torch.tensor(tail, dtype=torch.long, device=self.prompt.device)))
        fresh = self.target.forward(ids, self.target.new_memory(rows=1, max_len=len(ids)), last_only=True)
        ((_, here),) = self.passes([tail])
        assert fresh.logits is not None and here.logits is not None
        return float((fresh.logits[-1].float() - here.logits[-1].float()).abs().max())


class _Text(KVMemory):
    """The memory of a recalled target: no keys and values, only which tokens it stands for."""

    def __init__(self, max_len: int, device: torch.device) -> None:
        super().__init__(rows=1, max_len=max_len, shapes=(), dtype=torch.float32, device=device)
        self.tokens: list[int] = []

    def rollback(self, row: int, length: int) -> None:
        super().rollback(row, length)
        del self.tokens[length:]


class _Delegate:
    """A target that hands on to another one what it does not do itself."""

    def __init__(self, inner: Target) -> None:
        self.inner, self.info = inner, inner.info

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        return self.inner.new_memory(rows=rows, max_len=max_len)

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        return self.inner.forward(
            token_ids, memory, rows=rows, counts=counts, taps=taps, last_only=last_only, want_logits=want_logits
        )

    def logits(self, final: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        return self.inner.logits(final)

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        return self.inner.embed(token_ids)

    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        return self.inner.head_weight()


class RecalledTarget(_Delegate):
    """A target whose passes are answered from a fork, for single requests that begin with the fork's context."""

    def __init__(self, inner: Target, fork: Fork) -> None:
        super().__init__(inner)
        self._fork, self._prompt = fork, fork.prompt.tolist()

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        assert rows == 1, "the loop runs one request"
        return _Text(max_len, self.info.device)

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        assert isinstance(memory, _Text) and tuple(taps) == self._fork.taps
        new = token_ids.tolist()
        memory.check_room((0,), (len(new),))
        if memory.lengths[0] == 0:
            assert new == self._prompt and last_only, "a trial begins with the context in one pass"
            output = self._fork.prefill
        else:
            tail = (*memory.tokens[len(self._prompt) :], *new)
            output = self._fork.recall(tail, 1 if last_only else len(new))
        memory.tokens += new
        memory.advance((0,), (len(new),))
        return output


class GivenFirst(_Delegate):
    """A target that gives a chosen token, with certainty, behind the prompt; all else is the inner one's."""

    def __init__(self, inner: Target, token: int) -> None:
        super().__init__(inner)
        self._logits = torch.full((1, inner.info.vocab_size), float("-inf"), device=inner.info.device)
        self._logits[0, token] = 0.0

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        first = memory.lengths[0] == 0
        output = super().forward(
            token_ids, memory, rows=rows, counts=counts, taps=taps, last_only=last_only, want_logits=want_logits
        )
        if not first:
            return output
        assert last_only, "the prompt comes in one pass, of which only the last row is drawn from"
        return TargetOutput(self._logits, output.features, output.final)


def given_first(inner: Target, token: int | None) -> Target:
    """``inner`` giving ``token`` behind the prompt; ``inner`` itself for None."""
    return inner if token is None else GivenFirst(inner, token)
