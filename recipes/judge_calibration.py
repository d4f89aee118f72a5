"""Judges calibrations on rounds that they were not fitted on: another set, another domain, another temperature.

    python recipes/judge_calibration.py RECORDS CALIBRATION...

RECORDS is a folder of `dspark eval`. Every calibration is applied to every cell of it with full-length rounds of the
drafter that it is of, whatever its temperature: the expected calibration error of prefix survivals, the mean over
positions, before and after, with the error that true chances would show (floor), by domain and together.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dspark.evaluate.confidence_curves import confident_cells, outcomes_by_prompt
from dspark.evaluate.records import Cell, find_cells
from dspark.maths.calibration import RoundOutcomes, SlotQuality, judge, summarise
from dspark.schedule_files import Calibration

HEAD = "| temperature | domain | rounds | accepted | calibration | ECE | floor | conditional AUC | AUC |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("calibrations", type=Path, nargs="+")
    args = parser.parse_args()
    known = {path.stem: Calibration.read(path) for path in args.calibrations}
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|")
    for cell in confident_cells(find_cells([args.records])):
        for line in judged(cell, known):
            print(line)


def judged(cell: Cell, calibrations: dict[str, Calibration]) -> list[str]:
    """A row for every domain of a cell, and for all of it, raw and under every calibration of its drafter."""
    outcomes, _, domains = outcomes_by_prompt(cell)
    names = np.array(domains)
    lines = []
    for domain in (*dict.fromkeys(domains), "all"):
        part = outcomes if domain == "all" else outcomes.take(names == domain)
        ways: dict[str, RoundOutcomes] = {"raw": part}
        for name, each in calibrations.items():
            if each.drafter_fingerprint == cell.made_for["drafter_fingerprint"]:
                ways[name] = part.replaced(each.scaling(part.confidence))
        place = f"| {cell.temperature:g} | {domain} | {len(part)} | {part.accepted.mean():.2f}"
        lines += [f"{place} | {name} | {shown(summarise(judge(found)))} |" for name, found in ways.items()]
    return lines


def shown(quality: SlotQuality) -> str:
    return f"{quality.ece:.2%} | {quality.floor:.2%} | {quality.conditional_auc:.4f} | {quality.auc:.4f}"


if __name__ == "__main__":
    main()
