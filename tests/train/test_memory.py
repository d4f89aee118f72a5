"""The memory plan bounds what a step really takes, closely, and each field that it names makes it less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from dspark.data.features import Sample, SampleFeatures
from dspark.maths.losses import LossAlphas
from dspark.models.decoder_config import from_transformers
from dspark.train.config import DRAFTERS, TrainConfig, drafter_defaults
from dspark.train.frozen_target import FrozenTarget
from dspark.train.loop import step_pieces
from dspark.train.memory import Allocations, memory_plan, step_bytes, target_bytes
from dspark.train.methods import draft_config, make_method
from dspark.train.shares import passes_of

TARGET = LlamaConfig(
    vocab_size=600,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
CONFIG = TrainConfig(
    block_size=4,
    draft_vocab=500,
    markov_rank=8,
    taps=(0, 2),
    mask_token_id=3,
    max_tokens=100,
    sequences_per_step=4,
    slots_per_step=320,
    target_top=8,
    chunk=64,
    dtype="bfloat16",
    steps=10,
)


@cache
def frozen_target() -> FrozenTarget:
    """Embedding and head of a random model, in bfloat16."""
    tensors = dict(LlamaForCausalLM(TARGET).state_dict())
    shape = replace(from_transformers(TARGET), num_layers=0, slides=())
    target = FrozenTarget(shape, tensors, name="t", dtype=torch.bfloat16, native=False)
    target.info = replace(target.info, num_layers=4)
    return target


def real_peak(config: TrainConfig) -> int:
    """Bytes that a step of full-length samples allocates on this CPU, by the same count."""
    method = make_method(config, TARGET, frozen_target().info, mask_token_id=3)
    method.bind(frozen_target())
    tokens = config.max_tokens
    samples = [Sample(f"s{i}", "x", torch.randint(600, (tokens,)), torch.arange(tokens) >= 1) for i in range(4)]
    kept = SampleFeatures(
        torch.randn(tokens, 64 * len(method.taps)).bfloat16(),
        1,
        torch.randint(500, (tokens - 2, 8), dtype=torch.int32),
        torch.rand(tokens - 2, 8).bfloat16(),
        torch.randn(tokens - 2, 64).bfloat16(),
    )
    pieces = step_pieces(samples, config, 0)
    size = config.block_at(0)
    count = -(-sum(b.anchors.shape[0] for _, b in pieces) // (config.blocks_per_pass or 10**6))
    totals = method.totals([blocks for _, blocks in pieces])
    with Allocations() as seen:
        for part in passes_of(pieces, count):
            parts = [(sample, kept, blocks) for sample, blocks in part]
            method.numbers(parts, block_size=size, alphas=LossAlphas(), totals=totals).loss.backward()
    return seen.peak


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"blocks_per_pass": 20},
        {"chunk": 16},
        {"layers": 1, "confidence": False},
        {"markov_head": "rnn"},
        {"drafter": "dflash"},
        {"drafter": "eagle3"},
        {"drafter": "eagle3", "unroll": 2},
        {"drafter": "eagle3", "own_head": True, "own_embedding": True, "draft_vocab": 0},
        {"drafter": "mtp"},
    ],
    ids=str,
)
def test_a_step_stays_within_the_plan_and_the_plan_is_close(fields: dict) -> None:
    fields = {**drafter_defaults(fields.get("drafter", "dspark")), **fields}
    config = replace(CONFIG, **fields)
    size = config.block_at(0)
    planned = step_bytes(draft_config(config, TARGET, frozen_target().info, 3), config, size, compute=torch.bfloat16)
    real = real_peak(config)
    assert real <= planned < 1.3 * real


def test_the_fields_that_a_plan_names_make_it_less() -> None:
    before = {item.name: item.nbytes for item in memory_plan(CONFIG, TARGET).items}
    for name, fields in {
        "a step: activations, logits, gradients": {"blocks_per_pass": 10},
        "features": {"feature_gigabytes": 1.0},
        "target's head, draft vocabulary": {"draft_vocab": 100},
        "masters and moments": {"layers": 1},
        "a pass of the target": {"max_tokens": 50},
    }.items():
        after = {item.name: item.nbytes for item in memory_plan(replace(CONFIG, **fields), TARGET).items}
        assert after[name] < before[name], name
    step = "a step: activations, logits, gradients"
    wide = replace(CONFIG, chunk=320)
    assert {i.name: i.nbytes for i in memory_plan(wide, TARGET).items}[step] > before[step]


def test_shards_are_smaller_than_copies() -> None:
    def state(**fields: object) -> int:
        processes = int(fields.pop("processes", 1))
        items = memory_plan(replace(CONFIG, **fields), TARGET, processes=processes).items
        return next(item.nbytes for item in items if item.name == "masters and moments")

    assert state(processes=4, parallel="fsdp") < state() < state(processes=4, parallel="ddp")


def test_a_targets_parts_are_less_than_the_whole() -> None:
    whole, parts = (target_bytes(TARGET, torch.bfloat16, whole=w) for w in (True, False))
    assert parts == 2 * 2 * 600 * 64 < whole  # embedding and a head of its own, two bytes each


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_method_has_a_plan(drafter: str) -> None:
    fields = drafter_defaults(drafter)
    items = {item.name: item.nbytes for item in memory_plan(replace(CONFIG, drafter=drafter, **fields), TARGET).items}
    assert all(nbytes > 0 for nbytes in items.values()) and len(items) == 6
    tapped = "a pass of the target"  # Eagle3 wants five states of every token, MTP one, the others here two
    shared = {item.name: item.nbytes for item in memory_plan(CONFIG, TARGET).items}
    assert (items[tapped] < shared[tapped]) == (drafter == "mtp")


def test_playing_rounds_takes_memory_of_its_own() -> None:
    name = "rounds that the drafter plays"
    assert name not in {item.name for item in memory_plan(CONFIG, TARGET).items}
    config = replace(CONFIG, played_from=0.5)
    few, many = (
        {item.name: item.nbytes for item in memory_plan(replace(config, played_texts=n), TARGET).items}[name]
        for n in (4, 24)
    )
    assert 5 * few < many


def qwen3(**shape: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40960, tie_word_embeddings=True,
        **shape,
    )  # fmt: skip


@pytest.mark.parametrize(
    "target, layers, gibibytes",
    [
        (qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32), 1, 4.0),
        (qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32), 2, 5.9),
        (qwen3(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16), 2, 3.8),
    ],
    ids=["4B, one layer", "4B, two layers", "2B, two layers"],
)
def test_the_peaks_that_the_log_states(
    target: Qwen3Config, layers: int, gibibytes: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On a GPU of six gigabytes: from a cache, embedding and head alone, 32 blocks a pass (docs/log.md)."""
    config = TrainConfig(
        dtype="bfloat16",
        cache=str(tmp_path_factory.mktemp("cache")),
        whole_target=False,
        feature_gigabytes=0.25,
        blocks_per_pass=32,
        chunk=128,
        max_tokens=1024,
        layers=layers,
        mask_token_id=151669,
        steps=10,
    )
    assert gibibytes - 0.1 < memory_plan(config, target).nbytes / 2**30 < gibibytes
