"""The compiled verification gives the plain form's verdicts to the last bit, also where roundings could decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from verification_fakes import KINDS, SAMPLINGS, Drafts, Step, plain_verdicts_at, random_step, verdicts_at

from dspark.core import SamplingParams
from dspark.maths import batch_verification
from dspark.maths.sampling import RequestStreams, target_probs
from dspark.maths.shaping import Shaper
from dspark.models import native, native_verification
from dspark.models.native_verification import verify_batch

LIBRARY = native_verification._library()
compiled = pytest.mark.skipif(LIBRARY is None, reason="no C compiler")


def test_the_compiled_form_is_tested_here() -> None:
    """Where a compiler is, nothing here must be skipped."""
    assert (native._compiler() is None) == (LIBRARY is None)


def check_alike(step: Step) -> None:
    fast_streams, plain_streams = step.streams(), step.streams()
    arguments = step.logits, step.verify_lens, step.drafts, step.sampling
    kept = step.logits.clone()
    fast = verify_batch(*arguments, fast_streams)
    plain = verify_batch(*arguments, plain_streams, native=False)
    assert np.array_equal(fast.accepted, plain.accepted) and np.array_equal(fast.next_tokens, plain.next_tokens)
    assert not fast.errors and not plain.errors
    assert torch.equal(step.logits, kept)
    for mine, other in zip(fast_streams, plain_streams, strict=True):
        for role in ("propose", "accept", "residual"):
            assert torch.equal(getattr(mine, role).get_state(), getattr(other, role).get_state()), role


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [3, 257, 5000])
def test_batches_get_the_plain_verdicts(vocab: int, kind: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        check_alike(random_step(seed, vocab=vocab, requests=2 * len(SAMPLINGS), block=4, dtype=dtype, kind=kind))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 256, 1000])
def test_greedy_steps_get_the_plain_verdicts_in_one_call(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request or many, rows full of ties, drafts anywhere in the proposal, broken rows; and no record of any."""
    monkeypatch.setattr(native_verification, "_Step", None)
    random = torch.Generator().manual_seed(vocab)
    for requests in (1, 2, 9) * 4:
        lens = torch.randint(0, 4, (requests,), generator=random).tolist()
        logits = torch.randint(0, 9, (sum(lens) + requests, vocab), generator=random).to(dtype)
        logits[torch.rand(logits.shape, generator=random) < 0.1] = float("-inf")
        broken = torch.rand(len(logits), generator=random) < 0.1
        logits[broken, int(torch.randint(0, vocab, (), generator=random))] = float("nan")
        rows = torch.randperm(requests + 2, generator=random)[:requests].tolist()
        tokens, first = torch.randint(0, vocab, (requests + 2, 4), generator=random), 0
        for row, length in zip(rows, lens, strict=True):
            likely = logits[first : first + length].nan_to_num(neginf=-1.0).argmax(1)
            tokens[row, :length] = torch.where(torch.rand(length, generator=random) < 0.8, likely, tokens[row, :length])
            first += length + 1
        drafts = Drafts(tokens, np.ones(requests + 2, dtype=bool))
        arguments = logits, lens, drafts, [SamplingParams()] * requests, [RequestStreams.from_seed(0)] * requests
        fast = verify_batch(*arguments, draft_rows=rows)
        plain = verify_batch(*arguments, draft_rows=rows, native=False)
        assert np.array_equal(fast.accepted, plain.accepted) and np.array_equal(fast.next_tokens, plain.next_tokens)
        assert {i: str(error) for i, error in fast.errors.items()} == {i: str(e) for i, e in plain.errors.items()}


def edges(step: Step) -> tuple[Tensor, Tensor]:
    """Coins at p/q of each draft, and closings at a token's edge in the row after all drafts, give or take one part in
    ten million."""
    random = torch.Generator().manual_seed(step.seed)
    coins, closing, row = [], [], 0
    for i, length in enumerate(step.verify_lens):
        probs = target_probs(step.logits[row : row + length + 1], step.sampling[i])
        tokens, distribution = batch_verification.drafts_of(step.drafts, i, length)
        chances = torch.ones(length) if distribution is None else distribution.of(tokens)
        coins.append(probs[:length].gather(1, tokens[:, None])[:, 0].double() / chances.double())
        cdf = probs[-1].double().cumsum(0)
        closing.append(cdf[torch.randint(0, len(cdf), (1,), generator=random)] / cdf[-1])
        row += length + 1
    shake = 1 + (torch.randint(-4, 5, (sum(step.verify_lens),), generator=random)) * 2.5e-8
    return (torch.cat(coins) * shake).clamp(0, 1 - 2.0**-53), torch.cat(closing).clamp(0, 1 - 2.0**-53)


