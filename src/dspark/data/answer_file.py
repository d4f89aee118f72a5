"""An answers file that survives kills: lines are added one by one, and a run goes on by (prompt id, sample).

| file                          | holds                                                                             |
|-------------------------------|-----------------------------------------------------------------------------------|
| answers.jsonl                 | a line per finished answer, in the order in which they ended                      |
| answers.jsonl.manifest.json   | how they were drawn, from which prompts, and the provenance of the run that began |

Lines are never counted: the order is arbitrary, and a count would lose and duplicate answers (DeepSpec's regeneration).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.artifacts import append_jsonl, atomic_write_text, provenance, read_jsonl
from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.data.answers import Answer
from dspark.errors import ConfigError, DataError

KIND, VERSION = "answers", 1

Fields = dict[str, Any]  # Any: whatever JSON holds
Prompts = Mapping[str, Mapping[str, Any]]


def answer_settings(model: str, chat: ChatFormat, sampling: SamplingParams, *, max_new_tokens: int) -> Fields:
    """All that decides which answers a prompt gets; a file holds answers of one setting only."""
    template = json.dumps(getattr(chat.tokenizer, "chat_template", None), sort_keys=True)
    return {
        "model": model,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_new_tokens": max_new_tokens,
        "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "stop_token_ids": list(chat.stop_token_ids),
    }


class AnswerFile:
    """Answers on disk, to be added to by one process at a time. ``done`` holds the (prompt id, sample) of every
    line."""

    def __init__(self, path: Path | str, settings: Mapping[str, Any], prompts: Prompts) -> None:
        """Begin a file, or go on with one that was begun with the same ``settings`` and prompts.

        ``prompts`` may have grown at the end. A last line that a kill has torn counts as not written. Raises
        :class:`ConfigError` naming the setting that differs, and :class:`DataError` for a file that is not ours.
        """
        self.path = Path(path)
        self.manifest_path = self.path.with_name(self.path.name + ".manifest.json")
        self.done: set[tuple[str, int]] = set()
        begun = self.path.exists() and self.path.stat().st_size > 0
        before = self._read_manifest() if begun else None
        if before is not None:
            self._check(before, settings, prompts)
            self._read_done()
        wanted = {**settings, "prompts": {"count": len(prompts), "sha256": _prompts_sha256(prompts, len(prompts))}}
        if wanted != before:
            content = {"kind": KIND, "version": VERSION, "fields": wanted, "provenance": provenance()}
            atomic_write_text(self.manifest_path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def add(self, answer: Answer, chat: ChatFormat) -> None:
        """Append one answer and flush it to the disk."""
        append_jsonl(self.path, [answer.row(chat)])
        self.done.add((answer.job.id, answer.job.sample))

    def _read_manifest(self) -> Fields:
        """The fields of the manifest that must lie beside the file."""
        path, remedy = self.manifest_path, "choose another file for the answers"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"out is {self.path}, which exists without {path.name}, so how its lines were made is unknown; {remedy}"
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path} is unreadable ({error}); {remedy}") from None
        if not isinstance(content, dict) or (content.get("kind"), content.get("version")) != (KIND, VERSION):
            raise DataError(f"{path} is not the manifest of {KIND} version {VERSION}; {remedy}")
        fields = content.get("fields")
        prompts = fields.get("prompts") if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or not isinstance(prompts, dict) or not isinstance(prompts.get("count"), int):
            raise DataError(f"{path} lacks its fields; {remedy}")
        return fields

    def _check(self, before: Fields, settings: Mapping[str, Any], prompts: Prompts) -> None:
        """Refuse to mix: another setting, or other prompts under the same ids, which would be skipped as answered."""
        for name, value in settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{name} is {value!r}, but {self.path} was begun with {before.get(name)!r}; "
                    "give the same value, or choose another file"
                )
        count = before["prompts"]["count"]
        if len(prompts) < count:
            raise ConfigError(
                f"prompts are {len(prompts)}, but {self.path} was begun with {count}; give all of them (and a limit), "
                "or choose another file"
            )
        if _prompts_sha256(prompts, count) != before["prompts"].get("sha256"):
            raise ConfigError(
                f"prompts: the first {count} are not those that {self.path} was begun with; add new ones at the end, "
                "or choose another file"
            )

    def _read_done(self) -> None:
        for number, row in enumerate(read_jsonl(self.path, allow_torn_tail=True), 1):
            key = (row.get("id"), row.get("sample"))
            if not isinstance(key[0], str) or not isinstance(key[1], int):
                raise DataError(f"{self.path}:{number}: an answer needs a string `id` and a whole number `sample`")
            self.done.add((key[0], key[1]))


def _prompts_sha256(prompts: Prompts, count: int) -> str:
    """Hash of the first ``count`` prompts as they are answered: ids and first turns, in order."""
    digest = hashlib.sha256()
    for key in list(prompts)[:count]:
        digest.update(json.dumps([key, prompts[key]["turns"][0]]).encode() + b"\n")
    return digest.hexdigest()
