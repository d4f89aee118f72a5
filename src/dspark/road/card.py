"""What a finished road says of itself: report.json with every figure, README.md as the drafter's card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.artifacts import atomic_write_text, provenance, write_json
from dspark.numbers import clock_text, number_text
from dspark.road.ledger import Facts
from dspark.road.road import Road

REPORT_NAME, CARD_NAME = "report.json", "README.md"


def write_result(road: Road, compared: Facts) -> None:
    """Write report and card into the road's folder."""
    stages = {**road.ledger.done, "compare": compared}
    report: Facts = {
        "kind": "accelerate",
        "version": 1,
        "model": road.config.model,
        "settings": road.config.settings(""),
        "seconds": round(road.budget.spent, 1),
        "stages": stages,
        "provenance": provenance(),
    }
    write_json(road.out / REPORT_NAME, report)
    atomic_write_text(road.out / CARD_NAME, card(road, stages, report["provenance"]))


def card(road: Road, stages: dict[str, Facts], origin: dict[str, Any]) -> str:
    """The model card."""
    compared, trained, prompts, answers = (stages[name] for name in ("compare", "train", "prompts", "answers"))
    figures = compared["reports"][compared["scheduler"]]
    fields, spent = trained["fields"], clock_text(road.budget.spent)
    source = "that the model wrote itself" if road.config.prompts is None else f"of {road.config.prompts}"
    name = Path(road.config.model).name
    return f"""# DSpark drafter for {name}

Proposes {fields["block_size"]} tokens a round to {road.config.model}, which checks them in one pass; the output stays
the model's own. Made by `{origin["command"]}`.

    dspark generate "..." --model {road.config.model} --drafter THIS_FOLDER --scheduler {compared["scheduler"]}
    dspark bench --model {road.config.model} --drafter THIS_FOLDER --scheduler {compared["scheduler"]}

## Before and after

{prompts["compare"]} held-out prompts, temperature {road.config.temperature:g}, up to {road.plan.play_tokens} tokens, \
with and without drafts in turn, medians; scheduler `{compared["scheduler"]}`.

| domain | speedup | acceptance length | tokens/s | undrafted | identical |
|---|---|---|---|---|---|
{_rows(figures)}
{_advice(figures)}
## How it was made

| | |
|---|---|
| data | {answers["answers"]} answers ({answers["tokens"]} tokens) of the model at temperature 0.8 to \
{prompts["training"]} prompts {source} |
| drafter | {fields["layers"]} layers, block {fields["block_size"]}, Markov rank {fields["markov_rank"]}, start: \
{fields["initialise"]} |
| training | {trained["steps"]} steps; {trained["held_out_samples"]} samples held out |
| calibration | {_calibration(stages["calibrate"])} |
| time | {spent} of {clock_text(road.config.budget)} on {origin["accelerator"] or origin["cpu"]}, \
{origin["threads"]} threads, {origin["date"]} |
| dspark | {origin["dspark"]}, commit {origin["git_commit"] or "unknown"} |

`report.json` has every figure, `road/` the prompts, the answers and the training run.
"""


def _rows(figures: dict[str, Any]) -> str:
    rows = [*figures["domains"].items(), ("mean", figures["mean"])]
    lines = []
    for name, found in rows:
        numbers = [number_text(found["speedup"]), number_text(found["acceptance_length"])]
        numbers += [number_text(found[key], ".1f") for key in ("tokens_per_second", "plain_tokens_per_second")]
        lines.append(f"| {' | '.join([name, *numbers, _same(found['identical'])])} |\n")
    return "".join(lines)


def _same(agreement: dict[str, Any] | None) -> str:
    if agreement is None:
        return "sampled"
    ties = f", {agreement['near_ties']} part at a near-tie" if agreement["near_ties"] else ""
    return f"{agreement['count']} of {agreement['total']}{ties}"


def _advice(figures: dict[str, Any]) -> str:
    speedup = figures["mean"]["speedup"]
    if speedup is not None and speedup >= 1.0:
        return ""
    return "\nDrafting does not pay here: decode this model without it (`--drafter none`), or give more time.\n"


def _calibration(facts: Facts) -> str:
    if not facts["calibrated"]:
        return f"none: {facts['reason']}"
    before, after = (number_text(100 * facts[name]["ece"]) for name in ("before", "after"))
    return f"ECE {before} % before and {after} % after, on {facts['held_out_rounds']} held-out rounds"
