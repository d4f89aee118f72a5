"""Answers drawn by a server with the OpenAI interface (vLLM, SGLang, llama.cpp, a proxy), many requests at a time.

A drafter learns from ids. vLLM says which ids it drew (``return_token_ids``), and they are kept as they are. Elsewhere
the text is tokenised again with the model's own tokenizer: mostly, but not always, the ids that were drawn; where they
do not even decode to the text, the answer says ``exact_ids: false``. A reply that stopped gets the end token that the
template closes an answer with, if the server left it out; one cut by a limit gets none.

What may pass is tried again with growing pauses: no connection, a broken one, silence, 408, 409, 429, 5xx, a reply that
is no JSON. A prompt that the server refuses is left out and named. What would spoil every answer stops the run: a wrong
key or model, a prompt that the server renders otherwise than our template, or a server that no longer answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import Answer, Job, check_drawable, job_seed
from dspark.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import httpx

PASSING = frozenset({408, 409, 425, 429})  # and all of 5xx
STOPPING = frozenset({401, 403, 404, 405})
FAILURES_IN_A_ROW = 4  # prompts given up one after the other until the server counts as gone
REFUSED_AT_FIRST = 8  # refused prompts, and no answer yet: then it is the request that is wrong
SEED_RANGE = 2**31  # servers take seeds of 32 bits


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where answers come from, and how patiently they are asked for."""

    url: str  # with or without /v1
    model: str  # as the server calls it
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 32  # requests under way; >= 1
    attempts: int = 6  # of one request; >= 1
    first_pause: float = 1.0  # seconds before the second attempt; doubles, with jitter
    longest_pause: float = 60.0  # seconds
    timeout: float = 600.0  # seconds without a byte

    def __post_init__(self) -> None:
        for name in ("concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("first_pause", "longest_pause", "timeout"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"server is {self.url!r}; it must begin with http:// or https://")

    @property
    def base(self) -> str:
        """The address that ends in /v1."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else url + "/v1"


@dataclass(kw_only=True)
class Tally:
    """What a run tells at its end, beside the answers."""

    answers: int = 0
    retries: int = 0
    inexact: int = 0  # answers whose ids do not decode to the server's text
    retokenised: int = 0  # answers whose ids are our tokenizer's, not the server's
    miscounted: int = 0  # prompts of another number of tokens than the server counts
    refused: dict[str, str] = field(default_factory=dict)  # prompt id -> the server's words
    failed: dict[str, str] = field(default_factory=dict)  # prompt id -> why it was given up; asked again next time


class _PassingError(Exception):
    """Something that another attempt may not meet."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause  # seconds that the server asks for


class _RefusedError(Exception):
    """The server will not answer this prompt."""


async def remote_answers(
    server: Server,
    jobs: Sequence[Job],
    chat: ChatFormat,
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    tally: Tally,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncIterator[Answer]:
    """Ask for every job, at most ``server.concurrency`` at a time; answers come in the order in which they end.

    ``tally`` is counted up. ``transport`` replaces the network, for tests. Raises :class:`ConfigError` for what would
    spoil every answer, :class:`RequestError` once the server is gone; what was yielded before stands.
    """
    import httpx  # slow to import, only needed here

    check_drawable(sampling)
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
    async with httpx.AsyncClient(
        headers=headers, timeout=httpx.Timeout(server.timeout, connect=30.0), limits=limits, transport=transport
    ) as client:
        asker = _Asker(server, client, chat, sampling, max_new_tokens, tally)
        waiting = iter(jobs)
        results: asyncio.Queue[Answer | Exception | None] = asyncio.Queue()
        workers = [asyncio.create_task(asker.work(waiting, results)) for _ in range(min(server.concurrency, len(jobs)))]
        try:
            left = len(workers)
            while left:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    left -= 1
                else:
                    yield result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def served_model(server_url: str, *, api_key: str | None, transport: Any = None) -> str:
    """The name of the one model that a server offers. Raises :class:`ConfigError` if there are more, or none."""
    import httpx

    server = Server(url=server_url, model="", api_key=api_key)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(headers=headers, timeout=30.0, transport=transport) as client:
        try:
            reply = await client.get(f"{server.base}/models")
            reply.raise_for_status()
            names = [entry["id"] for entry in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"server is {server_url!r}, which does not list its models ({error}); check the address, or name the "
                "model with --served-model"
            ) from None
    if len(names) != 1:
        raise ConfigError(f"served_model is not given, and {server_url} offers {names}; name one of them")
    return str(names[0])


class _Asker:
    """The workers' common part: one request with its attempts, and what becomes of a reply."""

    def __init__(
        self,
        server: Server,
        client: httpx.AsyncClient,
        chat: ChatFormat,
        sampling: SamplingParams,
        max_new_tokens: int,
        tally: Tally,
    ) -> None:
        self.server, self.client, self.chat = server, client, chat
        self.sampling, self.max_new_tokens, self.tally = sampling, max_new_tokens, tally
        self.wants_ids = True  # until the server does not know the field
        self.failures = 0  # in a row, over all workers

    async def work(self, waiting: Any, results: asyncio.Queue[Answer | Exception | None]) -> None:
        """Take jobs until there are none; the last word into ``results`` is None, or the error that ends the run."""
        try:
            for job in waiting:
                answer = await self._answer(job)
                if answer is not None:
                    await results.put(answer)
            await results.put(None)
        except Exception as error:  # whatever it is, it must reach the run and not die with the worker
            await results.put(error)

    async def _answer(self, job: Job) -> Answer | None:
        try:
            answer = self._read(job, await self._ask(job))
        except _RefusedError as error:
            self.tally.refused[job.id] = str(error)
            if not self.tally.answers and len(self.tally.refused) >= REFUSED_AT_FIRST:
                raise RequestError(
                    f"the server refused the first {len(self.tally.refused)} prompts: {error}; check the options"
                ) from None
            return None
        except _PassingError as error:
            self.tally.failed[job.id] = str(error)
            self.failures += 1
            if self.failures >= FAILURES_IN_A_ROW:
                raise RequestError(
                    f"{self.server.url} gave up {self.failures} prompts in a row, the last with: {error}; the answers "
                    "so far are saved, and the same command goes on"
                ) from None
            return None
        self.failures = 0
        self.tally.answers += 1
        self.tally.inexact += not answer.exact_ids
        return answer

    async def _ask(self, job: Job) -> Mapping[str, Any]:
        """The reply to a job's request, after as many attempts as it takes."""
        jitter = random.Random(job_seed(self.sampling.seed, job.id, job.sample, job.turn))
        pause = self.server.first_pause
        for attempt in range(1, self.server.attempts + 1):
            try:
                return await self._post(job)
            except _PassingError as error:
                if attempt == self.server.attempts:
                    raise
                self.tally.retries += 1
                # spread out, so that those who failed together do not come back together
                wait = error.pause if error.pause is not None else pause * jitter.uniform(0.5, 1.0)
                await asyncio.sleep(min(wait, self.server.longest_pause))
                pause = min(2 * pause, self.server.longest_pause)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, job: Job) -> Mapping[str, Any]:
        import httpx

        while True:
            asked_for_ids = self.wants_ids
            try:
                reply = await self.client.post(f"{self.server.base}/chat/completions", json=self.request(job))
            except httpx.TransportError as error:
                raise _PassingError(f"{type(error).__name__} {error}".strip()) from None
            if reply.status_code == 200:
                return _checked_reply(reply)
            words = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
            if reply.status_code in PASSING or reply.status_code >= 500:
                raise _PassingError(words, _asked_pause(reply.headers.get("retry-after")))
            if reply.status_code in STOPPING or reply.status_code < 400:
                raise ConfigError(
                    f"server is {self.server.url!r}, model {self.server.model!r}: {words}; check the address, the "
                    "model's name and the key"
                )
            if asked_for_ids and "return_token_ids" in reply.text:
                self.wants_ids = False  # a strict server: ask again without
                continue
            raise _RefusedError(words)

    def request(self, job: Job) -> dict[str, Any]:
        """The body of a job's request; fields beyond OpenAI's are sent only where they are needed."""
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.server.model,
            "messages": [dict(message) for message in job.messages],
            "max_tokens": self.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": job_seed(sampling.seed, job.id, job.sample, job.turn) % SEED_RANGE,
            "stream": False,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if self.chat.template_options:
            body["chat_template_kwargs"] = dict(self.chat.template_options)
        if self.wants_ids:
            body["return_token_ids"] = True
        return body

    def _read(self, job: Job, reply: Mapping[str, Any]) -> Answer:
        """A checked reply as an answer."""
        self._check_prompt(job, reply)
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise _RefusedError(f"finish_reason is {reason!r}")
        text = message.get("content") or ""
        stopped = reason == "stop"
        drawn = choice.get("token_ids")
        if drawn is not None:
            ids = self._ended(drawn, stopped)
            return self._answered(job, ids, stopped, text=None, exact=True)
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ConfigError(
                "the server parts thoughts from answers and does not say the token ids, so what the model wrote cannot "
                "be put together again; start it without a reasoning parser, or without thinking"
            )
        ids = list(self.chat.tokenizer(text, add_special_tokens=False)["input_ids"])
        exact = self.chat.decode(ids, skip_special_tokens=False) == text
        self.tally.retokenised += 1
        return self._answered(job, self._ended(ids, stopped), stopped, text=text, exact=exact)

    def _answered(self, job: Job, ids: Sequence[int], stopped: bool, *, text: str | None, exact: bool) -> Answer:
        if not ids:
            raise _RefusedError("the answer is empty")
        reason = "stop" if stopped else "length"
        return Answer(job=job, token_ids=tuple(ids), finish_reason=reason, text=text, exact_ids=exact)

    def _ended(self, ids: Sequence[int], stopped: bool) -> list[int]:
        """Ids up to the first stop token; one is added to an answer that stopped without, none to one that was cut."""
        stops = self.chat.stop_token_ids
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        if not stopped:
            return list(ids[:end])
        if end < len(ids):
            return list(ids[: end + 1])
        closing = self.chat.end_token_id
        return [*ids, *([] if closing is None else [closing])]

    def _check_prompt(self, job: Job, reply: Mapping[str, Any]) -> None:
        """Compare how the server renders the prompt with how we do."""
        theirs = reply.get("prompt_token_ids")
        if theirs is not None and list(theirs) != list(job.prompt_ids):
            raise ConfigError(
                f"the server renders prompt {job.id!r} otherwise than the model's chat template does here "
                f"({len(theirs)} tokens, not {len(job.prompt_ids)}, or others); a drafter would learn on texts that "
                "the target never sees: serve the same model with its own template, and give the same options"
            )
        counted = (reply.get("usage") or {}).get("prompt_tokens")
        if theirs is None and isinstance(counted, int) and counted != len(job.prompt_ids):
            self.tally.miscounted += 1


def _checked_reply(reply: httpx.Response) -> Mapping[str, Any]:
    """The body of a reply; a broken one counts as passing."""
    try:
        body = reply.json()
        message = body["choices"][0]["message"]
        ids = body["choices"][0].get("token_ids")
        sound = isinstance(message, dict) and isinstance(message.get("content"), str | None)
        if not sound or not (ids is None or all(type(token) is int for token in ids)):
            raise ValueError("choices")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _PassingError(f"a reply that is no completion: {' '.join(reply.text.split())[:200]!r}") from None
    assert isinstance(body, dict)
    return body


def _asked_pause(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None if there is none, or it is a date."""
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, float(text))  # type: ignore[arg-type]  # None raises TypeError
    return None


def named(prompts: Mapping[str, str], *, most: int = 5) -> str:
    """A few of the prompts with the reasons, for a line of text."""
    shown = [f"{key} ({reason})" for key, reason in list(prompts.items())[:most]]
    return ", ".join(shown) + (", ..." if len(prompts) > most else "")