@compiled
def test_verdicts_are_the_plain_ones_where_roundings_decide() -> None:
    """Coins and draws on the very edge; without its margins the compiled form gets some of them wrong."""
    assert LIBRARY is not None
    careless = native.compiled(native_verification.SOURCE, ("-DMARGINS=0.0",))
    assert careless is not None
    careless.verify_requests.argtypes = LIBRARY.verify_requests.argtypes
    wrong = 0
    for seed in range(12):
        step = random_step(seed, vocab=300, requests=22, block=4, dtype=torch.float32, kind=KINDS[seed % 4], masked=0.3)
        coins, closing = edges(step)
        plain = plain_verdicts_at(step, coins, closing)
        for library in (LIBRARY, careless):
            found = verdicts_at(step, coins, closing, library)
            pairs = list(zip(found.accepted.tolist(), found.next_tokens.tolist(), strict=True))
            if library is LIBRARY:
                assert pairs == plain
            else:
                wrong += sum(mine != theirs for mine, theirs in zip(pairs, plain, strict=True))
    assert wrong > 2, "a test that cannot fail"


@compiled
def test_both_exponentials_are_within_their_margin() -> None:
    """A unit in the last place each, here and in PyTorch, for every size of argument; and PyTorch divides."""
    assert LIBRARY is not None
    x = -torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)).pow(2) * 87.3
    x[0] = 0.0
    weights = torch.empty_like(x)
    LIBRARY.verify_weights(x.data_ptr(), weights.data_ptr(), len(x))
    exact = x.double().exp()
    for found in (weights, x.exp()):
        assert float(((found.double() - exact).abs() / exact).max()) <= 2.0**-23
        assert float(found[0]) == 1.0
    assert np.array_equal(x.clone().div_(0.7).numpy(), x.numpy() / np.float32(0.7))


@compiled
def test_few_requests_need_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []
    monkeypatch.setattr(
        native_verification._Step,
        "_decide",
        lambda self, i, real=native_verification._Step._decide: (decided.append(i), real(self, i)),
    )
    for seed in range(10):
        step = random_step(seed, vocab=5000, requests=44, block=4, dtype=torch.bfloat16, kind="support")
        verify_batch(*step.arguments())
    assert len(decided) <= 44 * 10 // 20


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=compiled)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [SAMPLINGS[name] for name in ("greedy", "plain", "joint", "top_p")])
def test_a_request_without_a_distribution_fails_alone(sampling: SamplingParams, value: float, fast: bool) -> None:
    step = random_step(5, vocab=40, requests=9, block=3, dtype=torch.float32, kind="certain")
    clean = verify_batch(*step.arguments(), native=fast)
    logits = step.logits.clone()
    first = sum(step.verify_lens[:4]) + 4
    logits[first, slice(None) if value < 0 else 7] = value
    mixed = [sampling if i == 4 else params for i, params in enumerate(step.sampling)]
    spoilt = verify_batch(logits, step.verify_lens, step.drafts, mixed, step.streams(), native=fast)
    assert list(spoilt.errors) == [4] and "after 0 of the step's drafts" in str(spoilt.errors[4])
    assert (spoilt.accepted[4], spoilt.next_tokens[4]) == (0, -1)
    with pytest.raises(ValueError, match="no distribution"):
        spoilt.of(4)
    for i in {*range(9)} - {4}:
        assert spoilt.of(i) == clean.of(i)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=compiled)])
def test_rows_that_no_decision_needs_may_be_spoilt(fast: bool) -> None:
    """The first draft is impossible, so the rows behind it are not looked at."""
    logits = torch.zeros(3 * 4, 20)
    logits[0::4, 5] = float("-inf")
    logits[0::4, 6] = 1.0
    for k in (1, 2, 3):
        logits[k::4] = float("nan")
    drafts = Drafts(torch.full((3, 3), 5), np.ones(3, dtype=bool))
    samplings = [SAMPLINGS[name] for name in ("greedy", "plain", "joint")]
    streams = [RequestStreams.from_seed(i) for i in range(3)]
    verdict = verify_batch(logits, [3, 3, 3], drafts, samplings, streams, native=fast)
    assert not verdict.errors and verdict.accepted.tolist() == [0, 0, 0] and 5 not in verdict.next_tokens


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=compiled)])
def test_shaped_requests_are_judged_by_their_shaped_rows(fast: bool) -> None:
    """Each by its own history; and a request whose bans leave nothing fails alone."""
    step = random_step(3, vocab=12, requests=6, block=3, dtype=torch.bfloat16, kind="support", masked=0.0)
    rules = [
        SamplingParams(temperature=1.0, frequency_penalty=1.5, repetition_penalty=1.4),
        SamplingParams(banned_token_ids=(1, 2)),
        SamplingParams(temperature=1.0, banned_token_ids=tuple(range(12))),
    ]
    samplings = [*rules, *step.sampling[3:]]
    shapers = [Shaper(params, [1, 2, 3]) if params.shapes_logits else None for params in samplings]
    found = verify_batch(step.logits, step.verify_lens, step.drafts, samplings, step.streams(), shapers, native=fast)
    assert list(found.errors) == [2]
    row = 0
    for i, length in enumerate(step.verify_lens):
        rows = step.logits[row : row + length + 1]
        row += length + 1
        if i != 2:
            tokens, distribution = batch_verification.drafts_of(step.drafts, i, length)
            streams = step.streams()[i]
            alone = batch_verification.verify_rows(rows, tokens, distribution, samplings[i], streams, shapers[i])
            assert found.of(i) == alone


