"""The training run's configuration: a line per field, one place for a default."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.models.draft_config import HEAD_TYPES
from dspark.train.optim import SCHEDULES

INITIALISERS = ("target", "fresh")
CHAINS = ("eagle3", "mtp")  # one layer, run once per draft
# Fields of Eagle3Config that a run chooses under the same name.
EAGLE3_OPTIONS = ("own_head", "own_embedding", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DRAFTERS = ("dspark", "dflash", *CHAINS)
PARALLELS = ("ddp", "fsdp")


def drafter_defaults(drafter: str) -> dict[str, Any]:
    """Fields of :class:`TrainConfig` that a method wants otherwise than the class's defaults, which are DSpark's.

    dflash: no heads, cross-entropy alone (DeepSpec). eagle3: one layer, five taps, the whole block unrolled, soft
    cross-entropy throughout (DeepSpec). mtp: one layer, the one prediction of DeepSeek's module, DSpark's losses.
    """
    none = {"markov_rank": 0, "confidence": False, "alpha_confidence": 0.0, "bigram_passes": 0.0}
    found: dict[str, dict[str, Any]] = {
        "dspark": {},
        "dflash": {**none, "alpha_ce": 1.0, "alpha_l1": 0.0, "soft_until": 0.0},
        "eagle3": {
            **none,
            "layers": 1,
            "num_taps": 5,
            "alpha_ce": 0.0,
            "alpha_l1": 0.0,
            "alpha_soft": 1.0,
            "soft_until": 0.0,
        },
        "mtp": {**none, "layers": 1, "unroll": 1},
    }
    if drafter not in found:
        raise ConfigError(f"drafter is {drafter!r}; supported: {', '.join(DRAFTERS)}")
    return found[drafter]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run; together with the answers' files it determines the result."""

    # what is trained on
    model: str = "smollm2"  # target: Hub id, folder, .gguf or `smollm2`
    answers: tuple[str, ...] = ()  # JSONL files written by `dspark answers`
    prompts: tuple[str, ...] = ()  # JSONL files with the prompts that the answers name by id
    out: str = "runs/drafter"  # run folder; an interrupted run found there is resumed
    max_tokens: int = 512  # of a sample, prompt and answer; longer ones are cut on the right
    held_out: int = 48  # samples never trained on, spread over the domains

    # the drafter
    drafter: str = "dspark"  # the method: dspark, dflash, eagle3 or mtp; `drafter_defaults` has what goes with each
    layers: int = 2  # eagle3 and mtp have one
    block_size: int = 7
    markov_rank: int = 128
    markov_head: str = "vanilla"  # vanilla, gated or rnn
    sample_from_anchor: bool = True  # False: the anchor's slot is given and predicts nothing (z-lab's DFlash)
    taps: tuple[int, ...] = ()  # empty: spread over the target by z-lab's formula
    num_taps: int = 3  # used when `taps` is empty
    draft_vocab: int = 16384  # most frequent tokens of the answers; 0 keeps the whole vocabulary
    mask_token_id: int = -1  # -1 picks a reserved token that no answer contains
    confidence: bool = True
    confidence_detach: bool = True  # confidence loss trains its own head alone
    unroll: int = 0  # steps of a chain that eagle3 and mtp are trained on; 0 is block_size
    own_head: bool = False  # eagle3: train a head of its own instead of sharing the target's
    own_embedding: bool = False  # eagle3: train an embedding of its own
    norm_before_residual: bool = False  # eagle3: this and the next three say where it norms, see `Eagle3Config`
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    # the start
    initialise: str = (
        "target"  # target: from its last layers; fresh: the reference's random start; or a drafter's folder
    )
    bigram_passes: float = 1.0  # passes over the answers' bigrams for the Markov head's start; 0 skips it

    # the loss
    alpha_ce: float = 0.1
    alpha_l1: float = 0.9
    alpha_soft: float = 0.0  # soft cross-entropy against the target's distribution, for the whole run
    alpha_confidence: float = 1.0
    alpha_state: float = 0.0  # relative squared error of the anchor slot's state against the target's final state
    soft_until: float = (
        0.5  # soft cross-entropy fades into the loss above over this fraction of the run; 0 never uses it
    )
    loss_decay: float = 4.0  # of dspark and dflash: slot k weighs exp(-k / loss_decay)
    step_loss_decay: float = 0.8  # of eagle3 and mtp: weight of an unrolled step relative to the one before
    target_top: int = 64  # target probabilities kept per position

    # the steps
    steps: int = 4000
    state_steps: int = 0  # first steps, in which the anchor's slot alone learns the target's final state
    state_slots: int = 4096  # anchors per such step; they cost no product over the vocabulary
    sequences_per_step: int = 8
    fresh_per_step: int = 1  # sequences a step sees for the first time; the others are replayed from those seen
    slots_per_step: int = 1792  # supervised slots aimed at; anchors per sequence follow from it
    curriculum: tuple[tuple[float, int], ...] = (
        (1.0, 0),
    )  # (until this fraction of the run, block size); 0: the drafter's
    played_from: float = 1.0  # fraction of the steps from which on blocks are rounds that the drafter itself plays
    played_temperature: float = 0.0  # at which it plays them; 0: greedy
    played_texts: int = 24  # prompts continued in one playing; the target's memory has so many rows
    played_tokens: int = 128  # most of a text
    played_steps: int = 40  # steps on the rounds of one playing
    learning_rate: float = 1.2e-3
    warmup: float = 0.04
    schedule: str = "cosine"
    decay: float = 0.25  # last fraction of the steps over which the trapezoid falls
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 42

    # the machine
    dtype: str = "auto"  # compute dtype of products; masters and gradients are fp32
    feature_gigabytes: float = 8.0  # memory for features, computed or read
    cache: str = ""  # folder that `dspark cache build` wrote; empty: the target runs beside the trainer
    whole_target: bool = True  # False, with a cache: load its embedding and head alone, and judge without decoding
    chunk: int = 256  # rows whose logits exist at a time
    blocks_per_pass: int = 0  # blocks whose activations exist at a time, in each process; 0: all of a step's
    parallel: str = "ddp"  # several processes, started by `torchrun`: ddp (all whole) or fsdp (all sharded)

    # watching it
    log_every: int = 20
    evaluate_every: int = 500
    evaluate_prompts: int = 12  # held-out prompts decoded at every evaluation
    evaluate_tokens: int = 64
    patience: int = 0  # evaluations without a rise of held-out acceptance after which a run ends; 0: it never does
    save_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in (
            "held_out",
            "evaluate_every",
            "evaluate_prompts",
            "evaluate_tokens",
            "steps",
            "sequences_per_step",
            "slots_per_step",
            "layers",
            "block_size",
            "target_top",
            "chunk",
            "log_every",
            "played_texts",
            "played_tokens",
            "played_steps",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("blocks_per_pass", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.parallel not in PARALLELS:
            raise ConfigError(f"parallel is {self.parallel!r}; supported: {', '.join(PARALLELS)}")
        if not self.loss_decay > 0:
            raise ConfigError(f"loss_decay is {self.loss_decay}; it must be positive")
        if not 0 < self.step_loss_decay <= 1:
            raise ConfigError(f"step_loss_decay is {self.step_loss_decay}; it must be in (0, 1]")
        self._check_drafter()
        if not 0 <= self.played_from <= 1:
            raise ConfigError(f"played_from is {self.played_from}; it must be in [0, 1], and 1 plays nothing")
        if not 0 <= self.played_temperature < math.inf:
            raise ConfigError(f"played_temperature is {self.played_temperature}; it must be 0 (greedy) or more, finite")
        if self.played_from < 1 and not self.whole_target:
            raise ConfigError(
                f"played_from is {self.played_from} and whole_target is false; only a whole target can play rounds, "
                "set one of them otherwise"
            )
        if not 1 <= self.fresh_per_step <= self.sequences_per_step:
            raise ConfigError(f"fresh_per_step is {self.fresh_per_step}; it must lie in 1..{self.sequences_per_step}")
        if self.markov_head not in HEAD_TYPES:
            raise ConfigError(f"markov_head is {self.markov_head!r}; supported: {', '.join(HEAD_TYPES)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule is {self.schedule!r}; supported: {', '.join(SCHEDULES)}")
        if self.initialise not in INITIALISERS and not Path(self.initialise).is_dir():
            known = ", ".join(INITIALISERS)
            raise ConfigError(f"initialise is {self.initialise!r}; it must be {known} or the folder of a drafter")
        if not self.curriculum or self.curriculum[-1][0] < 1.0:
            raise ConfigError(f"curriculum is {self.curriculum}; its last entry must reach until fraction 1.0")
        if not self.whole_target and not self.cache:
            raise ConfigError("whole_target is false and cache is ''; features then must come from a cache, name one")
        if self.cache and not Path(self.cache).is_dir():
            raise ConfigError(f"cache is {self.cache!r}, which is no folder; name one that `dspark cache build` wrote")
        for path in (*self.answers, *self.prompts):
            if not Path(path).is_file():
                raise ConfigError(f"{path} does not exist; answers and prompts name JSONL files")

    def _check_drafter(self) -> None:
        """Refuse fields that the method would ignore, or that would make it another one."""
        chain = self.drafter in CHAINS
        if self.drafter not in DRAFTERS:
            raise ConfigError(f"drafter is {self.drafter!r}; supported: {', '.join(DRAFTERS)}")
        for name in ("markov_rank", "confidence") if self.drafter != "dspark" else ():
            if getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)}; {self.drafter} has no such head, switch it off")
        if chain and self.layers != 1:
            raise ConfigError(f"layers is {self.layers}; {self.drafter} has one layer, set 1")
        if chain and not self.sample_from_anchor:
            raise ConfigError(f"sample_from_anchor is false; {self.drafter} drafts from the anchor, set true")
        if not 0 <= self.unroll <= self.block_size or (self.unroll and not chain):
            raise ConfigError(
                f"unroll is {self.unroll}; it must lie in 0..{self.block_size}, and 0 unless the drafter is a chain "
                f"({', '.join(CHAINS)})"
            )
        for name in EAGLE3_OPTIONS if self.drafter != "eagle3" else ():
            if getattr(self, name):
                raise ConfigError(f"{name} is true; {self.drafter} has no such choice, set false")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are both true; taps are normed together or one by one")
        if self.own_head and (self.alpha_state or self.state_steps):
            raise ConfigError("own_head is true; states can only be learned under the target's head, set state_steps 0")

    def block_at(self, train_step: int) -> int:
        """Block size of a step: 1 while states are learned, then as the curriculum says, up to what is unrolled."""
        if train_step < self.state_steps:
            return 1
        done = train_step / self.steps
        size = next(size for until, size in self.curriculum if done < until or until >= 1.0)
        return min(size or self.block_size, self.unroll or self.block_size)

    def plays_at(self, train_step: int) -> bool:
        """Whether a step learns from rounds that the drafter plays, and not from blocks of the answers."""
        first = max(self.state_steps, math.ceil(self.played_from * self.steps))
        return self.played_from < 1 and train_step >= first

    def slots_at(self, train_step: int) -> int:
        """Supervised slots that a step aims at."""
        return self.state_slots if train_step < self.state_steps else self.slots_per_step

    def soft_share(self, train_step: int) -> float:
        """Share of the loss that soft cross-entropy has at a step: 1 at first, 0 from ``soft_until`` on."""
        return max(0.0, 1.0 - train_step / (self.soft_until * self.steps)) if self.soft_until > 0 else 0.0

    def differences(self, other: TrainConfig) -> list[str]:
        """Names of the fields that differ, for the message of a refused resume."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
