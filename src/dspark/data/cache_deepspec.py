"""DeepSpec's target cache, version 2: for every token the tapped states and the final one, in bfloat16.

| array | of a sample with T tokens                                            |
|-------|----------------------------------------------------------------------|
| 0     | int32 token ids [T]                                                  |
| 1     | uint8 attention mask [T], all ones: stored and never read            |
| 2     | uint8 loss mask [T]                                                  |
| 3     | features [T, layers * hidden], layers concatenated in ascending id   |
| 4     | final states [T, hidden], after the final norm: what the head reads  |

The target's distributions are not stored; training makes them from the final states by the head alone. Later versions
of DeepSpec may store the states as 8-bit floats without scales; we read those too and write bfloat16 only.

Source: DeepSpec ``deepspec/data/target_cache_dataset.py``, ``scripts/data/prepare_target_cache.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dspark.data.cache_format import RECORD, Fields, Sizes, mask_bytes, shard_name
from dspark.data.cache_rows import ENCODINGS, encode_rows, from_bytes, tensor_bytes
from dspark.data.features import Sample, SampleFeatures, TargetStates, summarise
from dspark.errors import ConfigError, DataError
from dspark.models.target import FINAL, Target

VERSION = 2
HIDDEN_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
FIXED = {"token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": RECORD.size}


@dataclass(frozen=True, kw_only=True)
class DeepSpecForm:
    """The reference's form."""

    name: ClassVar[str] = "deepspec"
    loss_array: ClassVar[int] = 2

    layer_ids: tuple[int, ...]  # strictly ascending decoder layers
    hidden_size: int
    hidden_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        layers = [layer for layer in self.layer_ids if layer != FINAL]
        if not layers or layers != sorted(set(layers)):
            raise ConfigError(
                f"taps are {named_taps(self.layer_ids)}; DeepSpec's cache needs at least one decoder layer, ascending "
                "(its final states come along anyway): set taps, or take the form small"
            )
        object.__setattr__(self, "layer_ids", tuple(layers))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layer_ids

    def sizes(self, loss_mask: Bool[Tensor, "tokens"]) -> Sizes:
        tokens = loss_mask.shape[0]
        state = tokens * self.hidden_size * HIDDEN_DTYPES[self.hidden_dtype].itemsize
        return 4 * tokens, tokens, tokens, len(self.layer_ids) * state, state

    def encode(self, target: Target, sample: Sample, states: TargetStates) -> tuple[bytes, ...]:
        exact = ENCODINGS["bfloat16"]
        return (
            tensor_bytes(sample.token_ids.int()),
            mask_bytes(torch.ones_like(sample.loss_mask)),
            mask_bytes(sample.loss_mask),
            encode_rows(states.features, exact),
            encode_rows(states.final, exact),
        )

    def states(self, arrays: Sequence[bytearray], taps: tuple[int, ...]) -> TargetStates:
        """The states of ``taps``, which may be some of the stored layers, and the final ones; in bfloat16 where they
        were stored in less."""
        dtype = HIDDEN_DTYPES[self.hidden_dtype]
        final = from_bytes(arrays[4], dtype).view(-1, self.hidden_size).bfloat16()
        stored = from_bytes(arrays[3], dtype).view(final.shape[0], len(self.layer_ids), self.hidden_size)
        parts = [final if tap == FINAL else stored[:, self.layer_ids.index(tap)].bfloat16() for tap in taps]
        return TargetStates(torch.cat(parts, 1), final)

    def load(
        self,
        arrays: Sequence[bytearray],
        sample: Sample,
        target: Target,
        *,
        taps: tuple[int, ...],
        draft_ids: Int[Tensor, "draft_vocab"],
        top: int,
    ) -> SampleFeatures:
        """Everything from the stored states, the target's distributions by its head."""
        found = self.states(arrays, taps)
        device = target.info.device
        states = TargetStates(found.features.to(device), found.final.to(device, target.info.dtype))
        return summarise(target, sample, states, draft_ids, top=top)

    def check_request(
        self, *, taps: tuple[int, ...], draft_ids: Int[Tensor, "draft_vocab"], top: int, hidden_size: int
    ) -> None:
        """Any draft vocabulary will do, and any of the stored layers."""
        check_taps(taps, (*self.layer_ids, FINAL))
        if hidden_size != self.hidden_size:
            raise DataError(
                f"hidden_size of the cache is {self.hidden_size}; the target's is {hidden_size}: it was made by another"
            )

    def manifest(self, *, num_samples: int, num_shards: int, extra: Mapping[str, Any]) -> Fields:
        return {
            "version": VERSION,
            "num_samples": num_samples,
            "num_shards": num_shards,
            "target_layer_ids": list(self.layer_ids),
            "hidden_dtype": self.hidden_dtype,
            **FIXED,
            "hidden_size": self.hidden_size,
            "shards": [{"shard_id": i, "file_name": shard_name(i)} for i in range(num_shards)],
            **extra,
        }


def named_taps(taps: Sequence[int]) -> str:
    """Taps as a user reads them."""
    return ", ".join("final" if tap == FINAL else str(tap) for tap in taps) or "none"


def check_taps(wanted: tuple[int, ...], stored: tuple[int, ...]) -> None:
    """Raise :class:`DataError` naming the taps that a cache lacks."""
    if missing := [tap for tap in wanted if tap not in stored]:
        raise DataError(
            f"the cache lacks the target layers {named_taps(missing)}; it holds {named_taps(stored)}: set taps to some "
            "of these, or build a cache with the others"
        )


def form_of(manifest: Mapping[str, Any], where: str) -> DeepSpecForm:
    """The form that a version 2 manifest describes. Raises :class:`DataError` naming the field that we cannot read."""
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{where}: version is {manifest.get('version')!r}; this reads DeepSpec's target cache version {VERSION}"
        )
    required = ("num_samples", "num_shards", "target_layer_ids", "hidden_dtype", *FIXED, "hidden_size", "shards")
    if missing := [name for name in required if name not in manifest]:
        raise DataError(f"{where} lacks {', '.join(missing)}; build the cache anew")
    if manifest["hidden_dtype"] not in HIDDEN_DTYPES:
        raise DataError(f"{where}: hidden_dtype is {manifest['hidden_dtype']!r}; supported: {', '.join(HIDDEN_DTYPES)}")
    for name, value in FIXED.items():
        if manifest[name] != value:
            raise DataError(f"{where}: {name} is {manifest[name]!r}; version {VERSION} has {value!r}")
    layers, hidden = manifest["target_layer_ids"], manifest["hidden_size"]
    if not isinstance(layers, list) or not all(type(i) is int for i in layers) or layers != sorted(set(layers)):
        raise DataError(f"{where}: target_layer_ids is {layers!r}; it must be a list of ascending layer ids")
    if type(hidden) is not int or hidden < 1 or not layers:
        raise DataError(f"{where}: hidden_size is {hidden!r} and there are {len(layers)} layers; both must be positive")
    return DeepSpecForm(layer_ids=tuple(layers), hidden_size=hidden, hidden_dtype=manifest["hidden_dtype"])
