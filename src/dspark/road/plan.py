"""What a road will do with its time: how many prompts, answers and steps, and what drafts may be worth in the end.

Pure arithmetic on a measured :class:`~dspark.road.probe.Probe`. A training step sees one answer for the first time and
replays others, so as many answers are wanted as there will be steps, and the time for both is shared out accordingly.
Stages after training are small and come off first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dspark.errors import ConfigError
from dspark.models.draft_config import DraftConfig
from dspark.numbers import clock_text
from dspark.road.probe import Probe

ANSWER_SHARE = 0.75  # of the most tokens that an answer may have, what answers have on average
PROMPT_TOKENS = 60  # of a prompt that the model writes, and of one that is not kept
DRAFTS_PER_PROMPT = 1.6  # written for each one kept
# Of the sampler's measured pace, what whole texts reach: prompts are run first, contexts grow, the last rows run out.
# An hour's road reached 0.58 in answers and 0.74 in prompts (docs/log.md).
SAMPLER_SHARE = 0.65
SLOTS = 1344  # supervised slots of a training step
OVERHEAD = 1.0  # factor on the products of a training step; the pass that tells their speed has other parts as well
EVALUATIONS = 6  # in the course of a run
SMALL_SHARE = 0.06  # of the budget: calibration, and the comparison
CALIBRATION_ROUNDS = 400  # of which half are fitted on, and half judged on
LEAST_ANSWERS, MOST_ANSWERS = 32, 200_000
SLACK_SHARE, SLACK_SECONDS = 0.01, 2.0  # kept for writing files, and for what was not foreseen
GOOD_CHANCE = 0.75  # that a draft survives, given that those before did, after a long training: what blocks are for
# What training had reached on SmolLM2-135M-Instruct in tokens a round, blocks of 7, held-out prompts (docs/log.md):
# supervised slots, then the least and the most. The first line is the forty-second runs' (chat, and the mean of the
# domains). After it the least is an hour's road on one core, 1,059 answers to prompts that the model wrote itself,
# decoded; the most is the shipped drafter's (its card), 7,168 answers to prompts of three domains, analytic and, in the
# last line, decoded. Nothing is known beyond, so the last values stand for any longer training.
REACHED = (
    (100_000, 1.26, 1.34),
    (380_000, 1.27, 1.55),
    (1_000_000, 1.58, 1.73),
    (2_400_000, 1.70, 1.88),
    (6_800_000, 1.70, 2.04),
)
REACHED_BLOCK = 7
# What a round had cost in plain passes beyond verification and the weights that drafting reads: on one core, where
# drafting is bound by arithmetic too, and on two.
EXTRA_COST = (0.1, 0.0)
BYTES_PER_PARAMETER = 16  # masters, gradients and two moments, fp32
STATE_BYTES = 12  # masters and moments on the disk, fp32; two states are kept while a third is written
PROFILES = ((4, 7), (4, 5), (2, 5), (2, 3), (1, 3), (1, 1))  # (requests, repeats), the most thorough first


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Numbers that the stages go by, and the time each may take in seconds. Of ``answers`` and ``steps`` the clock has
    the last word, unless they were fixed by the user."""

    seconds: dict[str, float]  # by stage, in the order of the road
    prompts: int  # to be had, those for calibration and comparison included
    answers: int
    steps: int
    step_seconds: float
    evaluate_prompts: int  # decoded at every evaluation of the training; 0: acceptance is computed, not decoded
    calibration_prompts: int
    compare_prompts: int
    play_tokens: int  # most tokens of an answer in calibration and comparison
    profile_requests: int
    profile_repeats: int
    feature_bytes: int
    disk_bytes: int  # needed
    memory_bytes: int  # needed beside the target
    gain: tuple[float, float]  # expected speedup, the least and the most


