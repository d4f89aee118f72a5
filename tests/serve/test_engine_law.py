"""With schedulers that look at the load, what each request writes has the target's own distribution: chi-square per
kind of request and at several depths, in batches whose members come and go.

Sample sizes are chosen to see a shift of ``SHIFT`` in total variation over the cells of any one test with a chance of
95 %, at the level that all of them share. DSPARK_LAW_TIMES multiplies them."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from engine_rig import eager_lookup
from history_rig import HistoryDrafter, HistoryTarget, marginal, unchecked

from dspark.core import SamplingParams
from dspark.evaluate.audit_stats import detectable_shift, goodness_of_fit, holm
from dspark.maths.batch_schedulers import BatchScheduler, StepDrafts
from dspark.maths.step_costs import StepCosts
from dspark.models.lookup_drafter import LookupDrafter
from dspark.serve.engine import Engine
from dspark.serve.overlapped import OverlappedEngine
from dspark.serve.request import GenerationRequest
from dspark.serve.settings import EngineConfig

ALPHA, POWER, SHIFT = 1e-3, 0.95, 0.13
TRIALS = 750 * int(os.environ.get("DSPARK_LAW_TIMES", "1"))  # of each kind
SEATS, BLOCK, LENGTH = 16, 3, 6
EARLY, LATE = slice(0, 2), slice(4, 6)
KINDS = {
    "plain": ((0, 1), SamplingParams(temperature=1.0)),
    "filtered": ((2,), SamplingParams(temperature=0.7, top_k=3, presence_penalty=0.5)),
}
TARGET = HistoryTarget(vocab_size=4, seed=3)
DRAFTER = HistoryDrafter(TARGET, block_size=BLOCK, blur=0.6)


def costs(*, step: float, draft: float) -> StepCosts:
    """Jagged, and steep enough that what pays changes with who is there."""
    tokens = np.arange(SEATS * (1 + BLOCK) + 17)
    passes = 1.0 + 0.03 * tokens + step * (tokens // 8)
    drafts = np.outer(np.arange(SEATS + 1), np.arange(BLOCK + 1)) * draft
    return StepCosts(contexts=(100,), passes=passes[None], drafts=drafts)


def engine_of(name: str) -> Engine:
    config = EngineConfig(
        seats=SEATS,
        page_size=4,
        pages=70,
        prefill_tokens=16,
        max_waiting=10**6,
        scheduler=name.partition("+")[0],
        draft_gate=name.endswith("+gate"),
        overlap=name.startswith("lagged"),
    )
    kind = OverlappedEngine if config.overlap else Engine
    drafter = LookupDrafter(DRAFTER) if name.endswith("+lookup") else DRAFTER
    dear = costs(step=0.1, draft=0.02) if config.gated else costs(step=0.2, draft=0.005)
    return kind(TARGET, drafter, config=config, costs=dear)


def outputs(engine: Engine) -> dict[str, Counter[tuple[int, ...]]]:
    """What ``TRIALS`` requests of each kind write, in order of arrival mixed, each with a seed of its own."""
    found: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    of: dict[str, list[int]] = {}
    for i in range(TRIALS):
        for j, (kind, (prompt, sampling)) in enumerate(KINDS.items()):
            seeded = SamplingParams(**{**sampling.__dict__, "seed": 2 * i + j})
            name = f"{kind}-{i}"
            of[name] = []
            found[kind].append(of[name])
            engine.add(
                GenerationRequest(request_id=name, prompt_ids=prompt, sampling=seeded, max_new_tokens=LENGTH + i % 3)
            )
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            of[event.request_id] += event.token_ids
    return {kind: Counter(tuple(tokens[:LENGTH]) for tokens in lists) for kind, lists in found.items()}


def p_values(counts: dict[str, Counter[tuple[int, ...]]]) -> list[float]:
    """Of every kind at every depth, adjusted."""
    found = []
    for kind, (prompt, sampling) in KINDS.items():
        chances = TARGET.chances(prompt, sampling, LENGTH)
        impossible = sum(count for output, count in counts[kind].items() if output not in chances)
        for part in (EARLY, LATE):
            seen: Counter[tuple[int, ...]] = Counter()
            for output, count in counts[kind].items():
                seen[output[part]] += count
            fit = goodness_of_fit(seen, marginal(chances, part), impossible=impossible)
            assert detectable_shift(fit.cells, fit.trials, alpha=ALPHA / 4, power=POWER) <= SHIFT, "too few trials"
            found.append(fit.p_value)
    return holm(found)


@pytest.mark.parametrize("name", ["greedy", "lagged", "greedy+gate", "greedy+lookup", "lagged+lookup"])
def test_each_request_has_the_targets_distribution_under_a_scheduler_that_looks_at_the_load(name: str) -> None:
    engine = engine_of(name)
    with unchecked(), eager_lookup():
        counts = outputs(engine)
    assert min(p_values(counts)) > ALPHA
    stats = engine.stats()
    if name.endswith("+lookup"):
        assert 0.1 * stats.rounds < stats.lookup_rounds < 0.9 * stats.rounds and stats.lookup_accepted > 0
    lens = stats.verify_lens
    assert min(lens[:2]) > 0.05 * sum(lens), f"the scheduler did not vary: {lens}"
    assert 0 < sum(stats.accepted_at) < sum(stats.verified_at)
    if name == "greedy+gate":
        undrafted = stats.rounds - stats.proposed_at[0]
        assert 0.02 * stats.rounds < undrafted < 0.98 * stats.rounds, f"the gate did not move: {undrafted}"


class Foreseeing:
    """A planted fault: verifies all drafts or none by the second one's confidence, which follows from the first."""

    needs_confidence = True

    def choose(self, drafts: StepDrafts) -> np.ndarray:
        return np.where(drafts.confidence[:, 1] > 0.5, drafts.proposed, 0)


def test_a_scheduler_that_looks_at_what_it_admits_is_caught() -> None:
    engine = engine_of("greedy")
    scheduler: BatchScheduler = Foreseeing()
    engine.planner.scheduler = scheduler
    with unchecked():
        counts = outputs(engine)
    assert min(p_values(counts)) < 1e-6
