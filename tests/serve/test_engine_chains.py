"""Eagle3 and MTP in the engine, in their batched form: each request's tokens are those of the loop for it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import alone, run, tiny_drafter, tiny_target, tokens_of

from dspark.core import SamplingParams
from dspark.models.batch_drafter import batched
from dspark.models.chain_batch import ChainDraftBatch
from dspark.serve.engine import Engine, EngineConfig
from dspark.serve.request import GenerationRequest

SAMPLED = SamplingParams(temperature=0.9, seed=5)
RULES = SamplingParams(temperature=0.8, repetition_penalty=1.2, banned_token_ids=(7,), seed=6)
CHAINS = pytest.mark.parametrize("drafter", ["eagle3", "mtp"])


def engine(drafter: str, **changes: object) -> Engine:
    fields = {"seats": 3, "page_size": 4, "max_len": 64, "pages": 40, "prefill_tokens": 9, **changes}
    return Engine(tiny_target("llama"), tiny_drafter("llama", drafter), config=EngineConfig(**fields))


@CHAINS
def test_each_request_gets_what_it_gets_alone(drafter: str) -> None:
    """Beginnings in common that part at a page's end, rules, a pool so small that requests are run again."""
    here = engine(drafter, pages=10)
    assert isinstance(batched(tiny_drafter("llama", drafter), tiny_target("llama")), ChainDraftBatch)
    requests = [
        GenerationRequest(
            request_id=f"{i}",
            prompt_ids=(*range(10, 18), *(40 + i + k for k in range(i))),
            sampling=sampling,
            max_new_tokens=12 + i,
        )
        for i, sampling in enumerate([SamplingParams(), SAMPLED, RULES, SAMPLED])
    ]
    events = run(here, requests)
    for request in requests:
        wanted = alone("llama", drafter, None, replace(request, request_id="any"))
        assert tokens_of(events[request.request_id]) == list(wanted.token_ids)
    stats = here.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and sum(stats.verified_at) > 0


@CHAINS
def test_drafts_are_as_good_behind_a_cached_prefix(drafter: str) -> None:
    """Round by round the same drafts: the rows of shared pages are the request's own."""
    first = GenerationRequest(request_id="first", prompt_ids=(*range(10, 22), 3), max_new_tokens=1)
    second = replace(first, request_id="second", prompt_ids=(*range(10, 22), 9), max_new_tokens=16)
    here = engine(drafter)
    run(here, [first])
    events = run(here, [second])["second"]
    assert events[0].cached_tokens == 12
    rounds = alone("llama", drafter, None, replace(second, request_id="any")).rounds
    told = [event for event in events if event.completion_tokens > 1]
    assert [event.accepted for event in told] == [r.accepted for r in rounds]
    assert [event.rejected_ids for event in told] == [r.draft_tokens[r.accepted :] for r in rounds]
