"""What the ``cache`` verbs do: foretell a cache, build it, check it, and measure what it loses.

A cache is made for a training run, so it takes the run's own configuration: the same target, answers, lengths, taps,
draft vocabulary and held-out set follow from it by the same rules.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dspark.chat import ChatFormat
from dspark.data.anchors import anchor_candidates, make_blocks, sample_anchors
from dspark.data.answer_file import template_options_of
from dspark.data.cache_deepspec import DeepSpecForm
from dspark.data.cache_features import CachedFeatureSource, target_identity
from dspark.data.cache_format import BUILD_NAME, Form, TargetIdentity
from dspark.data.cache_reader import FeatureCache
from dspark.data.cache_rows import ENCODINGS, encoding_named, relative_errors
from dspark.data.cache_writer import CacheBuild
from dspark.data.features import FeatureSource, Sample, target_states
from dspark.data.sample_cache import load_samples
from dspark.data.samples import choose_draft_vocab, split_held_out, token_counts
from dspark.data.windows import SmallForm
from dspark.errors import ConfigError, DataError
from dspark.maths.losses import LossAlphas
from dspark.models.backbone import DraftModel
from dspark.models.chain import ChainModel
from dspark.models.checkpoint import build_model, check_fits, draft_token_ids, read_drafter
from dspark.models.loading import load_target
from dspark.models.target import FINAL, Target
from dspark.models.weights import resolve_model
from dspark.train.blocks import make_shared, run_blocks
from dspark.train.chains import run_chains
from dspark.train.config import INITIALISERS, TrainConfig
from dspark.train.loop import step_generator
from dspark.train.methods import run_taps
from dspark.train.slots import Part, freeze_head

FORMS = (DeepSpecForm.name, SmallForm.name)
MIN_LOSS_TOKENS = 2  # supervised tokens below which `read_samples` leaves an answer out


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A target, its samples, and what a training run of ``config`` will ask of their features."""

    config: TrainConfig
    target: Target
    chat: ChatFormat
    identity: TargetIdentity
    samples: list[Sample]
    taps: tuple[int, ...]
    draft_ids: Int[Tensor, "draft_vocab"]

    @property
    def tokens(self) -> int:
        return sum(sample.token_ids.shape[0] for sample in self.samples)

    def form(self, name: str, encoding: str) -> Form:
        """The form called ``name``. Raises :class:`ConfigError` for one that there is not, or that cannot hold the
        run's taps."""
        if name not in FORMS:
            raise ConfigError(f"form is {name!r}; supported: {', '.join(FORMS)}")
        if name == DeepSpecForm.name:
            if encoding != "bfloat16":
                raise ConfigError(f"encoding is {encoding!r}; the form deepspec is bfloat16, the form small has others")
            return DeepSpecForm(layer_ids=self.taps, hidden_size=self.target.info.hidden_size)
        return SmallForm(
            taps=self.taps,
            hidden_size=self.target.info.hidden_size,
            encoding=encoding_named(encoding),
            top=min(self.config.target_top, self.draft_ids.shape[0]),
            draft_ids=self.draft_ids,
        )


def prepare(config: TrainConfig, folder: Path | None = None) -> CacheJob:
    """Load what ``config`` names. A build begun in ``folder`` keeps the dtype that it began with."""
    place = resolve_model(config.model)
    chat = ChatFormat.from_folder(place, template_options=template_options_of(config.answers))
    samples = load_samples(config.answers, config.prompts, chat, max_tokens=config.max_tokens)
    dtype = (begun_dtype(folder) or "auto") if config.dtype == "auto" else config.dtype
    target = load_target(config.model, dtype=dtype)
    highest = max(int(sample.token_ids.max()) for sample in samples)
    if highest >= target.info.vocab_size:
        raise ConfigError(f"the answers hold token id {highest}; {config.model} has {target.info.vocab_size} tokens")
    return CacheJob(
        config=config,
        target=target,
        chat=chat,
        identity=target_identity(place, config.model, chat.tokenizer),
        samples=samples,
        taps=run_taps(config, target.info.num_layers),
        draft_ids=run_draft_ids(config, samples, target.info.vocab_size, chat.stop_token_ids),
    )


def begun_dtype(folder: Path | None) -> str | None:
    """The dtype of the build begun in ``folder``, if there is one: what is fastest may come out otherwise today."""
    if folder is None or not (folder / BUILD_NAME).is_file():
        return None
    return json.loads((folder / BUILD_NAME).read_text(encoding="utf-8"))["fields"]["dtype"]


def run_draft_ids(
    config: TrainConfig, samples: Sequence[Sample], vocab_size: int, stop_token_ids: Sequence[int]
) -> Int[Tensor, "draft_vocab"]:
    """Target ids of the draft vocabulary that a run has: that of the drafter it starts from, or the most frequent
    tokens of the answers it trains on."""
    if config.initialise not in INITIALISERS:
        return draft_token_ids(read_drafter(Path(config.initialise)))
    if not 0 < config.draft_vocab < vocab_size:
        return torch.arange(vocab_size)
    training, _ = split_held_out(samples, config.held_out)
    return choose_draft_vocab(token_counts(training, vocab_size), config.draft_vocab, stop_token_ids)


