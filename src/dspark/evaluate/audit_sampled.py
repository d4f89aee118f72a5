"""The sampled part of an audit: the joint distribution of what the loop writes against the target's own.

Each case runs the loop with a seed per trial and tests the first one, two and three tokens. The number of trials is
what it takes to see a stated shift with a stated power at the family's level divided by the number of tests; where the
time does not allow it, the shift that can be seen with the trials there were is told instead. Whoever stops by the
clock has not looked at the outcome, so the tests keep their level. The controls run the same trials and the same test
on a loop with a known flaw, and may stop as soon as they have caught it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.evaluate.audit_flaws import FLAWS, Flaw, broken
from dspark.evaluate.audit_fork import TrialSetting
from dspark.evaluate.audit_greedy import Say, Variant
from dspark.evaluate.audit_law import exact_law
from dspark.evaluate.audit_stats import (
    MIN_EXPECTED,
    Fit,
    detectable_shift,
    goodness_of_fit,
    holm,
    trials_needed,
)
from dspark.evaluate.audit_trials import Trial, Trials, plain_trial
from dspark.evaluate.bench import near_tie_tolerance
from dspark.models.target import Target

LENGTH = 3  # tokens of the longest joint distribution
CHECK_SHARE = 0.15  # of a case's time that its plain runs may take
MIN_CHECKS = 2
FIRST_TRIALS = 16
LOOKS = 5  # of a control: after 1/16, 1/8, 1/4, 1/2 and all of its trials
MOST_SIMULATIONS = 1_000_000
LOW_PRECISION_MISMATCHES = 0.25  # share of plain runs that rounding may turn elsewhere below fp32


@dataclass(frozen=True, kw_only=True)
class SampledConfig:
    """How sure an audit is to be."""

    alpha: float = 1e-3  # chance that an intact loop fails any of the tests; (0, 0.1)
    power: float = 0.9  # chance that a shift by ``shift`` is seen; (0, 1)
    shift: float = 0.03  # total variation; (0, 1)
    most_trials: int = 50_000  # of a case; >= 1
    checks: int = 16  # trials of a case that are run again on the target itself
    seed: int = 0  # of the first trial

    def __post_init__(self) -> None:
        for name in ("alpha", "power", "shift"):
            value, most = getattr(self, name), 0.1 if name == "alpha" else 1.0
            if not 0.0 < value < most:
                raise ConfigError(f"{name} is {value}; it must lie between 0 and {most:g}")
        if self.power <= self.alpha:
            raise ConfigError(f"power is {self.power}; it must be above alpha, {self.alpha:g}")
        if self.most_trials < 1 or self.checks < 0:
            raise ConfigError(f"most_trials is {self.most_trials} and checks is {self.checks}; at least 1 and 0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way of running the pair behind one context."""

    name: str
    variant: Variant
    context: tuple[int, ...]  # token ids; the last is the anchor
    sampling: SamplingParams
    drafts: int  # most drafts of a round
    from_prefill: bool = False  # whether the first token is the prefill's draw, behind the whole context

    @property
    def setting(self) -> TrialSetting:
        return TrialSetting(
            prompt_ids=self.context if self.from_prefill else self.context[:-1],
            anchor=None if self.from_prefill else self.context[-1],
            sampling=replace(self.sampling, rule=self.variant.rule),
            scheduler=self.variant.scheduler,
            drafts=self.drafts,
            length=LENGTH,
        )


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """The test of the first ``tokens`` tokens."""

    tokens: int
    fit: Fit
    adjusted_p: float  # by Holm, over all tests of the audit
    detectable: float  # total variation over the cells seen with the stated power by these trials; 1 if hopeless


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """What became of a case."""

    name: str
    context_tokens: int
    trials: int
    trials_wanted: int  # for the stated shift
    verified: float  # drafts that the target checked, per trial
    accepted: float  # of these, per trial
    tests: tuple[FitRow, ...]
    checks: int  # trials run again on the target itself ...
    mismatches: int  # ... that gave other tokens
    recheck: float  # logits; largest difference of a shared pass and a fresh one
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """Whether the test catches a loop with a known flaw."""

    flaw: str
    says: str
    case: str
    trials: int
    p_value: float  # the smallest of the tests at the last look
    caught: bool