RULES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.9, repetition_penalty=0.7, frequency_penalty=-0.37, presence_penalty=0.3),
    SamplingParams(temperature=1.0, frequency_penalty=1.7, logit_bias=((3, -40.5), (5, 7.25)), min_tokens=6),
    SamplingParams(temperature=1.0, logit_bias=((2, 3.0),), banned_token_ids=(1, 2), min_tokens=9, rule="block"),
    SamplingParams(temperature=0.8, presence_penalty=-1.1, top_p=0.8),
    SamplingParams(temperature=1.0, min_tokens=7, top_k=4, rule="block"),
    SamplingParams(temperature=1.0, repetition_penalty=2.9, logit_bias=((0, 0.1), (7, 1.5)), rule="block"),
]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_are_the_shapers_bit_for_bit(dtype: torch.dtype) -> None:
    """Rows as the compiled form shapes them, over a few rounds of each request's life; and the verdicts on them."""
    assert LIBRARY is not None
    histories = [Shaper(params, [1, 3, 3, 5], stop_token_ids=(4, 5)) for params in RULES]
    for seed in range(4):
        step = random_step(
            seed, vocab=21 + 8 * seed, requests=len(RULES), block=4, dtype=dtype, kind="support", masked=0.0
        )
        native_step = native_verification._Step(step.logits, step.verify_lens, step.drafts, RULES, None)
        native_step.shape(histories)
        for i, shaper in enumerate(histories):
            drafts = native_step._drafts(i)
            expected = shaper.rows(native_step._own_rows(i), drafts)
            room = torch.empty(step.logits.shape[1] + 16)
            for k in range(len(drafts) + 1):
                address = native_step.requests.ctypes.data + i * native_verification.REQUEST.itemsize
                LIBRARY.verify_shape(address, k, step.logits.shape[1], room.data_ptr())
                assert torch.equal(room[: step.logits.shape[1]], expected[k]), (RULES[i], k)
        arguments = step.logits, step.verify_lens, step.drafts, RULES
        fast = verify_batch(*arguments, step.streams(), histories)
        plain = verify_batch(*arguments, step.streams(), histories, native=False)
        assert np.array_equal(fast.accepted, plain.accepted) and np.array_equal(fast.next_tokens, plain.next_tokens)
        for i, shaper in enumerate(histories):
            shaper.commit([*native_step._drafts(i)[: int(fast.accepted[i])], int(fast.next_tokens[i])])


@compiled
def test_rows_may_lie_apart_and_drafts_anywhere_in_the_proposal() -> None:
    step = random_step(7, vocab=300, requests=8, block=3, dtype=torch.bfloat16, kind="mixed")
    wide = torch.zeros(len(step.logits), 400, dtype=torch.bfloat16)
    wide[:, 50:350] = step.logits
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert step.drafts.probs is not None and step.drafts.support_ids is not None
    places = torch.empty_like(order)
    places[order] = torch.arange(8)
    moved = Drafts(
        step.drafts.draft_tokens[order],
        step.drafts.certain[order.numpy()],
        step.drafts.probs[order],
        step.drafts.support_ids[order],
    )
    expected = verify_batch(*step.arguments())
    found = verify_batch(
        wide[:, 50:350], step.verify_lens, moved, step.sampling, step.streams(), draft_rows=places.tolist()
    )
    assert np.array_equal(found.accepted, expected.accepted)
    assert np.array_equal(found.next_tokens, expected.next_tokens)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=compiled)])
def test_a_step_without_drafts(fast: bool) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    samplings = [SAMPLINGS["greedy"], SAMPLINGS["plain"], SAMPLINGS["top_p"], SAMPLINGS["joint"]]
    streams = [RequestStreams.from_seed(i) for i in range(4)]
    verdict = verify_batch(logits, [0] * 4, None, samplings, streams, native=fast)
    assert verdict.accepted.tolist() == [0] * 4 and int(verdict.next_tokens[0]) == int(logits[0].argmax())
