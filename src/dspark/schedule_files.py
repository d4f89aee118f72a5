"""The two small files that schedulers read: a calibration and a profile. Each says what it was made for, and is refused
for anything else.

    calibration   one drafter for one target: a temperature per position, and weights where the drafter has no
                  confidence head. Wrong for another drafter, another target, or between greedy and sampled decoding.
    profile       one target on one machine: steps per second by tokens and context, drafting time by requests. Wrong
                  for another model, implementation, dtype, device or number of threads.

Both are JSON: ``kind``, ``version``, ``fields`` and ``provenance``, as in a manifest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dspark.artifacts import provenance, read_json, tuples, write_json
from dspark.core import SamplingParams
from dspark.errors import ConfigError, DataError
from dspark.maths.calibrated_scheduling import CalibratedScheduler, EstimatingScheduler
from dspark.maths.estimator import FEATURES, Estimator
from dspark.maths.platt import Scaling
from dspark.maths.scheduling import Scheduler
from dspark.models.drafter import Drafter
from dspark.models.registry import default_drafter_folder
from dspark.models.target import Target

VERSION = 1  # of both formats
CALIBRATION_NAME, PROFILE_NAME = "calibration.json", "profile.json"  # in a drafter's folder, found there unasked
CALIBRATION_NAMES = (CALIBRATION_NAME, "calibration-greedy.json")  # one of greedy, one of sampled requests
SAMPLES, SAMPLE_BYTES = 64, 4096  # what a fingerprint reads of each weight file
WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin")


def folder_fingerprint(folder: Path) -> str:
    """Sixteen hex digits that tell the models of two folders apart: names, sizes and evenly spaced samples of their
    weight files, and their configs. Raises :class:`ConfigError` if there is no weight file.
    """
    files = sorted({path for pattern in WEIGHT_FILES for path in folder.glob(pattern)})
    if not files:
        raise ConfigError(f"{folder} holds no weights ({', '.join(WEIGHT_FILES)}); it cannot be told from others")
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def drafter_fingerprint(spec: str) -> str:
    """The same for a drafter as the user names it; `ngram` and `none` are their own fingerprints."""
    if spec in ("ngram", "none"):
        return spec
    return folder_fingerprint(default_drafter_folder() if spec == "default" else Path(spec))


def device_name(device: torch.device) -> str:
    """What a device is called, so that two machines' files are not mixed up."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {provenance()['cpu']}"


