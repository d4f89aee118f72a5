"""OpenAI's own client, sync and async, streaming and not, over every endpoint and option."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from api_run import Running, running, tiny_chat_format
from openai.types import CompletionUsage

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def text_of(reply: Any) -> str:
    return reply.choices[0].message.content


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**COMMON, "messages": MESSAGES, **options})


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    reply = chat(client)
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.index, choice.message.role) == ("chat.completion", "tiny", 0, "assistant")
    assert choice.finish_reason == "length" and choice.logprobs is None and choice.message.refusal is None
    prompt = len(tiny_chat_format().prompt_ids(MESSAGES))
    assert isinstance(reply.usage, CompletionUsage)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        prompt,
        12,
        prompt + 12,
    )
    assert reply.id.startswith("chatcmpl-") and reply.created > 1e9
    sent_back = [*MESSAGES, choice.message.model_dump(), {"role": "user", "content": "go on"}]
    assert text_of(chat(client, messages=sent_back))  # the fields that a message comes back with are taken


def test_seed_and_temperature(client: openai.OpenAI) -> None:
    first = text_of(chat(client))
    assert text_of(chat(client)) == first != text_of(chat(client, seed=6))
    greedy = text_of(chat(client, temperature=0))
    assert greedy == text_of(chat(client, temperature=0, seed=99)) == text_of(chat(client, extra_body={"top_k": 1}))
    assert len({text_of(chat(client, seed=None)) for _ in range(3)}) > 1


@pytest.mark.parametrize("options", [{}, {"stop": ["e"]}, {"logprobs": True}, {"n": 3}, {"temperature": 0}])
def test_streamed_chat_says_the_same(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = chat(client, **options)
    pieces: dict[int, list[str]] = {choice.index: [] for choice in whole.choices}
    reasons: dict[int, str] = {}
    roles = 0
    usage = None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, **options):
        assert chunk.object == "chat.completion.chunk"
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        roles += choice.delta.role == "assistant"
        pieces[choice.index].append(choice.delta.content or "")
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert roles == len(whole.choices)
    assert ["".join(pieces[c.index]) for c in whole.choices] == [c.message.content for c in whole.choices]
    assert [reasons[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_no_usage_chunk_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_n_answers_differ_and_the_first_is_that_of_one(client: openai.OpenAI) -> None:
    texts = [choice.message.content for choice in chat(client, n=4).choices]
    assert texts[0] == text_of(chat(client)) and len(set(texts)) == 4
    assert [choice.message.content for choice in chat(client, n=4).choices] == texts


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    free = text_of(chat(client, max_tokens=40))
    stop = free[5:7]
    reply = chat(client, max_tokens=40, stop=stop)
    assert reply.choices[0].finish_reason == "stop" and text_of(reply) == free[: free.index(stop)]
    assert text_of(chat(client, max_tokens=40, stop=["~~~~", stop])) == text_of(reply)
    token = tiny_chat_format().tokenizer(free[4])["input_ids"]
    reply = chat(client, max_tokens=40, extra_body={"stop_token_ids": token})
    assert reply.choices[0].finish_reason == "stop" and text_of(reply) == free[: free.index(free[4])]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    for streamed in (False, True):
        reply = chat(client, logprobs=True, top_logprobs=3, stream=streamed)
        if streamed:
            found = [c.logprobs.content for chunk in reply for c in chunk.choices if c.logprobs]
            content = [one for part in found for one in part]
        else:
            content = reply.choices[0].logprobs.content
            assert "".join(one.token for one in content) == text_of(reply)
        assert len(content) == 12
        for one in content:
            assert one.logprob <= 0 and one.bytes == list(one.token.encode()) and len(one.top_logprobs) == 3
            best = [top.logprob for top in one.top_logprobs]
            assert best == sorted(best, reverse=True) and one.logprob <= best[0] + 1e-6
    content = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(one.top_logprobs == [] for one in content)


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_end_with_the_text(client: openai.OpenAI, streamed: bool) -> None:
    free = text_of(chat(client, max_tokens=40))
    stop = free[7:9]
    reply = chat(client, max_tokens=40, stop=stop, logprobs=True, stream=streamed)
    if streamed:
        content = [one for chunk in reply for c in chunk.choices if c.logprobs for one in c.logprobs.content]
    else:
        content = reply.choices[0].logprobs.content
    assert "".join(one.token for one in content) == free[: free.index(stop)]


def test_penalties_bias_and_min_tokens(client: openai.OpenAI) -> None:
    (a,) = tiny_chat_format().tokenizer("q")["input_ids"]
    assert text_of(chat(client, logit_bias={str(a): 100}, temperature=0)) == "q" * 12
    spread = text_of(chat(client, logit_bias={str(a): 20}, temperature=0, frequency_penalty=2, max_tokens=60))
    assert 1 < spread.count("q") < 60
    assert "q" not in text_of(chat(client, logit_bias={str(a): -100}, max_tokens=60))
    loop = text_of(chat(client, temperature=0, max_tokens=60))
    other = text_of(
        chat(client, temperature=0, max_tokens=60, presence_penalty=2, extra_body={"repetition_penalty": 2})
    )
    assert loop != other
    end = str(tiny_chat_format().end_token_id)
    assert text_of(chat(client, logit_bias={end: 100})) == ""
    longer = chat(client, logit_bias={end: 100}, extra_body={"min_tokens": 5})
    assert len(text_of(longer)) == 5 and longer.choices[0].finish_reason == "stop"
    assert len(text_of(chat(client, logit_bias={end: 100}, extra_body={"ignore_eos": True}))) == 0  # no text, but:
    assert chat(client, logit_bias={end: 100}, extra_body={"ignore_eos": True}).usage.completion_tokens == 12


def test_lengths(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=openai.omit, max_completion_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        chat(client, max_tokens=4000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, messages=[{"role": "user", "content": "x" * 1000}], max_tokens=openai.omit)
    filled = chat(client, max_tokens=openai.omit)
    assert filled.usage.total_tokens == 256 and filled.choices[0].finish_reason == "length"


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_outputs(client: openai.OpenAI, streamed: bool) -> None:
    def text(**options: Any) -> str:
        reply = chat(client, max_tokens=100, stream=streamed, temperature=0.5, **options)
        return "".join(c.choices[0].delta.content or "" for c in reply) if streamed else text_of(reply)

    schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    assert 0 <= json.loads(text(response_format=schema))["a"] <= 99
    for one in ({"json": SCHEMA}, {"json": json.dumps(SCHEMA)}):
        assert 0 <= json.loads(text(extra_body={"structured_outputs": one}))["a"] <= 99
    assert text(response_format={"type": "json_object"}).lstrip().startswith("{")
    assert text(extra_body={"structured_outputs": {"choice": ["red", "green"]}}) in ("red", "green")
    regex = text(extra_body={"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}})
    assert regex[:3].strip("ab") == "" and regex[3] == "-" and regex[4:].isdigit() and len(regex) == 6
    assert text(extra_body={"structured_outputs": {"grammar": 'start: "x" | "yy"'}}) in ("x", "yy")
    assert text(response_format={"type": "text"})


class Numbered(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: Literal[1, 2, 3]


def test_the_clients_own_helpers(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**{**COMMON, "max_tokens": 90}, messages=MESSAGES, response_format=Numbered)
    assert parsed.choices[0].message.parsed is not None and parsed.choices[0].message.parsed.a in (1, 2, 3)
    with client.chat.completions.stream(**COMMON, messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.current_completion_snapshot.choices[0].message.content
    raw = client.chat.completions.with_raw_response.create(**COMMON, messages=MESSAGES)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == text


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(**COMMON, prompt="once")
    assert reply.object == "text_completion" and len(reply.choices[0].text) == 12 and reply.id.startswith("cmpl-")
    assert client.completions.create(model="tiny", prompt="once").usage.completion_tokens == 16  # OpenAI's default
    ids = tiny_chat_format().tokenizer("once")["input_ids"]
    assert client.completions.create(**COMMON, prompt=ids).choices[0].text == reply.choices[0].text
    many = client.completions.create(**COMMON, prompt=["once", "twice"], n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == reply.choices[0].text and many.usage.prompt_tokens == 4 + 5
    lists = client.completions.create(**COMMON, prompt=[ids, ids])
    assert [choice.text for choice in lists.choices] == [reply.choices[0].text] * 2
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(**COMMON, prompt=["once", "twice"], n=2, stream=True):
        assert chunk.object == "text_completion"
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in many.choices}


@pytest.mark.parametrize("streamed", [False, True])
def test_completion_logprobs_and_echo(client: openai.OpenAI, streamed: bool) -> None:
    def joined(**options: Any) -> tuple[str, dict[str, list[Any]]]:
        reply = client.completions.create(**{**COMMON, "prompt": "once", "stream": streamed, **options})
        choices = [chunk.choices[0] for chunk in reply] if streamed else reply.choices
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        lists = {name: [v for c in choices if c.logprobs for v in getattr(c.logprobs, name)] for name in names}
        return "".join(choice.text for choice in choices), lists

    plain, lists = joined(logprobs=2)
    assert "".join(lists["tokens"]) == plain and lists["text_offset"] == list(range(12))
    assert all(
        2 <= len(top) <= 3 and token in top for top, token in zip(lists["top_logprobs"], lists["tokens"], strict=True)
    )
    text, lists = joined(logprobs=0, echo=True)
    assert text == "once" + plain == "".join(lists["tokens"]) and lists["text_offset"] == list(range(16))
    assert lists["token_logprobs"][0] is None and all(value <= 0 for value in lists["token_logprobs"][1:])
    assert joined(echo=True) == ("once" + plain, {name: [] for name in lists})
    text, lists = joined(echo=True, logprobs=1, max_tokens=0)  # only the prompt is judged
    assert text == "once" and len(lists["tokens"]) == 4
    assert joined(echo=True, logprobs=1, prompt="o")[0][0] == "o"  # one token: nothing to judge


def test_token_ids(client: openai.OpenAI) -> None:
    """As `dspark answers --server` asks for them."""
    extra = {"return_token_ids": True}
    reply = chat(client, extra_body=extra)
    assert tiny_chat_format().decode(reply.choices[0].token_ids) == text_of(reply)
    assert reply.prompt_token_ids == tiny_chat_format().prompt_ids(MESSAGES)
    ids = [
        i for chunk in chat(client, extra_body=extra, stream=True) for i in getattr(chunk.choices[0], "token_ids", [])
    ]
    assert ids == reply.choices[0].token_ids
    completion = client.completions.create(**COMMON, prompt="once", extra_body=extra)
    assert len(completion.choices[0].token_ids) == 12 and len(completion.choices[0].prompt_token_ids) == 4


def test_drafts_are_told_to_those_who_ask(client: openai.OpenAI) -> None:
    options = {"include_drafts": True, "include_usage": True}
    text, pieces, accepted = "", "", 0
    for chunk in chat(client, stream=True, max_tokens=60, stop=["zz"], extra_body={"stream_options": options}):
        if not chunk.choices:
            assert chunk.usage.drafts["accepted"] == accepted
            continue
        text += chunk.choices[0].delta.content or ""
        if drafts := getattr(chunk, "drafts", None):
            pieces += "".join(piece for _, piece in drafts["pieces"])
            accepted += drafts["accepted"]
            assert {kind for kind, _ in drafts["pieces"]} <= {"draft", "own"}
    assert pieces == text and accepted > 0


def test_messages_of_parts_and_developers(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    as_parts = chat(client, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    as_text = chat(client, messages=[MESSAGES[0], {"role": "user", "content": "hel\nlo"}])
    assert text_of(as_parts) == text_of(as_text)


def test_async_client(server: Running) -> None:
    async def talk() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            one = client.chat.completions.create(**COMMON, messages=MESSAGES)
            two = client.completions.create(**COMMON, prompt="once")
            stream = await client.chat.completions.create(**COMMON, messages=MESSAGES, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            whole, completion = await asyncio.gather(one, two)
            assert whole.choices[0].message.content == streamed and completion.choices[0].text

    asyncio.run(talk())


@pytest.mark.parametrize(
    "error, status, options",
    [
        (openai.NotFoundError, 404, {"model": "other"}),
        (openai.BadRequestError, 400, {"temperature": 3}),
        (openai.BadRequestError, 400, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, 400, {"extra_body": {"no_such_option": 1}}),
    ],
)
def test_errors_are_the_clients_own(
    client: openai.OpenAI, error: type[openai.APIStatusError], status: int, options: dict[str, Any]
) -> None:
    for streamed in (False, True):
        with pytest.raises(error) as caught:
            chat(client, stream=streamed, **options)
        assert caught.value.status_code == status and caught.value.type == "invalid_request_error"
        assert caught.value.request_id
