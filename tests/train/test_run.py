"""A training run as a whole: it learns, it stops when nothing rises, and it refuses a changed config."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import lines, of_method, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.core import SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError
from dspark.models.checkpoint import read_draft_config
from dspark.models.draft_recipes import default_taps
from dspark.models.drafter import NoDrafter
from dspark.models.loading import load_target
from dspark.models.registry import load_drafter
from dspark.train.config import DRAFTERS, EAGLE3_OPTIONS, TrainConfig, drafter_defaults
from dspark.train.loop import step_parts, train_step
from dspark.train.run import load_corpus, settle_dtype, start, train
from dspark.train_cli import decode_held_out


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny_config(tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_run_learns_and_leaves_a_drafter_that_decodes(base: TrainConfig, tmp_path: Path, drafter: str) -> None:
    """On the answers' tokens alone, whatever the method's own loss: they can be learned, a random target hardly."""
    fields = {"out": str(tmp_path / "run"), "steps": 80, "learning_rate": 5e-3, "save_seconds": 99.0}
    fields |= {"evaluate_prompts": 2, "evaluate_tokens": 6, "evaluate_every": 40}
    config = of_method(base, drafter, **fields, soft_until=0.0, alpha_soft=0.0, alpha_ce=1.0, alpha_l1=0.0)
    best = train(config, evaluate=decode_held_out)
    logged = lines(tmp_path / "run")
    assert logged[(80, "held")]["held_out_analytic"]["mean"] > 1
    ce = [logged[(step, "step")]["ce"] for step in range(1, 81)]
    assert sum(ce[-10:]) < 0.75 * sum(ce[:10])
    shape = read_draft_config(best)
    assert shape.draft_vocab_size == 60 and shape.block_size == 3
    target = load_target(config.model, dtype="float32")
    found = load_drafter(str(best), target)
    prompt = list(range(40, 60))
    drafted, plain = (
        generate(target, d, prompt, sampling=SamplingParams(), max_new_tokens=20) for d in (found, NoDrafter())
    )
    assert drafted.token_ids == plain.token_ids and sum(len(r.draft_tokens) for r in drafted.rounds) > 0


OWN = {"own_head": True, "own_embedding": True, "draft_vocab": 0}
NORMED = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}


@pytest.mark.parametrize("fields", [OWN | NORMED, {"initialise": "fresh", "unroll": 2, "norm_before_fc": True}])
def test_eagle3_with_its_other_choices(base: TrainConfig, tmp_path: Path, fields: dict) -> None:
    config = of_method(base, "eagle3", out=str(tmp_path / "run"), steps=3, **fields)
    found = load_drafter(str(train(config)), load_target(config.model, dtype="float32"))
    assert found.block_size == 3
    assert all(getattr(found.config, name) == getattr(config, name) for name in EAGLE3_OPTIONS)
    origin = load_file(tmp_path / "run" / "last" / "model.safetensors")
    second = replace(
        config, out=str(tmp_path / "second"), steps=1, learning_rate=0.0, initialise=f"{tmp_path}/run/last"
    )
    train(second)
    again = load_file(tmp_path / "second" / "last" / "model.safetensors")
    assert again.keys() == origin.keys() and all(torch.equal(again[k], origin[k]) for k in origin)


def test_resuming_another_run_is_refused_by_field(base: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, out=str(tmp_path / "run"), steps=2)
    train(config)
    with pytest.raises(ConfigError, match="learning_rate, seed"):
        train(replace(config, seed=1, learning_rate=1.0))
    train(replace(config, steps=3))  # a longer run is the same run
    assert len(json.loads((tmp_path / "run" / "config.json").read_text())["calls"]) == 2


def test_a_field_unknown_to_the_runs_version_stood_at_its_default(base: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, out=str(tmp_path / "run"), steps=2)
    train(config)
    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text())
    del stored["config"]["drafter"], stored["config"]["unroll"]
    path.write_text(json.dumps(stored))
    train(replace(config, steps=3))
    del stored["config"]["learning_rate"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="learning_rate"):
        train(replace(config, steps=4, learning_rate=7e-3))


def test_resuming_on_grown_answers_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    grown = tmp_path / "answers.jsonl"
    grown.write_text(Path(base.answers[0]).read_text())
    config = replace(base, out=str(tmp_path / "run"), answers=(str(grown),), steps=2)
    train(config)
    with open(grown, "a") as answers:
        answers.write(json.dumps({"id": "p0", "sample": 1, "answer_ids": [50, 51, 52, 53]}) + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl"):
        train(replace(config, steps=3))


def test_a_resumed_run_keeps_the_dtype_it_began_with(base: TrainConfig, tmp_path: Path) -> None:
    train(replace(base, out=str(tmp_path / "run"), steps=2))
    assert settle_dtype(replace(base, out=str(tmp_path / "run"), dtype="auto")).dtype == "float32"
    assert settle_dtype(replace(base, out=str(tmp_path / "new"), dtype="auto")).dtype in ("float32", "bfloat16")


def test_a_run_ends_when_held_out_acceptance_stops_rising(base: TrainConfig, tmp_path: Path) -> None:
    """Without learning nothing rises: the first evaluation sets the best, and ``patience`` further ones end the run."""
    config = replace(base, out=str(tmp_path / "run"), learning_rate=0.0, steps=9, evaluate_every=1, patience=2)
    train(config)
    assert sorted(step for step, kind in lines(tmp_path / "run") if kind == "step" and step) == [1, 2, 3]
    assert (tmp_path / "run" / "state-00000003").is_dir() and (tmp_path / "run" / "best").is_dir()
    train(config)  # the same command finds the run at its end
    assert max(step for step, _ in lines(tmp_path / "run")) == 3
    train(replace(config, patience=3))  # and with more patience it goes on
    assert max(step for step, _ in lines(tmp_path / "run")) == 4


def test_of_equally_good_drafters_the_newest_is_kept(base: TrainConfig, tmp_path: Path) -> None:
    """Where drafts are as good as they can be, confidences still have to learn it."""
    config = replace(base, out=str(tmp_path / "run"), steps=4, evaluate_every=1, save_seconds=99.0)
    train(config, evaluate=lambda *_: {"acceptance_length": 2.0})
    best, last = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("best", "last"))
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_a_log_is_json_and_tells_of_acceptance_where_there_is_any(base: TrainConfig, tmp_path: Path) -> None:
    """Steps that learn the target's states have none, and a drafter without a confidence head no error of it."""
    train(replace(base, out=str(tmp_path / "run"), steps=3, state_steps=1, log_every=1, confidence=False))
    kept = [text for text in (tmp_path / "run" / "log.jsonl").read_text().splitlines() if '"loss"' in text]
    first, second, _ = (json.loads(text, parse_constant=pytest.fail) for text in kept)
    assert "acceptance_length" not in first and second["acceptance_length"] >= 1.0
    assert second["confidence_error"] is None