# --- calibration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How a drafter's confidences become true chances."""

    model: str  # as the user named it
    model_fingerprint: str
    drafter: str
    drafter_fingerprint: str
    block_size: int
    sampling: Mapping[str, Any]  # of the recorded rounds: temperature, filters and rule
    prompts: tuple[str, ...]  # files the rounds came from; empty: the built-in ones
    sts_temperatures: tuple[float, ...]  # one per position
    estimator: tuple[tuple[float, ...], ...] | None  # weights per position; None: the drafter has a head
    fitted_rounds: int
    held_out_rounds: int
    before: tuple[Mapping[str, Any], ...]  # quality per position on the held-out rounds, raw
    after: tuple[Mapping[str, Any], ...]  # and calibrated
    biases: tuple[float, ...] = ()  # of Platt's scaling, one per position; empty: temperatures alone

    def __post_init__(self) -> None:
        if len(self.sts_temperatures) != self.block_size:
            raise DataError(
                f"sts_temperatures has {len(self.sts_temperatures)} entries; block_size {self.block_size} needs as many"
            )
        if len(self.biases) not in (0, self.block_size):
            raise DataError(f"biases has {len(self.biases)} entries; give {self.block_size}, or none")
        if self.estimator is not None:
            shape = {len(self.estimator), *(len(row) for row in self.estimator)}
            if len(self.estimator) != self.block_size or shape - {self.block_size, len(FEATURES)}:
                raise DataError(f"estimator must be {self.block_size} rows of {len(FEATURES)} weights")

    @property
    def greedy(self) -> bool:
        """Whether it is of greedy requests."""
        return SamplingParams(temperature=self.sampling["temperature"]).greedy

    @property
    def method(self) -> str:
        """How it was fitted: "sts", by temperatures alone, or "platt", with biases too."""
        return "platt" if any(self.biases) else "sts"

    @functools.cached_property
    def scaling(self) -> Scaling:
        """What it does to confidences, made once: schedulers ask in every step."""
        biases = self.biases or (0.0,) * self.block_size
        return Scaling(sts_temperatures=np.array(self.sts_temperatures), biases=np.array(biases))

    def scheduler(self, inner: Scheduler) -> Scheduler:
        """``inner`` as it chooses with this calibration."""
        scaling = self.scaling
        if self.estimator is None:
            return CalibratedScheduler(inner, scaling.sts_temperatures, scaling.biases)
        estimator = Estimator(np.array(self.estimator))
        return EstimatingScheduler(inner, estimator, scaling.sts_temperatures, scaling.biases)

    def check(self, *, model: str, drafter: str, sampling: SamplingParams) -> None:
        """Refuse other fingerprints than those it was made for, and greedy for sampled or sampled for greedy."""
        _check_same("calibration", "model_fingerprint", self.model_fingerprint, model, remedy="dspark calibrate")
        _check_same("calibration", "drafter_fingerprint", self.drafter_fingerprint, drafter, remedy="dspark calibrate")
        if self.greedy != sampling.greedy:
            of = float(self.sampling["temperature"])
            raise ConfigError(
                f"the calibration is of temperature {of} and this run has {sampling.temperature}; "
                "greedy and sampled drafts survive differently: run dspark calibrate at this temperature"
            )

    def write(self, path: Path | str) -> None:
        _write(path, "calibration", asdict(self))

    @classmethod
    def read(cls, path: Path | str) -> Calibration:
        """Raises :class:`DataError` for anything but a calibration of this version."""
        try:
            return cls(**_read(path, "calibration"))
        except TypeError as error:
            raise DataError(f"{path} is no calibration of this dspark ({error}); make it again") from None


