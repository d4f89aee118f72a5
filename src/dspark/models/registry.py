"""One door to a drafter: `none`, `ngram`, `default` (the one we ship for the embedded model), or a checkpoint folder
in any of the formats of :mod:`dspark.export`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dspark.errors import CheckpointError
from dspark.export.formats import open_folder
from dspark.models import DEFAULT_CANDIDATES
from dspark.models.backbone import DraftModel
from dspark.models.checkpoint import build_model, check_fits, check_mask, check_shared
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3 import Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.mtp import MTPModel
from dspark.models.mtp_drafter import MTPDrafter
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


def load_drafter(
    spec: str,
    target: Target,
    *,
    candidates: int = DEFAULT_CANDIDATES,
    reserved: Mapping[int, str] | None = None,
    weight_bits: int | None = None,
) -> Drafter:
    """The drafter that ``spec`` names, ready for ``target``.

    ``reserved`` names tokens of the target that no drafter may use as its mask (id -> "an end token"). ``weight_bits``
    is for DSpark and DFlash (:class:`dspark.models.dspark.DsparkDrafter`); the others keep the target's dtype. Raises
    :class:`CheckpointError` if the folder is no drafter's, is damaged, or does not fit the target.
    """
    if spec == "none":
        return NoDrafter()
    if spec == "ngram":
        return NgramDrafter()
    folder = default_drafter_folder() if spec == "default" else Path(spec)
    if not folder.is_dir():
        raise CheckpointError(f"drafter is {spec!r}; it must be `none`, `ngram`, `default` or a checkpoint folder")
    checkpoint = open_folder(folder, num_target_layers=target.info.num_layers).checkpoint
    check_fits(checkpoint.config, target.info)
    check_mask(checkpoint, where=folder, reserved=reserved)
    check_shared(
        checkpoint,
        embedding=lambda ids: target.embed(ids.to(target.info.device)),
        head=lambda ids: target.head_weight()[ids.to(target.info.device)],
        where=folder,
        target=target.info.name,
        scales=(1.0, target.info.hidden_size**0.5),
    )
    model, name = build_model(checkpoint), folder.name
    if isinstance(model, Eagle3Model):
        return Eagle3Drafter(model, target, candidates=candidates, name=name)
    if isinstance(model, MTPModel):
        return MTPDrafter(model, target, candidates=candidates, name=name)
    assert isinstance(model, DraftModel)
    return DsparkDrafter(model, target, candidates=candidates, name=name, weight_bits=weight_bits)
