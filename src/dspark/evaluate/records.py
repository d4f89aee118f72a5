"""What an evaluation leaves on disk: every answer with every round of it, and what it was made for.

A *cell* is one drafter at one temperature; it has a folder:

    manifest.json        kind "eval-records": ``made_for`` (what a resume must match), ``about`` (drafter, sources) and
                         the provenance
    answers-<p>.jsonl    a line per answer (a turn of a conversation), written by process p in the order played

Lines are flushed one by one, so a kill loses the answer under way and nothing else. Figures are computed from these
files alone; names of a line's fields are those of :class:`AnswerRecord` and :class:`dspark.core.RoundRecord`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.artifacts import MANIFEST_NAME, append_jsonl, read_jsonl, read_manifest, write_manifest
from dspark.core import Completion, RoundRecord
from dspark.errors import ConfigError, DataError
from dspark.evaluate.suite import Conversation

KIND, VERSION = "eval-records", 1
SECONDS, CHANCES = 7, 8  # decimals kept
Key = tuple[str, str, int]  # set, prompt, turn


@dataclass(frozen=True, kw_only=True)
class AnswerRecord:
    """One answered turn. ``token_ids`` end with the stop token when ``finish_reason`` is "stop"."""

    set: str
    domain: str
    prompt: str  # its id in the set
    turn: int  # of the user, 0-based
    asked: str  # hash of the conversation's words
    seed: int  # of the answer's streams
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "context"
    prefill_seconds: float
    decode_seconds: float  # after the first token
    rounds: tuple[RoundRecord, ...] = field(repr=False)

    @property
    def key(self) -> Key:
        return self.set, self.prompt, self.turn

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token; nan where nothing came after it."""
        return (len(self.token_ids) - 1) / self.decode_seconds if self.rounds else float("nan")

    def anchors(self) -> Iterator[int]:
        """Position of each round's anchor in prompt and answer together, 0-based."""
        at = self.prompt_tokens
        for record in self.rounds:
            yield at
            at += len(record.committed)


def answer_record(
    conversation: Conversation, turn: int, *, seed: int, prompt_tokens: int, completion: Completion
) -> AnswerRecord:
    """What is kept of a finished request."""
    return AnswerRecord(
        set=conversation.set_name,
        domain=conversation.domain,
        prompt=conversation.id,
        turn=turn,
        asked=conversation.asked,
        seed=seed,
        prompt_tokens=prompt_tokens,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        prefill_seconds=completion.prefill_seconds,
        decode_seconds=completion.decode_seconds,
        rounds=completion.rounds,
    )


def to_line(record: AnswerRecord) -> dict[str, Any]:
    """A record as a line of JSON. A round's tokens are not repeated: they are a stretch of the answer's."""
    line = {name: getattr(record, name) for name in AnswerRecord.__dataclass_fields__ if name != "rounds"}
    line["token_ids"] = list(record.token_ids)
    for name in ("prefill_seconds", "decode_seconds"):
        line[name] = round(line[name], SECONDS)
    rounds = []
    for anchor, each in zip(record.anchors(), record.rounds, strict=True):
        rounds.append(
            {
                "anchor": anchor,
                "draft_tokens": list(each.draft_tokens),
                "confidence": [round(c, CHANCES) for c in each.confidence],
                "verify_len": each.verify_len,
                "accepted": each.accepted,
                "committed": len(each.committed),
                "draft_seconds": round(each.draft_seconds, SECONDS),
                "sequential_seconds": round(each.sequential_seconds, SECONDS),
                "verify_seconds": round(each.verify_seconds, SECONDS),
                "host_seconds": round(each.host_seconds, SECONDS),
                **({"looked_up": True} if each.looked_up else {}),
            }
        )
    return {**line, "rounds": rounds}


def from_line(line: Mapping[str, Any]) -> AnswerRecord:
    """The record of a line. Raises :class:`DataError` for a line that is none, or whose rounds do not add up."""
    try:
        token_ids, rounds, at = tuple(line["token_ids"]), [], 1  # the first token is the prefill's
        for each in line["rounds"]:
            if each["anchor"] != line["prompt_tokens"] + at - 1:
                raise DataError(f"a round's anchor is {each['anchor']}; the rounds before it end elsewhere")
            committed = token_ids[at : at + each["committed"]]
            at += each["committed"]
            kept = {name: value for name, value in each.items() if name != "anchor"}
            kept |= {name: tuple(each[name]) for name in ("draft_tokens", "confidence")}
            rounds.append(RoundRecord(**{**kept, "committed": committed}))
        if at != len(token_ids):
            raise DataError(f"the rounds commit {at} tokens and the answer has {len(token_ids)}")
        return AnswerRecord(**{**line, "token_ids": token_ids, "rounds": tuple(rounds)})
    except (KeyError, TypeError) as error:
        raise DataError(f"no answer of this dspark's `eval` ({type(error).__name__}: {error})") from None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter at one temperature, as its folder has it."""

    folder: Path
    made_for: Mapping[str, Any]
    about: Mapping[str, Any]
    provenance: Mapping[str, Any]
    answers: tuple[AnswerRecord, ...] = field(repr=False)

    @property
    def label(self) -> str:
        return str(self.made_for["drafter"])

    @property
    def temperature(self) -> float:
        return float(self.made_for["sampling"]["temperature"])

    @property
    def timed(self) -> bool:
        """Whether an answer's seconds are its own: nothing else shared its passes."""
        return bool(self.made_for["rows"] == 1)

    @property
    def drafts(self) -> bool:
        return bool(self.about["facts"]["block_size"])