# --- building --------------------------------------------------------------------------------------------------------


def plan_build(
    job: CacheJob, folder: Path, *, form: str, encoding: str, shard_bytes: int, reserve_bytes: int
) -> CacheBuild:
    """The build that a job makes in ``folder``; its manifest carries DeepSpec's notes on where the data came from."""
    notes: dict[str, str | int | list[str] | None] = {
        "target_model_name_or_path": job.config.model,
        "source_jsonl_paths": [*job.config.answers, *job.config.prompts],
        "chat_template": "the tokenizer's own" if job.chat.has_template else "none",
        "max_length": job.config.max_tokens,
        "min_loss_tokens": MIN_LOSS_TOKENS,
        "project_name": "dspark",
        "exp_name": None,
    }
    return CacheBuild(
        folder,
        job.form(form, encoding),
        job.samples,
        identity=job.identity,
        dtype=str(job.target.info.dtype).removeprefix("torch."),
        notes=notes,
        shard_bytes=shard_bytes,
        reserve_bytes=reserve_bytes,
    )


# --- foretelling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A cache that could be built. ``seconds`` are of one process on this machine, writing included."""

    form: str
    encoding: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the caches of a job would cost."""

    forecasts: tuple[Forecast, ...]
    samples: int
    tokens: int
    free_bytes: int  # of the disk in question
    measured_samples: int
    measured_tokens: int
    left_out: tuple[str, ...]  # forms that cannot hold the run's taps, and why


def estimate(job: CacheJob, place: Path, *, measured: int = 4) -> Estimate:
    """Bytes of every form to the byte, and seconds from ``measured`` samples: their target pass, encoding, and a write
    to an unnamed file on the disk of ``place`` that is gone at once."""
    lengths = [sample.token_ids.shape[0] for sample in job.samples]
    chosen = [job.samples[i] for i in spread_by_tokens(lengths, measured)]
    disk = next(path for path in (place.absolute(), *place.absolute().parents) if path.is_dir())
    names = [(DeepSpecForm.name, "bfloat16"), *((SmallForm.name, name) for name in ENCODINGS)]
    forms: list[tuple[str, Form]] = []
    left_out = []
    for name, encoding in names:
        try:
            forms.append((encoding, job.form(name, encoding)))
        except ConfigError as error:
            left_out.append(f"{name}: {error}")
    target_states(job.target, chosen[0], job.taps)  # the first pass is slower than the others
    share = job.tokens / sum(sample.token_ids.shape[0] for sample in chosen)
    forecasts = tuple(
        Forecast(
            form=form.name,
            encoding=encoding,
            nbytes=sum(sum(form.sizes(sample.loss_mask)) for sample in job.samples),
            seconds=share * _measured_seconds(job.target, form, chosen, disk),
        )
        for encoding, form in forms
    )
    return Estimate(
        forecasts=forecasts,
        samples=len(job.samples),
        tokens=job.tokens,
        free_bytes=disk_usage(disk).free,
        measured_samples=len(chosen),
        measured_tokens=sum(sample.token_ids.shape[0] for sample in chosen),
        left_out=tuple(left_out),
    )


def spread_by_tokens(lengths: Sequence[int], count: int) -> list[int]:
    """Numbers of up to ``count`` samples that stand for the lengths that tokens come in: a long one counts for its
    tokens."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ends = torch.tensor([lengths[i] for i in order]).cumsum(0)
    marks = (torch.arange(count) + 0.5) / count * int(ends[-1])
    return [order[i] for i in dict.fromkeys(torch.searchsorted(ends, marks.long(), right=True).tolist())]


def _measured_seconds(target: Target, form: Form, samples: Sequence[Sample], disk: Path) -> float:
    begin = time.perf_counter()
    with tempfile.TemporaryFile(dir=disk) as file:
        for sample in samples:
            file.writelines(form.encode(target, sample, target_states(target, sample, form.taps)))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


# --- measuring what is lost ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CacheLoss:
    """How far a cache's features are from the target's own, computed again for some samples."""

    samples: int
    feature_error: float  # mean over rows of |difference| / |row|
    feature_error_max: float
    state_error: float  # the same of final states, at positions that may be anchors
    acceptance_length: float | None  # of a drafter, analytic, on the target's own features
    acceptance_length_cached: float | None  # on the cache's


