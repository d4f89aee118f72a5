"""What is refused, by which code and name, and that it is refused before any work; keys, headers, logs, figures."""

from __future__ import annotations

import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_run import Direct, running, tiny_chat_format, tiny_engine
from prometheus_client.parser import text_string_to_metric_families

from dspark.errors import ConfigError
from dspark.serve.api import logs
from dspark.serve.api.bodies import parse_object
from dspark.serve.api.config import ApiConfig
from dspark.serve.api.errors import ApiError, shown
from dspark.serve.api.schemas import NOT_HERE

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    direct = Direct(config=ApiConfig(max_body_bytes=60_000, max_n=4, max_choices=6, max_prompts=5))
    yield direct
    direct.close()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged; the loggers are as they were afterwards."""
    names = ("dspark", "uvicorn", "uvicorn.error")
    kept = [(logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, names)]
    stream = io.StringIO()
    logs.set_up(stream)
    yield stream
    for logger, logger.handlers, logger.propagate, level in kept:
        logger.setLevel(level)


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a reply, whose shape is checked."""
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    assert reply.headers["x-request-id"] and reply.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_what_we_do_not_have_is_refused_by_name(direct: Direct, name: str) -> None:
    value: Any = {"best_of": 3, "modalities": ["audio"], "store": True, "service_tier": "flex"}.get(name, "x")
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
        if name in body:
            continue
        error = error_of(direct.post(path, {**body, name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter") and name in error["message"]
        assert direct.post(path, {**body, name: None}).status_code == 200


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def schema(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": value}}


IDLE = {"best_of": 1, "modalities": ["text"], "store": False, "service_tier": "auto", "tool_choice": "none"}
CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"no_such": 1}, "no_such"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": 1.5}, "n"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": ["x" * 600]}, "stop.0"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 200}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"9999": 1}}, "logit_bias.9999"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias.01"),
    ({"logit_bias": {str(i): 1 for i in range(1100)}}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages.0.foo"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 65}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "x"}] * 1100}, "messages"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema("a b", {})}, "response_format.json_schema.name"),
    ({"response_format": schema("a", {"type": "foo"})}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"user": 5}, "user"),
    ({"cache_salt": ""}, "cache_salt"),
]  # fmt: skip
PLAIN_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": ["a"] * 6}, "prompt"),
    ({"prompt": ["a"] * 4, "n": 2}, "n"),
    ({"prompt": "x" * 300}, "prompt"),
    ({"prompt": "x" * 9000}, "prompt"),
    ({"prompt": "x" * 250, "max_tokens": 10}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": 1}, "echo"),
]


@pytest.mark.parametrize(
    "path, body, param",
    [("/v1/chat/completions", {**CHAT, **change}, param) for change, param in CHAT_FAULTS]
    + [("/v1/completions", {**PLAIN, **change}, param) for change, param in PLAIN_FAULTS],
)
def test_faults_are_named(direct: Direct, path: str, body: dict[str, Any], param: str) -> None:
    seen = len(direct.engine.seen)
    error = error_of(direct.post(path, body))
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert len(direct.engine.seen) == seen and direct.service.in_flight == 0


def test_values_without_effect_are_taken(direct: Direct) -> None:
    for name, value in IDLE.items():
        assert direct.post("/v1/chat/completions", {**CHAT, name: value}).status_code == 200, name


NO_JSON = [
    b"",
    b"{",
    b"[1]",
    b'"x"',
    b"null",
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": 1, "a": 2}',
    b'{"a": "\\ud800"}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 10_000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    json.dumps({str(i): 1 for i in range(10_001)}).encode(),
]


@pytest.mark.parametrize("raw", NO_JSON, ids=range(len(NO_JSON)))
def test_bodies_that_are_no_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert caught.value.status == 400 and len(caught.value.message) < 300


def test_large_values_are_cut_in_messages() -> None:
    for value in ("x" * 10**6, 10**5000, [0] * 10**6, {"a": 1}, 1.5, None, True):
        assert len(shown(value)) < 200


