"""The last stages: calibration and profile, which schedulers read, and the comparison with the target alone."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.bundle import Bundle
from dspark.calibrate_cli import fit_bundle
from dspark.data.prompts import prompt_messages, read_prompts
from dspark.errors import DataError
from dspark.evaluate.bench import BenchConfig, measure, near_tie_tolerance
from dspark.evaluate.calibrate import quality_fields
from dspark.evaluate.figures import BenchReport, Pair, bench_report, plain_data
from dspark.maths.scheduling import FixedScheduler, Scheduler
from dspark.models.lookup_drafter import LookupDrafter
from dspark.profile_cli import measure_bundle
from dspark.road.data import part_path
from dspark.road.ledger import Facts
from dspark.road.road import Road
from dspark.schedule_files import CALIBRATION_NAME, PROFILE_NAME

CONTEXTS = (128, 1024)  # committed tokens behind a request: a curve each


def calibrate(road: Road) -> Facts:
    """Play held-out prompts at full length and fit the confidences; too few rounds leave a drafter uncalibrated."""
    bundle = road.bundle()
    prompts = [ids for _, ids in _asked(road, "calibration")]

    def on_prompt(done: int) -> None:
        road.ledger.beat()
        road.progress.show(f"{done} of {len(prompts)} prompts played", done / len(prompts))

    path = road.out / CALIBRATION_NAME
    try:
        fitted, calibration = fit_bundle(
            bundle,
            prompts,
            sampling=road.config.sampling,
            max_new_tokens=road.plan.play_tokens,
            files=(str(part_path(road, "calibration").relative_to(road.out)),),
            on_prompt=on_prompt,
        )
    except DataError as error:
        path.unlink(missing_ok=True)
        road.progress.say(f"not calibrated: {error}")
        return {"calibrated": False, "reason": str(error)}
    calibration.write(path)
    before, after = (quality_fields([quality])[0] for quality in fitted.totals)
    return {
        "calibrated": True,
        "rounds": fitted.fitted_rounds,
        "held_out_rounds": fitted.held_out_rounds,
        "before": before,
        "after": after,
        "doubts": list(fitted.doubts()),
    }


def profile(road: Road) -> Facts:
    """Measure what steps and drafting cost on this machine."""
    bundle, plan = road.bundle(), road.plan
    per_request = bundle.drafter.block_size + 1
    room = road.target.info.max_len - per_request - 4 * (plan.profile_repeats + 1)  # what timing drafts takes in
    if room < 2:
        road.progress.say(f"no profile: the model's context of {road.target.info.max_len} tokens is too short for one")
        return {"profiled": False}
    contexts = tuple(sorted({min(context, room) for context in CONTEXTS}))

    def on_context(context: int) -> None:
        road.ledger.beat()
        road.progress.show(f"steps behind {context} tokens", contexts.index(context) / len(contexts))

    measured = measure_bundle(
        bundle,
        max_tokens=per_request * plan.profile_requests,
        contexts=contexts,
        requests=(1, 2),
        repeats=plan.profile_repeats,
        on_context=on_context,
    )
    measured.write(road.out / PROFILE_NAME)
    return {"profiled": True, "contexts": list(contexts), "tokens": measured.max_tokens}


def compare(road: Road) -> Facts:
    """Answer held-out prompts with and without drafts, as they will be served, by every scheduler that the folder has
    the files for."""
    bundle = road.bundle()
    asked = _asked(road, "compare")
    rules: dict[str, Scheduler] = {"fixed": FixedScheduler()}
    if bundle.drafter.has_confidence and (road.out / PROFILE_NAME).is_file():
        rules["greedy"] = bundle.scheduled("greedy", sampling=road.config.sampling).scheduler
    reports = {name: _compared(road, bundle, asked, name, rule) for name, rule in rules.items()}
    speedups = {name: report.mean.speedup for name, report in reports.items()}
    best = max(speedups, key=lambda name: speedups[name] if speedups[name] == speedups[name] else 0.0)  # nan: no token
    return {"scheduler": best, "reports": {name: plain_data(report) for name, report in reports.items()}}


def _compared(
    road: Road, bundle: Bundle, asked: Sequence[tuple[str, list[int]]], name: str, rule: Scheduler
) -> BenchReport:
    config = BenchConfig(
        max_new_tokens=max(2, road.plan.play_tokens),
        sampling=road.config.sampling,
        stop_token_ids=frozenset(bundle.chat.stop_token_ids),
    )
    pairs: list[Pair] = []
    for pair in measure(bundle.target, LookupDrafter(bundle.drafter), asked, config, scheduler=rule):
        pairs.append(pair)
        road.ledger.beat()
        road.progress.show(f"{name}: {len(pairs)} of {len(asked)} prompts", len(pairs) / len(asked))
    tolerance = near_tie_tolerance(bundle.target.info.dtype)
    return bench_report(pairs, greedy=road.config.sampling.greedy, tolerance=tolerance)


def _asked(road: Road, part: str) -> list[tuple[str, list[int]]]:
    """Domain and ids of a part's prompts, without those that leave no room for an answer in the model's context."""
    most = road.target.info.max_len - road.plan.play_tokens - 1
    prompts = read_prompts([part_path(road, part)]).values()
    asked = [(str(p.get("domain", "all")), road.chat.prompt_ids(prompt_messages(p))) for p in prompts]
    fitting = [(domain, ids) for domain, ids in asked if len(ids) <= most]
    if len(fitting) < len(asked):
        road.progress.say(f"{len(asked) - len(fitting)} of {len(asked)} prompts are over {most} tokens, and left out")
    if not fitting:
        raise DataError(f"all prompts are over {most} tokens, which leaves no room for an answer; give shorter ones")
    return fitting