@dataclass(frozen=True, kw_only=True)
class SampledPart:
    """All cases and controls; ``skipped`` says why a control did not apply."""

    dtype: str
    config: SampledConfig
    level: float  # of one test: alpha / number of tests
    mismatches_allowed: float  # share of checks
    recheck_allowed: float  # logits
    cases: tuple[CaseRow, ...]
    controls: tuple[ControlRow, ...]
    skipped: tuple[str, ...]


def audit_sampled(
    target: Target, cases: Sequence[Case], config: SampledConfig, *, seconds: float, say: Say
) -> SampledPart:
    """Run ``cases`` and then every flaw on the first of them, each with an equal part of the time that is left."""
    end, left = time.monotonic() + seconds, len(cases) + len(FLAWS)
    level = config.alpha / (LENGTH * len(cases))
    ran: list[tuple[CaseRow, list[Fit]]] = []
    certain = False
    for number, case in enumerate(cases):
        runner = _Runner(target, case, config, level, _share(end, left), say, f"{number + 1}/{len(cases)} {case.name}")
        ran.append(runner.run())
        certain = runner.trials.drafter.certain if number == 0 else certain
        left -= 1
    adjusted = iter(holm([fit.p_value for _, fits in ran for fit in fits]))
    rows = tuple(replace(row, tests=_tests(fits, adjusted, config, level)) for row, fits in ran)
    controls, skipped = [], []
    for flaw in FLAWS:
        if flaw.needs_distribution and certain:
            skipped.append(f"{flaw.name}: no flaw here, for this drafter draws nothing")
        else:
            runner = _Runner(target, cases[0], config, level, _share(end, left), say, f"control, {flaw.name}")
            controls.append(runner.control(flaw))
        left -= 1
    exact = target.info.dtype in (torch.float32, torch.float64)
    return SampledPart(
        dtype=str(target.info.dtype).removeprefix("torch."),
        config=config,
        level=level,
        mismatches_allowed=0.0 if exact else LOW_PRECISION_MISMATCHES,
        recheck_allowed=near_tie_tolerance(target.info.dtype),
        cases=rows,
        controls=tuple(controls),
        skipped=tuple(skipped),
    )


def _share(end: float, units: int) -> float:
    return max(0.0, end - time.monotonic()) / units


def _tests(fits: Sequence[Fit], adjusted: Iterator[float], config: SampledConfig, level: float) -> tuple[FitRow, ...]:
    return tuple(
        FitRow(
            tokens=k,
            fit=fit,
            adjusted_p=next(adjusted),
            detectable=detectable_shift(fit.cells, fit.trials, alpha=level, power=config.power),
        )
        for k, fit in enumerate(fits, start=1)
    )