def measure_loss(
    cache: FeatureCache, target: Target, samples: Sequence[Sample], *, drafter: Path | None = None, top: int = 64
) -> CacheLoss:
    """Compare the cache with the target on ``samples`` of the cache, and with ``drafter`` also what it accepts.

    Raises :class:`CheckpointError` for a drafter that does not fit, :class:`DataError` for one whose taps or
    vocabulary the cache cannot serve.
    """
    model, draft_ids = None, cache_draft_ids(cache, target)
    taps = cache.form.taps
    if drafter is not None:
        checkpoint = read_drafter(drafter)
        check_fits(checkpoint.config, target.info)
        model, draft_ids = build_model(checkpoint), draft_token_ids(checkpoint)
        taps = checkpoint.config.target_layer_ids
    top = min(top, cache.form.top) if isinstance(cache.form, SmallForm) else top
    online = FeatureSource(target, taps, draft_ids, top=top)
    cached = CachedFeatureSource(cache, target, taps, draft_ids, top=top)
    rows, states = [], []
    for sample in samples:
        ours, exact = cached.get(sample), online.get(sample)
        width = target.info.hidden_size
        count = ours.features.shape[0]
        rows.append(relative_errors(ours.features.reshape(-1, width), exact.features[:count].reshape(-1, width)))
        wanted = anchor_candidates(sample.loss_mask) - exact.start
        states.append(relative_errors(ours.states[wanted], exact.states[wanted]))
    errors = torch.cat(rows)
    lengths = [None if model is None else analytic_acceptance(model, source, samples) for source in (online, cached)]
    return CacheLoss(
        samples=len(samples),
        feature_error=float(errors.mean()),
        feature_error_max=float(errors.max()),
        state_error=float(torch.cat(states).mean()),
        acceptance_length=lengths[0],
        acceptance_length_cached=lengths[1],
    )


def cache_draft_ids(cache: FeatureCache, target: Target) -> Int[Tensor, "draft_vocab"]:
    """The draft vocabulary that a cache holds probabilities of, or the whole one where it holds none."""
    return cache.form.draft_ids if isinstance(cache.form, SmallForm) else torch.arange(target.info.vocab_size)


@torch.no_grad()
def analytic_acceptance(
    model: nn.Module, source: FeatureSource, samples: Sequence[Sample], *, anchors: int = 32, seed: int = 0
) -> float:
    """Analytic acceptance length of a drafter on the features that ``source`` gives: mean over samples, at anchors that
    do not depend on it."""
    target, config, lengths = source.target, TrainConfig(), []
    numbers = _numbers_of(model, target, config)
    block_size = getattr(model.config, "block_size")  # noqa: B009 - every drafter's config has it, nn.Module hides it
    for i, sample in enumerate(samples):
        positions = sample_anchors(sample.loss_mask, anchors, step_generator(seed, i, 4))
        if positions.shape[0]:
            blocks = make_blocks(sample.token_ids, sample.loss_mask, positions, block_size)
            lengths.append(numbers([(sample, source.get(sample), blocks)], block_size))
    if not lengths:
        raise DataError("none of the samples has two supervised tokens in a row; measure on others")
    return sum(lengths) / len(lengths)


def _numbers_of(model: nn.Module, target: Target, config: TrainConfig) -> Callable[[Sequence[Part], int], float]:
    """The acceptance length of one pass of ``model`` over blocks."""
    dtype, alphas = target.info.dtype, LossAlphas()
    model.to(target.info.device)
    if isinstance(model, ChainModel):
        frozen = freeze_head(target, model.draft_token_ids(), dtype)
        return lambda parts, size: (
            run_chains(model, frozen, parts, config, block_size=size, alphas=alphas).acceptance_length
        )
    assert isinstance(model, DraftModel)
    shared = make_shared(target, model, dtype)
    return lambda parts, size: (
        run_blocks(model, shared, parts, config, block_size=size, alphas=alphas).acceptance_length
    )


# --- checking --------------------------------------------------------------------------------------------------------


def check_bytes(cache: FeatureCache) -> None:
    """Read the whole cache. Raises :class:`DataError` naming every shard that is damaged."""
    found: dict[int, str] = {}
    for index, message in cache.damaged():
        found.setdefault(cache.shard_id(index), message)
    if found:
        raise DataError(f"{len(found)} shards are damaged: " + "; ".join(found.values()))


def check_identity(cache: FeatureCache, model: str) -> None:
    """Raises :class:`DataError` unless ``model`` is the target that made the cache, with the same tokenizer."""
    place = resolve_model(model)
    cache.check_target(target_identity(place, model, ChatFormat.from_folder(place).tokenizer))


def cache_facts(cache: FeatureCache) -> dict[str, Any]:
    """What a cache is, ready for JSON."""
    form = cache.form
    facts: dict[str, Any] = {
        "form": form.name,
        "encoding": form.encoding.name if isinstance(form, SmallForm) else "bfloat16",
        "target": cache.target_name,
        "taps": ["final" if tap == FINAL else tap for tap in form.taps],
        "samples": len(cache),
        "tokens": sum(record.tokens for record in cache.records),
        "bytes": cache.nbytes,
        "shards": int(cache.manifest["num_shards"]),
        "checksums": cache.ours,
    }
    if isinstance(form, SmallForm):
        facts |= {"draft_vocab": form.draft_ids.shape[0], "top": form.top}
    elif isinstance(form, DeepSpecForm):
        facts["encoding"] = form.hidden_dtype
    return facts


def load_for(cache: FeatureCache, model: str, dtype: str) -> Target:
    """The target of a cache, in the dtype that it was made in unless another is named."""
    made_in = cache.build.get("dtype", "auto")
    return load_target(model, dtype=made_in if dtype == "auto" else dtype)
