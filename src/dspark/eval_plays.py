"""What an evaluation plays: its config, its conversations, and a cell for every drafter at every temperature."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.bundle import Bundle, Scheduled, check_scheduler
from dspark.core import SamplingParams
from dspark.data.prompts import prompt_messages
from dspark.errors import ConfigError, ScheduleError
from dspark.eval_sources import read_sets
from dspark.evaluate.playing import Table
from dspark.evaluate.records import AnswerRecord, Key, cell_name, open_cell, plain_sampling, read_answers
from dspark.evaluate.suite import Conversation, in_rounds
from dspark.models import DEFAULT_CANDIDATES
from dspark.models.checkpoint import kind_of
from dspark.models.drafter import Drafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.skipping_drafter import SkippingDrafter
from dspark.schedule_files import CALIBRATION_NAMES, PROFILE_NAME, Setting, drafter_fingerprint, folder_fingerprint

PLAIN = "none"  # the drafter that never proposes: what speedups are measured against
NAMED = 8  # skipped prompts that a warning names

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated, on what, and how."""

    prompts: tuple[str, ...]  # sources, as `read_sets` takes them
    out: Path
    model: str = "smollm2"
    drafters: tuple[str, ...] = ("default",)  # SPEC or LABEL=SPEC
    undrafted: bool = True  # also without drafts, for speedups
    temperatures: tuple[float, ...] = (0.0,)
    sampling: SamplingParams = field(default_factory=SamplingParams)  # all but the temperature; its seed is the run's
    max_new_tokens: int = 256  # of one answer; >= 1
    turns: int | None = None  # most turns of a conversation; None asks all
    limit: int | None = None  # conversations per set; None takes all
    minutes: float | None = None  # time after which no conversation is begun; None finishes
    scheduler: str = "fixed"
    scheduling: Mapping[str, Any] = field(default_factory=dict)  # verify_len, threshold, calibration, profile
    candidates: int = DEFAULT_CANDIDATES
    rows: int = 1  # conversations in one target pass; more give no speeds
    processes: int = 1
    place: Mapping[str, Any] = field(default_factory=dict)  # dtype, device, ...: as Bundle.load takes them

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rows", "processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes is {self.minutes}; it must be positive")
        if len(set(self.temperatures)) < len(self.temperatures) or not self.temperatures:
            raise ConfigError(f"temperature is {list(self.temperatures)}; give at least one, each once")
        check_scheduler(self.scheduler, **{"verify_len": None, "threshold": None, **self.scheduling})
        self.labels()

    def labels(self) -> dict[str, str]:
        """Drafters as the user names them, by label; plain decoding first. Raises :class:`ConfigError` for a label that
        occurs twice or is no folder's name."""
        found: dict[str, str] = {PLAIN: PLAIN} if self.undrafted or PLAIN in self.drafters else {}
        for text in self.drafters:
            label, _, spec = text.rpartition("=")
            label = label or Path(spec).name
            if spec == PLAIN and label == PLAIN:
                continue
            if label in found:
                raise ConfigError(f"two drafters are called {label!r}; name one of them otherwise, LABEL={spec}")
            if not label or Path(label).name != label:
                raise ConfigError(f"drafter is {text!r}; its label {label!r} must do as a folder's name")
            found[label] = spec
        return found

    @property
    def threads(self) -> int | None:
        """CPU threads of each process."""
        given: int | None = self.place.get("threads")
        if given is None and self.processes > 1:
            return max(1, (os.cpu_count() or 1) // self.processes)
        return given


@dataclass(frozen=True, kw_only=True)
class Play:
    """A cell under way in one process."""

    folder: Path
    table: Table
    known: dict[Key, AnswerRecord]


def load(config: EvalConfig) -> tuple[Bundle, list[Conversation]]:
    """The target, and the conversations that fit it, in the order in which they are asked."""
    bundle = Bundle.load(config.model, PLAIN, **{**config.place, "threads": config.threads})
    sets = read_sets(config.prompts, limit=config.limit, seed=config.sampling.seed)
    conversations = in_rounds(sets.values())
    ids, most = prompt_ids_of(bundle), bundle.target.info.max_len
    long = [each.key for each in conversations if len(ids(each, ())) >= most]
    if long:
        _log.warning(
            "%d prompts have %d tokens or more, the context limit, and are skipped: %s%s",
            len(long),
            most,
            ", ".join(" ".join(key) for key in long[:NAMED]),
            ", ..." if len(long) > NAMED else "",
        )
    return bundle, [each for each in conversations if each.key not in set(long)]


def prompt_ids_of(bundle: Bundle) -> Callable[[Conversation, Sequence[Sequence[int]]], list[int]]:
    """How a conversation and the ids of its answers so far become the next turn's prompt."""
    stops = frozenset(bundle.chat.stop_token_ids)

    def ids(conversation: Conversation, answers: Sequence[Sequence[int]]) -> list[int]:
        texts = [bundle.chat.decode(each[:-1] if each[-1] in stops else each) for each in answers]
        prompt = {"turns": conversation.turns, "system": conversation.system}
        return bundle.chat.prompt_ids(prompt_messages(prompt, texts))

    return ids


def make_plays(config: EvalConfig, bundle: Bundle, *, create: bool) -> list[Play]:
    """Every drafter at every temperature, with the answers that are there already."""
    plays = []
    for order, (label, spec) in enumerate(config.labels().items()):
        drafting = bundle.with_drafter(spec, candidates=config.candidates)
        for temperature in config.temperatures:
            sampling = replace(config.sampling, temperature=temperature)
            scheduled = _scheduled(config, drafting, sampling)
            drafting = scheduled.bundle
            folder = config.out / cell_name(label, temperature)
            if create:
                about = {
                    "model": bundle.model,
                    "drafter_spec": spec,
                    "facts": drafter_facts(drafting.drafter),
                    "prompts": list(config.prompts),
                    "order": order,
                }
                open_cell(folder, made_for=_made_for(config, drafting, label, sampling), about=about)
            table = Table(
                target=bundle.target,
                drafter=drafting.drafter,
                scheduler=scheduled.scheduler,
                sampling=sampling,
                max_new_tokens=config.max_new_tokens,
                turns=config.turns,
                stop_token_ids=frozenset(bundle.chat.stop_token_ids),
                prompt_ids=prompt_ids_of(bundle),
            )
            plays.append(Play(folder=folder, table=table, known=read_answers(folder)))
    return plays


def _scheduled(config: EvalConfig, bundle: Bundle, sampling: SamplingParams) -> Scheduled:
    """One drafter under the run's scheduler; plain decoding has nothing to schedule."""
    if not bundle.drafter.block_size:
        return bundle.scheduled("fixed")
    scheduled = bundle.scheduled(config.scheduler, **config.scheduling, sampling=sampling)
    if scheduled.scheduler.needs_confidence and not bundle.drafter.has_confidence:
        raise ScheduleError(f"{config.scheduler} needs confidences and {bundle.drafter_spec} gives none; use fixed")
    return scheduled


def _made_for(config: EvalConfig, bundle: Bundle, label: str, sampling: SamplingParams) -> dict[str, Any]:
    """Everything that a record of this cell depends on, but the prompt."""
    setting = Setting.of(bundle.target, model_fingerprint=folder_fingerprint(bundle.folder))
    drafts = bool(bundle.drafter.block_size)
    files = {f"{name}_file": _digest(config.scheduling.get(name)) for name in ("calibration", "profile")}
    if drafts and config.scheduler != "fixed":
        own = bundle.own_folder
        files |= {name: _digest(own and own / name) for name in (*CALIBRATION_NAMES, PROFILE_NAME)}
    numbers = {name: config.scheduling.get(name) for name in ("verify_len", "threshold")}
    scheduler = {"name": config.scheduler, **numbers, **files} if drafts else {"name": "fixed"}
    return {
        **asdict(setting),
        "template": bundle.chat.fingerprint()[:16],
        "drafter": label,
        "drafter_fingerprint": drafter_fingerprint(bundle.drafter_spec),
        "candidates": config.candidates if drafts else None,
        "scheduler": scheduler,
        "sampling": plain_sampling(sampling),
        "max_new_tokens": config.max_new_tokens,
        "turns": config.turns,
        "rows": config.rows,
        "processes": config.processes,
    }


def _digest(path: Path | None) -> str | None:
    """Sixteen hex digits of a file; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None and path.is_file() else None


def drafter_facts(drafter: Drafter) -> dict[str, Any]:
    """What figures want to know of a drafter: its kind and shape; one that sits rounds out is still what it is."""
    if isinstance(drafter, SkippingDrafter):
        return drafter_facts(drafter.inner)
    facts: dict[str, Any] = {"kind": "other", "layers": 1, "head": None, "rank": 0}
    if isinstance(drafter, DsparkDrafter):
        config = drafter.config
        facts = {"kind": kind_of(config), "layers": config.num_hidden_layers, "rank": config.markov_rank}
        facts |= {"head": config.markov_head_type if config.markov_rank else None}
    elif isinstance(drafter, Eagle3Drafter | MTPDrafter):
        facts["kind"] = "eagle3" if isinstance(drafter, Eagle3Drafter) else "mtp"
    elif drafter.name in ("ngram", PLAIN):
        facts |= {"kind": drafter.name, "layers": 0}
    return {
        **facts,
        "block_size": drafter.block_size,
        "taps": list(drafter.taps),
        "has_confidence": drafter.has_confidence,
    }


def check_known(plays: Sequence[Play], conversations: Sequence[Conversation]) -> None:
    """Raise :class:`ConfigError` if a record answers other words than this run asks under the same id."""
    asked = {each.key: each.asked for each in conversations}
    for play in plays:
        for record in play.known.values():
            if asked.get((record.set, record.prompt), record.asked) != record.asked:
                raise ConfigError(
                    f"{play.folder} has an answer to other words of prompt {record.prompt!r} of {record.set}: "
                    "name another --out, or give the prompts that it was made for"
                )
