"""Answers from a server: what is asked, what becomes of replies, and what a bad network costs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tiny_chat import save_chat_model

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import Answer, Job, make_jobs
from dspark.data.remote_answers import Server, Tally, named, remote_answers, served_model
from dspark.errors import ConfigError, RequestError

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
SERVER = Server(url="http://there:8000", model="tiny", concurrency=4, first_pause=0.001, longest_pause=0.01)
Handler = Callable[[dict[str, Any]], httpx.Response]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("model")))


def some_jobs(chat: ChatFormat, count: int = 6) -> tuple[Job, ...]:
    prompts = {f"p{i}": {"id": f"p{i}", "turns": [f"say {i}"]} for i in range(count)}
    return make_jobs(prompts, chat, samples=1, max_len=None).jobs


def reply(text: str | None = "hello é", reason: str = "stop", **extra: Any) -> httpx.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    choice |= extra.pop("choice", {})
    return httpx.Response(200, json={"choices": [choice], **extra})


def ask(
    chat: ChatFormat, handler: Handler, *, jobs: Any = None, server: Server = SERVER, sampling: Any = SAMPLING
) -> tuple[list[Answer], Tally]:
    tally, found = Tally(), []

    async def handle(request: httpx.Request) -> httpx.Response:
        return handler({**json.loads(request.content), "_headers": request.headers, "_url": str(request.url)})

    async def run() -> None:
        async for answer in remote_answers(
            server,
            some_jobs(chat) if jobs is None else jobs,
            chat,
            sampling=sampling,
            max_new_tokens=9,
            tally=tally,
            transport=httpx.MockTransport(handle),
        ):
            found.append(answer)

    try:
        asyncio.run(run())
    except Exception as error:
        error.answers = found  # type: ignore[attr-defined]
        raise
    return found, tally


def ids_of(chat: ChatFormat, text: str) -> list[int]:
    return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_request_says_all_that_was_chosen(chat: ChatFormat) -> None:
    bodies: list[dict] = []

    def handler(body: dict) -> httpx.Response:
        bodies.append(body)
        return reply()

    server = Server(url="http://there/v1/", model="tiny", api_key="secret", first_pause=0.001)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=5)
    ask(chat, handler, server=server, sampling=sampling)
    ask(chat, handler, server=server, sampling=SamplingParams())
    body, greedy = bodies[0], bodies[-1]
    assert body.pop("_url") == "http://there/v1/chat/completions"
    assert body.pop("_headers")["authorization"] == "Bearer secret" and "secret" not in repr(server)
    seeds = [b.pop("seed") for b in bodies]
    assert len(set(seeds[:6])) == 6 and all(0 <= seed < 2**31 for seed in seeds)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": body["messages"][0]["content"]}],
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stream": False,
        "return_token_ids": True,
    }
    assert greedy["temperature"] == 0.0 and not {"top_k", "min_p", "chat_template_kwargs"} & set(greedy)


def test_template_options_go_along(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict] = []
    monkeypatch.setattr(chat, "template_options", {"enable_thinking": False})
    ask(chat, lambda body: bodies.append(body) or reply())
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies) and len(bodies) == 6


def test_no_more_requests_than_allowed_are_under_way(chat: ChatFormat) -> None:
    under_way, most = 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        return reply()

    async def run() -> int:
        jobs, tally = some_jobs(chat, 30), Tally()
        options = {"sampling": SAMPLING, "max_new_tokens": 9, "transport": httpx.MockTransport(handle)}
        return len([a async for a in remote_answers(SERVER, jobs, chat, tally=tally, **options)])

    assert asyncio.run(run()) == 30 and most == 4


# --- replies ---------------------------------------------------------------------------------------------------------


def test_a_text_is_tokenised_and_closed_unless_it_was_cut(chat: ChatFormat) -> None:
    cut = {"say 1", "say 4"}
    found, tally = ask(chat, lambda body: reply(reason="length" if body["messages"][-1]["content"] in cut else "stop"))
    end = chat.end_token_id
    for answer in found:
        was_cut = answer.job.messages[-1]["content"] in cut
        assert answer.token_ids == tuple(ids_of(chat, "hello é") + ([] if was_cut else [end]))
        assert answer.finish_reason == ("length" if was_cut else "stop") and answer.exact_ids
        assert answer.row(chat)["answer"] == "hello é" and "exact_ids" not in answer.row(chat)
    assert (tally.answers, tally.retokenised, tally.inexact) == (6, 6, 0)


def test_a_text_that_ids_do_not_give_back_is_marked(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = chat.decode
    monkeypatch.setattr(chat, "decode", lambda ids, **options: decode(ids, **options).lstrip())
    found, tally = ask(chat, lambda body: reply(" hello"))
    assert tally.inexact == 6 and all(answer.row(chat)["exact_ids"] is False for answer in found)
    assert found[0].row(chat)["answer"] == " hello"


def test_the_servers_own_ids_are_kept(chat: ChatFormat) -> None:
    stop, other = chat.stop_token_ids[0], 9
    letters = ids_of(chat, "hi")
    for drawn, reason, expected in (
        ([*letters, stop], "stop", [*letters, stop]),
        (letters, "stop", [*letters, chat.end_token_id]),
        ([*letters, stop, other], "stop", [*letters, stop]),
        (letters, "length", letters),
        ([*letters, stop], "length", letters),
    ):
        found, tally = ask(chat, lambda body: reply("?", reason, choice={"token_ids": drawn}))  # noqa: B023
        assert {answer.token_ids for answer in found} == {tuple(expected)} and tally.retokenised == 0
        assert found[0].row(chat)["answer"] == "hi"


def test_a_prompt_rendered_otherwise_ends_the_run(chat: ChatFormat) -> None:
    jobs = some_jobs(chat, 1)
    right = list(jobs[0].prompt_ids)
    found, _ = ask(chat, lambda body: reply(prompt_token_ids=right), jobs=jobs)
    assert len(found) == 1
    with pytest.raises(ConfigError, match=r"renders prompt 'p0' otherwise"):
        ask(chat, lambda body: reply(prompt_token_ids=[*right, 3]), jobs=jobs)
    for count, miscounted in ((len(right), 0), (len(right) + 7, 1)):
        _, tally = ask(chat, lambda body: reply(usage={"prompt_tokens": count}), jobs=jobs)  # noqa: B023
        assert tally.miscounted == miscounted


def test_thoughts_without_ids_cannot_be_put_together(chat: ChatFormat) -> None:
    def handler(body: dict) -> httpx.Response:
        return reply(choice={"message": {"content": "so", "reasoning_content": "hm"}})

    with pytest.raises(ConfigError, match="parts thoughts from answers"):
        ask(chat, handler)
    found, _ = ask(chat, lambda body: reply(choice={"message": {"content": "so", "reasoning": "hm"}, "token_ids": [9]}))
    assert len(found) == 6


def test_a_strict_server_is_asked_again_without_the_ids(chat: ChatFormat) -> None:
    asked = Counter[bool]()

    def handler(body: dict) -> httpx.Response:
        asked["return_token_ids" in body] += 1
        return httpx.Response(400, text="unknown field return_token_ids") if "return_token_ids" in body else reply()

    found, tally = ask(chat, handler, jobs=some_jobs(chat, 20))
    assert len(found) == 20 and not tally.refused and asked[True] <= 4 and asked[False] == 20


def test_an_empty_answer_that_stopped_is_its_end_token(chat: ChatFormat) -> None:
    found, _ = ask(chat, lambda body: reply(""))
    assert {answer.token_ids for answer in found} == {(chat.end_token_id,)}
    _, tally = ask(chat, lambda body: reply(None, "length"))
    assert set(tally.refused.values()) == {"the answer is empty"}


# --- faults ----------------------------------------------------------------------------------------------------------


def test_every_prompt_is_answered_once_by_a_server_that_fails_at_random(chat: ChatFormat) -> None:
    source = random.Random(3)

    def handler(body: dict) -> httpx.Response:
        fault = source.choice(["none", "none", "503", "429", "cut", "silence", "broken", "odd", "connect"])
        if fault in ("503", "429"):
            headers = {"retry-after": source.choice(["0", "0.001", "Mon, 30 Nov 2026 00:00:00 GMT"])}
            return httpx.Response(int(fault), headers=headers)
        if fault == "cut":
            return httpx.Response(200, content=b'{"choices": [{"message"')
        if fault == "odd":
            return httpx.Response(200, json=source.choice([[], {"choices": []}, {"choices": [{"message": 3}]}, None]))
        if fault != "none":
            raise {
                "silence": httpx.ReadTimeout,
                "broken": httpx.RemoteProtocolError,
                "connect": httpx.ConnectError,
            }[fault]("no")
        return reply(body["messages"][-1]["content"])

    server = Server(**{**SERVER.__dict__, "attempts": 60})
    found, tally = ask(chat, handler, jobs=some_jobs(chat, 40), server=server)
    assert sorted(a.job.id for a in found) == sorted(f"p{i}" for i in range(40))
    assert all(a.text == a.job.messages[-1]["content"] for a in found)
    assert tally.retries > 40 and not tally.failed and not tally.refused


def test_a_refused_prompt_is_named_and_the_others_go_on(chat: ChatFormat) -> None:
    def handler(body: dict) -> httpx.Response:
        long = body["messages"][-1]["content"] == "say 2"
        return httpx.Response(400, json={"error": "context\nlength"}) if long else reply()

    found, tally = ask(chat, handler)
    assert len(found) == 5 and list(tally.refused) == ["p2"]
    assert named(tally.refused) == 'p2 (status 400: {"error":"context\\nlength"})'


def test_when_every_prompt_is_refused_it_is_the_request(chat: ChatFormat) -> None:
    with pytest.raises(RequestError, match=r"refused the first 8 prompts: status 422: top_k"):
        ask(chat, lambda body: httpx.Response(422, text="top_k"), jobs=some_jobs(chat, 30))


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_a_wrong_key_or_model_ends_the_run_at_once(chat: ChatFormat, status: int) -> None:
    asked = Counter[str]()

    def handler(body: dict) -> httpx.Response:
        asked["all"] += 1
        return httpx.Response(status, text="no such model")

    with pytest.raises(ConfigError, match=rf"model 'tiny': status {status}: no such model"):
        ask(chat, handler, jobs=some_jobs(chat, 30))
    assert asked["all"] <= 4


def test_one_prompt_that_always_fails_is_left_for_the_next_time(chat: ChatFormat) -> None:
    def handler(body: dict) -> httpx.Response:
        return httpx.Response(500, text="boom") if body["messages"][-1]["content"] == "say 3" else reply()

    found, tally = ask(chat, handler)
    assert len(found) == 5 and tally.failed == {"p3": "status 500: boom"}
    assert tally.retries == SERVER.attempts - 1


def test_a_server_that_is_gone_ends_the_run_and_answers_stand(chat: ChatFormat) -> None:
    served = Counter[str]()

    def handler(body: dict) -> httpx.Response:
        served["all"] += 1
        if served["all"] > 7:
            raise httpx.ConnectError("refused")
        return reply()

    with pytest.raises(RequestError, match=r"gave up 4 prompts in a row.*ConnectError refused.*goes on") as caught:
        ask(chat, handler, jobs=some_jobs(chat, 30))
    assert len(caught.value.answers) == 7  # type: ignore[attr-defined]


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value", [("concurrency", 0), ("attempts", 0), ("timeout", 0.0), ("first_pause", -1.0), ("url", "there:80")]
)
def test_impossible_settings(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"server is|must be"):
        Server(**{"url": "http://x", "model": "m", field: value})


def test_penalties_are_refused(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match="without penalties"):
        ask(chat, lambda body: reply(), sampling=SamplingParams(presence_penalty=1.0))


@pytest.mark.parametrize(
    "models, words", [([], "offers"), (["a", "b"], "offers"), (None, "does not list"), (["only"], None)]
)
def test_the_only_model_of_a_server_needs_no_name(models: list | None, words: str | None) -> None:
    body = {} if models is None else {"data": [{"id": name} for name in models]}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    if words is None:
        assert asyncio.run(served_model("http://x", api_key=None, transport=transport)) == "only"
        return
    with pytest.raises(ConfigError, match=words):
        asyncio.run(served_model("http://x", api_key=None, transport=transport))


def test_names_of_many_prompts_are_cut() -> None:
    assert named({str(i): "r" for i in range(9)}, most=2) == "0 (r), 1 (r), ..."