class _Runner:
    """The trials of one case in ``seconds``."""

    def __init__(
        self, target: Target, case: Case, config: SampledConfig, level: float, seconds: float, say: Say, label: str
    ) -> None:
        self.begin = time.monotonic()
        self.target, self.case, self.config, self.level = target, case, config, level
        self.seconds, self._say, self._label = seconds, say, label
        say(f"sampled, {label}: the target's own distribution")
        self.trials = Trials(target, case.variant.drafter, case.setting)
        self.law = exact_law(self.trials.fork, case.setting, floor=MIN_EXPECTED / config.most_trials)
        self.wanted = min(config.most_trials, max(self._needed(level_k) for level_k in self.law.levels))
        self.found: list[Trial] = []
        self._step = FIRST_TRIALS

    def _needed(self, chances: dict[tuple[int, ...], float]) -> int:
        return trials_needed(chances, shift=self.config.shift, alpha=self.level, power=self.config.power)

    def run(self) -> tuple[CaseRow, list[Fit]]:
        """All trials that are wanted or that the time allows; the row's tests are filled in when all cases are run."""
        checks, mismatches = self._check_plainly()
        self._until(self.wanted)
        row = CaseRow(
            name=self.case.name,
            context_tokens=len(self.case.context),
            trials=len(self.found),
            trials_wanted=self.wanted,
            verified=sum(trial.verified for trial in self.found) / len(self.found),
            accepted=sum(trial.accepted for trial in self.found) / len(self.found),
            tests=(),
            checks=checks,
            mismatches=mismatches,
            recheck=max(self.trials.fork.recheck(tail) for tail in self._some_tails()),
            seconds=time.monotonic() - self.begin,
        )
        return row, self._fits(simulate=True)

    def control(self, flaw: Flaw) -> ControlRow:
        """Trials of the broken loop, tested after 1/16, 1/8, ... of them, until the flaw is caught. Every look must
        pass for as many tests as there are."""
        caught, p_value = False, 1.0
        with broken(flaw):
            for look in range(LOOKS - 1, -1, -1):
                wanted = math.ceil(self.wanted / 2**look)
                self._until(wanted)
                p_value = min(fit.p_value for fit in self._fits(simulate=False))
                caught = p_value * LOOKS < self.level
                if caught or len(self.found) < wanted:
                    break
        return ControlRow(
            flaw=flaw.name,
            says=flaw.says,
            case=self.case.name,
            trials=len(self.found),
            p_value=p_value,
            caught=caught,
        )

    def _until(self, wanted: int) -> None:
        """Run trials until there are ``wanted`` or the time is over; ``FIRST_TRIALS`` at least. They are asked for in
        numbers that take a twentieth of the time, as far as the last ones tell."""
        while len(self.found) < wanted and not (self.found and self._over(1.0)):
            self._say(f"sampled, {self._label}: {len(self.found)} of {self.wanted} trials")
            start, begin = self.config.seed + len(self.found), time.monotonic()
            count = min(self._step, self.trials.wave, wanted - len(self.found))
            self.found += self.trials.run(range(start, start + count))
            pace = count / max(time.monotonic() - begin, 1e-6)
            self._step = max(FIRST_TRIALS, int(min(pace * self.seconds / 20, self.trials.wave)))

    def _over(self, share: float) -> bool:
        return time.monotonic() - self.begin > share * self.seconds

    def _check_plainly(self) -> tuple[int, int]:
        """Trials run again with the target's own prefill, memory and rollback: how many, and how many differ."""
        checks = mismatches = 0
        self._say(f"sampled, {self._label}: plain runs")
        while checks < self.config.checks and not (checks >= MIN_CHECKS and self._over(CHECK_SHARE)):
            seed = self.config.seed + checks
            plain = plain_trial(self.target, self.case.variant.drafter, self.case.setting, seed)
            mismatches += plain != self.trials.run([seed])[0]
            checks += 1
        return checks, mismatches

    def _some_tails(self) -> list[tuple[int, ...]]:
        given = self.case.setting.given
        return [(*given, *trial.outcome) for trial in self.found[:3]]

    def _fits(self, *, simulate: bool) -> list[Fit]:
        """The tests of one, two and three tokens. Enough samples are simulated that a p-value can be significant."""
        simulations = min(MOST_SIMULATIONS, math.ceil(10 / self.level)) if simulate else 0
        fits = []
        for k, chances in enumerate(self.law.levels, start=1):
            counts, impossible = self.law.count((trial.outcome for trial in self.found), k)
            fits.append(
                goodness_of_fit(counts, chances, impossible=impossible, simulations=simulations, seed=self.config.seed)
            )
        return fits
