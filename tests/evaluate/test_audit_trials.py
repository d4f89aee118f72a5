"""Trials from a fork equal plain runs of the loop, and the exact law is the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from audit_fakes import FromTable, liar
from fakes import TableDrafter, TableTarget, target_chain

import dspark.decode as loop
from dspark.core import SamplingParams
from dspark.evaluate import audit_fork
from dspark.evaluate.audit_flaws import FLAWS, broken
from dspark.evaluate.audit_fork import Fork, TrialSetting
from dspark.evaluate.audit_law import exact_law
from dspark.evaluate.audit_stats import goodness_of_fit
from dspark.evaluate.audit_trials import Trials, plain_trial
from dspark.maths.rejection import verify
from dspark.maths.sampling import RequestStreams
from dspark.maths.scheduling import FixedScheduler, ThresholdScheduler
from dspark.models.ngram import NgramDrafter

SAMPLED = SamplingParams(temperature=0.9, top_k=3)


def setting(**changes: Any) -> TrialSetting:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2, 0),
        "anchor": 3,
        "sampling": SAMPLED,
        "scheduler": FixedScheduler(),
        "drafts": 3,
        "length": 3,
    }
    return TrialSetting(**{**fields, **changes})


def table(kind: str = "dense") -> FromTable:
    return FromTable(TableDrafter(block=3, kind=kind, seed=4))


SETTINGS = {
    "fixed": setting(),
    "from the prefill": setting(anchor=None),
    "threshold": setting(scheduler=ThresholdScheduler(0.5)),
    "block rule": setting(sampling=replace(SAMPLED, rule="block")),
    "penalties": setting(sampling=replace(SAMPLED, repetition_penalty=1.5, presence_penalty=0.3)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["dense", "candidates", "certain"])
def test_trials_from_a_fork_are_plain_runs_of_the_loop(name: str, kind: str) -> None:
    target, drafter = TableTarget(order=3, seed=2), table(kind)
    trials = Trials(target, drafter, SETTINGS[name])
    assert trials.run(range(12)) == [plain_trial(target, drafter, SETTINGS[name], seed) for seed in range(12)]
    assert trials.drafter.certain == (kind == "certain")


def test_ngram_state_is_copied_for_every_trial() -> None:
    target, drafter = TableTarget(order=2), NgramDrafter(min_match=1)
    wanted = setting(prompt_ids=(1, 2, 3, 1, 2, 3, 1, 2))
    found = Trials(target, drafter, wanted).run(range(20))
    assert found == [plain_trial(target, drafter, wanted, seed) for seed in range(20)]
    assert any(trial.verified for trial in found)


def test_few_passes_serve_many_trials() -> None:
    passes = 0

    class Counting(TableTarget):
        def forward(self, *args: Any, **options: Any) -> Any:
            nonlocal passes
            passes += 1
            return super().forward(*args, **options)

    Trials(Counting(order=3), table(), setting()).run(range(40))
    assert passes < 20


def test_what_is_forgotten_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = TableTarget(order=3), table()
    expected = Trials(target, drafter, setting()).run(range(20))
    monkeypatch.setattr(audit_fork, "MEMORY_BYTES", 1)
    trials = Trials(target, drafter, setting())
    assert trials.wave == 2 and trials.fork.rows == 1
    assert trials.run(range(20)) == expected and len(trials.fork.known) <= trials.fork.capacity


@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_is_the_targets(name: str) -> None:
    target, wanted = TableTarget(order=3, seed=2), SETTINGS[name]
    law = exact_law(Fork(target, wanted), wanted, floor=0.0)
    if not wanted.sampling.shapes_logits:
        prefix = (*wanted.prompt_ids, *wanted.given)
        chain = target_chain(prefix, lambda tail: target.next_probs(tail, wanted.sampling), 3)
        for k, level in enumerate(law.levels, start=1):
            marginal = chain.sum(tuple(range(k, 3))) if k < 3 else chain
            for outcome, chance in level.items():
                assert chance == pytest.approx(marginal[outcome], abs=1e-6)
    assert all(sum(level.values()) == pytest.approx(1.0) for level in law.levels)
    assert law.allows(max(law.levels[2], key=law.levels[2].__getitem__))
    first = next(t for t in range(4) if (t,) not in law.levels[0])
    assert not law.allows((first, 0, 0))


def test_a_floor_prunes_and_keeps_the_rest_as_it_is() -> None:
    target, wanted = TableTarget(order=3, seed=2), setting(sampling=SamplingParams(temperature=1.0))
    full = exact_law(Fork(target, wanted), wanted, floor=0.0)
    pruned = exact_law(Fork(target, wanted), wanted, floor=0.02)
    for whole, part in zip(full.levels, pruned.levels, strict=True):
        assert part == pytest.approx({o: p for o, p in whole.items() if p >= 0.02})


def test_recheck_sees_a_spoilt_row() -> None:
    fork = Fork(TableTarget(order=3), setting())
    assert fork.recheck((3, 1)) == 0.0
    fork.memory.keys[0][:, 0, 1:3] = (fork.memory.keys[0][:, 0, 1:3] + 1) % 4
    assert fork.recheck((3,)) > 1e-3


def p_value(drafter: Any, wanted: TrialSetting, trials: int = 200) -> float:
    engine = Trials(TableTarget(order=3, seed=2), drafter, wanted)
    law = exact_law(engine.fork, wanted, floor=0.0)
    counts, impossible = law.count([trial.outcome for trial in engine.run(range(trials))], 2)
    return goodness_of_fit(counts, law.levels[1], impossible=impossible).p_value


@pytest.mark.parametrize("name", ["block rule", "penalties"])
def test_honest_loops_fit(name: str) -> None:
    assert p_value(table(), SETTINGS[name]) > 1e-3


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.name)
def test_every_flaw_is_caught_and_leaves_nothing_behind(flaw: Any) -> None:
    with broken(flaw):
        assert p_value(table(), setting()) < 1e-6
    assert (loop.RequestStreams, loop.verify) == (RequestStreams, verify)


def test_a_drafter_that_reports_another_distribution_is_caught() -> None:
    assert p_value(liar(table()), setting()) < 1e-4


def test_features_and_vocabulary_keep_their_shapes() -> None:
    fork = Fork(TableTarget(order=2), setting(), taps=(1, 3))
    fork.learn([(3, 1, 2), (3, 1)])
    output = fork.recall((3, 1, 2), 2)
    assert output.features is not None and output.features.shape == (2, 12)
    assert output.logits is not None and output.logits.shape == (2, 4) and output.final.shape == (2, 6)
    assert torch.allclose(output.logits, output.final @ fork.target.head_weight().T)
