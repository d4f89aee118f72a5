"""What was asked for, and what every stage holds in its hands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.bundle import Bundle
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.models.draft_config import DraftConfig
from dspark.models.registry import load_drafter
from dspark.models.target import Target
from dspark.road.budget import Budget
from dspark.road.ledger import Ledger
from dspark.road.plan import Plan
from dspark.road.probe import Probe

Fields = dict[str, Any]  # Any: fields of TrainConfig
OF_THE_ROAD = {"model", "answers", "prompts", "out", "steps", "dtype", "drafter"}  # fields of TrainConfig


@dataclass(frozen=True, kw_only=True)
class RoadConfig:
    """One call of `dspark accelerate`. All but the budget must be the same when a road goes on."""

    model: str
    out: str
    budget: float = 3600.0  # seconds of work
    prompts: str | None = None  # a JSONL file or a Hub data set; None: the model writes its own
    split: str = "train"  # of the Hub data set
    temperature: float = 0.0  # that calibration and comparison play at
    max_new_tokens: int = 256  # of an answer to learn from
    answers: int | None = None  # how many; None: what the time allows
    steps: int | None = None  # of training; likewise
    fields: Fields = field(default_factory=dict)  # of TrainConfig that shall differ from what the road chooses
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        if not 0.0 < self.budget < float("inf"):
            raise ConfigError(f"budget is {self.budget} seconds; it must be positive")
        for name in ("answers", "steps", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if chosen := sorted(self.fields.keys() & OF_THE_ROAD):
            raise ConfigError(f"--set {chosen[0]}: the road chooses that itself; leave it out")
        if self.answers is not None and self.answers < 8:
            raise ConfigError(f"answers is {self.answers}; a drafter needs 8 or more, some of them held out")

    @property
    def sampling(self) -> SamplingParams:
        """How calibration and comparison draw."""
        return SamplingParams(temperature=self.temperature, seed=self.seed)

    def settings(self, fingerprint: str) -> dict[str, Any]:
        """What must not change while a road is walked; ``fingerprint`` tells the model's weights."""
        names = ("model", "prompts", "split", "temperature", "max_new_tokens", "answers", "steps", "fields", "seed")
        return {**{name: getattr(self, name) for name in names}, "model_fingerprint": fingerprint}


@dataclass(kw_only=True)
class Progress:
    """Where a road says what it does; the command line shows it, tests collect it."""

    say: Callable[[str], None] = lambda text: None  # a line worth keeping
    show: Callable[[str, float], None] = lambda text, share: None  # what is going on, and how much of it is done, 0..1


@dataclass(kw_only=True)
class Road:
    """The state of one call: the target is loaded once and serves all stages."""

    config: RoadConfig
    place: Path  # of the target's files
    target: Target
    chat: ChatFormat
    target_config: Any  # of transformers
    ledger: Ledger
    progress: Progress
    probe: Probe
    shape: DraftConfig
    plan: Plan

    @property
    def out(self) -> Path:
        """The folder that is made: a drafter, and all that belongs to it."""
        return Path(self.config.out)

    @property
    def work(self) -> Path:
        return self.out / "road"

    @property
    def budget(self) -> Budget:
        return self.ledger.budget

    @property
    def fixed(self) -> bool:
        """Whether the amount of work is fixed, so that the clock decides nothing."""
        return self.config.answers is not None and self.config.steps is not None

    def bundle(self) -> Bundle:
        """The target with the drafter that lies in ``out``."""
        reserved = dict.fromkeys(self.chat.stop_token_ids, "an end token")
        return Bundle(
            target=self.target,
            drafter=load_drafter(str(self.out), self.target, reserved=reserved),
            chat=self.chat,
            folder=self.place,
            model=self.config.model,
            drafter_spec=str(self.out),
        )

    def planned(self, *stages: str) -> float:
        """Seconds that the plan has for ``stages``."""
        return sum(self.plan.seconds[stage] for stage in stages)

    def end_of(self, stage: str) -> float:
        """When the time of a stage is over, in seconds spent; kills do not lengthen it."""
        return self.ledger.begun[stage] + self.planned(stage)
