"""The ``prompts`` verb: prompts of any shape, from files, the Hub, or the model itself, become one clean file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dspark.artifacts import atomic_write_text, read_jsonl
from dspark.chat import ChatFormat
from dspark.data.near_duplicates import NearDuplicates, OverlapFilter
from dspark.data.prompts import Prompt, add_prompt, prompt_of, read_hub, read_prompts
from dspark.data.self_prompts import DraftFile, Selection, SelfPromptConfig, draft_settings, write_drafts
from dspark.errors import ConfigError, DataError
from dspark.models.loading import load_target
from dspark.models.weights import resolve_model

NAMED = 8  # refused prompts that a line names
REASONS = 20  # lines of refusals, the most frequent first


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where prompts come from: exactly one of the three."""

    files: tuple[Path, ...] = ()
    hub: str | None = None
    split: str = "train"
    model: str | None = None  # writes its own

    def __post_init__(self) -> None:
        if sum((bool(self.files), self.hub is not None, self.model is not None)) != 1:
            raise ConfigError("prompts come from one source: name --from, --hub or --model")


@dataclass(kw_only=True)
class _Refusals:
    """Prompts that are left out, by reason: nothing is dropped in silence."""

    ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, key: str) -> None:
        self.ids.setdefault(reason, []).append(key)

    def lines(self) -> Iterator[str]:
        """A line per reason, the most frequent first."""
        ordered = sorted(self.ids.items(), key=lambda item: -len(item[1]))
        for reason, keys in ordered[:REASONS]:
            more = ", ..." if len(keys) > NAMED else ""
            yield f"{len(keys)} refused, {reason}: {', '.join(keys[:NAMED])}{more}"
        if rest := [key for _, keys in ordered[REASONS:] for key in keys]:
            yield f"{len(rest)} refused for {len(ordered) - REASONS} other reasons: {', '.join(rest[:NAMED])}, ..."


def evaluation_filter(paths: Sequence[Path]) -> OverlapFilter | None:
    """The thirteen-word filter against evaluation files, in any shape of prompts; None without files."""
    if not paths:
        return None
    sets = {str(path): [turn for prompt in read_prompts([path]).values() for turn in prompt["turns"]] for path in paths}
    return OverlapFilter(sets)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Prompts that were kept, by id, and a line for every reason why others were not."""

    prompts: dict[str, Prompt]
    refusals: tuple[str, ...]


def gather(
    source: Source,
    *,
    evaluation: Sequence[Path] = (),
    limit: int | None = None,
    domain: str | None = None,
    similarity: float | None = None,
) -> Gathered:
    """The prompts of files or of a Hub data set.

    Refused with a count and their ids: rows that are no prompts, prompts that share thirteen words with an
    ``evaluation`` file, and, where ``similarity`` is given, near-duplicates of an earlier prompt. ``limit`` counts the
    prompts that are kept.
    """
    overlap = evaluation_filter(evaluation)
    seen = NearDuplicates(similarity) if similarity is not None else None
    kept: dict[str, Prompt] = {}
    refusals = _Refusals()
    for place, row in _rows(source):
        if len(kept) == limit:
            break
        try:
            prompt = prompt_of(row)
            if prompt["id"] in kept:
                add_prompt(kept, prompt)  # the same again, or an error
                refusals.add("given before", prompt["id"])
                continue
        except DataError as error:
            refusals.add(str(error), place)
            continue
        text = "\n".join(prompt["turns"])
        if overlap is not None and (name := overlap.find(text)) is not None:
            refusals.add(f"in the evaluation set {name}", prompt["id"])
        elif seen is not None and (other := seen.find(text)) is not None:
            refusals.add("near-duplicates of earlier ones", f"{prompt['id']} ({other})")
        else:
            kept[prompt["id"]] = prompt if domain is None else {**prompt, "domain": domain}
            if seen is not None:
                seen.add(prompt["id"], text)
    return Gathered(prompts=kept, refusals=tuple(refusals.lines()))


def convert(
    source: Source,
    out: Path,
    *,
    evaluation: Sequence[Path],
    limit: int | None,
    domain: str | None,
    similarity: float | None,
) -> None:
    """Write what :func:`gather` keeps as one file of {"id", "turns", ...}, and say what it refused.

    Raises :class:`DataError` if no prompt is left.
    """
    found = gather(source, evaluation=evaluation, limit=limit, domain=domain, similarity=similarity)
    console = Console(stderr=True, highlight=False)
    for line in found.refusals:
        console.print(line, soft_wrap=True, markup=False)
    if not found.prompts:
        raise DataError("no prompts are left; give others, or fewer filters")
    write_prompts(out, found.prompts.values())
    console.print(f"{len(found.prompts)} prompts", soft_wrap=True)
    Console(highlight=False).print(str(out), soft_wrap=True)


def write_own(
    source: Source,
    out: Path,
    config: SelfPromptConfig,
    *,
    evaluation: Sequence[Path],
    rows: int,
    place: dict[str, Any],
) -> None:
    """Let the model write ``config.count`` prompts into ``out``; an interrupted run goes on with its drafts.

    ``place`` are the options that say how the model is run.
    """
    assert source.model is not None, "checked by Source"
    place = dict(place)
    if (threads := place.pop("threads")) is not None:
        torch.set_num_threads(threads)
    trust = place["trust_remote_code"]
    folder = resolve_model(source.model, trust_remote_code=trust)
    chat = ChatFormat.from_folder(folder, trust_remote_code=trust)
    file = DraftFile(out, draft_settings(source.model, chat, config))
    overlap = evaluation_filter(evaluation)
    target = load_target(source.model, **place)
    console = Console(stderr=True, highlight=False)
    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("0 drafts", total=config.count)
        chosen = Selection()
        for chosen in write_drafts(target, chat, file, config, rows=rows, overlap=overlap):
            words = f"{len(chosen.prompts)}/{config.count} prompts of {len(file.drafts)} drafts"
            bar.update(task, completed=len(chosen.prompts), description=words)
            if not console.is_terminal:
                console.print(words, soft_wrap=True)
    console.print(_refused_line(chosen), soft_wrap=True, markup=False)
    write_prompts(out, chosen.prompts)
    Console(highlight=False).print(str(out), soft_wrap=True)


def _refused_line(chosen: Selection) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(chosen.refused).most_common())
    line = f"{len(chosen.prompts)} prompts; refused: {counts or 'none'}"
    if chosen.overlaps:
        ids = [f"{key} ({name})" for key, name in list(chosen.overlaps.items())[:NAMED]]
        line += f"; in evaluation sets: {', '.join(ids)}{', ...' if len(chosen.overlaps) > NAMED else ''}"
    return line


def _rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with the place it came from."""
    if source.hub is not None:
        for number, row in enumerate(read_hub(source.hub, split=source.split)):
            yield f"{source.hub}[{number}]", row
    for path in source.files:
        for number, row in enumerate(read_jsonl(path), 1):
            yield f"{path}:{number}", row


def write_prompts(out: Path, prompts: Iterable[Prompt]) -> None:
    """Write a prompts file in one step."""
    atomic_write_text(out, "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts))