def test_bodies_media_and_sizes(direct: Direct) -> None:
    body = json.dumps(CHAT)
    post = direct.post
    error_of(post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"}), 415)
    error_of(post("/v1/chat/completions", content=body), 415)
    error_of(post("/v1/chat/completions", content=body, headers={**JSON, "content-encoding": "gzip"}), 415)
    error_of(post("/v1/chat/completions", content=b"", headers=JSON), 400)
    assert error_of(post("/v1/chat/completions", {**PLAIN, "prompt": "x" * 90_000}), 413)["code"] == "request_too_large"

    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 1000

    error_of(post("/v1/chat/completions", content=chunks(), headers=JSON), 413)
    assert post("/v1/chat/completions", content=body.ljust(60_000), headers=JSON).status_code == 200


def test_paths_methods_and_headers(direct: Direct) -> None:
    assert error_of(direct.get("/v1/nothing"), 404)["code"] == "not_found"
    reply = direct.get("/v1/chat/completions")
    assert error_of(reply, 405)["code"] == "method_not_allowed" and reply.headers["allow"] == "POST"
    error_of(direct.post("/metrics", {}), 405)
    error_of(direct.post("/v1/chat/completions", {**CHAT, "model": "x"}), 404)
    assert "model" in error_of(direct.post("/v1/chat/completions", {**CHAT, "model": None}))["message"]
    assert direct.get("/health").json() == {"status": "ok"}
    direct.engine.healthy = False
    assert direct.get("/health").status_code == 503 and direct.get("/health").json() == {"status": "failed"}
    direct.engine.healthy = True
    assert direct.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert direct.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
    page = direct.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/static/../api/app.py", "/static/%2e%2e/api/app.py", "/static/nothing", "/static//etc/passwd"):
        assert direct.get(path).status_code == 404
    document = direct.get("/openapi.json").json()
    assert "ChatRequest" in document["components"]["schemas"]


def test_a_key_opens_everything_but_health_and_the_page() -> None:
    direct = Direct(config=ApiConfig(api_keys=("secret", "other")))
    for path in ("/v1/models", "/metrics", "/live/events", "/openapi.json", "/nothing"):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
            {"authorization": "é"},
        ):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            error = error_of(direct.get(path, headers=encoded), 401)
            assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
    for path in ("/health", "/", "/static/index.html"):
        assert direct.get(path).status_code == 200
    for key in ("secret", "other"):
        assert direct.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert error_of(direct.post("/v1/chat/completions", CHAT), 401) and not direct.engine.seen
    direct.close()


@pytest.mark.parametrize(
    "options",
    [{"max_requests": 0}, {"body_seconds": 0.0}, {"drain_seconds": -1.0}, {"api_keys": ("",)}, {"api_keys": ("é",)},
     {"max_completion_tokens": 0}, {"request_seconds": float("inf")}],
)  # fmt: skip
def test_impossible_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ApiConfig(**options)


def test_the_log_has_figures_and_no_text(direct: Direct, log: io.StringIO) -> None:
    secret = "do-not-log-me"
    messages = [{"role": "user", "content": secret}]
    answer = direct.post("/v1/chat/completions", {**CHAT, "messages": messages, "user": secret})
    direct.post("/v1/chat/completions", {**CHAT, "messages": messages, "temperature": secret})
    direct.get(f"/v1/models?q={secret}")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert secret not in log.getvalue() and answer.json()["choices"][0]["message"]["content"] not in log.getvalue()
    assert [line["status"] for line in lines] == [200, 400, 200]
    first = lines[0]
    assert (
        first["outcome"] == "answered"
        and first["completion_tokens"] == 4
        and first["id"] == answer.headers["x-request-id"]
    )
    assert first["seconds"] >= first["first_token_seconds"] > 0 and len(first["user"]) == 12
    assert lines[1]["param"] == "temperature" and lines[1]["code"] == "invalid_type"


def test_a_failing_engine_is_a_500_and_the_log_says_where(log: io.StringIO) -> None:
    direct = Direct(tiny_engine(fail="words of a prompt"))
    for streamed in (False, True):
        error = (
            error_of(direct.post("/v1/chat/completions", {**CHAT, "stream": streamed}), 500) if not streamed else None
        )
        if streamed:
            text = direct.post("/v1/chat/completions", {**CHAT, "stream": True}).text
            error = json.loads(text.split("data: ")[-1])["error"]
            assert "[DONE]" not in text
        assert error is not None and error["code"] == "internal_error" and "words" not in json.dumps(error)
    assert "words of a prompt" not in log.getvalue() and "fake_engine.py" in log.getvalue()
    assert direct.service.in_flight == 0
    direct.close()


