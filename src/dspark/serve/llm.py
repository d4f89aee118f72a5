"""The engine from Python: ``LLM("smollm2").generate("Why is the sky blue?")``, at once, as coroutines, or streamed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dspark.bundle import Bundle
from dspark.chat import Message
from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.serve.building import build_engine
from dspark.serve.events import EngineStats, StepEvent, TokenLogprobs
from dspark.serve.request import GenerationRequest, seed_of_answer
from dspark.serve.runner import LoopStream, Runner, ThreadStream
from dspark.serve.settings import EngineConfig
from dspark.serve.threads import release_pool

Prompt = str | Sequence[int] | Sequence[Message]  # a text to be continued, ids, or a conversation to be answered


@dataclass(frozen=True, kw_only=True)
class AnswerParams:
    """How prompts are to be answered."""

    sampling: SamplingParams = field(default_factory=SamplingParams)  # greedy by default
    max_new_tokens: int = 256  # >= 1
    n: int = 1  # answers to each prompt, the later ones with seeds derived from the first's; >= 1
    stop: tuple[str, ...] = ()  # strings that end an answer, which does not contain them
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's own
    logprobs: int | None = None  # alternatives per output token; 0: its own only; None: none at all
    prompt_logprobs: int | None = None  # likewise for the prompt
    constraint: Any | None = None  # dspark.serve.constraint.Constraint; Any, so that llguidance stays optional
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RequestError(f"n is {self.n}; it must be 1 or more")


@dataclass(kw_only=True)
class Answer:
    """One answer; complete when ``finish_reason`` is there."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" | "length" | "context" | "cancelled" | "error"
    stop_reason: str | int | None = None  # the stop string or stop token
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: int = 0  # draft-verify-commit rounds; the first token comes without one
    drafted: int = 0  # drafts proposed
    verified: int = 0  # of these, checked by the target
    accepted: int = 0  # of these, committed
    cached_tokens: int = 0  # prompt tokens that came from a cached prefix
    error: str | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included; nan without rounds."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else float("nan")

    def add(self, event: StepEvent) -> None:
        """Take in the next event."""
        self.rounds += bool(event.token_ids and self.token_ids)
        self.text += event.text
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.drafted, self.verified = self.drafted + event.drafted, self.verified + event.verify_len
        self.accepted += event.accepted
        self.cached_tokens = event.cached_tokens
        self.finish_reason, self.stop_reason, self.error = event.finish_reason, event.stop_reason, event.error


@dataclass(kw_only=True)
class Output:
    """A prompt's answers."""

    prompt_ids: tuple[int, ...]
    answers: list[Answer]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the second token on

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0].token_ids


