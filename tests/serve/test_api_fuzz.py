"""Whatever is sent: never a 500, always an answer, and an error in OpenAI's shape."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from api_run import Direct
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspark.serve.api.config import ApiConfig
from dspark.serve.api.schemas import NOT_HERE, ChatRequest, CompletionRequest

EXAMPLES = int(os.environ.get("DSPARK_FUZZ_EXAMPLES", "60"))
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    direct = Direct(config=ApiConfig(max_body_bytes=100_000, max_completion_tokens=8))
    yield direct
    direct.close()


LEAVES: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["", "tiny", "text", "json_object", "json_schema", "user", "a", "1", "\x00", "é", "🦆", "(", "[a-z"]
    ),
    st.text(max_size=12),
)
KEYS = st.one_of(st.sampled_from(["type", "text", "role", "content", "json_schema", "$ref"]), st.text(max_size=4))
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool"])},
            optional={"content": st.one_of(st.text(max_size=9), JUNK), "name": JUNK, "tool_calls": JUNK},
        ),
        JUNK,
    ),
    max_size=3,
)
PROMPTS = st.one_of(
    st.text(max_size=9),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.integers(-1, 270), max_size=5),
    JUNK,
)
SENSIBLE: dict[str, Any] = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 0.9),
    "max_tokens": st.integers(0, 9),
    "min_tokens": st.integers(0, 4),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stream": st.booleans(),
    "stop": st.one_of(st.text(max_size=2), st.lists(st.text(max_size=2), max_size=3)),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "structured_outputs": st.one_of(
        st.fixed_dictionaries({"regex": st.text(max_size=6)}),
        st.fixed_dictionaries({"choice": st.lists(st.text(max_size=3), max_size=3)}),
        st.fixed_dictionaries({"json": JUNK}),
        st.fixed_dictionaries({"grammar": st.text(max_size=9)}),
    ),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "include_drafts": st.booleans()}
    ),
    "return_token_ids": st.booleans(),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
}


def bodies(kind: Any, asked: str, prompt: Any) -> Any:
    """Requests that could be meant, requests with up to three fields gone wrong, and junk."""
    names = [name for name in (*kind.model_fields, *NOT_HERE) if name not in (asked, "model")]
    head = {"model": st.just("tiny"), asked: prompt}
    near = {name: SENSIBLE[name] for name in names if name in SENSIBLE}
    wrong = {name: st.one_of(SENSIBLE.get(name, JUNK), JUNK) for name in names}

    def spoilt(chosen: list[str]) -> Any:
        return st.fixed_dictionaries({**head, **{name: wrong[name] for name in chosen}})

    some = st.lists(st.sampled_from(names), max_size=3, unique=True)
    return st.one_of(st.fixed_dictionaries(head, optional=near), some.flatmap(spoilt), JUNK)


def check(direct: Direct, path: str, raw: bytes) -> None:
    reply = direct.post(path, content=raw, headers=JSON)
    assert reply.status_code in (200, 400, 404, 413), (reply.status_code, reply.text)
    if reply.status_code != 200:
        (error,) = reply.json().values()
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert isinstance(error["message"], str) and 0 < len(error["message"]) < 2000
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n"), reply.text
        for line in reply.text.split("\n\n")[:-2]:
            assert "error" not in json.loads(line.removeprefix("data: "))
    else:
        assert reply.json()["choices"]
    assert direct.service.in_flight == 0 and not direct.engine.running


@QUICK
@given(body=bodies(ChatRequest, "messages", st.one_of(MESSAGES, JUNK)))
def test_chat_bodies(direct: Direct, body: Any) -> None:
    check(direct, "/v1/chat/completions", json.dumps(body).encode())


@QUICK
@given(body=bodies(CompletionRequest, "prompt", PROMPTS))
def test_completion_bodies(direct: Direct, body: Any) -> None:
    check(direct, "/v1/completions", json.dumps(body).encode())


@QUICK
@given(
    raw=st.one_of(st.binary(max_size=200), st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
)
@example(raw=b'{"model": "tiny", "messages": ' + b"[" * 40_000)
@example(raw=b'{"model": "tiny", "prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}")
@example(
    raw=b'{"model": "tiny", "structured_outputs": {"json": '
    + b'{"not":' * 900
    + b"{}"
    + b"}" * 900
    + b'}, "prompt": "a"}'
)
@example(raw=b'{"model": "tiny", "prompt": "a", "temperature": ' + b"9" * 4000 + b"}")
@example(raw=b'{"model": "tiny", "prompt": "a", "temperature": 1e-999, "seed": -0}')
@example(raw=b'{"model": "tiny", "prompt": "\\ud83d"}')
@example(raw=b"\xef\xbb\xbf{}")
def test_raw_bytes(direct: Direct, raw: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        check(direct, path, raw)


@QUICK
@given(
    path=st.text(max_size=30).map(lambda text: "/" + text),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
    header=st.binary(max_size=20).filter(lambda value: not set(value) & set(b"\r\n\x00")),
)
def test_paths_methods_and_headers(direct: Direct, path: str, method: str, header: bytes) -> None:
    headers = {"authorization": header, "x-request-id": header, "content-length": b"0"}
    request = direct.client.build_request(method, "http://test" + quote(path), headers=headers)
    reply = direct.run(direct.client.send(request))
    assert reply.status_code in (200, 400, 404, 405, 415)
    if reply.status_code != 200 and method != "HEAD":
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
