"""One door to a drafter: `none`, `ngram`, `default` (the one we ship for the embedded model), or a checkpoint
folder."""

from __future__ import annotations

from pathlib import Path

from dspark.errors import CheckpointError
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.ngram import NgramDrafter
from dspark.models.target import Target

DEFAULT_DRAFTER = "smollm2-135m-instruct-dspark"


def default_drafter_folder() -> Path:
    """Folder of the shipped drafter: inside an installed package, or `models/` of a checkout."""
    package = Path(__file__).parent.parent
    for place in (package / "shipped" / DEFAULT_DRAFTER, package.parent.parent / "models" / DEFAULT_DRAFTER):
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(
        f"the shipped drafter {DEFAULT_DRAFTER} is missing; clone the repository with its models/ folder"
    )


def load_drafter(spec: str, target: Target, *, candidates: int = 64) -> Drafter:
    """The drafter that ``spec`` names, ready for ``target``. Raises :class:`CheckpointError` if it is none or does
    not fit."""
    from dspark.models.checkpoint import load_drafter_model

    if spec == "none":
        return NoDrafter()
    if spec == "ngram":
        return NgramDrafter()
    folder = default_drafter_folder() if spec == "default" else Path(spec)
    if not folder.is_dir():
        raise CheckpointError(f"drafter is {spec!r}; it must be `none`, `ngram`, `default` or a checkpoint folder")
    return DsparkDrafter(load_drafter_model(folder), target, candidates=candidates, name=folder.name)
