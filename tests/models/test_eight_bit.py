"""Weights of eight bits: compiled products have the plain ones' bits, a row's numbers depend on the row alone, and a
drafter of such weights proposes the same alone and in any batch."""

from __future__ import annotations

import functools

import pytest
import torch
from models.test_short_pass import SHAPE, lean
from tiny_drafter import tiny_drafter
from tiny_models import LAYERS, VOCAB
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import target_probs
from dspark.models import dspark as drafting
from dspark.models import native
from dspark.models.batch_drafter import BatchProposal, DraftAsk
from dspark.models.dspark import DsparkDrafter
from dspark.models.eight_bit import EightBit, compiled_for, fits, rounded
from dspark.models.heads import sequential_logits
from dspark.models.linear import Linear
from dspark.models.paged_memory import PageTables

DEPTH = 11


@functools.cache
def library():  # type: ignore[no-untyped-def]
    """Compiled operations with products of eight bits."""
    ops = lean("qwen3")._native
    if ops is None or not compiled_for(ops.library):
        pytest.skip("no compiler, or a CPU without AVX512-VNNI and AVX512-BF16")
    return ops.library


def states(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of unlike sizes, with a few states that are many times as large as the others."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=random) * torch.randn(rows, 1, generator=random).exp()
    return (x * (1 + 40 * (torch.rand(width, generator=random) > 0.97))).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (192, 1536), (320, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_compiled_products_have_the_plain_ones_bits(outputs: int, inputs: int, biased: bool) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if biased else None
    weight[3], weight[5] = 0.0, weight[5] * 1e4
    product = EightBit(weight.bfloat16(), bias, library=library())
    for rows in (1, 2, 5, 8, 130):
        x = states(rows, inputs, rows)
        x[rows // 2, :64] = 0.0
        assert torch.equal(product(x), product.plain(x))


def test_they_are_near_the_exact_product() -> None:
    weight = torch.randn(128, 576)
    product, x = EightBit(weight), states(9, 576).float()
    exact = x @ weight.T
    assert (product(x) - exact).norm() < 0.02 * exact.norm()
    assert (product.numbers() * product.scale[:, None] - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.001


@pytest.mark.parametrize("rows", [3, 4, 8, 29, 200])
def test_a_row_has_the_same_bits_in_any_company(rows: int) -> None:
    product, x = EightBit(torch.randn(320, 192), library=library()), states(rows, 192)
    whole = product(x)
    alone = torch.cat([product(row) for row in x.split(1)])
    assert torch.equal(whole, alone)
    assert torch.equal(product(x.flip(0)), whole.flip(0))


def test_two_threads_give_the_same_bits() -> None:
    product, x = EightBit(torch.randn(448, 192), library=library()), states(7, 192)
    one, before = product(x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(x), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_state_breaks_its_own_row_alone(broken: float) -> None:
    product, x = EightBit(torch.randn(64, 128), library=library()), states(6, 128)
    x[2, 70] = broken
    for found in (product(x), product.plain(x)):
        assert found[2].isnan().all()
        assert found[[0, 1, 3, 4, 5]].isfinite().all()
    assert rounded(x)[1].isnan().tolist() == [[False, False]] * 2 + [[False, True]] + [[False, False]] * 3


def test_sizes_that_do_not_fit() -> None:
    assert fits(torch.empty(64, 128)) and not fits(torch.empty(65, 128)) and not fits(torch.empty(64, 96))
    with pytest.raises(AssertionError, match="does not fit"):
        EightBit(torch.zeros(64, 96))


def drafter(bits: int | None = 8, *, native_wanted: bool = True, candidates: int = 16) -> DsparkDrafter:
    """Two layers whose sizes are multiples of 64, and a head of 64 draft tokens."""
    shape = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": VOCAB, "block_size": 7}
    model = tiny_drafter(
        scale=0.1,
        norms=1.0,
        num_target_layers=LAYERS,
        target_layer_ids=(0, 1),
        num_hidden_layers=2,
        draft_vocab_size=64,
        **shape,
    )
    assert model.d2t is not None
    model.d2t.copy_(torch.arange(64) // 3)  # target ids 0, 1, 2, 4, ...
    return DsparkDrafter(model, lean("qwen3"), weight_bits=bits, native=native_wanted, candidates=candidates)


def proposal(made: DsparkDrafter, seats: list[int], limits: list[int]) -> BatchProposal:
    """Blocks of some of 40 seats, each behind a context of its own; the odd ones sampled."""
    tables = PageTables(seats=40, pages_per_seat=3, page_size=8)
    memory = made.paged_memory(tables, pages=120, max_len=20)
    for seat in range(40):
        tables.assign(seat, [seat + 40 * i for i in range(3)])
    for seat in seats:
        features = torch.randn(DEPTH, 2 * 192, generator=torch.Generator().manual_seed(seat)).bfloat16()
        made.project(memory, torch.full((DEPTH,), seat), torch.arange(DEPTH), features)
        memory.lengths[seat] = DEPTH
    asks = [
        DraftAsk(
            seat=seat,
            anchor=seat + 2,
            sampling=SamplingParams(temperature=0.9 * (seat % 2)),
            generator=torch.Generator().manual_seed(seat),
            limit=limit,
        )
        for seat, limit in zip(seats, limits, strict=True)
    ]
    return made.draft(memory, asks, [None] * len(asks))


def test_alone_and_in_any_batch_a_request_gets_the_same_draft() -> None:
    """Of 38 requests at once, more rows than any pass in bfloat16 takes in one call."""
    library()
    made, seats = drafter(), list(range(38))
    assert isinstance(made._head, EightBit) and made._short is not None
    limits = [1 + seat % 7 for seat in seats]
    assert sum(limits) > 128
    together = proposal(made, seats, limits)
    for seat in (0, 1, 6, 13, 37):
        alone = proposal(made, [seat], [limits[seat]]).of(0)
        other = together.of(seat)
        assert torch.equal(alone.draft_tokens, other.draft_tokens)
        assert alone.confidence is not None and other.confidence is not None
        assert torch.equal(alone.confidence, other.confidence)
        if seat % 2:
            assert alone.distribution is not None and other.distribution is not None
            assert torch.equal(alone.distribution.probs, other.distribution.probs)
            assert torch.equal(alone.distribution.token_ids, other.distribution.token_ids)


def test_what_is_reported_is_what_the_rounded_weights_say() -> None:
    """Plain products, layer by layer, with the reported distribution recomputed from their logits."""
    library()
    made, plain = drafter(candidates=0), drafter(candidates=0, native_wanted=False)
    assert isinstance(plain._layers[0].down, EightBit) and not plain.native
    fast, slow = (proposal(one, [5], [7]).of(0) for one in (made, plain))
    assert fast.distribution is not None and slow.distribution is not None
    overlap = torch.minimum(fast.distribution.probs, slow.distribution.probs).sum(1)
    assert (overlap > 0.97).all(), "small operations round to bfloat16 at other places"

    tables = PageTables(seats=6, pages_per_seat=3, page_size=8)
    memory = made.paged_memory(tables, pages=20, max_len=20)
    tables.assign(5, [0, 1, 2])
    features = torch.randn(DEPTH, 2 * 192, generator=torch.Generator().manual_seed(5)).bfloat16()
    made.project(memory, torch.full((DEPTH,), 5), torch.arange(DEPTH), features)
    memory.lengths[5] = DEPTH
    with torch.inference_mode():
        hidden, base = made.parallel(memory, [5], [7], [7])
        assert torch.equal(base, made._head.plain(hidden))
        prev = torch.cat((torch.tensor([7]), fast.draft_tokens[:-1]))
        logits = sequential_logits(base.float()[None], hidden.float()[None], prev[None], made._stage.head)[0]
    wanted = target_probs(logits, SamplingParams(temperature=0.9))
    torch.testing.assert_close(fast.distribution.probs, wanted, rtol=1e-4, atol=1e-6)


def test_eight_bits_stay_near_sixteen() -> None:
    library()
    eight, sixteen = (proposal(drafter(bits, candidates=0), [5], [7]).of(0) for bits in (8, 16))
    assert eight.distribution is not None and sixteen.distribution is not None
    overlap = torch.minimum(eight.distribution.probs[0], sixteen.distribution.probs[0]).sum()
    assert overlap > 0.9, "the first position sees the same tokens before it"


def test_who_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits where compiled code multiplies them; sixteen elsewhere, or where it is said."""
    library()
    assert drafter(None).weight_bits == 8
    assert isinstance(drafter(16)._head, Linear)
    assert drafter(None, native_wanted=False).weight_bits == 16
    with monkeypatch.context() as patch:
        patch.setattr(drafting, "compiled_for", lambda found: False)
        made = drafter(None)
        assert made.weight_bits == 16 and isinstance(made._layers[0].qkv, Linear)
        assert isinstance(drafter(8)._head, EightBit)  # asked for: the plain products serve
    monkeypatch.setattr(native, "compiled", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="weight_bits is 4; it must be 8, 16"):
        drafter(4)
