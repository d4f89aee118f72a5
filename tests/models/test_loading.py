"""The door to a target: what each option chooses, and what it refuses before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_model, tiny_model

from dspark.errors import ConfigError, ModelError
from dspark.models import loading
from dspark.models.lean import LeanTarget
from dspark.models.loading import load_target
from dspark.models.target import Target
from dspark.models.transformers_target import TransformersTarget


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "int8"), ("device", "abacus"), ("device", "cuda:99"), ("implementation", "fast")],
)
def test_bad_options_are_refused(option: str, value: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match=f"{option} is '{value}'"):
        load_target("there-is-no-such-model", **options)


def test_auto_takes_lean_and_the_measured_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tiny_model("qwen3"), tmp_path)
    monkeypatch.setattr(loading, "choose_cpu_dtype", lambda: torch.bfloat16)
    target = load_target(folder, device="cpu")
    assert isinstance(target, LeanTarget) and isinstance(target, Target)
    assert target.info.dtype == torch.bfloat16 and target.info.name == folder and target.info.family == "qwen3"
    assert (target.info.vocab_size, target.info.hidden_size, target.info.num_layers) == (89, 48, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_implementation_are_obeyed(dtype: str, tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path)
    for implementation, kind in (("lean", LeanTarget), ("transformers", TransformersTarget)):
        target = load_target(folder, dtype=dtype, device="cpu", implementation=implementation)
        assert isinstance(target, kind) and isinstance(target, Target)
        assert str(target.info.dtype) == f"torch.{dtype}"
        out = target.forward(torch.tensor([3, 4]), target.new_memory(rows=1, max_len=4))
        assert out.logits is not None and torch.isfinite(out.logits.float()).all()


def test_lean_by_name_refuses_what_it_does_not_cover(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2)
    folder = save_model(transformers.GPT2LMHeadModel(config), tmp_path)
    with pytest.raises(ModelError, match="model_type is 'gpt2'"):
        load_target(folder, dtype="float32", device="cpu", implementation="lean")
    assert isinstance(load_target(folder, dtype="float32", device="cpu"), TransformersTarget)