def test_metrics() -> None:
    direct = Direct()
    direct.post("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 20})
    direct.post("/v1/completions", {**PLAIN, "temperature": 9})  # refused by its schema: no request to the engine
    direct.post("/v1/completions", {**PLAIN, "n": 99})
    reply = direct.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    found = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert found["dspark_requests_total", "answered", "chat"] == 1
    assert found["dspark_requests_total", "completions", "invalid"] == 1
    assert found["dspark_request_output_tokens_total",] == found["dspark_output_tokens_total",] == 40
    assert found["dspark_http_responses_total", "400"] == 2
    stats = direct.engine.stats()
    for k in range(4):
        assert found["dspark_drafts_accepted_total", str(k)] == stats.accepted_at[k]
        assert found["dspark_drafts_verified_total", str(k)] == stats.verified_at[k]
    for name, counts in (
        ("drafted", stats.proposed_at),
        ("verified", stats.verified_at),
        ("accepted", stats.accepted_at),
    ):
        assert found[f"dspark_{name}_tokens_total",] == sum(counts)
    assert found["dspark_verify_length_count",] == stats.rounds
    assert found["dspark_verify_length_sum",] == sum(k * count for k, count in enumerate(stats.verify_lens))
    assert found["dspark_stage_seconds_total", "target"] == 1.0 and found["dspark_pages_total",] == 16
    assert found["dspark_answers_in_flight",] == 0 and found["dspark_engine_finished_total", "length"] == 2
    assert found["dspark_acceptance_length",] == pytest.approx(stats.acceptance_length)
    direct.close()


def raw_talk(port: int, data: bytes, *, seconds: float = 5.0) -> bytes:
    """What a server says to some bytes, until it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        sock.sendall(data)
        reply = b""
        try:
            while part := sock.recv(65536):
                reply += part
        except TimeoutError:
            pass
    return reply


def shape_of(reply: bytes) -> dict[str, Any]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), reply
    return json.loads(body)["error"]


def test_slow_clients_and_bytes_that_are_no_http() -> None:
    config = ApiConfig(body_seconds=0.3, head_seconds=0.3, max_connections=3, max_body_bytes=1000)
    with running(config=config) as server:
        started = time.monotonic()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
        )
        assert shape_of(raw_talk(server.port, head + b"{"))["code"] == "request_timeout"
        assert shape_of(raw_talk(server.port, b"POST /v1/comp"))["code"] == "request_timeout"
        assert raw_talk(server.port, b"").startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 4
        for junk in (b"\x00\xff\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"x" * 100_000, b"GET /\xff HTTP/1.1\r\n\r\n"):
            assert shape_of(raw_talk(server.port, junk))["code"] == "invalid_http"
        large = head.replace(b"50", b"999999999999")
        assert shape_of(raw_talk(server.port, large + b"{"))["code"] == "request_too_large"
        two = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (
            raw_talk(server.port, two + two + b"GET /he", seconds=2).count(b"200 OK") == 2
        )  # pipelined, the third slow
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        assert shape_of(raw_talk(server.port, two))["code"] == "too_many_connections"
        for sock in held:
            sock.close()
        time.sleep(0.2)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_template_options_of_a_request() -> None:
    chat = tiny_chat_format()
    before = chat.tokenizer.chat_template
    try:
        chat.tokenizer.chat_template = "{% if loud %}{{ '!' }}{% endif %}" + before
        direct = Direct()
        plain = direct.post("/v1/chat/completions", {**CHAT, "return_token_ids": True}).json()
        loud = direct.post(
            "/v1/chat/completions", {**CHAT, "return_token_ids": True, "chat_template_kwargs": {"loud": True}}
        ).json()
        assert loud["prompt_token_ids"] == [*chat.tokenizer("!")["input_ids"], *plain["prompt_token_ids"]]
        direct.close()
    finally:
        chat.tokenizer.chat_template = before
