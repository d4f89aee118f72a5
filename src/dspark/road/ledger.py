"""What is finished, what was begun, and how much time is spent: the memory of a road that may be killed anywhere.

| file in road/  | holds                                                                                              |
|----------------|----------------------------------------------------------------------------------------------------|
| road.json      | what was asked for; another call with other wishes is refused by field                             |
| ledger.jsonl   | a line per call, per stage begun and per stage done with its facts; only ever appended to          |
| spent.json     | seconds worked so far, and the steps that training is planned to have; replaced every few seconds  |
| lock           | held by the process that works here; the system lets go of it when that process dies               |
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.artifacts import append_jsonl, provenance, read_json, read_jsonl, write_json
from dspark.errors import ConfigError, DataError
from dspark.numbers import json_data
from dspark.road.budget import Budget

VERSION = 1
BEAT_SECONDS = 2.0
Facts = dict[str, Any]  # Any: whatever JSON holds


class Ledger:
    """The books of one road, kept by one process at a time (:func:`locked`)."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], budget: Budget) -> None:
        """Begin in ``folder``, or go on with what was begun there; ``budget`` is told what earlier calls spent.

        Raises :class:`ConfigError` naming a setting that differs from what the road was begun with.
        """
        self.folder, self.budget = folder, budget
        self.done: dict[str, Facts] = {}
        self.begun: dict[str, float] = {}  # stage -> seconds spent when it first began
        self.note: Facts = {}
        self._beaten = 0.0
        self._claim(settings)
        self._read()
        self._append({"event": "call", "spent": budget.spent, "budget": budget.seconds, "provenance": provenance()})

    def begin(self, stage: str) -> bool:
        """Note that ``stage`` begins; returns whether an earlier call had begun it and not come to its end."""
        before = stage in self.begun
        if not before:
            self.begun[stage] = self.budget.spent
            self._append({"event": "begun", "stage": stage, "spent": self.begun[stage]})
        return before

    def finish(self, stage: str, facts: Mapping[str, Any]) -> None:
        """Note that ``stage`` is done; its result must be on the disk by now."""
        self._append({"event": "done", "stage": stage, "spent": self.budget.spent, "facts": dict(facts)})
        self.done[stage] = json_data(facts)  # as a later call reads it
        self.beat(force=True)

    def beat(self, *, force: bool = False, **note: Any) -> None:
        """Write down the time spent, at most every two seconds unless ``note`` has something new to remember."""
        changed = {**self.note, **note} != self.note
        spent = self.budget.spent
        if force or changed or spent - self._beaten >= BEAT_SECONDS:
            self.note |= note
            write_json(self.folder / "spent.json", {"seconds": spent, **self.note})
            self._beaten = spent

    def _claim(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / "road.json"
        ours = json.loads(json.dumps(dict(settings)))
        if path.is_file():
            content = _read_object(path)
            if content.get("version") != VERSION:
                raise DataError(f"{path} is of version {content.get('version')!r}, this dspark writes {VERSION}")
            theirs = content["settings"]
            for name in ours:
                if theirs.get(name) != ours[name]:
                    raise ConfigError(
                        f"{name} is {ours[name]!r}, but {self.folder.parent} was begun with {theirs.get(name)!r}; give "
                        "the same again, or choose another --out"
                    )
            return
        write_json(path, {"version": VERSION, "settings": ours})

    def _read(self) -> None:
        path = self.folder / "ledger.jsonl"
        for row in read_jsonl(path, allow_torn_tail=True) if path.is_file() else ():
            if row.get("event") == "begun":
                self.begun.setdefault(row["stage"], row["spent"])
            elif row.get("event") == "done":
                self.done[row["stage"]] = row["facts"]
        spent = self.folder / "spent.json"
        if spent.is_file():
            note = _read_object(spent)
            self.budget.spent_before += note.pop("seconds")
            self.note = note
        self._beaten = self.budget.spent

    def _append(self, row: Mapping[str, Any]) -> None:
        append_jsonl(self.folder / "ledger.jsonl", [json_data(row)])


def _read_object(path: Path) -> Facts:
    return read_json(path, remedy="choose another --out")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; raises :class:`ConfigError` if another one works there.

    Where the system has no such locks (Windows) nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"out is {folder.parent}, where another `dspark accelerate` is at work; wait for it, or choose another"
            ) from None
        yield
    finally:
        os.close(handle)
