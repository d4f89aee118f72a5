"""A run as each of its processes holds it, and how it comes about: from nothing, from a drafter, or from a state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from dspark.data.features import FeatureSource
from dspark.data.samples import choose_draft_vocab
from dspark.errors import ConfigError
from dspark.models.checkpoint import AnyConfig, build_model, read_drafter
from dspark.models.weights import load_tensors, read_config
from dspark.train.config import INITIALISERS, TrainConfig
from dspark.train.corpus import Corpus, feature_source, reserved_token
from dspark.train.methods import Method, make_method
from dspark.train.optim import make_optimizer, restore_optimizer
from dspark.train.parallel import Parallel, make_parallel
from dspark.train.played import PlayedRounds, keep_played
from dspark.train.ranks import ALONE, Ranks
from dspark.train.run_folder import claim, cut_log, log
from dspark.train.state import SavedState, read_state


@dataclass(frozen=True)
class Standing:
    """How held-out acceptance stands."""

    best: float = -math.inf  # length under the best drafter
    measure: list[str | int] = field(default_factory=list)  # how ``best`` was measured
    stale: int = 0  # evaluations since


@dataclass
class Run:
    """Everything a process of a run holds in memory."""

    config: TrainConfig
    folder: Path
    corpus: Corpus
    parallel: Parallel
    optimizer: torch.optim.Optimizer
    features: FeatureSource
    ranks: Ranks = ALONE
    step: int = 0
    standing: Standing = field(default_factory=Standing)
    seconds: float = 0.0  # spent in steps, over all resumptions
    blocks: int = 0
    played: PlayedRounds | None = None  # the rounds that steps are on, in the phase that plays them

    @property
    def method(self) -> Method:
        return self.parallel.method

    @property
    def model(self) -> nn.Module:
        return self.method.model

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or held-out acceptance has stopped rising."""
        patience = self.config.patience
        return self.step >= self.config.steps or 0 < patience <= self.standing.stale


def start(config: TrainConfig, corpus: Corpus, *, features: FeatureSource | None = None, ranks: Ranks = ALONE) -> Run:
    """Build the drafter and restore the run folder's newest state, or give it its start.

    ``features`` may come from another run with the same taps, draft vocabulary and ``target_top``.
    Raises :class:`ConfigError` if the run folder belongs to a run of another configuration, or is not the same for
    all processes.
    """
    folder = Path(config.out)
    ranks.first(lambda: claim(folder, config, processes=ranks.size))
    method = _new_method(config, corpus)
    saved = _agreed(read_state(folder), folder, ranks)
    ranks.first(lambda: _cut(folder, -1 if saved is None else saved.facts["train_step"]))
    if saved is not None:  # before anything derives from the draft vocabulary
        method.model.load_state_dict(saved.model)
    method.bind(corpus.target)
    if saved is None and ranks.leads:  # the others are given its parameters
        _warm_start(config, corpus, method)
    parallel = make_parallel(config.parallel, method, ranks)
    optimizer = make_optimizer(method.model, betas=config.betas, weight_decay=config.weight_decay)
    features = features or feature_source(config, corpus, method)
    run = Run(config, folder, corpus, parallel, optimizer, features, ranks)
    if saved is not None:
        restore_optimizer(optimizer, method.model, saved.moments)
        facts = saved.facts
        run.step, run.seconds, run.blocks = facts["train_step"], facts["seconds"], facts["blocks"]
        best = -math.inf if facts["best"] is None else facts["best"]
        run.standing = Standing(best, facts["measure"], facts.get("stale", 0))
    return run


def _cut(folder: Path, step: int) -> None:
    """Forget what a run logged and played after the ``step`` that it goes on from: it will be done again."""
    cut_log(folder, step)
    keep_played(folder, first=0, last=step)


def _new_method(config: TrainConfig, corpus: Corpus) -> Method:
    """The method with random parameters and its draft vocabulary, on the target's device."""
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
    return method


def _agreed(saved: SavedState | None, folder: Path, ranks: Ranks) -> SavedState | None:
    """``saved``, if all processes read the same state."""
    ours = -1 if saved is None else saved.facts["train_step"]
    first = ranks.first(lambda: ours)
    if ranks.any(first != ours)[0]:
        raise ConfigError(f"{folder} is not the same for all processes; name an --out that all machines share")
    return saved


def _copy_drafter(model: nn.Module, folder: Path) -> None:
    """Take all parameters and the draft vocabulary of the drafter in ``folder``, which must have the same shape."""
    origin = read_drafter(folder)
    assert isinstance(model.config, AnyConfig)
    ours, theirs = model.config.to_json(), origin.config.to_json()
    changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if changed:
        raise ConfigError(f"initialise is {folder}, whose {', '.join(changed)} differ from the run's; set them alike")
    model.load_state_dict(build_model(origin).state_dict())


def _warm_start(config: TrainConfig, corpus: Corpus, method: Method) -> None:
    """The parameters before the first step; a drafter that was copied has them already."""
    if config.initialise not in INITIALISERS:
        return
    tensors = load_tensors(corpus.place) if config.initialise == "target" else None
    if figures := method.start(tensors, corpus.training):
        log(Path(config.out), figures)