def make_plan(
    probe: Probe,
    shape: DraftConfig,
    *,
    draft_parameters: int,
    budget: float,
    left: float,
    max_new_tokens: int,
    own_prompts: bool,
    answers: int | None = None,
    steps: int | None = None,
) -> Plan:
    """Share ``left`` seconds of the ``budget`` out. ``own_prompts``: the model writes them itself. ``answers`` and
    ``steps`` are numbers that the user fixed.

    Raises :class:`ConfigError` if the time, the disk or the memory is too little.
    """
    one = probe.of(1)
    play_tokens = min(128, max_new_tokens)
    each = play_tokens * one
    least = -(-CALIBRATION_ROUNDS * 3 // play_tokens)  # prompts, if a round commits three tokens
    calibration = _between(SMALL_SHARE * budget / each, least, max(least, min(96, answers or 96)))
    # a prompt is answered without drafts, with all of them, and with as many as pay
    compare = _between(SMALL_SHARE * budget / (3 * each), 4, 24)
    requests, repeats = _profile(probe, shape.block_size + 1, 0.04 * budget)
    answer_tokens = ANSWER_SHARE * max_new_tokens
    pace = SAMPLER_SHARE * probe.tokens_per_second
    answer = answer_tokens / pace
    prompt = DRAFTS_PER_PROMPT * PROMPT_TOKENS / pace if own_prompts else 0.0
    step = step_seconds(probe, draft_parameters, shape)
    tail = {
        "calibrate": calibration * each / 1.5,  # drafts that stand save passes
        "profile": profile_seconds(probe, shape.block_size + 1, requests, repeats),
        "compare": compare * each * 2.4,
    }
    front = (calibration + compare) * prompt
    room = left - sum(tail.values()) - front - SLACK_SHARE * budget - SLACK_SECONDS
    count = answers or min(MOST_ANSWERS, int(room / (answer + prompt + step)))
    if answers is None or steps is None:
        _check_time(count, room, answer + prompt + step, budget=budget)
    seconds = {"prompts": front + count * prompt, "answers": count * answer}
    seconds["train"] = max(0.0, room - seconds["answers"] - count * prompt)
    planned = steps or max(1, int(0.92 * seconds["train"] / step))  # the rest goes to evaluations
    features = int(min(8 << 30, 0.35 * probe.memory_free, count * _sample_bytes(probe, shape)))
    memory = BYTES_PER_PARAMETER * draft_parameters + features + 6 * shape.output_size * shape.hidden_size
    disk = (3 * STATE_BYTES + 6) * draft_parameters + count * 4096 + (64 << 20)
    _check_room(probe, memory=memory, disk=disk)
    evaluated = SMALL_SHARE * seconds["train"] / EVALUATIONS / (64 * one)
    return Plan(
        seconds={**seconds, **tail},
        prompts=count + calibration + compare,
        answers=count,
        steps=planned,
        step_seconds=step,
        evaluate_prompts=_between(evaluated, 0, 12),
        calibration_prompts=calibration,
        compare_prompts=compare,
        play_tokens=play_tokens,
        profile_requests=requests,
        profile_repeats=repeats,
        feature_bytes=features,
        disk_bytes=disk,
        memory_bytes=memory,
        gain=expected_gain(probe, shape, draft_parameters, slots=planned * SLOTS),
    )


def step_seconds(probe: Probe, draft_parameters: int, shape: DraftConfig) -> float:
    """Expected seconds of a training step: one target pass, and the products of forward and backward over its slots at
    the speed at which that pass multiplies."""
    rate = 2 * probe.target_parameters * probe.sample_tokens / probe.sample_seconds  # operations per second
    head = shape.hidden_size * shape.output_size
    return probe.sample_seconds + OVERHEAD * SLOTS * (6 * draft_parameters + 4 * head) / rate


def expected_gain(probe: Probe, shape: DraftConfig, draft_parameters: int, *, slots: int) -> tuple[float, float]:
    """Speedup if drafts survive as they did in the runs of ``REACHED`` after so many supervised slots: tokens of a
    round over its cost in plain passes, of which drafting takes the share of weights that it reads, head included."""
    read = draft_parameters + shape.hidden_size * shape.output_size
    cost = probe.of(shape.block_size + 1) / probe.of(1) + read / max(1, probe.target_parameters)
    low, high = (
        _tokens(shape.block_size, chance) / (cost + extra)
        for chance, extra in zip(survival_chances(slots), EXTRA_COST, strict=True)
    )
    return low, high


def survival_chances(slots: int) -> tuple[float, float]:
    """Chance that a draft survives, given that those before did, after so many supervised slots: the least and the
    most that ``REACHED`` lets expect. On lines between its entries over the logarithm of slots, and flat outside."""
    found = []
    for column in (1, 2):
        points = [(math.log(entry[0]), entry[column]) for entry in REACHED]
        at = min(max(math.log(max(1, slots)), points[0][0]), points[-1][0])
        tokens = next(y0 + (y1 - y0) * (at - x0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points) if at <= x1)
        found.append(_chance(REACHED_BLOCK, tokens))
    return found[0], found[1]


def best_block(probe: Probe, choices: Sequence[int]) -> int:
    """Of ``choices`` the block size that a good drafter gains most with; the first one unless another gains a tenth
    more."""
    gains = {size: _tokens(size, GOOD_CHANCE) / probe.of(size + 1) for size in choices}
    best = max(gains, key=lambda size: gains[size])
    return best if gains[best] > 1.1 * gains[choices[0]] else choices[0]


def profile_seconds(probe: Probe, per_request: int, requests: int, repeats: int) -> float:
    """Of the passes over every number of tokens up to whole blocks of ``requests``, in two contexts."""
    most = per_request * requests
    return 2 * (repeats + 1) * sum(probe.of(tokens) for tokens in range(1, most + 1))


def plan_lines(plan: Plan, probe: Probe, facts: Mapping[str, Any]) -> list[str]:
    """The plan as text. ``facts`` name the model, its dtype and device, the drafter's shape and the budget."""
    what = {
        "prompts": f"{plan.prompts} {facts['prompts']}",
        "answers": f"{plan.answers} by the model, {probe.rows} at a time, {probe.tokens_per_second:.0f} tokens/s",
        "train": f"about {plan.steps} steps of {plan.step_seconds:.2f} s",
        "calibrate": f"{plan.calibration_prompts} held-out prompts of up to {plan.play_tokens} tokens",
        "profile": f"steps for up to {plan.profile_requests} requests, {plan.profile_repeats} times each",
        "compare": f"{plan.compare_prompts} held-out prompts, with and without drafts",
    }
    low, high = plan.gain
    eight = f"{1e3 * probe.of(8):.1f} ms over eight tokens"
    return [
        f"{facts['model']}: {probe.target_parameters / 1e6:.0f} M parameters, {facts['dtype']} on {facts['device']}; "
        f"a pass takes {1e3 * probe.of(1):.1f} ms, {eight}",
        f"drafter: {facts['drafter']}",
        *(f"{name:>10} {clock_text(plan.seconds[name]):>8}  {words}" for name, words in what.items()),
        f"{'disk':>10} {plan.disk_bytes / 1e9:>5.1f} GB  of {probe.disk_free / 1e9:.0f} free",
        f"{'memory':>10} {plan.memory_bytes / 1e9:>5.1f} GB  of {probe.memory_free / 1e9:.0f} free, beside the model",
        f"expected: {low:.1f} to {high:.1f} times the speed, by what runs on SmolLM2-135M reached after as much "
        f"training ({plan.steps * SLOTS / 1e6:.1f} million draft slots)"
        + (" - drafting may not pay here" if high < 1.05 else ""),
    ]


def _tokens(block_size: int, chance: float) -> float:
    """Tokens of a round whose drafts survive with ``chance`` each, the bonus included."""
    return sum(chance**k for k in range(block_size + 1))


def _chance(block_size: int, tokens: float) -> float:
    """The inverse of :func:`_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(block_size, middle) < tokens else (low, middle)
    return low


def _between(value: float, low: int, high: int) -> int:
    return max(low, min(high, int(value)))


def _profile(probe: Probe, per_request: int, seconds: float) -> tuple[int, int]:
    """The most thorough profile that takes no longer than ``seconds``, else the shortest."""
    fitting = (each for each in PROFILES if profile_seconds(probe, per_request, *each) <= seconds)
    return next(fitting, PROFILES[-1])


def _sample_bytes(probe: Probe, shape: DraftConfig) -> int:
    """Features of one training sample in memory: tapped states, final states, 64 probabilities a position."""
    return probe.sample_tokens * (2 * (shape.feature_size + shape.hidden_size) + 64 * 6)


def _check_time(count: int, room: float, each: float, *, budget: float) -> None:
    if room <= 0 or count < LEAST_ANSWERS:
        needed = 1.2 * (budget - room + LEAST_ANSWERS * each)
        raise ConfigError(
            f"budget is {clock_text(budget)}, too little for this model on this machine; give at least "
            f"{clock_text(needed)}"
        )


def _check_room(probe: Probe, *, memory: int, disk: int) -> None:
    if disk > probe.disk_free:
        raise ConfigError(
            f"out needs {disk / 1e9:.1f} GB and its disk has {probe.disk_free / 1e9:.1f} free; choose another disk"
        )
    if memory > probe.memory_free:
        raise ConfigError(
            f"training needs {memory / 1e9:.1f} GB of memory beside the model and {probe.memory_free / 1e9:.1f} are "
            "free; free some, or take a smaller model"
        )
