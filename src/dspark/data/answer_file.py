"""An answers file that survives kills: lines are added one by one, and a run goes on by (prompt id, sample, turn).

| file                          | holds                                                                             |
|-------------------------------|-----------------------------------------------------------------------------------|
| answers.jsonl                 | a line per finished answer, in the order in which they ended                      |
| answers.jsonl.manifest.json   | how they were drawn, from which prompts, and the provenance of the run that began |

Lines are never counted: the order is arbitrary, and a count would lose and duplicate answers (DeepSpec's regeneration).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dspark.artifacts import append_jsonl, provenance, read_json, read_jsonl, write_json
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import Answer, PastTurn
from dspark.errors import ConfigError, DataError

KIND, VERSION = "answers", 1
REMEDY = "choose another file for the answers"

Fields = dict[str, Any]  # Any: whatever JSON holds
Prompts = Mapping[str, Mapping[str, Any]]


# what a manifest written before these settings existed stands for
OLDER = {"drawn_by": "dspark", "turns": 1, "template_options": {}}
OF_THE_TEMPLATE = ("template_sha256", "template_options", "stop_token_ids")


def answer_settings(
    model: str,
    chat: ChatFormat,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    turns: int = 1,
    drawn_by: str = "dspark",
) -> Fields:
    """All that decides which answers a prompt gets; a file holds answers of one setting only.

    ``drawn_by`` is "dspark" for our own sampler, else the name under which a server knows the model.
    """
    return {
        "model": model,
        "drawn_by": drawn_by,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_new_tokens": max_new_tokens,
        "turns": turns,
        **template_settings(chat),
    }


def template_settings(chat: ChatFormat) -> Fields:
    """What training must have in common with the answers it reads."""
    template = json.dumps(getattr(chat.tokenizer, "chat_template", None), sort_keys=True)
    return {
        "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "template_options": dict(chat.template_options),
        "stop_token_ids": list(chat.stop_token_ids),
    }


def manifest_path(path: Path | str) -> Path:
    """Where an answers file keeps its manifest."""
    path = Path(path)
    return path.with_name(path.name + ".manifest.json")


def template_options_of(paths: Iterable[Path | str]) -> Fields:
    """The chat template's options (thinking on or off) that answers were made with, from their manifests.

    A file without a manifest says nothing. Raises :class:`ConfigError` if two files differ.
    """
    found: Fields | None = None
    for path in map(Path, paths):
        if not manifest_path(path).is_file():
            continue
        options = _manifest_fields(path).get("template_options", {})
        if found is not None and options != found:
            raise ConfigError(f"answers: {path} was made with template_options {options}, another file with {found}")
        found = options
    return found or {}


def check_template(paths: Iterable[Path | str], chat: ChatFormat) -> None:
    """Raise :class:`ConfigError` if answers were made with another template, other options or stop tokens than ``chat``
    has; a drafter trained on them would draft for a model that nobody runs.

    A file without a manifest (answers of other origin) cannot be checked, and passes.
    """
    ours = template_settings(chat)
    for path in map(Path, paths):
        if not manifest_path(path).is_file():
            continue
        theirs = _manifest_fields(path)
        for name in OF_THE_TEMPLATE:
            if (before := theirs.get(name, OLDER.get(name))) != ours[name]:
                raise ConfigError(
                    f"{name} is {ours[name]!r}, but the answers in {path} were made with {before!r}; use the same "
                    "model and template, or make the answers again"
                )


class AnswerFile:
    """Answers on disk, to be added to by one process at a time. ``history`` holds the answered turns of every
    (prompt id, sample), in the order of the turns."""

    def __init__(self, path: Path | str, settings: Mapping[str, Any], prompts: Prompts) -> None:
        """Begin a file, or go on with one that was begun with the same ``settings`` and prompts.

        ``prompts`` may have grown at the end, and ``turns`` may grow. A last line that a kill has torn counts as not
        written. Raises :class:`ConfigError` naming the setting that differs, and :class:`DataError` for a file that is
        not ours.
        """
        self.path = Path(path)
        self.manifest_path = manifest_path(path)
        self.history: dict[tuple[str, int], list[PastTurn]] = {}
        begun = self.path.exists() and self.path.stat().st_size > 0
        before = self._read_manifest() if begun else None
        if before is not None:
            self._check(before, settings, prompts)
            self._read_history()
        turns = settings.get("turns", 1)
        asked = {"count": len(prompts), "sha256": _prompts_sha256(prompts, len(prompts), turns)}
        wanted = {**settings, "prompts": asked}
        if wanted != before:
            content = {"kind": KIND, "version": VERSION, "fields": wanted, "provenance": provenance()}
            write_json(self.manifest_path, content)

    @property
    def answers(self) -> int:
        """Number of answers in the file."""
        return sum(map(len, self.history.values()))

    def add(self, answer: Answer, chat: ChatFormat) -> None:
        """Append one answer and flush it to the disk. Raises :class:`DataError` for a turn that is not the next."""
        job = answer.job
        past = self.history.get((job.id, job.sample), [])
        if job.turn != len(past):
            raise DataError(f"turn {job.turn} of {job.id!r} is answered, but it has {len(past)} turns so far")
        row = answer.row(chat)
        append_jsonl(self.path, [row])
        self.history[job.id, job.sample] = [*past, _past_turn(row)]

    def _read_manifest(self) -> Fields:
        """The fields of the manifest that must lie beside the file."""
        if not self.manifest_path.is_file():
            raise ConfigError(
                f"out is {self.path}, which exists without {self.manifest_path.name}, so how its lines were made is "
                f"unknown; {REMEDY}"
            )
        return _manifest_fields(self.path)

    def _check(self, before: Fields, settings: Mapping[str, Any], prompts: Prompts) -> None:
        """Refuse to mix: another setting, or other prompts under the same ids, which would be skipped as answered."""
        for name, value in settings.items():
            if name == "turns" and value > before.get(name, OLDER[name]):
                continue
            if before.get(name, OLDER.get(name)) != value:
                raise ConfigError(
                    f"{name} is {value!r}, but {self.path} was begun with {before.get(name, OLDER.get(name))!r}; "
                    "give the same value, or choose another file"
                )
        count = before["prompts"]["count"]
        if len(prompts) < count:
            raise ConfigError(
                f"prompts are {len(prompts)}, but {self.path} was begun with {count}; give all of them (and a limit), "
                "or choose another file"
            )
        if _prompts_sha256(prompts, count, before.get("turns", 1)) != before["prompts"].get("sha256"):
            raise ConfigError(
                f"prompts: the first {count} are not those that {self.path} was begun with; add new ones at the end, "
                "or choose another file"
            )

    def _read_history(self) -> None:
        found: dict[tuple[str, int], dict[int, PastTurn]] = {}
        for number, row in enumerate(read_jsonl(self.path, allow_torn_tail=True), 1):
            key, sample, turn = row.get("id"), row.get("sample"), row.get("turn", 0)
            if not isinstance(key, str) or not isinstance(sample, int) or not isinstance(turn, int):
                raise DataError(f"{self.path}:{number}: an answer needs a string `id` and a whole number `sample`")
            turns = found.setdefault((key, sample), {})
            if turn in turns:
                raise DataError(f"{self.path}:{number}: turn {turn} of {key!r}, sample {sample}, is answered twice")
            turns[turn] = _past_turn(row)
        for (key, sample), turns in found.items():
            if sorted(turns) != list(range(len(turns))):
                raise DataError(
                    f"{self.path}: {key!r}, sample {sample}, has answers to the turns {sorted(turns)} and not to those "
                    f"before; {REMEDY}"
                )
            self.history[key, sample] = [turns[turn] for turn in range(len(turns))]


def _past_turn(row: Mapping[str, Any]) -> PastTurn:
    return PastTurn(answer=str(row.get("answer", "")), finished=row.get("finish_reason") == "stop")


def _manifest_fields(answers: Path) -> Fields:
    """The fields of an answers file's manifest, which must be there."""
    path = manifest_path(answers)
    content = read_json(path, remedy=REMEDY)
    if (content.get("kind"), content.get("version")) != (KIND, VERSION):
        raise DataError(f"{path} is not the manifest of {KIND} version {VERSION}; {REMEDY}")
    fields = content.get("fields")
    prompts = fields.get("prompts") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(prompts, dict) or not isinstance(prompts.get("count"), int):
        raise DataError(f"{path} lacks its fields; {REMEDY}")
    return fields


def _prompts_sha256(prompts: Prompts, count: int, turns: int) -> str:
    """Hash of the first ``count`` prompts as they are answered: ids, turns and system texts, in order."""
    digest = hashlib.sha256()
    for key in list(prompts)[:count]:
        asked, system = prompts[key]["turns"][:turns], prompts[key].get("system")
        plain = len(asked) == 1 and not system  # hashed as ever, so that files of older versions go on
        digest.update(json.dumps([key, asked[0]] if plain else [key, asked, system]).encode() + b"\n")
    return digest.hexdigest()
