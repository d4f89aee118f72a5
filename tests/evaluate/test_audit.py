"""The parts of an audit on a table pair, and what a report concludes from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from audit_fakes import FromTable, liar
from fakes import TableDrafter, TableTarget

from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.evaluate.audit import CHANGED, TOO_WEAK, UNCHANGED, AuditReport, report_data, sampled_cases
from dspark.evaluate.audit_greedy import Spoilt, Variant, audit_greedy
from dspark.evaluate.audit_sampled import SampledConfig, SampledPart, audit_sampled
from dspark.maths.scheduling import FixedScheduler, ThresholdScheduler
from dspark.models.target import TargetOutput

TARGET = TableTarget(order=3, seed=2)
SAMPLED = SamplingParams(temperature=0.9, top_k=3)
COARSE = SampledConfig(shift=0.16, checks=2, most_trials=300)
CONTEXTS = [(1, 2, 0, 3), (1, 2, 0, 3, 1, 1, 2)]


def quiet(line: str) -> None:
    assert line


def table() -> FromTable:
    return FromTable(TableDrafter(block=3, seed=4))


def variants(drafter: Any = None) -> list[Variant]:
    drafter = drafter or table()
    return [
        Variant(name="as given", drafter=drafter),
        Variant(name="threshold", drafter=drafter, scheduler=ThresholdScheduler(0.5)),
        Variant(name="block", drafter=drafter, rule="block"),
        Variant(name="spoilt", drafter=Spoilt(drafter, 4)),
    ]


def greedy(target: Any, ways: list[Variant], **changes: Any) -> AuditReport:
    settings = {"max_new_tokens": 20, "stop_token_ids": (), "seconds": math.inf, "say": quiet}
    prompts = [(1, 2), (3, 0), (2, 2), (0, 1)]
    return AuditReport(greedy=audit_greedy(target, ways, prompts, **{**settings, **changes}))


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_outputs_agree_in_every_variant() -> None:
    report = greedy(TARGET, variants())
    assert report.verdict == UNCHANGED and report.greedy is not None
    rows = {row.variant: row for row in report.greedy.rows}
    assert rows["as given"].prompts == 4 == report.greedy.prompts_done
    assert sum(row.prompts for name, row in rows.items() if name != "as given") == 4
    assert all(row.identical == row.prompts and not row.partings for row in rows.values())
    assert rows["spoilt"].acceptance_length >= 1.0


def test_time_cuts_the_prompts_and_says_so() -> None:
    report = greedy(TARGET, variants(), seconds=-1.0)
    assert report.greedy is not None and (report.greedy.prompts_done, report.greedy.prompts) == (1, 4)


class Wavering(TableTarget):
    """Its logits depend on how many tokens share the pass, by ``amount`` on token 0."""

    amount = 0.0

    def forward(self, token_ids: Any, *arguments: Any, **options: Any) -> TargetOutput:
        output = super().forward(token_ids, *arguments, **options)
        if output.logits is None or len(token_ids) == 1:
            return output
        logits = output.logits.clone()
        logits[:, 0] += self.amount
        return TargetOutput(logits, output.features, output.final)


def test_a_parting_beyond_rounding_is_a_fault() -> None:
    target = Wavering(order=3, seed=2)
    target.amount = 3.0
    report = greedy(target, variants())
    assert report.verdict == CHANGED and any("logits apart" in fault for fault in report.faults)


def test_a_parting_at_a_near_tie_is_told_and_is_no_fault() -> None:
    target = Wavering(order=1, seed=2)
    target.states[:, 0], target.head[:2] = 5.0, 0.0
    target.head[:2, 0] = torch.tensor([1.0, 1.0 + 1e-6])  # tokens 0 and 1 are the best two, all but tied, everywhere
    target.amount = 1e-4
    report = greedy(target, variants()[:1])
    assert report.greedy is not None
    (row,) = report.greedy.rows
    assert row.near_ties > 0 and row.faults == 0 and report.verdict == UNCHANGED
    assert all(parting.gap <= report.greedy.tolerance for parting in row.partings)


# --- sampled ---------------------------------------------------------------------------------------------------------


def sampled(drafter: Any, config: SampledConfig = COARSE, **changes: Any) -> SampledPart:
    cases = sampled_cases(variants(drafter), CONTEXTS, SAMPLED, quick=True)[:1]
    return audit_sampled(TARGET, cases, config, **{"seconds": math.inf, "say": quiet, **changes})


def test_an_honest_pair_passes_and_both_flaws_are_caught() -> None:
    report = AuditReport(sampled=sampled(table()))
    assert report.verdict == UNCHANGED, (report.faults, report.weaknesses)
    part = report.sampled
    assert part is not None and [c.flaw for c in part.controls] == ["shared streams", "no residual"]
    (case,) = part.cases
    assert case.trials == case.trials_wanted <= 300 and case.checks == 2 and case.mismatches == 0
    assert case.verified > case.accepted > 0 and case.recheck == 0.0
    assert [test.tokens for test in case.tests] == [1, 2, 3]
    if case.trials < 300:
        assert max(test.detectable for test in case.tests) <= 0.16 * 1.001
    data = report_data(report)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["sampled"]["cases"][0]["tests"][2]["fit"]["cells"] > 1  # type: ignore[index,call-overload]


def test_a_lying_drafter_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.evaluate.audit_sampled.FLAWS", ())
    report = AuditReport(sampled=sampled(liar(table())))
    assert report.verdict == CHANGED and any("not distributed" in fault for fault in report.faults)


def test_certain_drafts_have_one_control() -> None:
    part = sampled(FromTable(TableDrafter(block=3, seed=4, kind="certain")), replace(COARSE, most_trials=60))
    assert [control.flaw for control in part.controls] == ["no residual"]
    assert len(part.skipped) == 1 and "shared streams" in part.skipped[0]


def test_too_few_trials_are_called_too_weak() -> None:
    report = AuditReport(sampled=sampled(table(), seconds=-1.0))
    assert report.verdict == TOO_WEAK and report.sampled is not None
    assert all(case.trials < case.trials_wanted for case in report.sampled.cases)
    assert any("not caught" in line for line in report.weaknesses)


def test_without_drafts_nothing_is_shown() -> None:
    never = [Variant(name="never", drafter=table(), scheduler=FixedScheduler(0))]
    cases = sampled_cases(never, CONTEXTS[:1], SAMPLED, quick=True)
    report = AuditReport(sampled=audit_sampled(TARGET, cases, COARSE, seconds=-1.0, say=quiet))
    assert any("no draft was ever checked" in line for line in report.weaknesses)


def test_cases_cover_every_variant_depth_and_sampling() -> None:
    quick = sampled_cases(variants(), CONTEXTS, SAMPLED, quick=True)
    assert [case.variant.name for case in quick] == ["as given", "block", "as given"]
    assert quick[2].context == CONTEXTS[1]
    full = sampled_cases(variants(), CONTEXTS, SAMPLED, quick=False)
    assert {case.variant.name for case in full} == {"as given", "threshold", "block", "spoilt"}
    assert len({case.name for case in full}) == len(full)
    assert any(case.from_prefill for case in full) and any(case.sampling.shapes_logits for case in full)
    assert any(case.sampling.top_k == 0 for case in full)
    assert full[2].setting.sampling.rule == "block" and full[2].drafts == 3


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0.0}, {"alpha": 0.5}, {"power": 1.0}, {"shift": 0.0}, {"most_trials": 0}, {"power": 1e-4}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SampledConfig(**wrong)
