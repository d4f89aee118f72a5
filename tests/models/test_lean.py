"""The lean decoder equals transformers on a tiny random model of every family, however a sequence is cut up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, LAYERS, VOCAB, reference, save_model, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from dspark.errors import ConfigError, ModelError, RequestError
from dspark.models import ragged
from dspark.models.decoder_config import from_transformers
from dspark.models.lean import LeanTarget
from dspark.models.loading import load_target
from dspark.models.target import FINAL, KVMemory

TAPS = tuple(range(-1, LAYERS - 1))
Pair = tuple[PreTrainedModel, LeanTarget]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            model = tiny_model(name)
            folder = save_model(model, tmp_path_factory.mktemp(name))
            target = load_target(folder, dtype="float32", device="cpu", implementation="lean")
            assert isinstance(target, LeanTarget)
            made[name] = (model, target)
        return made[name]

    return pair


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor | None, b: Tensor) -> None:
    assert a is not None
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def in_chunks(target: LeanTarget, memory: KVMemory, ids: Tensor, sizes: list[int], row: int = 0) -> list[Tensor]:
    """Logits, features and final states of a sequence that goes in piece by piece."""
    pieces = [target.forward(part, memory, rows=[row], taps=TAPS) for part in ids.split(sizes)]
    return [torch.cat([getattr(piece, part) for piece in pieces]) for part in ("logits", "features", "final")]


@pytest.mark.parametrize(
    "sizes", [[60], [1] * 60, [5, 40, 1, 8, 6], [33, 27]], ids=["whole", "tokens", "mixed", "long"]
)
def test_equals_transformers(pair: Pair, sizes: list[int]) -> None:
    model, target = pair
    ids = tokens(60)
    memory = target.new_memory(rows=1, max_len=64)
    for got, wanted in zip(in_chunks(target, memory, ids, sizes), reference(model, ids), strict=True):
        close(got, wanted)
    assert memory.lengths == [60]


def test_rolled_back_tokens_leave_no_trace(pair: Pair) -> None:
    model, target = pair
    ids, other = tokens(30), tokens(12, seed=1)
    memory = target.new_memory(rows=1, max_len=64)
    target.forward(ids[:20], memory)
    for wrong in (other, other[:3], other[:1]):
        target.forward(wrong, memory)
        memory.rollback(0, 20)
    target.forward(other, memory)
    memory.rollback(0, 15)
    logits, features, final = reference(model, ids)
    out = target.forward(ids[15:], memory, taps=TAPS)
    close(out.logits, logits[15:])
    close(out.features, features[15:])
    close(out.final, final[15:])


# Rows of a memory, their tokens so far, and their new tokens: neighbours that share an attention call, neighbours too
# far apart in length or count to do so, gaps, and any order.
BATCHES = {
    "sampling": ([0, 1, 2, 3, 4, 5], [9, 4, 0, 21, 13, 2], [1] * 6),
    "equal": ([0, 1, 2], [8, 8, 8], [1] * 3),
    "blocks": ([1, 2, 3], [9, 30, 2], [8, 8, 8]),
    "ragged": ([4, 0, 2, 3], [3, 17, 0, 11], [2, 1, 40, 2]),
    "whole sequences": ([0, 1, 2], [0, 0, 0], [40, 37, 5]),
    "equal sequences": ([3, 4], [0, 0], [36, 36]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("call_tokens", [0, 256], ids=["a call per row", "shared calls"])
def test_ragged_batch_equals_row_by_row(
    pair: Pair, batch: str, call_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = pair
    monkeypatch.setattr(ragged, "CALL_TOKENS", call_tokens)
    rows, pasts, counts = BATCHES[batch]
    together, apart = (target.new_memory(rows=6, max_len=64) for _ in range(2))
    news: list[Tensor] = []
    for row, past, count in zip(rows, pasts, counts, strict=True):
        ids = tokens(past + count, seed=row)
        news.append(ids[past:])
        for memory in (together, apart):
            if past:
                target.forward(ids[:past], memory, rows=[row])
    singles = [target.forward(ids, apart, rows=[row], taps=TAPS) for row, ids in zip(rows, news, strict=True)]
    out = target.forward(torch.cat(news), together, rows=rows, counts=counts, taps=TAPS)
    for part in ("logits", "features", "final"):
        close(getattr(out, part), torch.cat([getattr(single, part) for single in singles]))
    assert together.lengths == apart.lengths
    for mine, theirs in zip(together.keys + together.values, apart.keys + apart.values, strict=True):
        close(mine, theirs)


def test_run_ragged_batches_again_after_rollback(pairs: Callable[[str], Pair]) -> None:
    _, target = pairs("gemma3")
    memory = target.new_memory(rows=2, max_len=64)
    ids, counts = tokens(20), [12, 8]
    first = target.forward(ids, memory, rows=[0, 1], counts=counts).logits
    for row, length in ((0, 4), (1, 7)):
        memory.rollback(row, length)
    again = target.forward(torch.cat((ids[4:12], ids[19:])), memory, rows=[0, 1], counts=[8, 1]).logits
    assert first is not None
    close(again, torch.cat((first[4:12], first[19:])))


def test_last_only_and_no_logits(pairs: Callable[[str], Pair]) -> None:
    _, target = pairs("gemma2")
    ids, rows, counts = tokens(9), [0, 2, 1], [4, 1, 4]

    def run(**options: bool) -> tuple[Tensor | None, Tensor]:
        out = target.forward(ids, target.new_memory(rows=3, max_len=16), rows=rows, counts=counts, **options)
        assert out.features is None
        return out.logits, out.final

    logits, final = run()
    assert logits is not None
    close(run(last_only=True)[0], logits[[3, 4, 8]])
    assert run(want_logits=False)[0] is None
    close(run(want_logits=False)[1], final)
    close(target.logits(final), logits)


def test_embed_and_head(pair: Pair) -> None:
    model, target = pair
    ids = tokens(6).reshape(2, 3)
    with torch.no_grad():
        close(target.embed(ids), model.get_input_embeddings()(ids))
    close(target.head_weight(), model.get_output_embeddings().weight.detach())


def test_results_can_be_trained_on(pairs: Callable[[str], Pair]) -> None:
    """Tensors born in inference mode could not be saved for a backward pass."""
    _, target = pairs("smollm2")
    out = target.forward(tokens(5), target.new_memory(rows=1, max_len=8), taps=(-1, 0))
    assert out.features is not None and out.logits is not None
    for part in (out.features, out.final, out.logits):
        weight = torch.ones(part.shape[1], 1, requires_grad=True)
        (part @ weight).sum().backward()
        assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_memory_made_in_inference_mode_serves_outside(pairs: Callable[[str], Pair]) -> None:
    _, target = pairs("smollm2")
    with torch.inference_mode():
        memory = target.new_memory(rows=1, max_len=8)
    target.forward(tokens(5), memory)
    assert memory.lengths == [5]


def test_bfloat16_stays_near_float32(pair: Pair) -> None:
    """Half precision runs through the same code; rounding is all that differs."""
    model, _ = pair
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = LeanTarget(from_transformers(model.config), tensors, name="half", dtype=torch.bfloat16)
    ids = tokens(30)
    half = target.forward(ids, target.new_memory(rows=1, max_len=32)).logits
    assert half is not None and half.dtype == torch.bfloat16
    with torch.no_grad():
        wanted = model.bfloat16()(ids[None]).logits[0].float()
        model.float()
    exact = reference(model, ids)[0]
    error, library_error = ((logits.float() - exact).square().mean().sqrt() for logits in (half, wanted))
    assert error < 1.5 * library_error + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_gpu_equals_cpu(pair: Pair, batch: str) -> None:
    model, target = pair
    config = from_transformers(model.config)
    gpu = LeanTarget(config, dict(model.state_dict()), name="gpu", dtype=torch.float32, device="cuda")
    rows, pasts, counts = BATCHES[batch]
    outputs = []
    for each in (target, gpu):
        memory = each.new_memory(rows=6, max_len=64)
        for row, past in zip(rows, pasts, strict=True):
            if past:
                each.forward(tokens(past, seed=row).to(each.info.device), memory, rows=[row])
        ids = tokens(sum(counts), seed=9).to(each.info.device)
        outputs.append(each.forward(ids, memory, rows=rows, counts=counts, taps=TAPS))
    for part in ("logits", "features", "final"):
        torch.testing.assert_close(getattr(outputs[1], part).cpu(), getattr(outputs[0], part), rtol=0, atol=1e-3)


@pytest.mark.parametrize("taps", [(LAYERS - 1,), (-2,), (1, 0), (1, 1)])
def test_illegal_taps_are_refused(pairs: Callable[[str], Pair], taps: tuple[int, ...]) -> None:
    _, target = pairs("llama")
    memory = target.new_memory(rows=1, max_len=8)
    with pytest.raises(ConfigError, match="target_layer_ids"):
        target.forward(tokens(3), memory, taps=taps)
    assert memory.lengths == [0]


def test_overflow_and_malformed_batches_are_refused(pairs: Callable[[str], Pair]) -> None:
    _, target = pairs("llama")
    memory = target.new_memory(rows=2, max_len=8)
    target.forward(tokens(6), memory)
    for rows, counts, words in (
        ([0], [3], "max_len 8"),
        ([0, 1], [2, 0], "positive count"),
        ([0, 1], [1, 1], "positive count"),
        ([0], [1, 2], "positive count"),
        ([0, 0], [1, 2], "distinct"),
        ([2], [3], "0..1"),
    ):
        with pytest.raises(RequestError, match=words):
            target.forward(tokens(3), memory, rows=rows, counts=counts)
    assert memory.lengths == [6, 0]


def test_missing_and_misshapen_tensors_are_named() -> None:
    model = tiny_model("llama")
    config = from_transformers(model.config)
    for name, replacement, words in (
        ("model.layers.2.mlp.up_proj.weight", None, "no tensor 'model.layers.2.mlp.up_proj.weight'"),
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(4, 4), r"k_proj.weight' has shape \(4, 4\)"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
    ):
        tensors = dict(model.state_dict())
        del tensors[name]
        if replacement is not None:
            tensors[name] = replacement
        with pytest.raises(ModelError, match=words):
            LeanTarget(config, tensors, name="broken", dtype=torch.float32)


def test_the_final_state_can_be_tapped(pairs: Callable[[str], Pair]) -> None:
    _, target = pairs("smollm2")
    out = target.forward(tokens(5), target.new_memory(rows=1, max_len=8), taps=(0, FINAL))
    assert out.features is not None
    assert torch.equal(out.features[:, out.final.shape[1] :], out.final)


@pytest.mark.parametrize("max_len", [0, 1 << 20])
def test_memory_beyond_the_context_is_refused(pairs: Callable[[str], Pair], max_len: int) -> None:
    _, target = pairs("smollm2")
    with pytest.raises(RequestError, match=f"max_len is {max_len}"):
        target.new_memory(rows=1, max_len=max_len)
