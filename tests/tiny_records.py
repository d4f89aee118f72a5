"""Records of evaluations that never ran: answers from chosen accepted lengths, and cells of them on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.core import RoundRecord
from dspark.evaluate.records import AnswerRecord, Cell, add_answer, cell_name, open_cell, read_cell

SECONDS = {"draft": 0.003, "sequential": 0.001, "verify": 0.02, "host": 0.0005}


def round_of(accepted: int, block: int, *, confidence: Sequence[float] = (), slow: float = 1.0) -> RoundRecord:
    """A full-length round with ``accepted`` drafts and a bonus token."""
    return RoundRecord(
        draft_tokens=tuple(range(10, 10 + block)),
        confidence=tuple(confidence),
        verify_len=block,
        accepted=accepted,
        committed=(*range(10, 10 + accepted), 7),
        draft_seconds=slow * SECONDS["draft"] if block else 0.0,
        sequential_seconds=slow * SECONDS["sequential"] if block else 0.0,
        verify_seconds=slow * SECONDS["verify"],
        host_seconds=slow * SECONDS["host"],
    )


def answer_of(
    rounds: Iterable[RoundRecord], *, name: str = "gsm8k", domain: str = "math", prompt: str = "p0", turn: int = 0
) -> AnswerRecord:
    """An answer of these rounds after a prompt of five tokens."""
    rounds = tuple(rounds)
    return AnswerRecord(
        set=name,
        domain=domain,
        prompt=prompt,
        turn=turn,
        asked=f"hash of {prompt}",
        seed=1,
        prompt_tokens=5,
        token_ids=(3, *(token for r in rounds for token in r.committed)),
        finish_reason="length",
        prefill_seconds=0.05,
        decode_seconds=sum(r.draft_seconds + r.verify_seconds + r.host_seconds for r in rounds),
        rounds=rounds,
    )


def made_for(label: str, temperature: float, **changes: Any) -> dict[str, Any]:
    return {
        "drafter": label,
        "sampling": {"temperature": temperature, "seed": 0},
        "rows": 1,
        "processes": 1,
        "threads": 1,
        "dtype": "float32",
        "device": "cpu",
        "max_new_tokens": 64,
        **changes,
    }


def facts(kind: str, block: int, **changes: Any) -> dict[str, Any]:
    base = {
        "kind": kind,
        "block_size": block,
        "layers": 2,
        "head": None,
        "rank": 0,
        "taps": [],
        "has_confidence": False,
    }
    return {**base, **changes}


def save_cell(
    out: Path, label: str, temperature: float, answers: Iterable[AnswerRecord], *, about: dict[str, Any], order: int = 0
) -> Cell:
    """Write a cell as `dspark eval` does, and read it back."""
    folder = out / cell_name(label, temperature)
    open_cell(
        folder,
        made_for=made_for(label, temperature),
        about={"model": "tiny", "drafter_spec": label, "prompts": ["x.jsonl"], "order": order, "facts": about},
    )
    for answer in answers:
        add_answer(folder, 0, answer)
    return read_cell(folder)


def drawn_rounds(
    random: np.random.Generator, count: int, chances: Sequence[float], *, confident: bool = False, sharp: float = 1.0
) -> list[RoundRecord]:
    """Rounds whose draft k survives with about ``chances[k]``, each round easier or harder than the next.

    ``confident``: the drafter says these chances, its logits ``sharp`` times what they should be.
    """
    rounds = []
    for _ in range(count):
        ease = random.normal(0.0, 1.0)
        logits = [np.log(c / (1 - c)) + ease for c in chances]
        true = [1 / (1 + np.exp(-z)) for z in logits]
        accepted = next((k for k, c in enumerate(true) if random.random() >= c), len(chances))
        said = [float(1 / (1 + np.exp(-sharp * z))) for z in logits] if confident else ()
        rounds.append(round_of(accepted, len(chances), confidence=said))
    return rounds
