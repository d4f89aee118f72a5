"""One drafter's folder into another format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.export.form import Format, without_copies
from dspark.export.formats import Opened, format_named, layout_of, open_folder, read_checkpoint, write_checkpoint
from dspark.export.inspection import problems_with
from dspark.export.target_facts import TargetFacts
from dspark.models.checkpoint import EMBEDDING, HEAD, Checkpoint, draft_token_ids, wanted_tensors


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was done: the source as it was read, and what the new folder holds."""

    source: Opened
    result: Checkpoint
    dropped: tuple[str, ...]  # copies of the target that were not carried over


def convert_folder(
    source: Path, out: Path, *, to: str, target: TargetFacts | None = None, with_embeddings: bool = False
) -> Conversion:
    """Write the drafter of ``source`` to ``out``, a new folder, in the format that ``to`` names.

    ``target`` is the model it was trained for: it is checked against, and named in formats that do so.
    ``with_embeddings`` stores copies of the target's embedding and head (its rows of the draft vocabulary), for engines
    that do not share the target's; otherwise copies are left out, but for the head's rows of a reduced vocabulary in
    formats whose engines cannot take them from the target. Raises :class:`CheckpointError` if the source is
    damaged, does not fit, or the format has no place for it, before anything is written.
    """
    form = format_named(to)
    if with_embeddings and target is None:
        raise ConfigError("--with-embeddings copies the target's embedding and head; name it with --target")
    opened = open_folder(source, num_target_layers=None if target is None else target.info.num_layers)
    if target is not None and (problems := problems_with(opened.checkpoint, target, source)):
        raise CheckpointError(problems[0])
    result = _named(replace(opened.checkpoint, tensors=without_copies(opened.checkpoint)), target)
    dropped = sorted(opened.checkpoint.tensors.keys() - result.tensors.keys())
    if with_embeddings and target is not None:
        result, dropped = with_copies(result, target), []
    elif form.wants_head_rows:
        result = _with_head_rows(result, target, form)
        dropped = [name for name in dropped if name not in result.tensors]
    layout_of(result, form)
    fields: dict[str, Any] = {
        "source": source.name,
        "source_format": opened.format.name,
        "drafter": result.kind,
        "target": result.target_name or None,
        "with_embeddings": with_embeddings,
    }
    write_checkpoint(out, result, form, fields=fields)
    _verify(out, result)
    return Conversion(source=opened, result=result, dropped=tuple(dropped))


def _named(checkpoint: Checkpoint, target: TargetFacts | None) -> Checkpoint:
    """The checkpoint with the target's name and classes, where one is at hand."""
    if target is None:
        return checkpoint
    return replace(checkpoint, target_name=target.info.name, target_architectures=target.architectures)


def with_copies(checkpoint: Checkpoint, target: TargetFacts) -> Checkpoint:
    """The checkpoint with copies of the target's embedding and head, as they are stored there."""
    own = wanted_tensors(checkpoint.config)  # what is the drafter's own stays
    copies = {} if EMBEDDING in own else {EMBEDDING: target.embedding}
    if HEAD not in own:
        copies[HEAD] = target.head[draft_token_ids(checkpoint)]
    return replace(checkpoint, tensors={**checkpoint.tensors, **copies})


def _with_head_rows(checkpoint: Checkpoint, target: TargetFacts | None, form: Format) -> Checkpoint:
    """The checkpoint with the target's rows of a reduced vocabulary, where its head is not stored."""
    if checkpoint.config.draft_vocab_size is None or HEAD in checkpoint.tensors:
        return checkpoint
    if target is None:
        raise CheckpointError(
            f"the drafter uses the target's head over a reduced vocabulary, and {form.title} wants those rows stored; "
            "name the target with --target"
        )
    rows = target.head[draft_token_ids(checkpoint)]
    return replace(checkpoint, tensors={**checkpoint.tensors, HEAD: rows})


def _verify(out: Path, wanted: Checkpoint) -> None:
    """Read the new folder back; an assertion, because a difference would be our own mistake."""
    again = read_checkpoint(out, num_target_layers=wanted.config.num_target_layers)
    assert again.same_as(wanted), f"{out} does not read back as it was written"
