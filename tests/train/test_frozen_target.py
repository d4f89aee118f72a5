"""A target without its layers: what training reads of it is the whole target's, and it refuses to decode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_chat import save_chat_model
from tiny_run import lines, tiny_config

from dspark.cache_runs import plan_build, prepare
from dspark.errors import ConfigError, ModelError
from dspark.models.loading import load_target
from dspark.train.config import TrainConfig
from dspark.train.frozen_target import load_frozen_target
from dspark.train.run import train
from dspark.train_cli import decode_held_out


def test_embedding_and_head_are_the_whole_targets(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "model")
    whole, parts = load_target(str(folder), dtype="float32"), load_frozen_target("m", folder, dtype="float32")
    ids, states = torch.arange(12).view(3, 4), torch.randn(5, whole.info.hidden_size)
    torch.testing.assert_close(parts.embed(ids), whole.embed(ids))
    torch.testing.assert_close(parts.head_weight(), whole.head_weight())
    torch.testing.assert_close(parts.logits(states), whole.logits(states))
    assert replace(parts.info, name=whole.info.name) == whole.info
    for ask in (
        lambda: parts.new_memory(rows=1, max_len=8),
        lambda: parts.forward(ids[0], whole.new_memory(rows=1, max_len=8)),
    ):
        with pytest.raises(ModelError, match="whole_target is false"):
            ask()


def test_from_a_cache_a_run_needs_no_layers_and_takes_the_same_steps(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path), steps=4, evaluate_every=2, evaluate_prompts=1, evaluate_tokens=4)
    job = prepare(config, tmp_path / "cache")
    build = plan_build(job, tmp_path / "cache", form="small", encoding="float32", shard_bytes=40_000, reserve_bytes=0)
    assert build.run(job.target)
    whole = replace(config, cache=str(tmp_path / "cache"), out=str(tmp_path / "whole"))
    parts = replace(whole, whole_target=False, out=str(tmp_path / "parts"))
    train(whole)
    train(parts, evaluate=decode_held_out)  # which it cannot: its best is chosen by analytic acceptance
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    with pytest.raises(ConfigError, match="whole_target is false and cache is ''"):
        TrainConfig(whole_target=False)
