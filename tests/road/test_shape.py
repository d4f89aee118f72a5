"""Sensible shapes: for any number of layers, for families of other names, and a mask that no conversation contains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from chat_templates import FAMILIES, byte_tokenizer
from tiny_models import save_model, tiny_model
from tiny_writers import save_writer

from dspark.errors import ConfigError, ModelError
from dspark.models.loading import load_target
from dspark.models.target import TargetInfo, check_taps
from dspark.models.weights import read_config
from dspark.road.probe import check_fits, disk_free, measure, memory_free
from dspark.road.shape import draft_shape, draft_start, mask_token, parameters, spread_taps


def info_of(layers: int, *, vocab: int = 1000, hidden: int = 64, device: str = "cpu") -> TargetInfo:
    return TargetInfo(
        name="m",
        family="f",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        max_len=512,
        dtype=torch.float32,
        device=torch.device(device),
    )


@pytest.mark.parametrize("layers", range(1, 50))
def test_taps_can_be_tapped_whatever_the_depth(layers: int) -> None:
    for count in (1, 3, 5):
        taps = spread_taps(layers, count)
        assert 1 <= len(taps) <= count and check_taps(taps, layers) == taps
    assert spread_taps(30, 3) == (1, 14, 27)


def test_a_gpu_gets_the_references_depth_and_a_cpu_two_layers() -> None:
    config = transformers.Qwen3Config(hidden_size=64, num_hidden_layers=36, vocab_size=1000)
    cpu, gpu = (draft_shape(config, info_of(36, device=device)) for device in ("cpu", "meta"))
    assert (cpu.num_hidden_layers, len(cpu.target_layer_ids)) == (2, 3)
    assert (gpu.num_hidden_layers, len(gpu.target_layer_ids)) == (5, 5)
    assert cpu.draft_vocab_size is None and parameters(gpu) > parameters(cpu)
    wide = transformers.Qwen3Config(hidden_size=64, num_hidden_layers=36, vocab_size=151936)
    assert draft_shape(wide, info_of(36, vocab=151936)).draft_vocab_size == 12288


def test_families_with_other_names_get_a_shape() -> None:
    gpt2 = transformers.GPT2Config(n_embd=48, n_layer=6, n_head=4, vocab_size=1000)
    shape = draft_shape(gpt2, info_of(6, hidden=48))
    assert (shape.hidden_size, shape.intermediate_size, shape.head_dim) == (48, 192, 12)


@pytest.mark.parametrize("family, start", [("qwen3", "target"), ("gemma", "fresh")])
def test_layers_are_copied_only_where_they_mean_the_same(family: str, start: str, tmp_path: Path) -> None:
    folder = save_writer(tmp_path, family)
    target, config = load_target(str(folder), dtype="float32"), read_config(folder)
    assert draft_start(draft_shape(config, target.info), config, folder) == start


def test_other_names_or_shapes_of_tensors_mean_a_fresh_start(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    folder = Path(save_model(model, tmp_path))
    config = read_config(folder)
    shape = draft_shape(config, info_of(4, vocab=89, hidden=48))
    assert draft_start(shape, config, folder) == "target"
    config.intermediate_size = 96
    other = draft_shape(config, info_of(4, vocab=89, hidden=48))
    assert draft_start(other, config, folder) == "fresh"


def test_the_mask_is_a_token_that_nobody_says() -> None:
    tokenizer = byte_tokenizer(FAMILIES["qwen3"])
    size = len(tokenizer)
    end, spare = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>"))
    seen = torch.ones(size + 2, dtype=torch.long)
    seen[[end, spare, 100]] = 0
    seen[size + 1] = 0
    assert mask_token(tokenizer, seen, never=[end]) == spare
    assert mask_token(tokenizer, seen, never=[end, spare]) == size + 1  # a row that the tokenizer does not use
    seen[size + 1] = 1
    assert mask_token(tokenizer, seen, never=[end, spare]) == 100
    seen[100] = 1
    with pytest.raises(ConfigError, match="every token of the vocabulary"):
        mask_token(tokenizer, seen, never=[end, spare])


def test_a_probe_is_measured_and_a_model_too_large_refused(tmp_path: Path) -> None:
    folder = save_writer(tmp_path / "model", "qwen3")
    target = load_target(str(folder), dtype="float32")
    probe = measure(target, parameters=1000, out=tmp_path / "not" / "there", answer_tokens=32, repeats=1)
    assert [tokens for tokens, _ in probe.pass_seconds] == [1, 4, 6, 8] and probe.rows == 64
    assert min(seconds for _, seconds in probe.pass_seconds) > 0 and probe.tokens_per_second > 0
    assert probe.disk_free == pytest.approx(disk_free(tmp_path), rel=0.2)
    middle = probe.of(5)
    assert min(probe.of(4), probe.of(6)) <= middle <= max(probe.of(4), probe.of(6))
    assert probe.of(16) == pytest.approx(2 * probe.of(8))
    cpu = torch.device("cpu")
    check_fits(tmp_path, itemsize=2, parameters=1000, device=cpu)
    with pytest.raises(ModelError, match="GB are free"):
        check_fits(tmp_path, itemsize=2, parameters=memory_free(cpu), device=cpu)


def test_memory_that_cannot_be_told_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.road.probe.Path", lambda _: SimpleNamespace(read_text=lambda: ""))
    monkeypatch.setattr("os.sysconf", lambda name: -1)
    assert memory_free(torch.device("cpu")) == 1 << 62
