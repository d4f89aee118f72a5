"""The compiled operations equal the plain ones, alone and in whole models, and their absence is harmless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import FAMILIES, LAYERS, SHAPE, VOCAB
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models import native
from dspark.models.decoder_config import DecoderConfig, from_transformers
from dspark.models.lean import LeanTarget
from dspark.models.native import NativeOps, native_ops
from dspark.models.norm import RMSNorm
from dspark.models.plain import PlainOps

CPU = torch.device("cpu")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # and the largest difference of unit-sized results
HEADS = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3-rope", HEADS),
    "wide heads": ("llama", {**HEADS, "head_dim": 128, "num_attention_heads": 2}),
    "ungrouped": ("ungrouped", {**HEADS, "num_key_value_heads": 6}),
    "many heads per group": ("llama", {**HEADS, "num_attention_heads": 12, "num_key_value_heads": 1}),
    "mistral (sliding)": ("mistral", HEADS),
    "qwen3 (normed heads)": ("qwen3", HEADS),
    "gemma2 (soft-caps)": ("gemma2", HEADS),
    "gemma3 (four norms, gelu, two rotations)": ("gemma3", HEADS),
}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build into a folder of our own; skip where there is no compiler, which is a supported machine."""
    if native._compiler() is None:
        pytest.skip("no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("DSPARK_NATIVE", raising=False)
        native._build.cache_clear()
        yield
    native._build.cache_clear()


def config_of(name: str) -> tuple[DecoderConfig, transformers.PretrainedConfig]:
    family, shape = MODELS[name]
    config_class, extra = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SHAPE, **extra, **shape})
    return from_transformers(config), config


