"""The continuous batch: answers depend on their own job alone, follow the target's distribution, and end where they
must."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fakes import TableTarget, chi_square_p, target_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import MAX_LEN, save_chat_model
from torch import Tensor

import dspark.data.answers as answers_module
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import (
    Answer,
    Job,
    blockwise_inverse_cdf,
    draw_tokens,
    job_seed,
    make_jobs,
    sample_answers,
)
from dspark.decode import generate
from dspark.errors import ConfigError, DataError, RequestError
from dspark.maths.sampling import inverse_cdf, target_probs
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
    found = make_jobs(prompts, chat, samples=2, max_len=MAX_LEN, done={("b", 1), ("z", 0)})
    keys = [(job.id, job.sample, job.domain) for job in found.jobs]
    assert keys == [("b", 0, "all"), ("a", 0, "math"), ("a", 1, "math")] and found.skipped == ()
    assert list(found.jobs[0].prompt_ids) == chat.prompt_ids([{"role": "user", "content": "one"}])


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


# --- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 256, 257, 5000])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_fast_draws_are_the_plain_ones_up_to_rounding(sampling: SamplingParams, vocab: int) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(400, vocab, generator=random).mul_(3).bfloat16()
    logits[::3, ::2] = float("-inf")
    u = torch.rand(400, dtype=torch.float64, generator=random)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    kept = logits.clone()
    fast, plain = (draw_tokens(logits, sampling, u, fast=fast) for fast in (True, False))
    assert torch.equal(logits, kept)
    assert int((fast != plain).sum()) <= 1
    probs = target_probs(logits, sampling).double()
    assert bool((probs.gather(1, fast[:, None]) > 0).all())
    if not sampling.greedy:
        upper = (probs / probs.sum(1, keepdim=True)).cumsum(1).gather(1, fast[:, None])[:, 0]
        lower = upper - probs.gather(1, fast[:, None])[:, 0]
        assert bool(((u >= lower - 1e-6) & (u <= upper + 1e-6)).all())


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.floats(0, 1, exclude_max=True), st.integers(1, 9))
def test_two_levels_find_the_token_of_one(counts: list[int], share: float, block: int) -> None:
    """Whole weights have exact sums, so that the versions may differ at the very edges of tokens only."""
    weights, u = torch.tensor([counts], dtype=torch.float32), torch.tensor([share], dtype=torch.float64)
    if not sum(counts):
        with pytest.raises(RequestError):
            blockwise_inverse_cdf(weights, u, block=block)
        return
    token = int(blockwise_inverse_cdf(weights, u, block=block)[0])
    assert counts[token] > 0
    edge = share * sum(counts)
    if abs(edge - round(edge)) > 1e-9:
        assert token == int(inverse_cdf(weights, u)[0])
    else:
        assert sum(counts[:token]) <= edge + 1e-9 and edge - 1e-9 <= sum(counts[: token + 1])


def test_every_token_gets_exactly_its_share() -> None:
    """1,024 equal weights and the middles of as many equal shares: each token once, in order."""
    u = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    assert blockwise_inverse_cdf(torch.full((1024, 1024), 0.3), u).tolist() == list(range(1024))
    assert blockwise_inverse_cdf(torch.ones(1024, 1024), u - 0.5 / 1024).tolist() == list(range(1024))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_without_a_distribution_are_refused(value: float) -> None:
    logits = torch.zeros(2, 300)
    logits[:, 0 if value < 0 else 280 :] = value
    for fast in (True, False):
        with pytest.raises(RequestError, match="positive and finite"):
            draw_tokens(logits, SamplingParams(temperature=1.0), torch.rand(2, dtype=torch.float64), fast=fast)
