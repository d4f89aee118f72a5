"""The server over the real engine: a tiny random chat model, a random drafter, the same client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from api_run import Running
from tiny_chat import save_chat_model, save_random_drafter

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.data.answers import Job, job_seed
from dspark.data.remote_answers import SEED_RANGE, Server, Tally, remote_answers
from dspark.maths.scheduling import FixedScheduler
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.serving import banner
from dspark.serve.async_engine import AsyncEngine
from dspark.serve.building import build_engine
from dspark.serve.settings import EngineConfig

MESSAGES: list[Any] = [{"role": "user", "content": "tell me of the sea, and of the ships that cross it"}]
COMMON: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 14, "seed": 3}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("served")
    model, drafter = save_chat_model(folder / "model"), save_random_drafter(folder / "drafter")
    return Bundle.load(str(model), str(drafter), dtype="float32")


@pytest.fixture(scope="module")
def server(bundle: Bundle) -> Iterator[Running]:
    config = EngineConfig(seats=4, max_waiting=4, prefill_tokens=64)
    engine = AsyncEngine(build_engine(bundle, config))
    info = engine.info
    model = ServedModel(
        name="tiny",
        chat=bundle.chat,
        max_len=info.max_len,
        vocab_size=info.vocab_size,
        drafter=info.drafter,
        block_size=info.block_size,
    )
    server = Running(engine, ApiConfig(max_requests=8), model)
    yield server
    server.stop()
    server.stop()
    server.join()
    assert asyncio.run(engine.shutdown(drain=False, timeout=5.0))


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def eventually(what: Callable[[], Any], *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**COMMON, **options})


def ids_of(client: openai.OpenAI, **options: Any) -> list[int]:
    reply = chat(client, extra_body={"return_token_ids": True, **options.pop("extra_body", {})}, **options)
    return list(reply.choices[0].token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
)
def test_answers_are_those_of_the_reference(client: openai.OpenAI, bundle: Bundle, fields: dict[str, Any]) -> None:
    """The decoding loop at batch 1, token for token: seeds and options arrive as they were given."""
    sampling = SamplingParams(seed=3, **fields)
    prompt = bundle.chat.prompt_ids(MESSAGES)
    wanted = bundle.answer(prompt, sampling=sampling, max_new_tokens=14, scheduler=FixedScheduler()).finish()
    extra = {name: fields[name] for name in fields if name != "temperature"}
    assert ids_of(client, temperature=fields["temperature"], extra_body=extra) == list(wanted.token_ids)


def test_streams_say_the_same_and_count(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2, n=2)
    text = {0: "", 1: ""}
    usage = None
    for chunk in chat(client, logprobs=True, top_logprobs=2, n=2, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
    assert text == {choice.index: choice.message.content for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens and text[0] != text[1]
    for choice in whole.choices:
        assert len(choice.logprobs.content) > 0
        assert all(one.top_logprobs[0].logprob >= one.logprob for one in choice.logprobs.content)


def test_options_reach_the_model(client: openai.OpenAI, bundle: Bundle) -> None:
    (q,) = bundle.chat.tokenizer("q")["input_ids"]
    assert chat(client, temperature=0, logit_bias={str(q): 100}, max_tokens=5).choices[0].message.content == "qqqqq"
    end = str(bundle.chat.end_token_id)
    short = chat(client, logit_bias={end: 100}, extra_body={"min_tokens": 4})
    assert short.choices[0].finish_reason == "stop" and short.usage.completion_tokens == 5
    forced = (
        chat(client, extra_body={"structured_outputs": {"regex": "(ab|cd){4}-[0-9]{3}"}}).choices[0].message.content
    )
    assert forced[:8].strip("abcd") == "" and forced[8] == "-" and forced[9:].isdigit() and len(forced) == 12
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    bias = {str(i): -100 for i in bundle.chat.tokenizer(" \n\t\r")["input_ids"]}
    assert json.loads(chat(client, response_format=form, logit_bias=bias).choices[0].message.content)["a"] in (1, 2)
    stopped = chat(client, temperature=0, logit_bias={str(q): 100}, max_tokens=9, stop=["qqq"])
    assert stopped.choices[0].message.content == "" and stopped.choices[0].finish_reason == "stop"


def test_prompts_are_judged(client: openai.OpenAI, bundle: Bundle) -> None:
    reply = client.completions.create(model="tiny", prompt="abcdef", echo=True, logprobs=1, max_tokens=0)
    lists = reply.choices[0].logprobs
    assert lists.tokens == list("abcdef") and lists.token_logprobs[0] is None and len(lists.token_logprobs) == 6
    ids = bundle.raw_ids("abcdef")
    memory = bundle.target.new_memory(rows=1, max_len=16)
    logits = bundle.target.logits(bundle.target.forward(torch.tensor(ids), memory, rows=[0], counts=[6]).final)
    wanted = logits.float().log_softmax(-1)[range(5), ids[1:]].tolist()
    assert lists.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)


def test_a_prefix_is_found_again(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "the same long beginning of a conversation, " * 3}]
    chat(client, messages=long)
    again = chat(client, messages=long)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    apart = chat(client, messages=long, extra_body={"cache_salt": "mine"})
    assert apart.usage.prompt_tokens_details.cached_tokens == 0


def test_who_leaves_frees_pages(server: Running, client: openai.OpenAI) -> None:
    stream = chat(client, max_tokens=180, n=3, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: server.engine.stats().running == 0 and server.service.in_flight == 0)
    assert server.engine.stats().pages_used == 0
    assert server.engine.stats().finished["cancelled"] >= 1


def test_a_flood_is_refused_and_the_rest_answered(server: Running) -> None:
    codes: list[int] = []

    def ask() -> None:
        codes.append(
            httpx.post(f"{server.url}/v1/chat/completions", json={**COMMON, "max_tokens": 16}, timeout=30).status_code
        )

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {200, 429} and codes.count(200) >= 8
    assert server.engine.stats().running == server.engine.stats().waiting == 0


def test_answers_are_drawn_over_http_with_their_ids(server: Running, bundle: Bundle) -> None:
    """`dspark answers --server`: our client, our server, the very ids that the engine would draw by itself."""
    sampling = SamplingParams(temperature=0.8, seed=5)
    messages = tuple(MESSAGES)
    job = Job(
        id="p", domain="d", sample=0, turn=0, messages=messages, prompt_ids=tuple(bundle.chat.prompt_ids(messages))
    )

    async def draw() -> list[Any]:
        tally = Tally()
        there = Server(url=server.url, model="tiny")
        stream = remote_answers(there, [job], bundle.chat, sampling=sampling, max_new_tokens=12, tally=tally)
        answers = [answer async for answer in stream]
        assert (tally.answers, tally.retokenised, tally.miscounted, tally.refused) == (1, 0, 0, {})
        return answers

    (answer,) = asyncio.run(draw())
    seed = job_seed(5, "p", 0, 0) % SEED_RANGE
    own = SamplingParams(temperature=0.8, seed=seed)
    wanted = bundle.answer(job.prompt_ids, sampling=own, max_new_tokens=12, scheduler=FixedScheduler()).finish()
    assert answer.token_ids == wanted.token_ids


def test_metrics_and_the_banner(server: Running, client: openai.OpenAI) -> None:
    chat(client)
    text = httpx.get(f"{server.url}/metrics").text
    stats = server.engine.stats()
    assert f"dspark_output_tokens_total {float(stats.completion_tokens)}" in text
    assert f"dspark_accepted_tokens_total {float(sum(stats.accepted_at))}" in text
    for stage in ("admit", "draft", "schedule", "target", "verify", "commit"):
        assert f'dspark_stage_seconds_total{{stage="{stage}"}}' in text
    lines = "\n".join(banner(server.url, server.service.model, server.engine, server.service.config))
    for word in (server.url, "tiny", "256 tokens", "4 answers at once", "API key"):
        assert word in lines