def test_a_drafter_that_has_diverged_is_never_the_best(base: TrainConfig, tmp_path: Path) -> None:
    scores = iter([math.nan, 1.5, math.nan, 1.25])
    config = replace(base, out=str(tmp_path / "run"), steps=4, evaluate_every=1, save_seconds=0.0)
    train(config, evaluate=lambda *_: {"acceptance_length": next(scores)})
    newest = sorted((tmp_path / "run").glob("state-*"))[-1]
    facts = json.loads((newest / "facts.json").read_text(), parse_constant=pytest.fail)
    assert (facts["best"], facts["stale"]) == (1.5, 2)


def test_masters_and_moments_are_fp32_whatever_the_products_are(base: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, out=str(tmp_path / "run"), dtype="bfloat16", confidence=False)
    run = start(config, load_corpus(config))
    parts = step_parts(run.corpus.training[:2], run.features, config, 0)
    products: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                products.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Watch():
        train_step(run.method, run.optimizer, parts, config, step=0, rate=1e-3)
    assert products == {torch.bfloat16}
    kept = [*run.model.parameters(), *(p.grad for p in run.model.parameters() if p.grad is not None)]
    kept += [value for state in run.optimizer.state.values() for value in state.values()]
    assert {t.dtype for t in kept} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in run.model.parameters())


def test_without_anything_held_out_a_run_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    one = tmp_path / "answers.jsonl"
    one.write_text(json.dumps({"id": "p0", "sample": 0, "answer_ids": [50, 51, 52, 53]}) + "\n")
    with pytest.raises(ConfigError, match="held_out is 4"):
        train(replace(base, out=str(tmp_path / "run"), answers=(str(one),)))


def test_a_run_can_begin_where_a_drafter_stands(base: TrainConfig, tmp_path: Path) -> None:
    first = replace(base, out=str(tmp_path / "first"), steps=3)
    train(first)
    origin = load_file(tmp_path / "first" / "last" / "model.safetensors")
    second = replace(
        base, out=str(tmp_path / "second"), steps=1, learning_rate=0.0, initialise=str(tmp_path / "first/last")
    )
    train(second)
    again = load_file(tmp_path / "second" / "last" / "model.safetensors")
    assert again.keys() == origin.keys() and all(torch.equal(again[k], origin[k]) for k in origin)
    with pytest.raises(ConfigError, match="markov_rank"):
        train(replace(second, out=str(tmp_path / "third"), markov_rank=8))


def test_default_taps_are_z_labs() -> None:
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(30, 3) == (1, 14, 27)
    assert default_taps(30, 1) == (15,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("held_out", 0),
        ("evaluate_every", 0),
        ("loss_decay", 0.0),
        ("patience", -1),
        ("blocks_per_pass", -1),
        ("parallel", "luck"),
        ("fresh_per_step", 9),
        ("schedule", "stairs"),
        ("initialise", "luck"),
        ("drafter", "medusa"),
        ("unroll", 2),
        ("own_head", True),
        ("step_loss_decay", 0.0),
        ("curriculum", ((0.5, 2),)),
    ],
)
def test_unusable_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("drafter", "field", "value"),
    [
        ("dflash", "markov_rank", 8),
        ("dflash", "confidence", True),
        ("eagle3", "layers", 2),
        ("eagle3", "unroll", 8),
        ("eagle3", "sample_from_anchor", False),
        ("mtp", "own_head", True),
        ("mtp", "norm_output", True),
        ("dflash", "own_embedding", True),
    ],
)
def test_what_a_method_cannot_use_is_refused(drafter: str, field: str, value: object) -> None:
    TrainConfig(drafter=drafter, **drafter_defaults(drafter))
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{"drafter": drafter, **drafter_defaults(drafter), field: value})


def test_mtp_is_trained_on_one_prediction_and_measured_on_the_whole_block() -> None:
    config = TrainConfig(drafter="mtp", **drafter_defaults("mtp"))
    assert config.block_at(0) == config.block_at(3999) == 1 and config.block_size == 7


def test_missing_files_are_named_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        TrainConfig(answers=("nowhere.jsonl",))


def test_the_curriculum_ends_at_the_drafters_block_size() -> None:
    config = TrainConfig(steps=10, curriculum=((0.2, 1), (0.5, 3), (1.0, 0)))
    assert [config.block_at(s) for s in range(10)] == [1, 1, 3, 3, 3, 7, 7, 7, 7, 7]
