"""An engine without a model, for tests of the HTTP side: same contract, seeded logits from the last token alone.

It seats, queues, refuses, cancels and counts as the real one does; options shape its logits by the real rules
(:mod:`dspark.maths.shaping`, constraints), so that their effect can be tested. Only the target is missing.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import torch

from dspark.chat import ChatFormat
from dspark.maths.sampling import target_probs
from dspark.maths.shaping import shaped_logits
from dspark.serve.errors import EngineClosed, QueueFull
from dspark.serve.events import EngineStats, StepEvent, TokenLogprobs
from dspark.serve.request import GenerationRequest
from dspark.serve.text import AnswerText

BLOCK = 4


class FakeEngine:
    """``step_seconds`` pass for every step. ``fail`` is raised by every step, if given."""

    def __init__(
        self,
        chat: ChatFormat,
        *,
        vocab_size: int,
        seats: int = 4,
        max_waiting: int = 8,
        step_seconds: float = 0.0,
        fail: str | None = None,
    ) -> None:
        self.chat, self.vocab_size = chat, vocab_size
        self.seats, self.max_waiting, self.step_seconds, self.fail = seats, max_waiting, step_seconds, fail
        self.running: set[str] = set()
        self.waiting: list[asyncio.Event] = []
        self.closed, self.healthy = False, True
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.verify_lens, self.verified, self.accepted = [0] * (BLOCK + 1), [0] * BLOCK, [0] * BLOCK
        self.seen: list[GenerationRequest] = []

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            seats=self.seats,
            pages_used=4 * len(self.running),
            pages_total=4 * self.seats,
            steps=self.counts["steps"],
            prompt_tokens=self.counts["prompt"],
            completion_tokens=self.counts["output"],
            rounds=self.counts["rounds"],
            proposed_at=tuple(self.verified),
            verified_at=tuple(self.verified),
            accepted_at=tuple(self.accepted),
            verify_lens=tuple(self.verify_lens),
            finished=dict(self.finished),
            stage_seconds={"draft": 0.25, "target": 1.0},
        )

    async def submit(self, request: GenerationRequest) -> AsyncIterator[StepEvent]:
        if self.closed:
            raise EngineClosed("the engine is closed")
        if len(self.running) >= self.seats and len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests wait")
        self.seen.append(request)
        await self._seat()
        self.running.add(request.request_id)
        reason = "cancelled"
        try:
            async for event in self._answer(request):
                reason = event.finish_reason or reason
                yield event
        finally:
            self.running.discard(request.request_id)
            self.finished[reason] += 1
            if self.waiting:
                self.waiting[0].set()

    async def _seat(self) -> None:
        turn = asyncio.Event()
        self.waiting.append(turn)
        try:
            while len(self.running) >= self.seats or self.waiting[0] is not turn:
                await turn.wait()
                turn.clear()
        finally:
            self.waiting.remove(turn)
            if self.waiting:
                self.waiting[0].set()

    async def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        self.closed = True

    @functools.cache  # noqa: B019  # lives as long as the test
    def _raw(self, token: int) -> torch.Tensor:
        """Letters, mostly; of special tokens none, unless a bias asks for it."""
        logits = torch.from_numpy(np.random.default_rng(token).normal(0.0, 2.0, self.vocab_size).astype(np.float32))
        likely = torch.tensor(self.chat.tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"])
        logits[likely] += 12.0
        logits[: len(self.chat.tokenizer.all_special_tokens)] -= 40.0
        return logits

    def _logprobs(self, before: int, token: int, top: int) -> TokenLogprobs:
        values = self._raw(before).log_softmax(0)
        best = sorted(range(self.vocab_size), key=lambda i: (-values[i].item(), i))[:top]
        return TokenLogprobs(token, values[token].item(), tuple((i, values[i].item()) for i in best))

    async def _answer(self, request: GenerationRequest) -> AsyncIterator[StepEvent]:
        sampling, text = request.sampling, AnswerText(self.chat, stop=request.stop)
        rng = np.random.default_rng(sampling.seed % 2**64)
        matcher = request.constraint.matcher() if request.constraint is not None else None
        prompt, out = list(request.prompt_ids), list[int]()
        self.counts["prompt"] += len(prompt)
        prompt_logprobs = None
        if (top := request.prompt_logprobs) is not None:
            prompt_logprobs = tuple(self._logprobs(a, b, top) for a, b in itertools.pairwise(prompt))
        yield StepEvent(request_id=request.request_id, prompt_tokens=len(prompt))
        reason = None
        while reason is None:
            await asyncio.sleep(self.step_seconds)
            if self.fail is not None:
                raise RuntimeError(self.fail)
            count = int(rng.integers(1, BLOCK + 2)) if out else 1
            new, pieces, logprobs, stop = list[int](), "", list[TokenLogprobs](), None
            for _ in range(count):
                before = (prompt + out)[-1]
                token = self._draw(request, prompt, out, matcher, rng, before)
                new.append(token)
                out.append(token)
                if matcher is not None:
                    matcher.commit([token])
                if request.logprobs is not None:
                    logprobs.append(self._logprobs(before, token, request.logprobs))
                if token in request.stop_token_ids:
                    reason, stop = "stop", token
                    pieces += text.finish()
                else:
                    pieces += text.push(token)
                    if text.stopped is not None:
                        reason, stop = "stop", text.stopped
                    elif len(out) == request.max_new_tokens:
                        pieces += text.finish()
                        reason = "stop" if text.stopped is not None else "length"
                        stop = text.stopped
                if reason is not None:
                    break
            drafted = BLOCK if len(out) > len(new) else 0
            accepted = min(len(new) - 1, drafted)
            self._count(len(new), drafted, accepted)
            yield StepEvent(
                request_id=request.request_id,
                token_ids=tuple(new),
                text=pieces,
                logprobs=tuple(logprobs),
                prompt_logprobs=prompt_logprobs,
                drafted=drafted,
                verify_len=drafted,
                accepted=accepted,
                rejected_ids=(40,) * (drafted - accepted),
                prompt_tokens=len(prompt),
                completion_tokens=len(out),
                finish_reason=reason,
                stop_reason=stop,
            )
            prompt_logprobs = None

    def _draw(self, request, prompt, out, matcher, rng, before) -> int:  # type: ignore[no-untyped-def]
        sampling = request.sampling
        logits = shaped_logits(self._raw(before), prompt, out, sampling, stop_token_ids=request.stop_token_ids)
        if matcher is not None:
            logits = logits.masked_fill(~torch.from_numpy(matcher.next_mask()), float("-inf"))
        probs = target_probs(logits[None], sampling)[0].double().numpy()
        return int(rng.choice(self.vocab_size, p=probs / probs.sum()))

    def _count(self, tokens: int, drafted: int, accepted: int) -> None:
        self.counts["steps"] += 1
        self.counts["output"] += tokens
        self.counts["rounds"] += 1
        self.verify_lens[drafted] += 1
        for k in range(drafted):
            self.verified[k] += 1
            self.accepted[k] += k < accepted
