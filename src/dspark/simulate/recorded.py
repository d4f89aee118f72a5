"""From the records of ``dspark eval`` to rounds that a simulation can replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark.artifacts import read_jsonl, read_manifest
from dspark.errors import DataError
from dspark.maths.platt import Scaling
from dspark.simulate.acceptance import RecordedRounds

KIND, VERSION, PATTERN = "eval-records", 1, "answers-*.jsonl"  # of a folder of records


def read_records(
    folder: Path | str,
    *,
    sets: Sequence[str] = (),
    scaling: Scaling | None = None,
) -> RecordedRounds:
    """The full-length rounds of a folder that ``dspark eval`` wrote, an answer being one request.

    ``sets`` limits them to the sets of these names. ``scaling`` makes the recorded, raw confidences true. A
    round whose end an answer's stop token or length limit cut off is left out: nobody knows what would have become of
    its drafts. Raises :class:`DataError` for a round that a scheduler cut, a set that is not there, or a field missing.
    """
    folder = Path(folder)
    about = read_manifest(folder, KIND, VERSION).fields.get("about", {})
    answers = [answer for answer in _answers(folder) if not sets or answer["set"] in sets]
    if missing := set(sets) - {answer["set"] for answer in answers}:
        raise DataError(f"{folder} holds no answers of the set {', '.join(sorted(missing))}")
    played = [rounds for answer in answers if (rounds := _judged(folder, answer["rounds"]))]
    rounds = [each for answer in played for each in answer]
    block = max((len(each["draft_tokens"]) for each in rounds), default=0)
    if not block:
        raise DataError(f"{folder} holds no round that drafted; give prompts to dspark eval, and a drafter")
    with_confidence = all(len(each["confidence"]) == len(each["draft_tokens"]) for each in rounds)
    confidence = np.zeros((len(rounds), block))
    for row, each in zip(confidence, rounds, strict=True):
        if with_confidence:
            row[: len(each["confidence"])] = each["confidence"]
    proposed = np.array([len(each["draft_tokens"]) for each in rounds])
    if scaling is not None and with_confidence:
        confidence = _calibrated(confidence, scaling) * (np.arange(block) < proposed[:, None])
    return RecordedRounds(
        confidence=confidence,
        proposed=proposed,
        accepted=np.array([each["accepted"] for each in rounds]),
        starts=np.cumsum([0, *(len(answer) for answer in played[:-1])]),
        has_confidence=with_confidence,
        description={
            "folder": str(folder),
            "drafter": about.get("drafter_spec"),
            "model": about.get("model"),
            "sets": sorted({answer["set"] for answer in answers}),
            "calibrated": scaling is not None,
        },
    )


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Answers of all files, in the order of files and lines; a line that a kill tore is passed over."""
    for path in sorted(folder.glob(PATTERN)):
        for number, answer in enumerate(read_jsonl(path, allow_torn_tail=True), start=1):
            if not isinstance(answer.get("set"), str) or not isinstance(answer.get("rounds"), list):
                raise DataError(f"{path}:{number}: an answer of {KIND} has a set and a list of rounds")
            yield answer


def _judged(folder: Path, rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rounds of an answer whose drafts all met their fate. Those without drafts stay: a lookup found nothing then."""
    kept = []
    for number, record in enumerate(rounds, start=1):
        try:
            proposed, accepted = len(record["draft_tokens"]), record["accepted"]
            committed, checked, _ = record["committed"], record["verify_len"], record["confidence"]
        except (KeyError, TypeError) as error:
            raise DataError(f"{folder}: a round lacks {error}; make the records again with this dspark") from None
        if checked < proposed:
            raise DataError(
                f"{folder}: a round checked {checked} of {proposed} drafts; record whole blocks, with --scheduler fixed"
            )
        ended = committed == accepted or (number == len(rounds) and not proposed)  # the answer did, within this round
        if not ended:
            kept.append(record)
    return kept


def _calibrated(confidence: Float[np.ndarray, "rounds block"], scaling: Scaling) -> Float[np.ndarray, "rounds block"]:
    block = confidence.shape[1]
    if len(scaling.biases) < block:
        raise DataError(
            f"the calibration has {len(scaling.biases)} temperatures and the records have blocks of {block}; "
            "calibrate this drafter"
        )
    return scaling(confidence)
