"""The rules by hand and against the library's; the form for whole blocks, bit for bit, over a request's life."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.maths.shaping import FIRST_CAPACITY, Shaper, shaped_logits

VOCAB = 12
INF = math.inf


def test_each_rule_by_hand() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])
    prompt, output = (0, 1), (1, 2, 2)

    def shaped(stops: tuple[int, ...] = (), **fields: object) -> list[float]:
        return shaped_logits(logits, prompt, output, SamplingParams(**fields), stop_token_ids=stops).tolist()  # type: ignore[arg-type]

    assert shaped() == logits.tolist()
    assert shaped(repetition_penalty=2.0) == [1.0, -2.0, 0.25, 0.0]  # prompt and output; negative ones times
    assert shaped(frequency_penalty=0.5) == [2.0, -1.5, -0.5, 0.0]  # output only, per occurrence
    assert shaped(presence_penalty=0.5) == [2.0, -1.5, 0.0, 0.0]  # output only, once
    assert shaped(logit_bias=((3, -1.5), (0, 1.0))) == [3.0, -1.0, 0.5, -1.5]
    assert shaped(banned_token_ids=(0, 3)) == [-INF, -1.0, 0.5, -INF]
    assert shaped(min_tokens=4, stops=(2,)) == [2.0, -1.0, -INF, 0.0]
    assert shaped(min_tokens=3, stops=(2,)) == logits.tolist()  # three there are


def test_the_order_of_the_rules() -> None:
    """Bias, then repetition (whose side of zero the bias may have changed), then frequency and presence."""
    params = SamplingParams(
        logit_bias=((0, -3.0),), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
    )
    assert shaped_logits(torch.tensor([2.0, 0.0]), (), (0, 0), params).tolist() == [-1.0 * 2.0 - 0.5 - 0.5, 0.0]


def test_rules_equal_the_librarys_processors() -> None:
    from transformers.generation import logits_process as library

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2)) * 4
    prompt, output = tuple(range(0, 20, 3)), (1, 3, 3, 30)
    ids = torch.tensor([[*prompt, *output]])
    theirs = library.SequenceBiasLogitsProcessor({(3,): 2.5, (40,): -9.0})(ids, logits)
    theirs = library.RepetitionPenaltyLogitsProcessor(1.4)(ids, theirs)
    theirs = library.SuppressTokensLogitsProcessor([7, 8])(ids, theirs)
    theirs = library.MinNewTokensLengthLogitsProcessor(len(prompt), 5, [9])(ids, theirs)
    params = SamplingParams(
        repetition_penalty=1.4, logit_bias=((3, 2.5), (40, -9.0)), banned_token_ids=(7, 8), min_tokens=5
    )
    torch.testing.assert_close(shaped_logits(logits[0], prompt, output, params, stop_token_ids=(9,)), theirs[0])


IDS = st.integers(0, VOCAB - 1)
TEXTS = st.lists(IDS, max_size=9)
RULES = st.builds(
    lambda repetition, frequency, presence, bias, banned, least: SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=tuple(bias.items()),
        banned_token_ids=tuple(banned),
        min_tokens=least,
    ),
    st.sampled_from([1.0, 0.7, 1.3, 2.9]),
    st.sampled_from([0.0, 0.1, -0.37, 1.7]),
    st.sampled_from([0.0, 0.3, -1.1]),
    st.dictionaries(IDS, st.floats(-50, 50), max_size=3),
    st.lists(IDS, max_size=2),
    st.integers(0, 8),
)


@settings(deadline=None, max_examples=200)
@given(RULES, TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_blocks_equal_the_plain_rule_bit_for_bit(
    params: SamplingParams, prompt: list[int], rounds: list[tuple[list[int], list[int]]], dtype: torch.dtype
) -> None:
    """A request's life: in each round drafts are looked at, and other tokens (or some of them) are committed."""
    shaper, output = Shaper(params, prompt, stop_token_ids=(4, 5)), []
    random = torch.Generator().manual_seed(len(prompt))
    for drafts, committed in [([], []), *rounds]:
        logits = (torch.randn(len(drafts) + 1, VOCAB, generator=random) * 3).to(dtype)
        before = logits.clone()
        rows = shaper.rows(logits, drafts)
        for k, row in enumerate(rows):
            plain = shaped_logits(logits[k], prompt, [*output, *drafts[:k]], params, stop_token_ids=(4, 5))
            assert torch.equal(row, plain)
        assert torch.equal(logits, before)
        shaper.commit(committed)
        output += committed


def test_more_distinct_tokens_than_the_first_capacity() -> None:
    count = 3 * FIRST_CAPACITY
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    prompt, output = list(range(0, count, 2)), list(range(1, count, 2))
    shaper = Shaper(params, prompt)
    for token in output:
        shaper.commit([token])
    logits = torch.linspace(-1, 1, count + 5)[None]
    assert torch.equal(shaper.rows(logits, [])[0], shaped_logits(logits[0], prompt, output, params))


def test_a_drafter_mirrors_what_the_committed_text_decides() -> None:
    params = SamplingParams(
        presence_penalty=1.0,
        logit_bias=((6, 2.0), (1, 1.0)),
        banned_token_ids=(2,),
        min_tokens=3,
        repetition_penalty=2.0,
    )
    shaper = Shaper(params, [7], stop_token_ids=(5,))
    shaper.commit([3])
    logits = torch.full((4, VOCAB), 4.0)
    whole = shaper.mirrored(logits)
    alone = [shaped_logits(logits[k], [7], [3], params, stop_token_ids=(5,)) for k in range(4)]
    assert torch.equal(whole[0], alone[0])
    assert torch.equal(whole[:2, 5], torch.tensor([-INF, -INF])) and bool(whole[2:, 5].isfinite().all())
    # a vocabulary of its own, in another order: tokens 6, 5, 3, 2, 7
    columns = torch.full((VOCAB,), -1)
    columns[torch.tensor([6, 5, 3, 2, 7])] = torch.arange(5)
    assert torch.equal(shaper.mirrored(logits[:, :5], columns), whole[:, [6, 5, 3, 2, 7]])


def test_a_drafters_row_is_left_alone_if_nothing_else_would_be_left_of_it() -> None:
    shaper = Shaper(SamplingParams(banned_token_ids=(0, 1), min_tokens=3), [2], stop_token_ids=(2,))
    columns = torch.tensor([1, 0, -1, -1])
    logits = torch.tensor([[0.5, 0.25]] * 2)
    assert torch.equal(shaper.mirrored(logits, columns), logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": INF}, "repetition_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"presence_penalty": -INF}, "presence_penalty is -inf"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"banned_token_ids": (4, -2)}, "banned_token_ids holds -2"),
        ({"logit_bias": ((-1, 0.5),)}, "logit_bias names token -1"),
        ({"logit_bias": ((1, 0.5), (1, 0.6))}, "token twice"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias of token 1 is nan"),
        ({"rule": "both"}, "rule is 'both'; it must be one of token, block"),
    ],
)
def test_fields_are_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_which_fields_shape_logits() -> None:
    assert not SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, rule="block", seed=4).shapes_logits
    for fields in ({"min_tokens": 1}, {"banned_token_ids": (1,)}, {"logit_bias": ((1, 0.0),)}):
        assert SamplingParams(**fields).shapes_logits  # type: ignore[arg-type]
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 1.1}).shapes_logits  # type: ignore[arg-type]
