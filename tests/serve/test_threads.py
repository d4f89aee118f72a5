"""OpenMP's pools: whoever loads a model, or checks a request, does not keep one beside the engine's."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_rig import tiny_target
from tiny_chat import save_chat_model

from dspark.bundle import Bundle
from dspark.models.drafter import NoDrafter
from dspark.serve.async_engine import AsyncEngine
from dspark.serve.engine import Engine
from dspark.serve.llm import LLM, AnswerParams
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig
from dspark.serve.threads import release_pool

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(
    not MAPS.exists() or "libgomp" not in MAPS.read_text(), reason="PyTorch's threads are not libgomp's here"
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    release_pool()
    yield
    release_pool()
    torch.set_num_threads(before)


def pool_of_this_thread() -> set[str]:
    """Threads that come with a parallel region of the calling thread."""
    release_pool()  # of an earlier one
    before = set(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)  # a thread asks for them itself
    assert torch.ones(1 << 20).add_(1)[-1] == 2
    return set(os.listdir("/proc/self/task")) - before


def gone(pool: set[str]) -> bool:
    """Whether none of them is left; the kernel takes a moment to forget a thread that has been joined."""
    for _ in range(200):
        if not pool & set(os.listdir("/proc/self/task")):
            return True
        time.sleep(0.005)
    return False


def test_a_thread_gives_its_own_pool_back_and_gets_another() -> None:
    pools: list[set[str]] = []
    made, finish = threading.Event(), threading.Event()

    def other() -> None:
        pools.append(pool_of_this_thread())
        made.set()
        finish.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(10)
    mine = pool_of_this_thread()
    assert len(mine) == len(pools[0]) == 1
    assert release_pool() and gone(mine)
    assert pools[0] <= set(os.listdir("/proc/self/task"))
    assert release_pool()  # nothing to give back
    assert len(pool_of_this_thread()) == 1
    finish.set()
    thread.join()
    assert gone(pools[0])


def test_a_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    assert pool_of_this_thread()  # whose books a fork copies
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(10 + release_pool()), daemon=True)
    child.start()
    child.join(20)
    ended = child.exitcode
    child.kill()
    assert ended == 10


def test_an_engine_computes_beside_no_other_pool() -> None:
    loading = pool_of_this_thread()
    engine = AsyncEngine(Engine(tiny_target("llama"), NoDrafter(), config=EngineConfig(seats=2, page_size=4)))
    assert loading and gone(loading)

    async def ask() -> tuple[int, ...]:
        checking = pool_of_this_thread()  # as the bias of a large vocabulary makes one
        async with engine:
            stream = engine.submit(GenerationRequest(request_id="a", prompt_ids=(1, 2), max_new_tokens=3))
            assert checking and gone(checking)
            return tuple([token async for event in stream for token in event.token_ids])

    assert len(asyncio.run(ask())) == 3


def test_whoever_asks_an_llm_computes_beside_it_only_meanwhile(tmp_path: Path) -> None:
    bundle = Bundle.load(str(save_chat_model(tmp_path)), "none", dtype="float32", device="cpu")
    params = AnswerParams(max_new_tokens=3)

    async def stream(llm: LLM) -> list[int]:
        mine = pool_of_this_thread()
        events = llm.stream("ab", params)
        assert mine and gone(mine)
        return [token async for event in events for token in event.token_ids]

    with LLM(bundle, config=EngineConfig(seats=2, memory_mib=8)) as llm:
        mine = pool_of_this_thread()
        answers = llm.generate("ab", params)
        assert mine and gone(mine)
        assert asyncio.run(stream(llm)) == answers[0].token_ids
