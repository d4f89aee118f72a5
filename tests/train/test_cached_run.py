"""Training from a cache is training beside the target: the same curve and the same drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_chat import save_chat_model
from tiny_run import tiny_config

from dspark.cache_runs import plan_build, prepare, run_draft_ids
from dspark.data.cache_features import CachedFeatureSource
from dspark.errors import ConfigError, DataError
from dspark.models.weights import read_config
from dspark.train.config import DRAFTERS, TrainConfig, drafter_defaults
from dspark.train.methods import make_method, run_taps
from dspark.train.run import load_corpus, start, train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return replace(tiny_config(tmp_path_factory.mktemp("cached")), steps=6, evaluate_every=3, save_seconds=99.0)


def cached(config: TrainConfig, folder: Path, *, form: str, encoding: str = "bfloat16") -> TrainConfig:
    """Build the cache of a run, and let the run read it."""
    job = prepare(config, folder)
    build = plan_build(job, folder, form=form, encoding=encoding, shard_bytes=40_000, reserve_bytes=0)
    assert build.run(job.target) and len(build.shards) > 1
    return replace(config, cache=str(folder))


def results(config: TrainConfig) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Logged losses and figures, and the drafter at the end."""
    train(config)
    lines = [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "second" not in k and k != "target_passes"} for line in lines]
    return kept, load_file(Path(config.out) / "last" / "model.safetensors")


@pytest.mark.parametrize(
    ("form", "encoding", "dtype"),
    [("deepspec", "bfloat16", "bfloat16"), ("small", "bfloat16", "bfloat16"), ("small", "float32", "float32")],
)
def test_a_cached_run_equals_the_online_one_bit_for_bit(
    base: TrainConfig, tmp_path: Path, form: str, encoding: str, dtype: str
) -> None:
    """Where the stored dtype is the target's own, nothing at all is lost."""
    online = replace(base, dtype=dtype, out=str(tmp_path / "online"))
    offline = cached(replace(online, out=str(tmp_path / "offline")), tmp_path / "cache", form=form, encoding=encoding)
    (lines, drafter), (lines_cached, drafter_cached) = results(online), results(offline)
    assert lines == lines_cached and len(lines) >= 8
    assert drafter.keys() == drafter_cached.keys()
    assert all(torch.equal(drafter[name], drafter_cached[name]) for name in drafter)
    logged = (tmp_path / "offline" / "log.jsonl").read_text().splitlines()
    passes = [json.loads(line).get("target_passes") for line in logged]
    assert set(passes) <= {None, 0} and 0 in passes


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_float32_target_in_bfloat16_is_close(base: TrainConfig, tmp_path: Path, drafter: str) -> None:
    heads = {} if drafter == "dspark" else {"markov_rank": 0, "confidence": False}
    config = replace(base, drafter=drafter, **{**heads, **drafter_defaults(drafter), "steps": 3})
    form = "small" if drafter == "mtp" else "deepspec"
    offline = cached(replace(config, out=str(tmp_path / "offline")), tmp_path / "cache", form=form)
    lines, lines_cached = (results(c)[0] for c in (replace(config, out=str(tmp_path / "online")), offline))
    for one, two in zip(lines, lines_cached, strict=True):
        if "loss" in one:
            assert two["loss"] == pytest.approx(one["loss"], rel=5e-3)
            assert two["acceptance_length"] == pytest.approx(one["acceptance_length"], rel=5e-3)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cache_foresees_the_taps_and_the_vocabulary_of_its_run(base: TrainConfig, drafter: str) -> None:
    heads = {} if drafter == "dspark" else {"markov_rank": 0, "confidence": False}
    config = replace(base, drafter=drafter, **{**heads, **drafter_defaults(drafter), "taps": (), "num_taps": 2})
    corpus = load_corpus(config)
    method = make_method(config, read_config(corpus.place), corpus.target.info, mask_token_id=3)
    assert run_taps(config, corpus.target.info.num_layers) == method.taps
    job = prepare(config)
    begun = start(replace(config, out=config.out + drafter), corpus)
    assert torch.equal(job.draft_ids, begun.features.draft_ids) and begun.features.taps == job.taps
    whole = run_draft_ids(replace(config, draft_vocab=0), job.samples, corpus.target.info.vocab_size, ())
    assert whole.tolist() == list(range(corpus.target.info.vocab_size))


def test_a_cache_that_does_not_fit_is_refused_before_the_first_step(base: TrainConfig, tmp_path: Path) -> None:
    config = cached(replace(base, out=str(tmp_path / "run")), tmp_path / "cache", form="small")
    corpus = load_corpus(config)
    assert isinstance(start(config, corpus).features, CachedFeatureSource)
    other = save_chat_model(tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-5}))
    for changes, words in (
        ({"taps": (0, 1)}, "lacks the target layers 1"),
        ({"draft_vocab": 50}, "draft_vocab"),
        ({"target_top": 61}, None),  # no more than the vocabulary has
        ({"max_tokens": 40}, "has other tokens"),
        ({"model": str(other)}, r"config\.json is another"),
    ):
        changed = replace(config, out=str(tmp_path / "changed"), **changes)
        if words is None:
            start(changed, corpus)
            continue
        with pytest.raises(DataError, match=words):
            start(changed, load_corpus(changed))
    with pytest.raises(ConfigError, match="cache is 'nowhere'"):
        replace(config, cache="nowhere")
