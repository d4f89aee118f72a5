"""A short pass in one call has the bits of the layers run one by one; where its products are not the library's, it is
not used."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
from tiny_drafter import tiny_drafter
from tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor

from dspark.models import compiled_products, short_pass
from dspark.models.decoder_config import from_transformers
from dspark.models.dspark import DsparkDrafter
from dspark.models.lean import LeanTarget
from dspark.models.linear import Linear, filled_rows
from dspark.models.paged_memory import PageTables
from dspark.models.short_pass import ShortPass
from dspark.models.target import FINAL

# Sizes that the library packs as the compiled products read them; 6 query heads over 2 key-value heads.
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}
FAMILIES = ("llama3-rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")  # biases, norms, windows, caps
TAPS = (-1, 0, LAYERS - 2, FINAL)


@functools.cache
def lean(name: str, dtype: torch.dtype = torch.bfloat16, vocab: int = VOCAB) -> LeanTarget:
    model = tiny_model(name, **SHAPE, vocab_size=vocab)
    return LeanTarget(from_transformers(model.config), dict(model.state_dict()), name=name, dtype=dtype)


@functools.cache
def supported() -> bool:
    """Whether this machine multiplies bfloat16 as the compiled code does; judged by one product, not by the models."""
    ops = lean("llama3-rope")._native
    if ops is None or not hasattr(ops.library, "short_pass"):
        return False
    return compiled_products.agree([Linear(torch.randn(192, 192).bfloat16())], 96, ops.library)


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def both_ways(target: LeanTarget, monkeypatch: pytest.MonkeyPatch, rows: list[int], counts: list[int]) -> None:
    """The same pass over pages in one call and layer by layer: results, and the memory that it leaves."""
    outs, pages = [], []
    for whole in (True, False):
        tables = PageTables(seats=3, pages_per_seat=8, page_size=5)
        memory = target.new_paged_memory(tables, pages=24)
        for seat in range(3):
            tables.assign(seat, [seat + 3 * i for i in range(8)])
        target.forward(tokens(37, 1), memory, rows=[0, 1, 2], counts=[3, 11, 23])
        with monkeypatch.context() as patch:
            if not whole:
                patch.setattr(target, "_short", None)
            out = target.forward(tokens(sum(counts), 2), memory, rows=rows, counts=counts, taps=TAPS)
        outs.append((out.logits, out.features, out.final))
        pages.append(memory.both)
    for mine, theirs in zip(*outs, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(pages[0], pages[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_layers_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean(name, vocab=192)
    assert isinstance(target._short, ShortPass), "sizes chosen to be covered"
    for rows, counts in (
        ([1], [1]),
        ([2], [8]),
        ([2, 0, 1], [1, 5, 7]),
        ([0, 1, 2], [6, 4, 6]),
        ([1, 2, 0], [29, 17, 20]),
    ):
        both_ways(target, monkeypatch, rows, counts)


@pytest.mark.parametrize("threads", [2, 3])
def test_equals_them_on_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    torch.set_num_threads(threads)
    try:
        both_ways(lean("qwen3"), monkeypatch, [2, 0], [5, 3])
        both_ways(lean("gemma2", vocab=192), monkeypatch, [1, 0], [1, 2])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_token_without_an_embedding_is_refused_as_the_plain_form_refuses_it(wrong: int) -> None:
    target = lean("qwen3")
    memory = target.new_memory(rows=1, max_len=20)
    with pytest.raises(IndexError):
        target.forward(torch.tensor([3, wrong]), memory)
    assert memory.lengths == [0]
    with pytest.raises(IndexError):
        target.embed(torch.tensor([3, wrong]))


def test_longer_passes_go_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = lean("qwen3")
    monkeypatch.setattr(target, "_short", lambda *arguments, **options: pytest.fail("not short"))
    target.forward(tokens(short_pass.SHORT_TOKENS + 1, 0), target.new_memory(rows=1, max_len=200))


def test_float32_goes_layer_by_layer() -> None:
    assert lean("llama3-rope", torch.float32)._short is None


def test_products_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit in one product of one layer, and a layout that is not the one we read."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean("qwen3")
    assert target._native is not None
    made = functools.partial(short_pass.short_pass, target._native, target._layers, target._final_norm)
    assert made() is not None
    library = Linear.__call__

    def spoilt(self: Linear, x: Tensor) -> Tensor:
        y = library(self, x)
        if self is target._layers[0].down:
            y.view(torch.int16)[-1, -1] ^= 1
        return y

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "__call__", spoilt)
        assert made() is None
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "place", lambda self: (0, 0))
        assert made() is None
    assert made() is not None


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])  # with and without a soft-cap
def test_the_head_has_the_librarys_bits_for_any_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean(name, vocab=192)
    assert target._short_head is not None, "sizes chosen to be covered"
    final = torch.randn(150, 192, generator=torch.Generator().manual_seed(4)).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(target, "_short_head", None)
        theirs = target.logits(final)
    for rows in (0, 1, 3, 4, 5, 7, 8, 13, 128, 129, 150):
        assert torch.equal(target.logits(final[:rows]), theirs[:rows])
    assert torch.equal(target.logits(final[::2]), theirs[::2]), "rows that do not lie side by side"
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "__call__", lambda self, x: pytest.fail("rows for the compiled head"))
        target.logits(final[:128])
    with pytest.raises(RuntimeError):
        target.logits(final[:3].float())  # as ever


def test_the_order_of_sums_is_found() -> None:
    """Sums over many inputs join piece by piece; a trial with any other piece fails."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean("qwen3")
    assert target._native is not None
    linears = [Linear(torch.randn(3072, 1536).bfloat16()) for _ in range(4)]
    sizes = (768, *(size for size in compiled_products.PIECES if size < 768))
    right = [size for size in sizes if compiled_products.agree(linears, size, target._native.library)]
    assert len(right) == 1, "one order fits, or this library has another"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 576), (64, 1536), (832, 64)])