def cell_name(label: str, temperature: float) -> str:
    """Folder of a cell: ``default-t0``, ``eagle3-t0.7``."""
    return f"{label}-t{temperature:g}"


def open_cell(folder: Path, *, made_for: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Create the folder of a cell, or check that the one there was made for the same.

    Raises :class:`ConfigError` naming every field that differs, :class:`DataError` for a folder of something else.
    """
    wanted = json.loads(json.dumps(dict(made_for)))  # as a file gives it back: lists for tuples
    if not (folder / MANIFEST_NAME).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise DataError(f"{folder} holds files but no {MANIFEST_NAME}; it is no evaluation's, name another --out")
        write_manifest(folder, KIND, VERSION, {"made_for": wanted, "about": dict(about)})
        return
    known = read_manifest(folder, KIND, VERSION).fields.get("made_for", {})
    different = [name for name in {**known, **wanted} if known.get(name) != wanted.get(name)]
    if different:
        shown = "; ".join(f"{name} {known.get(name)!r}, not {wanted.get(name)!r}" for name in different)
        raise ConfigError(f"{folder} was made for {shown}: name another --out, or run what it was made for")


@contextlib.contextmanager
def writing(out: Path, process: int, *, wait: bool) -> Iterator[None]:
    """Be the one writer of ``answers-<process>.jsonl`` in the cells of ``out``, until the block or the process ends.

    Raises :class:`ConfigError` if another process is at it, or waits for its end. Where the system has no such locks
    (Windows) nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f".lock-{process}", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"out is {out}, where another `dspark eval` is at work; wait for it, or name another"
            ) from None
        yield


def answers_path(folder: Path, process: int) -> Path:
    return folder / f"answers-{process}.jsonl"


def add_answer(folder: Path, process: int, record: AnswerRecord) -> None:
    """Append one answer to the file of ``process``, which has one writer."""
    append_jsonl(answers_path(folder, process), [to_line(record)])


def read_answers(folder: Path) -> dict[Key, AnswerRecord]:
    """Every answer of a cell, by set, prompt and turn; what a kill tore off is not there.

    An answer given twice alike (by a process that outlived its run) counts once. Raises :class:`DataError` naming the
    file for a line that is no answer, and for two different answers to one turn.
    """
    found: dict[Key, AnswerRecord] = {}
    for path in sorted(folder.glob("answers-*.jsonl")):
        for number, line in enumerate(read_jsonl(path, allow_torn_tail=True), 1):
            try:
                record = from_line(line)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
            if found.setdefault(record.key, record).token_ids != record.token_ids:
                raise DataError(f"{path}:{number}: {record.key} has another answer before; take one of the lines out")
    return found


def read_cell(folder: Path) -> Cell:
    """A cell's folder as data. Raises :class:`DataError` if it is none."""
    manifest = read_manifest(folder, KIND, VERSION)
    return Cell(
        folder=folder,
        made_for=manifest.fields["made_for"],
        about=manifest.fields["about"],
        provenance=manifest.provenance,
        answers=tuple(read_answers(folder).values()),
    )


def find_cells(folders: Sequence[Path]) -> list[Cell]:
    """The cells in ``folders``, each a cell or a folder of cells, in the order in which they were made.

    Raises :class:`DataError` for a folder without any.
    """
    cells = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
        places = [folder] if (folder / MANIFEST_NAME).is_file() else inside
        if not places:
            raise DataError(f"{folder} holds no records; `dspark eval --out {folder}` makes them")
        cells += [read_cell(place) for place in places]
    return sorted(cells, key=lambda cell: (cell.temperature, cell.about.get("order", 0), cell.label))


def plain_sampling(sampling: Any) -> dict[str, Any]:
    """Sampling parameters as JSON gives them back; the seed is the run's, not an answer's."""
    return dict(json.loads(json.dumps(asdict(sampling))))