# --- profile ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a profile's times were measured; they hold nowhere else."""

    model_fingerprint: str
    implementation: str  # class of the target
    dtype: str
    device: str
    threads: int

    @classmethod
    def of(cls, target: Target, *, model_fingerprint: str) -> Setting:
        """The setting that this process runs ``target`` in."""
        return cls(
            model_fingerprint=model_fingerprint,
            implementation=type(target).__name__,
            dtype=str(target.info.dtype).removeprefix("torch."),
            device=device_name(target.info.device),
            threads=torch.get_num_threads(),
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of one target, and of drafting for it. Curves are as jagged as they were measured."""

    model: str  # as the user named it
    setting: Setting
    contexts: tuple[int, ...]  # committed tokens behind each request, ascending: a curve each
    tokens_per_request: int  # of a step's tokens, the most that one request holds
    sps: tuple[tuple[float, ...], ...]  # steps per second at 0 (unused), 1, 2, ... tokens, a row per context
    drafter: str
    drafter_fingerprint: str
    draft_requests: tuple[int, ...]  # numbers of requests, ascending
    draft_seconds: tuple[float, ...]  # to draft a block for each of them and take its outcome in
    repeats: int  # behind every median
    draft_depth_shares: tuple[float, ...] = ()  # of those seconds, when at most 1, 2, ... drafts are asked for; (): all

    def __post_init__(self) -> None:
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)):
            raise DataError(f"contexts is {list(self.contexts)}; give ascending lengths")
        if len(self.sps) != len(self.contexts) or len({len(curve) for curve in self.sps}) != 1:
            raise DataError(f"sps must be {len(self.contexts)} curves of one length, one per context")
        if any(not 0.0 < rate < float("inf") for curve in self.sps for rate in curve[1:]):
            raise DataError("sps has an entry that is not positive and finite")
        if len(self.draft_requests) != len(self.draft_seconds):
            raise DataError("draft_requests and draft_seconds must have as many entries")
        shares = self.draft_depth_shares
        if shares and not (0.0 < shares[0] and list(shares) == sorted(shares) and shares[-1] == 1.0):
            raise DataError(f"draft_depth_shares is {list(shares)}; they must be positive, rise and end at 1")

    @property
    def max_tokens(self) -> int:
        return len(self.sps[0]) - 1

    def curves(self) -> Float[Tensor, "buckets max_tokens_plus_1"]:
        """``sps`` in float64."""
        return torch.tensor(self.sps, dtype=torch.float64)

    def round_curves(self, requests: int) -> Float[Tensor, "buckets max_tokens_plus_1"]:
        """Rounds per second when drafting for ``requests`` requests comes on top of every step.

        Drafting is paid whatever is then verified, so it belongs into the rate that expected tokens are weighed with.
        """
        curves = self.curves()
        curves[:, 1:] = 1.0 / (1.0 / curves[:, 1:] + self.drafting(requests))
        return curves

    def drafting(self, requests: int, depth: int | None = None) -> float:
        """Seconds to draft for ``requests`` requests, at most ``depth`` tokens each (None: whole blocks): measured, or
        on the line between (or through) the nearest two measured numbers; 0 if no drafting was measured."""
        known = dict(zip(self.draft_requests, self.draft_seconds, strict=True))
        if not known or requests == 0 or depth == 0:
            return 0.0
        if depth is not None and self.draft_depth_shares:
            shares = self.draft_depth_shares
            return shares[min(depth, len(shares)) - 1] * self.drafting(requests)
        if requests in known:
            return known[requests]
        points = sorted({0: 0.0, **known}.items())
        upper = next((i for i, (count, _) in enumerate(points) if count > requests), len(points) - 1)
        (a, at_a), (b, at_b) = points[upper - 1], points[upper]
        return max(0.0, at_a + (at_b - at_a) * (requests - a) / (b - a))

    def check(self, setting: Setting, *, drafter: str, tokens: int) -> None:
        """Refuse a profile measured in another setting or with another drafter, or one too short for ``tokens``."""
        for name, measured in asdict(self.setting).items():
            _check_same("profile", name, measured, getattr(setting, name), remedy="dspark profile")
        _check_same("profile", "drafter_fingerprint", self.drafter_fingerprint, drafter, remedy="dspark profile")
        if self.max_tokens < tokens:
            raise ConfigError(
                f"the profile covers {self.max_tokens} tokens and a step can carry {tokens}; "
                f"run dspark profile --max-tokens {tokens}"
            )

    def write(self, path: Path | str) -> None:
        _write(path, "profile", asdict(self))

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Raises :class:`DataError` for anything but a profile of this version."""
        fields = _read(path, "profile")
        try:
            return cls(**{**fields, "setting": Setting(**fields["setting"])})
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} is no profile of this dspark ({error}); make it again") from None


def check_drafts(drafter: Drafter) -> None:
    """Raise :class:`ConfigError` for a drafter that never proposes: there is nothing to calibrate."""
    if drafter.block_size == 0:
        raise ConfigError(f"drafter is {drafter.name!r}, which proposes nothing; name one that does with --drafter")


def _check_same(kind: str, name: str, made: object, here: object, *, remedy: str) -> None:
    if made != here:
        raise ConfigError(f"the {kind} was made for {name} {made} and this run has {here}; run {remedy} for it")


def _write(path: Path | str, kind: str, fields: Mapping[str, Any]) -> None:
    content = {"kind": kind, "version": VERSION, "fields": fields, "provenance": provenance()}
    write_json(path, content)


def _read(path: Path | str, kind: str) -> dict[str, Any]:
    """Fields of a file that must be of ``kind``; lists come as tuples."""
    remedy = f"make it with dspark {_VERBS[kind]}"
    content = read_json(path, remedy=remedy)
    found = (content.get("kind"), content.get("version"))
    if found != (kind, VERSION) or not isinstance(content.get("fields"), dict):
        raise DataError(
            f"{path} is kind {found[0]!r}, version {found[1]!r}; a {kind} of version {VERSION} is needed: {remedy}"
        )
    return {name: tuples(value) for name, value in content["fields"].items()}


_VERBS = {"calibration": "calibrate", "profile": "profile"}
