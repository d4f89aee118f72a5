"""The table of formats: which one a folder is in, reading it, and writing a checkpoint in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark.artifacts import atomic_folder, write_manifest
from dspark.errors import CheckpointError, ConfigError
from dspark.export import deepspec, sglang, specforge, speculators, zlab
from dspark.export.deepspec import to_checkpoint, to_layout
from dspark.export.form import Context, Format, Json, Layout, check_sections, names, without_copies
from dspark.models.checkpoint import SHARED_WITH_TARGET, Checkpoint, check
from dspark.models.draft_files import read_config_json, read_tensors, write_files

FORMATS: tuple[Format, ...] = (
    speculators.FORMAT,
    deepspec.FORMAT,
    specforge.FORMAT,
    zlab.FORMAT,
    sglang.FORMAT,
)
MANIFEST_KIND, MANIFEST_VERSION = "drafter", 1


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder as it was read."""

    format: Format
    checkpoint: Checkpoint
    layout: Layout  # as the format stores it


def format_named(name: str) -> Format:
    """The format that ``--to`` names. Raises :class:`ConfigError` if there is none such."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise ConfigError(f"format is {name!r}; it must be one of {', '.join(known.name for known in FORMATS)}")


def recognise(data: Json, where: Path) -> Format:
    """The format of a ``config.json``. Raises :class:`CheckpointError` if it is none of ours, or several."""
    found = [known for known in FORMATS if known.recognises(data)]
    if len(found) != 1:
        told = f"could be {' or '.join(known.name for known in found)}" if found else "is no drafter's that we know"
        raise CheckpointError(
            f"{where}: architectures is {names(data)}, which {told}; supported are "
            + ", ".join(known.title for known in FORMATS)
        )
    return found[0]


def open_folder(folder: Path, *, num_target_layers: int | None = None) -> Opened:
    """Read a drafter's folder in whatever format it is, and check it.

    ``num_target_layers`` is that of the target at hand, for formats that do not record it. Raises
    :class:`CheckpointError` naming what is missing, unknown, contradictory or out of range.
    """
    data = read_config_json(folder)
    check_sections(data, folder)
    known = recognise(data, folder)
    layout = Layout(data, read_tensors(folder))
    context = Context(where=folder, num_target_layers=num_target_layers)
    try:
        native = known.read(layout, context)
    except (TypeError, AttributeError, KeyError) as error:  # a list for a number, a string for an object
        raise CheckpointError(f"{folder}: config.json holds a value of the wrong type ({error})") from error
    return Opened(format=known, checkpoint=to_checkpoint(native, folder), layout=layout)


def read_checkpoint(folder: Path, *, num_target_layers: int | None = None) -> Checkpoint:
    """The checkpoint in a folder of any format; see :func:`open_folder`."""
    return open_folder(folder, num_target_layers=num_target_layers).checkpoint


def layout_of(checkpoint: Checkpoint, to: Format) -> Layout:
    """A checkpoint as a format stores it. Raises :class:`CheckpointError` if the format has no place for it."""
    copies = SHARED_WITH_TARGET & (checkpoint.tensors.keys() - without_copies(checkpoint).keys())
    if copies and not to.stores_copies:
        raise CheckpointError(f"{to.title} stores no copies of the target, and the drafter holds {sorted(copies)}")
    return to.write(to_layout(checkpoint), checkpoint)


def write_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    to: Format,
    *,
    fields: Mapping[str, object] | None = None,
    replace: bool = False,
) -> None:
    """Write ``folder`` at once: config, weights, and a manifest with ``fields`` and the provenance.

    Raises :class:`CheckpointError` if the format has no place for the drafter, :class:`ConfigError` if the folder
    exists and is not to be replaced.
    """
    layout = layout_of(check(checkpoint, folder), to)
    with atomic_folder(folder, existing="replace" if replace else "error") as draft:
        write_files(draft, layout.data, layout.tensors)
        write_manifest(draft, MANIFEST_KIND, MANIFEST_VERSION, {"format": to.name, **(fields or {})})
