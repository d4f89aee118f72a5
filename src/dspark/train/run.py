"""`dspark train` from files to a drafter: prepare, step, watch, keep the best, survive a kill.

A run folder holds
    config.json       the run's TrainConfig, hashes of its data, and the provenance of every call
    state-*/          newest training states (masters, moments); a run found there goes on from the newest
    best/             the drafter with the highest held-out acceptance so far, ready for `--drafter`
    last/             the drafter at the end of the run
    log.jsonl         a line per logged step or evaluation; TensorBoard files beside it
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dspark.artifacts import atomic_write_text, provenance
from dspark.chat import ChatFormat
from dspark.data.cache_features import open_features, target_identity
from dspark.data.features import FeatureSource, Sample
from dspark.data.samples import (
    choose_draft_vocab,
    read_prompts,
    read_samples,
    split_held_out,
    token_counts,
)
from dspark.errors import ConfigError
from dspark.models.checkpoint import AnyConfig, build_model, read_drafter, save_drafter
from dspark.models.drafter import Drafter
from dspark.models.loading import choose_device, choose_dtype, load_target
from dspark.models.target import Target
from dspark.models.weights import load_tensors, read_config, resolve_model
from dspark.train.config import INITIALISERS, TrainConfig
from dspark.train.loop import choose_samples, held_out_numbers, step_parts, train_step
from dspark.train.methods import Method, make_method
from dspark.train.optim import learning_rate, make_optimizer
from dspark.train.state import load_state, save_state


@dataclass(frozen=True)
class Corpus:
    """What several runs over the same answers and target can share."""

    place: Path  # the target's folder
    target: Target
    chat: ChatFormat
    training: list[Sample]
    held_out: list[Sample]
    counts: Int[Tensor, "vocab"]  # supervised tokens of the training samples


@dataclass
class Run:
    """Everything a run holds in memory."""

    config: TrainConfig
    folder: Path
    corpus: Corpus
    method: Method
    optimizer: torch.optim.Optimizer
    features: FeatureSource
    step: int = 0
    best: float = -math.inf  # held-out acceptance length of the best drafter
    measure: list[str | int] = field(default_factory=list)  # how ``best`` was measured
    seconds: float = 0.0  # spent in steps, over all resumptions
    blocks: int = 0

    @property
    def model(self) -> nn.Module:
        return self.method.model


def reserved_token(tokenizer: Any, counts: Tensor) -> int:
    """A special token that no answer contains, to serve as the mask; never the padding or an end token."""
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    for token, content in sorted(tokenizer.added_tokens_decoder.items()):
        if (
            token not in taken
            and token < counts.shape[0]
            and counts[token] == 0
            and not content.content.startswith("<|im_")
        ):
            return int(token)
    raise ConfigError("mask_token_id is -1 and no reserved token is unused; name a token id that no answer contains")


Evaluate = Callable[[Corpus, TrainConfig, Drafter, Sequence[Sample]], dict[str, float]]


def load_corpus(config: TrainConfig) -> Corpus:
    """The target and the samples, held-out prompts set apart."""
    place = resolve_model(config.model)
    target = load_target(config.model, dtype=config.dtype)
    chat = ChatFormat.from_folder(place)
    samples = read_samples(config.answers, read_prompts(config.prompts), chat, max_tokens=config.max_tokens)
    training, held_out = split_held_out(samples, config.held_out)
    if not training or not held_out:
        raise ConfigError(
            f"held_out is {config.held_out}: of {len(samples)} answers {len(training)} are left to train on and "
            f"{len(held_out)} to hold out; give answers to more prompts"
        )
    highest = max(int(sample.token_ids.max()) for sample in samples)
    if highest >= target.info.vocab_size:
        raise ConfigError(f"the answers hold token id {highest}; {config.model} has {target.info.vocab_size} tokens")
    return Corpus(place, target, chat, training, held_out, token_counts(training, target.info.vocab_size))


def start(config: TrainConfig, corpus: Corpus, *, features: FeatureSource | None = None) -> Run:
    """Build the drafter and restore the run folder's newest state, or give it its start.

    ``features`` may come from another run with the same taps, draft vocabulary and ``target_top``.
    Raises :class:`ConfigError` if the run folder belongs to a run of another configuration.
    """
    folder = Path(config.out)
    _claim(folder, config)
    target, counts = corpus.target, corpus.counts
    mask = config.mask_token_id if config.mask_token_id >= 0 else reserved_token(corpus.chat.tokenizer, counts)
    method = make_method(config, read_config(corpus.place), target.info, mask_token_id=mask)
    model = method.model
    if config.initialise not in INITIALISERS:
        _copy_drafter(model, Path(config.initialise))
    elif isinstance(model.d2t, Tensor):
        ids = choose_draft_vocab(counts, model.d2t.shape[0], corpus.chat.stop_token_ids)
        model.d2t.copy_(ids - torch.arange(ids.shape[0]))
    model.to(target.info.device)
    optimizer = make_optimizer(model, betas=config.betas, weight_decay=config.weight_decay)
    facts = load_state(folder, model, optimizer)  # before anything derives from the draft vocabulary
    method.bind(target)
    features = features or _feature_source(config, corpus, method)
    run = Run(config, folder, corpus, method, optimizer, features)
    if facts is None:
        _warm_start(run)
    else:
        run.step, run.seconds, run.blocks = facts["train_step"], facts["seconds"], facts["blocks"]
        run.best, run.measure = facts["best"], facts["measure"]
        _cut_log(folder, run.step)
    return run


def _feature_source(config: TrainConfig, corpus: Corpus, method: Method) -> FeatureSource:
    """The target beside the trainer, or what it said before, from a cache; one that does not fit is refused here."""
    top, memory_bytes = config.target_top, int(config.feature_gigabytes * 2**30)
    taps, draft_ids = method.taps, method.draft_token_ids()
    if not config.cache:
        return FeatureSource(corpus.target, taps, draft_ids, top=top, memory_bytes=memory_bytes)
    return open_features(
        config.cache,
        corpus.target,
        target_identity(corpus.place, config.model, corpus.chat.tokenizer),
        [*corpus.training, *corpus.held_out],
        taps=taps,
        draft_ids=draft_ids,
        top=top,
        memory_bytes=memory_bytes,
    )


FREE_FIELDS = frozenset(  # what a resumed run may change: its length, and what watches it
    {
        "out",
        "steps",
        "decay",
        "log_every",
        "evaluate_every",
        "evaluate_prompts",
        "evaluate_tokens",
        "save_seconds",
        "feature_gigabytes",
    }
)


_DEFAULTS = json.loads(json.dumps({f.name: f.default for f in fields(TrainConfig)}))


def settle_dtype(config: TrainConfig) -> TrainConfig:
    """``config`` with its dtype named: that of the folder's run, or else the one that is faster here.

    A measurement may come out otherwise on a busy day; a resumed run keeps the dtype that it began with.
    """
    if config.dtype != "auto":
        return config
    path = Path(config.out) / "config.json"
    if path.is_file() and any(Path(config.out).glob("state-*")):
        return replace(config, dtype=json.loads(path.read_text())["config"]["dtype"])
    return replace(config, dtype=str(choose_dtype("auto", choose_device("auto"))).removeprefix("torch."))


def _claim(folder: Path, config: TrainConfig) -> None:
    """Write the run's config, or check that the folder's run has the same one on the same data.

    A run that goes on writes the config that holds from now on, and adds the call to ``calls``.
    """
    path = folder / "config.json"
    ours = json.loads(json.dumps(asdict(config)))
    data = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in (*config.answers, *config.prompts)}
    calls: list[dict[str, Any]] = []
    if path.is_file() and any(folder.glob("state-*")):
        before = json.loads(path.read_text())
        calls = before["calls"]
        then = {**_DEFAULTS, **before["config"]}  # a field that the run's version did not know stood at its default
        changed = sorted(k for k in ours if k not in FREE_FIELDS and then.get(k) != ours[k])
        changed += sorted(name for name in data if before["data"].get(name) != data[name])
        if changed:
            raise ConfigError(
                f"{folder} holds a run that differs in {', '.join(changed)}; resume it unchanged or take another --out"
            )
    folder.mkdir(parents=True, exist_ok=True)
    calls = [*calls, {"steps": config.steps, "provenance": provenance()}]
    atomic_write_text(path, json.dumps({"config": ours, "data": data, "calls": calls}, indent=2))


def _copy_drafter(model: nn.Module, folder: Path) -> None:
    """Take all parameters and the draft vocabulary of the drafter in ``folder``, which must have the same shape."""
    origin = read_drafter(folder)
    assert isinstance(model.config, AnyConfig)
    ours, theirs = model.config.to_json(), origin.config.to_json()
    changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if changed:
        raise ConfigError(f"initialise is {folder}, whose {', '.join(changed)} differ from the run's; set them alike")
    model.load_state_dict(build_model(origin).state_dict())


def _warm_start(run: Run) -> None:
    """The parameters before the first step; a drafter that was copied has them already."""
    if run.config.initialise not in INITIALISERS:
        return
    tensors = load_tensors(run.corpus.place) if run.config.initialise == "target" else None
    if figures := run.method.start(tensors, run.corpus.training):
        _log(run.folder, figures)


def train(
    config: TrainConfig,
    *,
    evaluate: Evaluate | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Run or resume a training run to its end; returns the folder of the best drafter.

    ``evaluate`` measures acceptance by decoding on held-out samples and returns at least ``acceptance_length``;
    without it the analytic value decides which checkpoint is best. ``on_step`` receives every logged line; ``stop``
    is asked between steps.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import, only needed here

    config = settle_dtype(config)
    run = start(config, load_corpus(config))
    board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step)
    saved = time.monotonic()
    while run.step < config.steps and not stop():
        line = _one_step(run)
        if run.step % config.log_every == 0:
            _report(run, board, line, on_step)
        if run.step % config.evaluate_every == 0 or run.step == config.steps:
            _report(run, board, _evaluate(run, evaluate), on_step)
        if time.monotonic() - saved > config.save_seconds or run.step == config.steps:
            _save(run)
            saved = time.monotonic()
    _save(run)
    save_drafter(run.folder / "last", run.model)
    board.close()
    best = run.folder / "best"
    return best if best.is_dir() else run.folder / "last"


def _one_step(run: Run) -> dict[str, Any]:
    begin = time.perf_counter()
    rate = learning_rate(
        run.step,
        run.config.steps,
        run.config.learning_rate,
        warmup=run.config.warmup,
        schedule=run.config.schedule,
        decay=run.config.decay,
    )
    parts = step_parts(choose_samples(run.corpus.training, run.step, run.config), run.features, run.config, run.step)
    fed = time.perf_counter()
    numbers, norm = train_step(run.method, run.optimizer, parts, run.config, step=run.step, rate=rate)
    end = time.perf_counter()
    run.step += 1
    run.seconds += end - begin
    run.blocks += numbers.blocks
    return {
        "loss": float(numbers.loss.detach()),
        "ce": numbers.ce,
        "l1": numbers.l1,
        "acceptance_length": numbers.acceptance_length,
        "acceptance_rate": [round(float(x), 4) for x in numbers.acceptance_rate],
        "confidence_error": numbers.confidence_error,
        "gradient_norm": norm,
        "learning_rate": rate,
        "blocks_per_second": numbers.blocks / (end - begin),
        "trained_blocks_per_second": numbers.blocks / (end - fed),
        "tokens_per_second": sum(int(s.token_ids.shape[0]) for s, _, _ in parts) / (end - begin),
        "target_passes": run.features.computed,
    }


def _evaluate(run: Run, evaluate: Evaluate | None) -> dict[str, Any]:
    """Held-out acceptance, analytic and by decoding; the best drafter so far is kept."""
    analytic = held_out_numbers(run.method, run.features, run.corpus.held_out, run.config)
    line: dict[str, Any] = {"held_out_analytic": analytic}
    score = analytic["mean"]
    if evaluate is not None:
        chosen = run.corpus.held_out[:: max(1, len(run.corpus.held_out) // max(1, run.config.evaluate_prompts))]
        chosen = chosen[: run.config.evaluate_prompts]
        line["held_out_decoded"] = evaluate(run.corpus, run.config, run.method.drafter(), chosen)
        score = line["held_out_decoded"]["acceptance_length"]
    measure: list[str | int] = ["analytic"]
    if evaluate is not None:
        measure = ["decoded", run.config.evaluate_prompts, run.config.evaluate_tokens]
    if measure != run.measure:  # scores of another measure do not compare
        run.best, run.measure = -math.inf, measure
    if score > run.best:
        run.best = score
        save_drafter(run.folder / "best", run.model)
    return line


def _save(run: Run) -> None:
    facts = {"best": run.best, "measure": run.measure, "seconds": run.seconds, "blocks": run.blocks}
    save_state(run.folder, run.step, run.model, run.optimizer, facts)


def _report(run: Run, board: Any, line: dict[str, Any], on_step: Callable[[dict[str, Any]], None] | None) -> None:
    line = {"step": run.step, "seconds": round(run.seconds, 1), "blocks": run.blocks, **line}
    _log(run.folder, line)
    for name, value in line.items():
        for key, number in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(number, int | float):
                board.add_scalar(f"{name}/{key}" if key else name, number, run.step)
    if on_step is not None:
        on_step(line)


def _cut_log(folder: Path, step: int) -> None:
    """Drop the lines of steps that were logged but not saved: they will be run and logged again."""
    path = folder / "log.jsonl"
    if path.is_file():
        kept = [text for text in path.read_text().splitlines() if json.loads(text).get("step", 0) <= step]
        atomic_write_text(path, "".join(text + "\n" for text in kept))


def _log(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "log.jsonl", "a") as log:
        log.write(json.dumps(line) + "\n")