def test_a_products_row_has_the_librarys_bits_among_any_number_of_rows(outputs: int, inputs: int, threads: int) -> None:
    """Every form of the compiled loop; sums of one and of several pieces; blocks of columns that threads share."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    native = lean("qwen3")._native
    assert native is not None
    generator = torch.Generator().manual_seed(5)
    linear = Linear(torch.randn(outputs, inputs, generator=generator).bfloat16(), torch.randn(outputs).bfloat16())
    x = torch.randn(140, inputs, generator=generator).bfloat16()
    compiled, theirs = compiled_products.compiled_product(linear, native.library), linear(x)
    assert compiled is not None
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 18), 127, 128, 129, 140):
            assert torch.equal(compiled(x[-rows:]), theirs[-rows:]), rows
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("sizes", [[7], [1, 4, 7]], ids=["one", "several"])
def test_a_drafters_blocks_see_all_of_themselves_in_one_call(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks hide nothing from their own tokens; the call has the bits of the layers one by one there too."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean("qwen3")
    shape = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": VOCAB, "block_size": 7}
    model = tiny_drafter(
        scale=0.1, norms=1.0, num_target_layers=LAYERS, target_layer_ids=(0, 1), num_hidden_layers=2, **shape
    )
    drafter = DsparkDrafter(model, target, weight_bits=16)
    assert isinstance(drafter._short, ShortPass), "sizes chosen to be covered"
    rows = list(range(len(sizes)))
    found = []
    for whole in (True, False):
        tables = PageTables(seats=3, pages_per_seat=8, page_size=5)
        memory = drafter.paged_memory(tables, pages=24, max_len=30)
        for seat in rows:
            tables.assign(seat, [seat + 3 * i for i in range(8)])
        positions = torch.arange(11).repeat(len(rows))
        features = torch.randn(len(positions), 2 * 192, generator=torch.Generator().manual_seed(3)).bfloat16()
        drafter.project(memory, torch.tensor(rows).repeat_interleave(11), positions, features)
        memory.lengths[: len(rows)] = [11] * len(rows)
        with monkeypatch.context() as patch, torch.inference_mode():
            if not whole:
                patch.setattr(drafter, "_short", None)
            found.append(drafter.parallel(memory, rows, [5] * len(rows), sizes))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_a_drafter_takes_in_is_the_same_in_any_pieces_and_near_the_plain_form() -> None:
    """Keys and values of every layer, over scattered pages, from one call and from many."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean("qwen3")
    shape = {**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": VOCAB, "block_size": 7}
    model = tiny_drafter(
        scale=0.1, norms=1.0, num_target_layers=LAYERS, target_layer_ids=(0, 1), num_hidden_layers=2, **shape
    )
    drafter, tokens_each = DsparkDrafter(model, target), 90
    assert drafter._intake is not None, "sizes chosen to be covered"
    rows, positions = torch.arange(2).repeat_interleave(tokens_each), torch.arange(tokens_each).repeat(2)
    features = torch.randn(2 * tokens_each, 2 * 192, generator=torch.Generator().manual_seed(3)).bfloat16()

    def kept(pieces: list[int]) -> Tensor:
        tables = PageTables(seats=2, pages_per_seat=20, page_size=5)
        memory = drafter.paged_memory(tables, pages=40, max_len=95)
        for seat in range(2):
            tables.assign(seat, [2 * i + 1 - seat for i in range(20)])
        parts = zip(rows.split(pieces), positions.split(pieces), features.split(pieces), strict=True)
        for part in parts:
            drafter.project(memory, *part)
        return memory.both.clone()

    whole = kept([2 * tokens_each])
    assert torch.equal(kept([1, 2, 8, 100, 69]), whole)
    drafter._intake = None
    plain = kept([2 * tokens_each])
    assert (plain != 0).any(-1).sum() == 2 * tokens_each * 2 * 2 * 2, "tokens, layers, keys and values, heads"
    torch.testing.assert_close(whole, plain, rtol=0.03, atol=0.03)


def test_passes_of_any_length_leave_few_compiled_products(capfd: pytest.CaptureFixture[str]) -> None:
    """Short ones none at all; long ones as many as there are rounded numbers of rows, counted by the library itself."""
    if not supported():
        pytest.skip("no compiler, or other products of bfloat16")
    target = lean("qwen3")

    def made(counts: range) -> int:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
            for count in counts:
                memory = target.new_memory(rows=1, max_len=count)
                target.forward(tokens(count, count), memory, last_only=True)
            ctypes.CDLL(None).fflush(None)
        lines = capfd.readouterr().out.splitlines()
        return sum("create:cache_miss" in line and ",reorder," not in line for line in lines)

    made(range(1, 2))  # the head's product of one row
    assert made(range(2, 129, 3)) == 0
    numbers = {filled_rows(count) for count in range(130, 256, 2)}
    assert len(numbers) == 8
    assert 1 <= made(range(130, 256, 2)) <= 4 * len(numbers), "four products a layer, the layers alike"