def both_targets(name: str, dtype: torch.dtype, *, max_len: int = 256) -> tuple[LeanTarget, LeanTarget]:
    """The same random model with compiled operations and without."""
    decoder, config = config_of(name)
    decoder = replace(decoder, max_len=max_len)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.12
            parameter += torch.randn_like(parameter) * scale
    fast, plain = (
        LeanTarget(decoder, dict(model.state_dict()), name=name, dtype=dtype, native=native) for native in (True, False)
    )
    assert fast.native and not plain.native
    return fast, plain


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def agree(fast: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """Root mean square difference, relative to the size of the whole: single values of half precision may jump."""
    error = (fast.double() - plain.double()).square().mean().sqrt() / plain.double().square().mean().sqrt()
    assert error < DTYPES[dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_models_agree_over_ragged_batches(name: str, dtype: torch.dtype) -> None:
    """Prompts, then blocks of different lengths on rows in any order, with rollback in between."""
    fast, plain = both_targets(name, dtype)
    memories = [target.new_memory(rows=4, max_len=96) for target in (fast, plain)]

    def step(rows: list[int], counts: list[int], seed: int) -> None:
        ids = tokens(sum(counts), seed)
        outputs = [
            target.forward(ids, memory, rows=rows, counts=counts, taps=tuple(range(-1, LAYERS - 1)))
            for target, memory in zip((fast, plain), memories, strict=True)
        ]
        for part in ("logits", "features", "final"):
            agree(getattr(outputs[0], part), getattr(outputs[1], part), dtype)

    step([0, 1, 3], [5, 40, 31], 1)
    step([3, 0], [1, 8], 2)
    for memory in memories:
        memory.rollback(0, 9)
        memory.rollback(3, 30)
    step([0, 1, 2, 3], [1, 1, 1, 1], 3)
    step([1, 3, 0], [17, 2, 9], 4)
    for mine, theirs in zip(
        *([m.both[:, :, row, :, : m.lengths[row]] for row in range(4)] for m in memories), strict=True
    ):
        agree(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3 (normed heads)", "gemma2 (soft-caps)"])
@pytest.mark.parametrize(
    ("rows", "pasts", "counts"),
    [([1], [11], [9]), ([0, 1, 2], [20, 20, 20], [4, 4, 4]), ([2, 0, 1, 3], [30, 0, 7, 3], [5, 8, 5, 5])],
    ids=["one", "equal", "ragged"],
)
def test_blocks_that_hide_nothing_agree(
    rows: list[int], pasts: list[int], counts: list[int], name: str, dtype: torch.dtype
) -> None:
    """Attention of draft blocks: every token sees the whole row, the block's later tokens too, and no other row."""
    fast, plain = both_targets(name, dtype)
    config = replace(fast.config, sliding_window=None)
    layers = [replace(layer, slides=False) for layer in fast._layers]
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    tables = fast._angles(config.rope, 64)
    held, block = torch.randn(sum(pasts), width).to(dtype), torch.randn(sum(counts), width).to(dtype)
    outs = {}
    for causal in (False, True):
        for target in (fast, plain):
            memory = target.new_memory(rows=4, max_len=64)
            ops = native_ops(config, dtype, CPU) if target.native else PlainOps(config, dtype, CPU)
            assert ops is not None
            if some := [row for row, past in zip(rows, pasts, strict=True) if past]:
                ops.attention(memory, some, [p for p in pasts if p], layers, lambda rope: tables)(0, held.clone())
            for row, past in zip(rows, pasts, strict=True):
                memory.lengths[row] = past
            attend = ops.attention(memory, rows, counts, layers, lambda rope: tables, causal=causal)
            outs[causal, target.native] = attend(0, block.clone())
    for causal in (False, True):
        agree(outs[causal, True], outs[causal, False], dtype)
    lasts = torch.tensor(counts).cumsum(0) - 1  # the last token of a row sees the same either way
    agree(outs[False, True][lasts], outs[True, False][lasts], dtype)
    assert not torch.allclose(outs[False, True][lasts - 1], outs[True, True][lasts - 1], atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_small_operations_agree(rows: int, dtype: torch.dtype) -> None:
    for name in ("llama", "gemma3 (four norms, gelu, two rotations)"):
        config, _ = config_of(name)
        fast, plain = native_ops(config, dtype, CPU), PlainOps(config, dtype, CPU)
        assert isinstance(fast, NativeOps)
        x, added = (torch.randn(rows, 48).to(dtype) for _ in range(2))
        norm = RMSNorm(torch.randn(48).to(dtype), 1e-6)
        agree(fast.norm(x, norm), plain.norm(x, norm), dtype)
        for mine, theirs in zip(fast.add_norm(x, added, norm), plain.add_norm(x, added, norm), strict=True):
            agree(mine, theirs, dtype)
        gate_up = torch.randn(rows, 160).to(dtype) * 4
        agree(fast.gate(gate_up.clone()), plain.gate(gate_up), dtype)


def test_extreme_values_stay_right() -> None:
    """The exponential saturates as it should: large gates pass, large negative ones close, nothing becomes nan."""
    config, _ = config_of("llama")
    ops = native_ops(config, torch.float32, CPU)
    assert ops is not None
    gates = torch.tensor([-1e30, -1e4, -100.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 100.0, 1e4, 1e30, 1, 2, 3])
    result = ops.gate(torch.cat((gates, torch.ones(16)))[None])[0]
    torch.testing.assert_close(result, torch.nn.functional.silu(gates), rtol=1e-5, atol=1e-30)
    assert ops.gate(torch.full((1, 32), float("nan"))).isnan().all()


def test_rounding_is_to_nearest_even() -> None:
    config, _ = config_of("llama")
    ops = native_ops(config, torch.bfloat16, CPU)
    assert ops is not None
    x, added = torch.randn(4, 48).bfloat16() * 100, torch.randn(4, 48).bfloat16()
    total, _ = ops.add_norm(x, added, RMSNorm(torch.ones(48), 1e-6))
    assert torch.equal(total, x + added)


def test_long_contexts_agree() -> None:
    """Many keys, more than one block of queries, several threads."""
    fast, plain = both_targets("llama", torch.float32, max_len=700)
    ids = tokens(700)
    logits = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for target in (fast, plain):
            memory = target.new_memory(rows=1, max_len=700)
            target.forward(ids[:680], memory, want_logits=False)
            logits.append(target.forward(ids[680:], memory).logits)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


def test_models_that_the_code_leaves_out_get_none() -> None:
    config, _ = config_of("llama")
    assert native_ops(config, torch.float32, CPU) is not None
    for other in (
        replace(config, head_dim=80),
        replace(config, activation="gelu"),
        replace(config, hidden_size=50),
    ):
        assert native_ops(other, torch.float32, CPU) is None
    assert native_ops(config, torch.float16, CPU) is None
    assert native_ops(config, torch.float32, torch.device("meta")) is None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells loaded libraries from /proc")
def test_no_second_pool_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where PyTorch's OpenMP has another name, the code is built without; where it has not, both use one library."""

    def loaded() -> set[str]:
        return {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}

    config, _ = config_of("llama")
    before = loaded()
    assert native_ops(config, torch.float32, CPU) is not None
    assert loaded() == before
    commands = []
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compile", lambda command, path: commands.append(command))
    for shared in (True, False):
        monkeypatch.setattr(native, "_shares_threads", lambda shared=shared: shared)
        native._build.cache_clear()
        assert native_ops(config, torch.float32, CPU) is None
    assert ["-fopenmp" in command for command in commands] == [True, False]
    native._build.cache_clear()


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of("llama")
    monkeypatch.setenv("DSPARK_NATIVE", "0")
    assert native_ops(config, torch.float32, CPU) is None
    monkeypatch.setenv("DSPARK_NATIVE", "maybe")
    with pytest.raises(ConfigError, match="DSPARK_NATIVE is 'maybe'"):
        native_ops(config, torch.float32, CPU)


@pytest.mark.parametrize("compiler", ["/does/not/exist", "false"])
def test_without_a_working_compiler_plain_operations_serve(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of("llama")
    monkeypatch.setenv("CC", compiler)
    native._build.cache_clear()
    assert native_ops(config, torch.float32, CPU) is None
    native._build.cache_clear()


def test_is_built_once_per_kind_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of("llama")
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    for _ in range(2):
        native._build.cache_clear()
        assert native_ops(config, torch.float32, CPU) is not None
        assert len(list((tmp_path / "native").iterdir())) == 1
    monkeypatch.setattr(native, "_compile", lambda *arguments: pytest.fail("built again"))
    native._build.cache_clear()
    assert native_ops(config, torch.float32, CPU) is not None


def test_a_home_that_cannot_be_written_to_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of("llama")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "file"))
    native._build.cache_clear()
    assert native_ops(config, torch.float32, CPU) is not None
    native._build.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_however_many_share_its_pass(dtype: torch.dtype) -> None:
    for name in MODELS:
        target, _ = both_targets(name, dtype)
        assert target.rows_independent
        ids = tokens(48)

        def run(pieces: list[int], target: LeanTarget = target, ids: Tensor = ids) -> tuple[Tensor, Tensor, Tensor]:
            memory = target.new_memory(rows=1, max_len=64)
            target.forward(ids[:40], memory)
            outputs = [target.forward(part, memory, taps=(0, 2)) for part in ids[40:].split(pieces)]
            parts = zip(*((o.logits, o.features, o.final) for o in outputs), strict=True)
            logits, features, final = (torch.cat(part) for part in parts)
            return logits, features, final

        assert target.batches_independent
        whole = run([8])
        for pieces in ([1] * 8, [3, 5], [2, 1, 4, 1], [7, 1]):
            for ours, theirs in zip(run(pieces), whole, strict=True):
                assert torch.equal(ours, theirs), (name, pieces)
