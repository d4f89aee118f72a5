"""The engine in a thread: all at once, as coroutines, streamed; dropped, cancelled, full, shut down, failing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from history_rig import HistoryDrafter, HistoryTarget
from tiny_chat import save_chat_model, save_random_drafter

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.serve.async_engine import AsyncEngine
from dspark.serve.engine import Engine
from dspark.serve.errors import EngineClosed, QueueFull
from dspark.serve.events import StepEvent
from dspark.serve.llm import LLM, AnswerParams
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.request import GenerationRequest, seed_of_answer
from dspark.serve.settings import EngineConfig

SAMPLED = SamplingParams(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("llm")
    model, drafter = save_chat_model(folder / "model"), save_random_drafter(folder / "drafter")
    return Bundle.load(str(model), str(drafter), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = EngineConfig(seats=4, memory_mib=8, scheduler="fixed", overlap=request.param, max_waiting=3)
    with LLM(bundle, config=config) as made:
        yield made


def alone(llm: LLM, prompt_ids: tuple[int, ...], sampling: SamplingParams, count: int) -> list[int]:
    from dspark.decode import generate

    bundle = llm.bundle
    stops = bundle.chat.stop_token_ids
    done = generate(
        bundle.target, bundle.drafter, prompt_ids, sampling=sampling, max_new_tokens=count, stop_token_ids=stops
    )
    return list(done.token_ids)


def test_texts_ids_and_conversations_are_answered_in_order(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts: list[Any] = ["abc", [5, 6, 7], messages, "de"]
    outputs = llm.generate(prompts, AnswerParams(max_new_tokens=6, sampling=SAMPLED, logprobs=1, prompt_logprobs=0))
    assert [output.prompt_ids for output in outputs] == [llm.prompt_ids(prompt) for prompt in prompts]
    assert outputs[2].prompt_ids == tuple(llm.bundle.chat.prompt_ids(messages))
    for output in outputs:
        (answer,) = output.answers
        assert output.token_ids == alone(llm, output.prompt_ids, SAMPLED, 6)
        assert output.text == llm.bundle.chat.decode(output.token_ids) and answer.finish_reason == "length"
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_ids) - 1
        assert 1.0 <= answer.acceptance_length <= 5.0 and answer.accepted <= answer.verified <= answer.drafted
    assert llm.generate("abc", AnswerParams(max_new_tokens=3))[0].prompt_ids == llm.prompt_ids("abc")


def test_n_answers_have_seeds_of_their_own_and_more_than_may_wait_are_taken(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], AnswerParams(max_new_tokens=5, n=12, sampling=SAMPLED))
    for i, answer in enumerate(output.answers):
        seeded = replace(SAMPLED, seed=seed_of_answer(7, i))
        assert answer.token_ids == alone(llm, (5, 6, 7), seeded, 5)
    assert len({tuple(answer.token_ids) for answer in output.answers}) > 6
    assert seed_of_answer(7, 0) == 7 and seed_of_answer(7, 1) != seed_of_answer(8, 0)


def test_what_cannot_be_done_is_refused_before_anything_is_computed(llm: LLM) -> None:
    before = llm.stats().steps
    for prompt, params, why in (
        ([], AnswerParams(), "empty"),
        ([[5], [999]], AnswerParams(), "outside"),
        ([5, 6], AnswerParams(max_new_tokens=0), "max_new_tokens"),
        ([{"role": "user"}], AnswerParams(), "no text"),
    ):
        with pytest.raises((RequestError, ValueError), match=why):
            llm.generate(prompt or [prompt], params)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="n is 0"):
        AnswerParams(n=0)
    assert llm.stats().steps == before
    with pytest.raises(ConfigError, match="loaded model"):
        LLM(llm.bundle, dtype="float32")


def test_coroutines_share_steps(llm: LLM) -> None:
    async def ask() -> list[list[int]]:
        params = AnswerParams(max_new_tokens=8, sampling=SAMPLED)
        outputs = await asyncio.gather(*(llm.agenerate([5, 6, i], params) for i in range(4)))
        return [output.token_ids for output in outputs]

    before = llm.stats().steps
    assert asyncio.run(ask()) == [alone(llm, (5, 6, i), SAMPLED, 8) for i in range(4)]
    assert llm.stats().steps - before < 4 * 8


def test_a_stream_tells_as_it_goes_and_dropping_it_cancels(llm: LLM) -> None:
    async def read(count: int) -> list[StepEvent]:
        events = []
        async for event in llm.stream("abc", AnswerParams(max_new_tokens=100)):
            events.append(event)
            if len(events) == count:
                break
        return events

    async def told_to_stop() -> None:
        task = asyncio.create_task(read(1000))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def quiet() -> None:
        for _ in range(500):
            if not llm.stats().running + llm.stats().waiting:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request is still there")

    async def all_of_it() -> None:
        before = llm.stats().finished.get("cancelled", 0)
        assert len(await read(3)) == 3
        await quiet()
        await told_to_stop()
        await quiet()
        assert llm.stats().finished["cancelled"] == before + 2 and llm.stats().pages_used == 0
        with pytest.raises(RequestError, match="n is 2"):
            llm.stream("abc", AnswerParams(n=2))

    asyncio.run(all_of_it())


def test_threads_may_share_it(llm: LLM) -> None:
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([5, 6, i], AnswerParams(max_new_tokens=6, sampling=SAMPLED))[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: alone(llm, (5, 6, i), SAMPLED, 6) for i in range(3)}


# --- the runner under an async engine --------------------------------------------------------------------------------

TARGET = HistoryTarget(vocab_size=40, max_len=400, sharpness=3.0)


def made(kind: type[Engine] = Engine, **settings: Any) -> AsyncEngine:
    config = EngineConfig(**{"seats": 2, "page_size": 8, "scheduler": "fixed", **settings})
    return AsyncEngine(kind(TARGET, HistoryDrafter(TARGET), config=config))


def request(name: str, count: int = 5) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=(1, 2, 3), max_new_tokens=count)


async def last_of(stream: Any) -> StepEvent:
    events = [event async for event in stream]
    return events[-1]


def test_a_full_queue_refuses_at_once_and_takes_again_later() -> None:
    async def play() -> None:
        engine = made(max_waiting=1)
        streams = [engine.submit(request(f"{i}", 300)) for i in range(3)]
        with pytest.raises(QueueFull):
            engine.submit(request("3"))
        with pytest.raises(RequestError, match="in flight"):
            engine.submit(request("0"))
        engine.cancel("0")
        engine.cancel("0")
        assert (await last_of(streams[0])).finish_reason == "cancelled"
        engine.cancel("1")
        assert (await last_of(streams[1])).finish_reason == "cancelled"
        assert (await last_of(engine.submit(request("3")))).finish_reason == "length"
        await streams[2].aclose()
        assert await engine.shutdown(drain=True, timeout=20.0)

    asyncio.run(play())


@pytest.mark.parametrize("kind", [Engine, OverlappedEngine])
@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_finishes_or_cancels_and_then_refuses(kind: type[Engine], drain: bool) -> None:
    async def play() -> None:
        engine = made(kind)
        streams = [engine.submit(request(f"{i}", 40)) for i in range(4)]
        stopping = asyncio.create_task(engine.shutdown(drain=drain, timeout=30.0))
        reasons = [(await last_of(stream)).finish_reason for stream in streams]
        assert set(reasons) == ({"length"} if drain else {"cancelled"})
        assert await stopping
        with pytest.raises(EngineClosed):
            engine.submit(request("late"))
        assert engine.stats().pages_used == 0

    asyncio.run(play())


def test_draining_ends_at_the_deadline() -> None:
    async def play() -> None:
        async with made(max_len=390) as engine:
            stream = engine.submit(request("long", 380))
            await anext(stream)
            assert await engine.shutdown(drain=True, timeout=0.0)
            assert (await last_of(stream)).finish_reason == "cancelled"

    asyncio.run(play())


def test_a_step_that_fails_outside_of_any_request_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        engine = made()
        healthy = engine.engine.step

        def broken(*args: Any) -> list[StepEvent]:
            monkeypatch.setattr(engine.engine, "step", healthy)
            raise RuntimeError("books")

        monkeypatch.setattr(engine.engine, "step", broken)
        event = await last_of(engine.submit(request("a")))
        assert event.finish_reason == "error" and "books" in (event.error or "")
        assert (await last_of(engine.submit(request("b")))).finish_reason == "length"
        await engine.shutdown()

    asyncio.run(play())


def test_it_says_what_it_serves(tmp_path: Path) -> None:
    async def play() -> None:
        async with made(seats=3) as engine:
            info = engine.info
            assert (info.model, info.drafter, info.seats, info.vocab_size) == ("history", "history", 3, 40)
            assert (await last_of(engine.submit(request("a")))).completion_tokens == 5

    asyncio.run(play())