class LLM:
    """A model with its drafter, ready for many requests at once; the engine runs in one thread of its own.

    Threads and coroutines may share one. Close it, or use it in a ``with`` block, to end the thread.
    """

    def __init__(
        self,
        model: str | Bundle,
        drafter: str = "default",
        *,
        scheduler: str = "greedy",
        config: EngineConfig | None = None,
        calibrations: tuple[Path, ...] = (),
        profile: Path | None = None,
        lookup: bool = True,
        **loading: Any,
    ) -> None:
        """``model`` and ``drafter`` as for every command (a Hub id, a folder, ``smollm2``; ``default``, ``ngram``,
        ``none`` or a folder), or a loaded :class:`Bundle`, whose drafter then counts. ``config`` overrides
        ``scheduler``; ``lookup`` drafts what a text has said before from the text itself. ``loading``: dtype, device,
        implementation, threads, ... of :meth:`Bundle.load`.

        Raises :class:`ModelError`, :class:`CheckpointError` or :class:`ConfigError` where something does not fit.
        """
        if isinstance(model, Bundle) and loading:
            raise ConfigError(f"{', '.join(sorted(loading))} given with a loaded model; leave them out")
        self.bundle = model if isinstance(model, Bundle) else Bundle.load(model, drafter, lookup=lookup, **loading)
        config = config or EngineConfig(scheduler=scheduler)
        self.engine = build_engine(self.bundle, config, calibrations=calibrations, profile=profile)
        self._runner = Runner(self.engine)
        self._names = itertools.count()

    # --- all at once -------------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: AnswerParams | None = None) -> list[Output]:
        """Answer one prompt or several, and wait; an output per prompt, in order.

        Prompts beyond what may wait at once are held here. Raises :class:`RequestError` for a prompt or parameters
        that cannot be done, before anything is computed; a failure on the way is in the answer.
        """
        params = params or AnswerParams()
        outputs = [self._output(prompt, params) for prompt in _as_list(prompts)]
        requests = [request for output in outputs for request in self._requests(output, params)]
        for request in requests:
            self.engine.open(request)
        answers = [answer for output in outputs for answer in output.answers]
        most = max(1, self.engine.config.max_waiting)
        streams: list[ThreadStream] = []
        try:
            for i, request in enumerate(requests):
                if i >= most:  # the one that was submitted so long ago has left the queue when it ends
                    self._read(streams[i - most], answers[i - most], outputs[(i - most) // params.n])
                streams.append(self._submit(request))
            for i, stream in enumerate(streams):
                self._read(stream, answers[i], outputs[i // params.n])
        finally:
            for stream in streams:
                stream.close()
        return outputs

    def _submit(self, request: GenerationRequest) -> ThreadStream:
        stream = self._runner.submit(request, ThreadStream)
        assert isinstance(stream, ThreadStream)
        release_pool()  # of a caller who has loaded the model, or computes between two requests
        return stream

    def _read(self, stream: ThreadStream, answer: Answer, output: Output) -> None:
        for event in stream:
            answer.add(event)
            if event.prompt_logprobs is not None:
                output.prompt_logprobs = event.prompt_logprobs

    # --- as coroutines -----------------------------------------------------------------------------------------------

    async def agenerate(self, prompt: Prompt, params: AnswerParams | None = None) -> Output:
        """Answer one prompt; run many of these together, they share steps."""
        params = params or AnswerParams()
        output = self._output(prompt, params)
        streams = [self._astream(request) for request in self._requests(output, params)]

        async def read(i: int, stream: LoopStream) -> None:
            async for event in stream:
                output.answers[i].add(event)
                if event.prompt_logprobs is not None:
                    output.prompt_logprobs = event.prompt_logprobs

        await asyncio.gather(*(read(i, stream) for i, stream in enumerate(streams)))
        return output

    def stream(self, prompt: Prompt, params: AnswerParams | None = None) -> AsyncIterator[StepEvent]:
        """Events of one answer as they come, in a coroutine; closing the iterator cancels the request."""
        params = params or AnswerParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream is of one answer")
        (request,) = self._requests(self._output(prompt, params), params)
        return self._astream(request)

    def _astream(self, request: GenerationRequest) -> LoopStream:
        loop = asyncio.get_running_loop()
        stream = self._runner.submit(request, lambda cancel: LoopStream(loop, cancel))
        assert isinstance(stream, LoopStream)
        release_pool()
        return stream

    # --- both --------------------------------------------------------------------------------------------------------

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt: a text as it stands, ids, or a conversation through the chat template."""
        if isinstance(prompt, str):
            return tuple(self.bundle.raw_ids(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            return tuple(self.bundle.chat.prompt_ids([m for m in prompt if isinstance(m, Mapping)]))
        ids = tuple(token for token in prompt if isinstance(token, int))
        if len(ids) != len(prompt):
            raise RequestError("a prompt mixes ids with something else; give a text, ids, or messages")
        return ids

    def stats(self) -> EngineStats:
        """The engine's counts."""
        return self._runner.stats()

    def close(self, *, drain: bool = False, timeout: float = 30.0) -> None:
        """End the thread; with ``drain`` let what is in flight finish for up to ``timeout`` seconds."""
        self._runner.close(drain=drain, timeout=timeout)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _output(self, prompt: Prompt, params: AnswerParams) -> Output:
        return Output(prompt_ids=self.prompt_ids(prompt), answers=[Answer() for _ in range(params.n)])

    def _requests(self, output: Output, params: AnswerParams) -> list[GenerationRequest]:
        stops = self.bundle.chat.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
        return [
            GenerationRequest(
                request_id=f"llm-{next(self._names)}",
                prompt_ids=output.prompt_ids,
                sampling=replace(params.sampling, seed=seed_of_answer(params.sampling.seed, i)),
                max_new_tokens=params.max_new_tokens,
                stop_token_ids=tuple(stops),
                stop=params.stop,
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs if i == 0 else None,
                constraint=params.constraint,
                skip_special_tokens=params.skip_special_tokens,
            )
            for i in range(params.n)
        ]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:  # Any: Prompt cannot be told from its sequences
    """One prompt or several, as several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]
    return list(prompts)
