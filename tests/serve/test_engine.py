"""What the engine promises a single request, whoever shares its steps: ends, limits, rules, numbers, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_rig import alone, run, text_of, tiny_drafter, tiny_target, tokens_of
from history_rig import HistoryDrafter, HistoryTarget
from tiny_chat import save_chat_model

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError, RequestError
from dspark.maths.scheduling import FixedScheduler
from dspark.models.drafter import NoDrafter
from dspark.models.target import KVMemory, TargetOutput
from dspark.serve.engine import Engine
from dspark.serve.errors import EngineClosed, QueueFull
from dspark.serve.events import StepEvent
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

VOCAB = 260  # bytes and four special tokens
TARGET = HistoryTarget(vocab_size=VOCAB, max_len=64, sharpness=3.0)
DRAFTER = HistoryDrafter(TARGET, block_size=3, blur=1.0)
SAMPLED = SamplingParams(temperature=1.0, seed=11)
LOOPS = pytest.mark.parametrize("kind", [Engine, OverlappedEngine])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("chat")))


def engine(kind: type[Engine] = Engine, *, chat: ChatFormat | None = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"seats": 3, "page_size": 4, "prefill_tokens": 16, **settings})
    return kind(TARGET, DRAFTER, config=config, chat=chat)


def request(name: str = "a", prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"request_id": name, "prompt_ids": tuple(prompt), "max_new_tokens": 12, **fields})


def plain(one: GenerationRequest) -> list[int]:
    done = generate(
        TARGET,
        DRAFTER,
        one.prompt_ids,
        sampling=one.sampling,
        max_new_tokens=one.max_new_tokens,
        stop_token_ids=one.stop_token_ids,
    )
    return list(done.token_ids)


# --- ends ------------------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_a_stop_token_ends_the_answer_is_kept_and_has_no_text(
    kind: type[Engine], sampling: SamplingParams, chat: ChatFormat
) -> None:
    free = plain(request(sampling=sampling))
    for at in range(1, 8):
        stop = free[at]
        one = request(sampling=sampling, stop_token_ids=(stop,))
        events = run(engine(kind, chat=chat), [one])["a"]
        wanted = free[: free.index(stop) + 1]
        assert tokens_of(events) == wanted == plain(one)
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
        assert text_of(events) == chat.decode(wanted[:-1])
        assert sum(event.finish_reason is not None for event in events) == 1


@LOOPS
def test_a_stop_string_is_cut_out_exactly_wherever_it_lies(kind: type[Engine], chat: ChatFormat) -> None:
    whole = chat.decode(plain(request(sampling=SAMPLED, max_new_tokens=20)))
    stops = [whole[at : at + size] for at in range(0, len(whole) - 3, 2) for size in (1, 3)]
    engines = engine(kind, chat=chat, seats=8)
    requests = [
        request(f"{i}", sampling=SAMPLED, max_new_tokens=20, stop=(stop, "never")) for i, stop in enumerate(stops)
    ]
    for i, events in run(engines, requests).items():
        stop = stops[int(i)]
        assert text_of(events) == whole[: whole.find(stop)]
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
        assert len(chat.decode(tokens_of(events))) < whole.find(stop) + len(stop) + 4  # nothing is written behind it


@LOOPS
def test_limits_are_exact(kind: type[Engine], chat: ChatFormat) -> None:
    for count in range(1, 9):
        events = run(engine(kind), [request(max_new_tokens=count)])["a"]
        assert len(tokens_of(events)) == count == events[-1].completion_tokens
        assert events[-1].finish_reason == "length" and events[-1].prompt_tokens == 3
    full = run(engine(kind, max_len=10), [request(max_new_tokens=50)])["a"]
    assert len(tokens_of(full)) == 7 and full[-1].finish_reason == "context"
    assert tokens_of(full) == plain(request(max_new_tokens=7))


def test_min_tokens_holds_stop_tokens_and_stop_strings_back(chat: ChatFormat) -> None:
    free = plain(request())
    held = SamplingParams(min_tokens=6)
    one = request(sampling=held, stop_token_ids=(free[1], free[2]))
    events = run(engine(chat=chat), [one])["a"]
    assert tokens_of(events) == plain(one) and len(tokens_of(events)) >= 6
    whole = chat.decode(free)
    late = run(engine(chat=chat), [request(sampling=held, stop=(whole[0],))])["a"]
    assert len(tokens_of(late)) >= 6 and text_of(late).startswith(whole[:3])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=-0.3),
        SamplingParams(temperature=0.9, seed=3, logit_bias=((4, 5.0), (9, -3.0)), banned_token_ids=(5, 6)),
        SamplingParams(temperature=1.2, seed=4, top_k=9, top_p=0.8, min_p=0.02, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, seed=5, rule="block"),
    ],
)
def test_every_rule_of_sampling_is_what_it_is_alone(sampling: SamplingParams) -> None:
    requests = [request(f"{i}", (5, 6, i), sampling=replace(sampling, seed=i), max_new_tokens=15) for i in range(7)]
    for name, events in run(engine(prefill_tokens=4), requests).items():
        assert tokens_of(events) == plain(requests[int(name)])


# --- numbers ---------------------------------------------------------------------------------------------------------


@LOOPS
def test_log_probabilities_are_the_models_own(kind: type[Engine]) -> None:
    biased = SamplingParams(temperature=0.7, seed=1, logit_bias=((8, 4.0),))
    one = request(prompt=range(10, 23), sampling=biased, logprobs=2, prompt_logprobs=1)
    events = run(engine(kind, prefill_tokens=5), [request("b", range(10, 20)), one])["a"]
    text = [*one.prompt_ids, *tokens_of(events)]
    wanted = [TARGET.next_probs(text[:i], [], SAMPLED).log() for i in range(1, len(text))]
    told = [*(events[0].prompt_logprobs or ()), *(each for event in events for each in event.logprobs)]
    assert len(told) == len(wanted) and [each.token_id for each in told] == text[1:]
    for each, row in zip(told, wanted, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(row.topk(len(each.top)).values.tolist(), abs=1e-4)
    assert all(event.prompt_logprobs is None for event in events[1:])


def test_prompt_log_probabilities_survive_a_preemption_and_a_cached_prefix() -> None:
    prompt = tuple(range(10, 30))
    alone_ = run(engine(), [request(prompt=prompt, prompt_logprobs=0)])["a"][0].prompt_logprobs
    tight = engine(pages=12, prefill_tokens=3, seats=2)
    run(tight, [request("warm", prompt, max_new_tokens=1)])
    events = run(tight, [request("old", (1, 2), max_new_tokens=40), request(prompt=prompt, prompt_logprobs=0)])["a"]
    assert events[0].prompt_logprobs == alone_ and events[0].cached_tokens == 0


@LOOPS
def test_counts_add_up(kind: type[Engine]) -> None:
    here = engine(kind)
    requests = [request(f"{i}", (5, 6, i), max_new_tokens=9) for i in range(5)]
    events = [event for told in run(here, requests).values() for event in told]
    stats = here.stats()
    assert stats.completion_tokens == 45 == sum(len(event.token_ids) for event in events)
    assert stats.prompt_tokens + stats.cached_tokens == 15 and stats.finished == {"length": 5}
    assert stats.rounds + 5 == sum(bool(event.token_ids) for event in events)
    assert sum(stats.verified_at) == sum(event.verify_len for event in events)
    assert sum(stats.proposed_at) == sum(event.drafted for event in events)
    assert sum(stats.verify_lens) == stats.rounds
    assert sum(stats.accepted_at) >= sum(event.accepted for event in events) > 0  # cut at the end of an answer
    for event in events:
        assert event.accepted <= event.verify_len <= event.drafted
        assert len(event.rejected_ids) == event.verify_len - event.accepted
    assert stats.stage_seconds["target"] > 0


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_a_cached_prefix_brings_the_drafters_context_and_never_the_last_token(length: int) -> None:
    prompt = tuple(range(10, 10 + length))
    shared, apart = engine(), engine(prefix_sharing=False)
    told = []
    for here in (shared, apart):
        run(here, [request("first", prompt, max_new_tokens=2)])
        told.append(run(here, [request("second", prompt, sampling=SAMPLED, max_new_tokens=20)])["second"])
    assert told[0][0].cached_tokens == (length - 1) // 4 * 4 and told[1][0].cached_tokens == 0
    rounds = [[(e.token_ids, e.drafted, e.accepted, e.rejected_ids) for e in events] for events in told]
    assert rounds[0] == rounds[1]  # drafted and accepted as without the cache
    assert sum(e.accepted for e in told[0]) > 3


@pytest.mark.parametrize("drafter", ["sharp", "dspark"])
def test_a_model_accepts_as_much_behind_a_cached_prefix(drafter: str) -> None:
    one = request("second", range(10, 23), max_new_tokens=16)
    for sharing in (True, False):
        config = EngineConfig(seats=2, page_size=4, max_len=64, memory_mib=8, prefix_sharing=sharing)
        here = Engine(tiny_target("llama"), tiny_drafter("llama", drafter), config=config)
        run(here, [request("first", range(10, 23), max_new_tokens=1)])
        events = run(here, [one])["second"]
        assert events[0].cached_tokens == (12 if sharing else 0)
        rounds = alone("llama", drafter, None, replace(one, request_id="any")).rounds
        assert [e.accepted for e in events[1:]] == [r.accepted for r in rounds]
        assert [e.rejected_ids for e in events[1:]] == [r.draft_tokens[r.accepted :] for r in rounds]


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    here = engine()
    answer = tokens_of(run(here, [request(prompt=range(10, 17), max_new_tokens=12)])["a"])
    longer = (*range(10, 17), *answer, 40, 41)
    events = run(here, [request("b", longer)])["b"]
    assert events[0].cached_tokens == 16 and tokens_of(events) == plain(request("b", longer))


def test_another_salt_shares_nothing() -> None:
    here = engine()
    for salt, cached in (("", 0), ("tenant", 0), ("tenant", 8), ("", 8)):
        events = run(here, [request(prompt=range(10, 19), salt=salt)])["a"]
        assert events[0].cached_tokens == cached


def test_prompts_are_read_in_chunks_within_the_budget_while_others_go_on() -> None:
    here = engine(prefill_tokens=4)
    here.add(request("talks", max_new_tokens=30))
    here.step()
    here.add(request("reads", range(10, 31)))
    told: list[StepEvent] = []
    while not any(event.request_id == "reads" for event in told):
        before = here.counters.prompt_tokens
        told = here.step()
        assert here.counters.prompt_tokens - before <= 4
        assert next(event.request_id for event in told if event.token_ids) == "talks"
    assert here.counters.steps == 7


# --- coming and going ------------------------------------------------------------------------------------------------


@LOOPS
def test_a_cancelled_request_frees_everything_at_once_and_says_so_once(kind: type[Engine]) -> None:
    here = engine(kind, seats=1)
    here.add(request("runs", max_new_tokens=40))
    here.add(request("waits"))
    for _ in range(3):
        here.step()
    assert here.cancel("runs") and here.cancel("waits") and not here.cancel("runs") and not here.cancel("nobody")
    assert here.stats().pages_used == 0 and not list(here.roster)
    here.roster.check()
    last = {event.request_id: event.finish_reason for _ in range(2) for event in here.step() if event.finish_reason}
    assert last == {"runs": "cancelled", "waits": "cancelled"} and not here.has_work
    again = request("runs")
    assert tokens_of(run(here, [again])["runs"]) == plain(again)


def test_refusals_come_before_any_work() -> None:
    here = engine(max_waiting=1, seats=1, pages=8, max_len=40)
    for bad, why in (
        (request(prompt=(VOCAB,)), "outside 0..259"),
        (request(prompt=range(40), max_new_tokens=1), "40 tokens"),
        (request(prompt=range(30), max_new_tokens=9), "pages"),
        (request(stop=("x",)), "tokenizer"),
        (request(sampling=SamplingParams(banned_token_ids=(VOCAB,))), "names token 260"),
    ):
        with pytest.raises(RequestError, match=why):
            here.add(bad)
    here.add(request("1"))
    with pytest.raises(RequestError, match="in flight"):
        here.add(request("1"))
    here.add(request("2"))
    with pytest.raises(QueueFull):
        here.add(request("3"))
    here.close()
    with pytest.raises(EngineClosed):
        here.add(request("4"))
    assert {event.finish_reason for event in here.step()} == {"cancelled"} and not here.has_work
    for fields, why in (
        ({"prompt": ()}, "empty"),
        ({"name": ""}, "request_id"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ("",)}, "stop string"),
    ):
        with pytest.raises(RequestError, match=why):
            request(**fields)
    with pytest.raises(ConfigError, match="too few"):
        engine(pages=1)


def test_the_oldest_keeps_its_seat_and_the_youngest_comes_back_unchanged() -> None:
    here = engine(seats=3, pages=13, prefill_tokens=64)
    requests = [request(f"{i}", (5, 6, i), sampling=replace(SAMPLED, seed=i), max_new_tokens=24) for i in range(3)]
    order: list[str] = []
    for one in requests:
        here.add(one)
    events: dict[str, list[StepEvent]] = {one.request_id: [] for one in requests}
    while here.has_work:
        for event in here.step():
            events[event.request_id].append(event)
            order += [event.request_id] if event.finish_reason else []
        here.roster.check()
    assert here.stats().preemptions > 0 and order[0] == "0"
    for one in requests:
        assert tokens_of(events[one.request_id]) == plain(one)


def test_a_target_without_pages_runs_through_the_same_code() -> None:
    target, drafter = tiny_target("qwen3", "transformers"), tiny_drafter("qwen3", "ngram", "transformers")
    here = Engine(target, drafter, config=EngineConfig(seats=2, max_len=48, prefill_tokens=6))
    requests = [request(f"{i}", (5, 6, 5, 6, i), max_new_tokens=8) for i in range(3)]
    for name, events in run(here, requests).items():
        one = replace(requests[int(name)], request_id="any")
        assert tokens_of(events) == list(alone("qwen3", "none", None, one, "transformers").token_ids)
    assert here.stats().cached_tokens == 0


def test_plain_decoding_is_a_scheduler_too() -> None:
    here = engine(scheduler="none")
    assert tokens_of(run(here, [request()])["a"]) == plain(request())
    assert here.stats().drafted_steps == 0


# --- errors ----------------------------------------------------------------------------------------------------------


class Failing(HistoryTarget):
    """Rows behind token 99 are not a number; while ``broken``, no pass works at all."""

    broken = False

    def forward(self, token_ids: torch.Tensor, memory: KVMemory, **rest: Any) -> TargetOutput:
        if self.broken:
            raise RuntimeError("the device is gone")
        output = super().forward(token_ids, memory, **rest)
        final = torch.where((token_ids == 99)[:, None], float("nan"), output.final)
        return TargetOutput(output.logits, output.features, final)


@LOOPS
def test_one_bad_request_fails_alone(kind: type[Engine]) -> None:
    target = Failing(vocab_size=VOCAB, max_len=64, sharpness=3.0)
    here = kind(target, HistoryDrafter(target), config=EngineConfig(seats=3, page_size=4))
    events = run(here, [request("good"), request("bad", (*range(10, 20), 99)), request("also", (7, 7))])
    assert events["bad"][-1].finish_reason == "error" and "no distribution" in (events["bad"][-1].error or "")
    assert events["bad"][-1].error_kind == "request"
    for name, prompt in (("good", (5, 6, 7)), ("also", (7, 7))):
        assert tokens_of(events[name]) == plain(request(prompt=prompt))
    assert run(here, [request("next", range(10, 20))])["next"][0].cached_tokens == 0  # nothing of it is shared


@LOOPS
def test_a_broken_pass_ends_who_was_in_it_and_the_engine_goes_on(kind: type[Engine]) -> None:
    target = Failing(vocab_size=VOCAB, max_len=64, sharpness=3.0)
    here = kind(target, HistoryDrafter(target), config=EngineConfig(seats=2, page_size=4))
    for name in "abc":
        here.add(request(name))
    here.step()
    target.broken = True
    told: list[StepEvent] = []
    while here.has_work:
        told += here.step()
        here.roster.check()
        target.broken = here.stats().finished.get("error", 0) < 2
    errors = {event.request_id: event.error for event in told if event.finish_reason == "error"}
    assert set(errors) == {"a", "b"} and "device is gone" in str(errors["a"])
    assert tokens_of(event for event in told if event.request_id == "c") == plain(request())
    assert all(event.error_kind == "internal" for event in told if event.finish_reason == "error")


@LOOPS
@pytest.mark.parametrize("stage", ["propose", "keep", "open", "close"])
def test_a_drafter_that_fails_leaves_the_engine_usable(
    kind: type[Engine], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = engine(kind)

    def fail(*args: Any, **rest: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("no drafts today")

    here.add(request("a"))
    here.step()
    monkeypatch.setattr(here.drafter, stage, fail)
    here.add(request("b"))
    told = []
    while here.has_work:
        told += here.step()
        here.roster.check()
    reasons = {event.request_id: event.finish_reason for event in told if event.finish_reason}
    assert set(reasons) == {"a", "b"} and ("error" in reasons.values()) == (stage != "close")
    if stage != "close":
        assert tokens_of(run(here, [request("c")])["c"]) == plain(request())


def test_text_that_cannot_be_told_ends_its_request_alone(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    here = engine(chat=chat)
    here.add(request("a"))
    here.add(request("b"))
    here.step()
    flight = next(flight for flight in here.roster if flight.request.request_id == "a")
    monkeypatch.setattr(flight.text, "push", lambda *ids: 1 / 0)
    told = []
    while here.has_work:
        told += here.step()
    reasons = {event.request_id: event.finish_reason for event in told if event.finish_reason}
    assert reasons == {"a": "error", "b": "length"}


def test_the_engine_needs_no_drafter() -> None:
    here = Engine(TARGET, NoDrafter(), config=EngineConfig(seats=2, page_size=4))
    assert tokens_of(run(here, [request()])["a"]) == plain(request())


def test_fixed_lengths_are_the_loops_own() -> None:
    for length in (0, 1, 2):
        one = request(sampling=SAMPLED)
        done = generate(
            TARGET, DRAFTER, one.prompt_ids, sampling=SAMPLED, max_new_tokens=12, scheduler=FixedScheduler(length)
        )
        assert tokens_of(run(engine(verify_len=length), [one])["a"]) == list(done.token_ids)
