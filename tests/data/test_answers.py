"""The continuous batch: answers depend on their own job alone, follow the target's distribution, and end where they
must."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fakes import TableTarget, chi_square_p, target_chain
from tiny_chat import MAX_LEN, save_chat_model
from torch import Tensor

import dspark.data.answers as answers_module
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import Answer, Job, PastTurn, job_seed, make_jobs, sample_answers
from dspark.decode import generate
from dspark.errors import ConfigError, DataError, RequestError
from dspark.models.drafter import NoDrafter
from dspark.models.loading import load_target
from dspark.models.target import KVMemory, Target, TargetOutput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return ChatFormat.from_folder(folder)


def some_jobs(count: int = 8, samples: int = 2) -> list[Job]:
    """Prompts of 1 to 40 tokens, in no order of length."""
    lengths = [1 + 7 * i % 40 for i in range(count)]
    return [
        Job(id=f"p{i}", sample=s, domain="all", prompt_ids=tuple(4 + (i + k * k) % 250 for k in range(length)))
        for s in range(samples)
        for i, length in enumerate(lengths)
    ]


def answered(target: Target, jobs: Sequence[Job], **options: object) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], Answer] = {}
    defaults = {"sampling": SamplingParams(temperature=1.0), "max_new_tokens": 12, "stop_token_ids": ()}
    for answer in sample_answers(target, jobs, **{**defaults, **options}):
        key = (answer.job.id, answer.job.sample)
        assert key not in found, "answered twice"
        found[key] = answer
    return found


# --- independence ----------------------------------------------------------------------------------------------------

SAMPLINGS = {
    "warm": SamplingParams(temperature=1.3, seed=5),
    "filtered": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=5),
    "greedy": SamplingParams(),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_an_answer_depends_on_its_own_job_alone(target: Target, sampling: SamplingParams) -> None:
    jobs = some_jobs(samples=1 if sampling.greedy else 2)
    stops = range(4, 20)  # a sixteenth of the vocabulary: answers end early and late
    one, three, eight = (
        answered(target, jobs, sampling=sampling, stop_token_ids=stops, rows=rows, max_new_tokens=16)
        for rows in (1, 3, 8)
    )
    assert one == three == eight and len(one) == len(jobs)
    assert answered(target, jobs[::-1], sampling=sampling, stop_token_ids=stops, rows=5, max_new_tokens=16) == one
    some = jobs[3::5]  # as a resume would
    part = answered(target, some, sampling=sampling, stop_token_ids=stops, rows=4, max_new_tokens=16)
    assert part == {key: one[key] for key in part} and len(part) == len(some)
    if not sampling.greedy:
        assert len({len(answer.token_ids) for answer in one.values()}) > 4, "lengths too alike to test refilling"


def test_an_answer_is_what_plain_decoding_gives_for_the_jobs_seed(target: Target) -> None:
    sampling = SamplingParams(temperature=1.2, top_p=0.95, seed=3)
    jobs = some_jobs(6)
    for (key, sample), answer in answered(target, jobs, sampling=sampling, stop_token_ids=[7, 8, 9], rows=4).items():
        seed = job_seed(3, key, sample)
        single = generate(
            target,
            NoDrafter(),
            answer.job.prompt_ids,
            sampling=SamplingParams(temperature=1.2, top_p=0.95, seed=seed),
            max_new_tokens=12,
            stop_token_ids=[7, 8, 9],
        )
        assert (answer.token_ids, answer.finish_reason) == (single.token_ids, single.finish_reason)


def test_a_longer_limit_continues_the_same_answer(target: Target) -> None:
    short, long = (answered(target, some_jobs(4), max_new_tokens=tokens) for tokens in (5, 15))
    for key, answer in short.items():
        assert answer.token_ids == long[key].token_ids[:5] and len(long[key].token_ids) == 15


def test_seeds_differ_by_seed_prompt_and_sample() -> None:
    seeds = [job_seed(seed, key, sample) for seed in (0, 1) for key in ("p1", "p11", "1") for sample in (0, 1, 11)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**128 for seed in seeds)


# --- distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.2, top_k=3)])
def test_first_two_tokens_have_the_targets_distribution(sampling: SamplingParams) -> None:
    target, prompt, count = TableTarget(), (1, 3), 3000
    jobs = [Job(id="p", sample=i, domain="all", prompt_ids=prompt) for i in range(count)]
    seen = torch.zeros(4, 4)
    for answer in answered(target, jobs, sampling=sampling, max_new_tokens=2, rows=50).values():
        seen[answer.token_ids] += 1
    expected = count * target_chain(prompt, lambda prefix: target.next_probs(prefix, sampling), 2)
    possible = expected > 0
    assert seen.numpy()[~possible].sum() == 0
    assert chi_square_p(seen.numpy()[possible], expected[possible]) > 0.001
    wrong = TableTarget(seed=1)
    other = count * target_chain(prompt, lambda prefix: wrong.next_probs(prefix, SamplingParams(temperature=0.8)), 2)
    assert chi_square_p(seen.flatten().tolist(), other.flatten()) < 1e-6, "a test that cannot fail"


# --- ends ------------------------------------------------------------------------------------------------------------


def test_answers_end_with_their_first_stop_token_or_at_the_limit() -> None:
    target = TableTarget()
    jobs = [Job(id="p", sample=i, domain="all", prompt_ids=(0, 1)) for i in range(60)]
    reasons = set()
    for answer in answered(target, jobs, stop_token_ids=[2], max_new_tokens=6, rows=7).values():
        *before, last = answer.token_ids
        assert 2 not in before
        assert answer.finish_reason == ("stop" if last == 2 else "length")
        assert last == 2 or len(answer.token_ids) == 6
        reasons.add((answer.finish_reason, len(answer.token_ids)))
    assert {("stop", 1), ("stop", 6), ("length", 6)} <= reasons, "the seed shows too few kinds of end"


def test_the_end_of_the_context_is_an_end_by_length() -> None:
    target = TableTarget(max_len=9)
    jobs = [Job(id=f"p{n}", sample=0, domain="all", prompt_ids=(1,) * n) for n in (8, 5, 2)]
    found = answered(target, jobs, max_new_tokens=4, rows=3)
    assert [len(found[f"p{n}", 0].token_ids) for n in (8, 5, 2)] == [1, 4, 4]
    assert {answer.finish_reason for answer in found.values()} == {"length"}


def test_texts_leave_the_stop_token_out(chat: ChatFormat) -> None:
    job = Job(id="p", sample=1, domain="code", prompt_ids=(5,))
    ids = tuple(chat.tokenizer("a<|im_start|>b", add_special_tokens=False)["input_ids"])
    stop = chat.stop_token_ids[0]
    row = Answer(job=job, token_ids=(*ids, stop), finish_reason="stop").row(chat)
    assert row == {
        "id": "p",
        "sample": 1,
        "domain": "code",
        "answer": "ab",
        "answer_ids": [*ids, stop],
        "finish_reason": "stop",
    }
    assert Answer(job=job, token_ids=ids[:1], finish_reason="length").row(chat)["answer"] == "a"


# --- work ------------------------------------------------------------------------------------------------------------


class RecordingTarget(TableTarget):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        self.size = (rows, max_len)
        return super().new_memory(rows=rows, max_len=max_len)

    def forward(self, token_ids: Tensor, memory: KVMemory, **options: object) -> TargetOutput:
        self.passes.append((tuple(options["rows"]), tuple(options["counts"])))
        assert options["last_only"]
        return super().forward(token_ids, memory, **options)


def test_no_row_works_for_nothing_and_free_rows_are_filled_at_once() -> None:
    target = RecordingTarget()
    jobs = [Job(id=f"p{i}", sample=0, domain="all", prompt_ids=(1,) * (2 + i % 5)) for i in range(30)]
    drawn: list[int] = []
    found = answered(target, jobs, stop_token_ids=[2], max_new_tokens=9, rows=4, on_pass=drawn.append)
    assert target.size == (4, 6 + 9)
    tokens = sum(len(answer.job.prompt_ids) + len(answer.token_ids) - 1 for answer in found.values())
    assert sum(sum(counts) for _, counts in target.passes) == tokens, "every token is computed once, the last never"
    assert drawn == [len(rows) for rows, _ in target.passes]
    assert sum(drawn) == sum(len(answer.token_ids) for answer in found.values())
    decodes = [len(rows) for rows, counts in target.passes if max(counts) == 1]
    begun_all = len(decodes) - 9  # the last answers under way may leave rows free
    assert set(decodes[:begun_all]) == {4} and begun_all > 5


def test_prompts_share_a_pass_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "PREFILL_TOKENS", 6)
    target = RecordingTarget()
    jobs = [Job(id=f"p{i}", sample=0, domain="all", prompt_ids=(1,) * n) for i, n in enumerate((3, 3, 9, 2))]
    assert len(answered(target, jobs, max_new_tokens=2, rows=4)) == 4
    assert [counts for _, counts in target.passes] == [(3, 3), (9,), (2,), (1, 1, 1, 1)]


def test_no_jobs_need_no_pass() -> None:
    target = RecordingTarget()
    assert answered(target, []) == {} and target.passes == []


def test_impossible_requests_are_refused_before_anything_runs() -> None:
    target, job = TableTarget(max_len=9), Job(id="p7", sample=0, domain="all", prompt_ids=(1,) * 9)
    options = {"sampling": SamplingParams(), "stop_token_ids": ()}
    with pytest.raises(RequestError, match=r"'p7' has 9 tokens.*1\.\.8"):
        sample_answers(target, [job], max_new_tokens=4, **options)
    with pytest.raises(RequestError, match="has 0 tokens"):
        sample_answers(target, [Job(id="p", sample=0, domain="all", prompt_ids=())], max_new_tokens=4, **options)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        sample_answers(target, [], max_new_tokens=0, **options)
    with pytest.raises(ConfigError, match="rows is 0"):
        sample_answers(target, [], max_new_tokens=4, rows=0, **options)


# --- jobs ------------------------------------------------------------------------------------------------------------


def prompt_rows(**texts: str) -> dict[str, dict]:
    return {key: {"id": key, "turns": [text, "not asked"]} for key, text in texts.items()}


def test_jobs_are_first_turns_first_samples_first(chat: ChatFormat) -> None:
    prompts = prompt_rows(b="one", a="two")
    prompts["a"]["domain"] = "math"
    done = [PastTurn(answer="", finished=True)]
    found = make_jobs(prompts, chat, samples=2, max_len=MAX_LEN, history={("b", 1): done, ("z", 0): done})
    keys = [(job.id, job.sample, job.domain) for job in found.jobs]
    assert keys == [("b", 0, "all"), ("a", 0, "math"), ("a", 1, "math")] and found.skipped == ()
    assert list(found.jobs[0].prompt_ids) == chat.prompt_ids([{"role": "user", "content": "one"}])


def test_later_turns_follow_the_targets_own_answers(chat: ChatFormat) -> None:
    prompts = {key: {"id": key, "turns": ["one", "two"], "system": "be kind"} for key in "abc"} | prompt_rows(d="x")
    prompts["d"]["turns"] = ["x"]
    past = {(key, 0): [PastTurn(answer=f"said {key}", finished=key != "b")] for key in "abd"}
    assert [job.id for job in make_jobs(prompts, chat, samples=1, max_len=MAX_LEN, history=past).jobs] == ["c"]
    (job,) = make_jobs(prompts, chat, samples=1, max_len=MAX_LEN, turn=1, history=past).jobs
    assert (job.id, job.turn) == ("a", 1), "b was cut, c has no first answer, d no second turn"
    assert chat.decode(job.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\nsaid a<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert job_seed(0, "a", 0) != job_seed(0, "a", 0, 1) != job_seed(0, "a", 1)


def test_prompts_without_room_for_an_answer_are_named(chat: ChatFormat, caplog: pytest.LogCaptureFixture) -> None:
    prompts = prompt_rows(short="x", long="x" * 100)
    tokens = len(chat.prompt_ids([{"role": "user", "content": "x" * 100}]))
    assert make_jobs(prompts, chat, samples=1, max_len=tokens + 1).skipped == ()
    with caplog.at_level(logging.WARNING):
        found = make_jobs(prompts, chat, samples=3, max_len=tokens)
    assert found.skipped == ("long",) and [job.id for job in found.jobs] == ["short"] * 3
    assert "1 prompts are skipped" in caplog.text and f"{tokens} tokens" in caplog.text and "long" in caplog.text


def test_a_prompt_that_is_no_text_is_named(chat: ChatFormat) -> None:
    with pytest.raises(DataError, match="prompt 'odd'"):
        make_jobs({"odd": {"id": "odd", "turns": [3]}}, chat, samples=1, max_len=99)
