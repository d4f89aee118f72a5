"""A target with its drafter and its chat format, loaded together: what every verb that decodes starts from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from dspark.chat import ChatFormat
from dspark.core import Completion, RoundRecord, SamplingParams
from dspark.decode import stream
from dspark.errors import CheckpointError, ConfigError, DataError
from dspark.evaluate.profile import draft_seconds, profile_sps
from dspark.maths.calibrated_scheduling import ProfiledGreedyScheduler
from dspark.maths.scheduling import FixedScheduler, GreedyScheduler, Scheduler, ThresholdScheduler
from dspark.maths.skipping import SkipPolicy, break_even
from dspark.models import DEFAULT_CANDIDATES
from dspark.models.drafter import Drafter
from dspark.models.loading import load_target
from dspark.models.lookup_drafter import LookupDrafter
from dspark.models.registry import default_drafter_folder, load_drafter
from dspark.models.skipping_drafter import SkippingDrafter
from dspark.models.target import Target
from dspark.models.weights import resolve_model
from dspark.schedule_files import (
    CALIBRATION_NAMES,
    PROFILE_NAME,
    Calibration,
    Profile,
    Setting,
    check_drafts,
    drafter_fingerprint,
    folder_fingerprint,
)

WITHOUT_FILES = ("ngram", "none")  # drafters that are not trained
OTHERS = "name another with --drafter: ngram, none or a folder"
SCHEDULERS = ("fixed", "threshold", "greedy", "skip")
Found = TypeVar("Found")

_log = logging.getLogger(__name__)


class Answer:
    """An answer under way: iterate over its rounds, the prefill's first; ``completion`` is there after the last."""

    def __init__(self, rounds: Generator[RoundRecord, None, Completion]) -> None:
        self._rounds = rounds
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[RoundRecord]:
        self._completion = yield from self._rounds

    @property
    def completion(self) -> Completion:
        assert self._completion is not None, "the rounds have not been iterated to their end"
        return self._completion

    def finish(self) -> Completion:
        """Run the remaining rounds."""
        for _ in self:
            pass
        return self.completion


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A loaded target, the drafter that proposes to it, and the way its conversations become ids."""

    target: Target
    drafter: Drafter
    chat: ChatFormat
    folder: Path  # of the target's files
    model: str  # as the user named it
    drafter_spec: str  # likewise

    @classmethod
    def load(
        cls,
        model: str,
        drafter: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        implementation: str = "auto",
        trust_remote_code: bool = False,
        threads: int | None = None,
        candidates: int = DEFAULT_CANDIDATES,
        lookup: bool = False,
    ) -> Bundle:
        """Load everything. ``threads`` sets torch's CPU threads for the whole process; None leaves them.
        ``candidates`` is the number of tokens per position that DSpark's sequential stage weighs, 0 for all.
        ``lookup`` proposes what a text has said before ahead of what the drafter has to say
        (:mod:`dspark.maths.lookup`); it adds nothing to ``ngram`` and ``none``.

        Raises :class:`ModelError`, :class:`CheckpointError` or :class:`ConfigError` if a part cannot be had.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = resolve_model(model, trust_remote_code=trust_remote_code)
        target = load_target(
            model, dtype=dtype, device=device, implementation=implementation, trust_remote_code=trust_remote_code
        )
        chat = ChatFormat.from_folder(folder, trust_remote_code=trust_remote_code)
        loaded = _load_drafter(drafter, target, chat, candidates)
        return cls(
            target=target,
            drafter=LookupDrafter(loaded) if lookup and drafter not in WITHOUT_FILES else loaded,
            chat=chat,
            folder=folder,
            model=model,
            drafter_spec=drafter,
        )

    def with_drafter(self, spec: str, *, candidates: int = DEFAULT_CANDIDATES) -> Bundle:
        """The same target with another drafter; raises as :meth:`load` does."""
        drafter = _load_drafter(spec, self.target, self.chat, candidates)
        return replace(self, drafter=drafter, drafter_spec=spec)

    def prompt_ids(self, text: str, *, system: str | None = None) -> list[int]:
        """Ids of a single user turn through the chat template; ``system`` None leaves the template's own."""
        return self.chat.prompt_ids(messages(text, system=system))

    def raw_ids(self, text: str) -> list[int]:
        """Ids of a text to be continued as it stands, with whatever the tokenizer puts in front of every text."""
        return list(self.chat.tokenizer(text, add_special_tokens=True)["input_ids"])

    def answer(
        self, prompt_ids: Sequence[int], *, sampling: SamplingParams, max_new_tokens: int, scheduler: Scheduler
    ) -> Answer:
        """Start answering; nothing is computed before the first round is asked for."""
        return Answer(
            stream(
                self.target,
                self.drafter,
                prompt_ids,
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self.chat.stop_token_ids,
                scheduler=scheduler,
            )
        )

    def text_of(self, completion: Completion) -> str:
        """Text of an answer, without the token that ended it."""
        ids = completion.token_ids
        return self.chat.decode(ids[:-1] if completion.finish_reason == "stop" else ids)

    def scheduled(
        self,
        name: str,
        *,
        verify_len: int | None = None,
        threshold: float | None = None,
        calibration: Path | None = None,
        profile: Path | None = None,
        sampling: SamplingParams | None = None,
    ) -> Scheduled:
        """The pair under the scheduler called ``name``, with the files of `dspark calibrate` and `dspark profile`:
        those given, or those in the drafter's own folder where they fit (one that does not is left aside with a
        warning).

        ``greedy`` and ``skip`` without a profile measure costs first, a matter of seconds; a pair that skips already
        is not measured again. ``sampling`` is what a calibration must be of. Raises :class:`ConfigError` for a given
        file that was made for something else, and for ``skip`` with a drafter that never proposes.
        """
        check_scheduler(name, verify_len=verify_len, threshold=threshold, calibration=calibration, profile=profile)
        if name == "skip":
            return Scheduled(bundle=self._skipping(profile), scheduler=FixedScheduler())
        if name == "fixed":
            return Scheduled(bundle=self, scheduler=FixedScheduler(verify_len))
        rule = ThresholdScheduler(threshold) if threshold is not None else self._greedy(profile)
        wanted = sampling or SamplingParams()
        if calibration is not None:
            fitted: Calibration | None = self.read_calibration(calibration, wanted)
        else:
            own = self.own_calibrations()
            fitted = own.get(wanted.greedy)
            if own and fitted is None:
                _log.warning("the drafter's own calibration is of another temperature than %g", wanted.temperature)
        return Scheduled(bundle=self, scheduler=rule if fitted is None else fitted.scheduler(rule))

    def _skipping(self, profile: Path | None) -> Bundle:
        """The same pair with a drafter that sits rounds out while its drafts keep dying.

        Where it breaks even follows from what drafting and passes cost: by ``profile``, by the one in the drafter's
        own folder, or measured now, in a second or two.
        """
        drafter = self.drafter.inner if isinstance(self.drafter, LookupDrafter) else self.drafter
        if isinstance(drafter, SkippingDrafter):
            return self
        check_drafts(drafter)
        tokens = self.drafter.block_size + 1
        measured = self.measured(profile, tokens=tokens)
        if measured is None:
            sps = profile_sps(self.target, max_tokens=tokens)
            drafting = draft_seconds(self.target, drafter, requests=(1,), context=64, repeats=3)[0]
        else:
            sps, drafting = measured.curves()[0], measured.drafting(1)
        paid = break_even(
            draft_seconds=drafting, verify_seconds=1.0 / float(sps[tokens]), plain_seconds=1.0 / float(sps[1])
        )
        skipping = SkippingDrafter(drafter, SkipPolicy(break_even=paid))
        return replace(self, drafter=skipping if drafter is self.drafter else LookupDrafter(skipping))

    def read_calibration(self, path: Path, sampling: SamplingParams | None = None) -> Calibration:
        """A file of `dspark calibrate`; raises :class:`ConfigError` unless it is of this pair, and of the kind of
        ``sampling`` if that is given."""
        fitted = Calibration.read(path)
        fitted.check(
            model=folder_fingerprint(self.folder),
            drafter=drafter_fingerprint(self.drafter_spec),
            sampling=sampling or SamplingParams(temperature=fitted.sampling["temperature"]),
        )
        return fitted

    def read_profile(self, path: Path, *, tokens: int) -> Profile:
        """A file of `dspark profile`; raises :class:`ConfigError` unless it is of this pair, here, and covers steps of
        ``tokens`` tokens."""
        measured = Profile.read(path)
        here = Setting.of(self.target, model_fingerprint=folder_fingerprint(self.folder))
        measured.check(here, drafter=drafter_fingerprint(self.drafter_spec), tokens=tokens)
        return measured

    def own_calibrations(self) -> dict[bool, Calibration]:
        """The calibrations in the drafter's folder that are of this pair, by whether they are of greedy requests."""
        found: dict[bool, Calibration] = {}
        for name in CALIBRATION_NAMES:
            fitted = self.own_file(name, self.read_calibration)
            if fitted is not None and found.setdefault(fitted.greedy, fitted) is not fitted:
                _log.warning("%s of the drafter's folder is left aside: another there is of the same kind", name)
        return found

    @property
    def own_folder(self) -> Path | None:
        """Where the drafter's files lie; None for one that has none."""
        if self.drafter_spec in WITHOUT_FILES:
            return None
        return default_drafter_folder() if self.drafter_spec == "default" else Path(self.drafter_spec)

    def own_file(self, name: str, read: Callable[[Path], Found]) -> Found | None:
        """What ``read`` makes of a file in the drafter's folder; None where there is none, or none for this run."""
        folder = self.own_folder
        if folder is None or not (path := folder / name).is_file():
            return None
        try:
            return read(path)
        except (ConfigError, DataError) as error:
            _log.warning("%s is left aside: %s", path, error)
            return None

    def measured(self, path: Path | None, *, tokens: int) -> Profile | None:
        """The profile in ``path``, else the one in the drafter's own folder; None where there is none that fits."""
        if path is not None:
            return self.read_profile(path, tokens=tokens)
        return self.own_file(PROFILE_NAME, lambda own: self.read_profile(own, tokens=tokens))

    def _greedy(self, profile: Path | None) -> Scheduler:
        measured = self.measured(profile, tokens=self.drafter.block_size + 1)
        if measured is None:
            return GreedyScheduler(profile_sps(self.target, max_tokens=self.drafter.block_size + 1))
        return ProfiledGreedyScheduler(measured.contexts, measured.round_curves(1))


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A pair, and the rule by which its drafts are checked: they go together, for ``skip`` changes the drafter."""

    bundle: Bundle
    scheduler: Scheduler


def _load_drafter(spec: str, target: Target, chat: ChatFormat, candidates: int) -> Drafter:
    """The drafter; the message has a remedy where nobody chose the one that does not serve."""
    reserved = dict.fromkeys(chat.stop_token_ids, "an end token")
    if (pad := chat.tokenizer.pad_token_id) is not None:
        reserved.setdefault(pad, "the pad token")
    try:
        return load_drafter(spec, target, candidates=candidates, reserved=reserved)
    except CheckpointError as error:
        if spec != "default":
            raise
        raise CheckpointError(f"no default drafter for {target.info.name}: {error}; {OTHERS}") from error


def check_scheduler(
    name: str,
    *,
    verify_len: int | None,
    threshold: float | None,
    calibration: Path | None = None,
    profile: Path | None = None,
) -> None:
    """Raise :class:`ConfigError` for an unknown scheduler, or for a setting that it would ignore or lacks."""
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler is {name!r}; it must be one of {', '.join(SCHEDULERS)}")
    if verify_len is not None and name != "fixed":
        raise ConfigError(f"verify_len is {verify_len}, which only the fixed scheduler uses, not {name}; leave it out")
    if (threshold is not None) != (name == "threshold"):
        given = "is missing" if threshold is None else f"is {threshold}"
        raise ConfigError(f"threshold {given}; the threshold scheduler needs one in [0, 1] and no other takes one")
    if calibration is not None and name in ("fixed", "skip"):
        raise ConfigError(
            f"calibration is given, which the {name} scheduler would not read; choose threshold or greedy"
        )
    if profile is not None and name not in ("greedy", "skip"):
        raise ConfigError(f"profile is given, which only greedy and skip read, not {name}; leave it out")


def messages(text: str | None = None, *, system: str | None = None) -> list[dict[str, str]]:
    """A conversation of at most a system prompt and one user turn; what is None is left out."""
    turns = (("system", system), ("user", text))
    return [{"role": role, "content": content} for role, content in turns if content is not None]
