"""The small form of the feature cache: only what anchors need.

A block at anchor a attends to the features of ALL positions before a, so windows of features would not do: the rows up
to the last possible anchor are stored, once per sample and not once per block. What a block is held against, the
target's distribution and its final state, is needed at the positions of its supervised slots alone, and these are
exactly the positions that may be anchors: slot k of anchor a reads position a + k, where this token and the next are
both supervised. In an answer of one turn that is every position but the last; in a conversation the prompts of later
turns are left out.

With R = the last anchor, P = the number of possible anchors, m = the number of taps:

| array | of a sample with T tokens                                                                    |
|-------|----------------------------------------------------------------------------------------------|
| 0     | int32 token ids [T]                                                                          |
| 1     | uint8 loss mask [T]                                                                          |
| 2     | features [R * m, hidden] in the form's encoding (:mod:`dspark.data.cache_rows`), scales first |
| 3     | final states [P, hidden], likewise                                                           |
| 4     | draft ids [P, top], uint16 or int32, of the largest probabilities; then these [P, top]        |

Probabilities are fp32 in a float32 cache and bfloat16 in every other. They are of one draft vocabulary, whose target
ids lie beside the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dspark.data.anchors import anchor_candidates
from dspark.data.cache_deepspec import check_taps
from dspark.data.cache_format import DRAFT_IDS_NAME, RECORD, Fields, Sizes, mask_bytes, shard_name
from dspark.data.cache_rows import ENCODINGS, Encoding, decode_rows, encode_rows, from_bytes, tensor_bytes
from dspark.data.features import Sample, SampleFeatures, TargetStates, summarise
from dspark.errors import DataError
from dspark.models.target import Target

KIND, VERSION = "dspark-small-cache", 1
SHORT_IDS = 1 << 16  # draft vocabularies up to this size have ids of two bytes


@dataclass(frozen=True, kw_only=True)
class SmallForm:
    """Prefix features, and distributions and final states at the positions that may be anchors."""

    name: ClassVar[str] = "small"
    loss_array: ClassVar[int] = 1

    taps: tuple[int, ...]
    hidden_size: int
    encoding: Encoding
    top: int  # probabilities per position
    draft_ids: Int[Tensor, "draft_vocab"] = field(repr=False)  # target ids, on the CPU

    @property
    def _id_dtype(self) -> torch.dtype:
        return torch.uint16 if self.draft_ids.shape[0] <= SHORT_IDS else torch.int32

    @property
    def _prob_dtype(self) -> torch.dtype:
        return torch.float32 if self.encoding.dtype == torch.float32 else torch.bfloat16

    def sizes(self, loss_mask: Bool[Tensor, "tokens"]) -> Sizes:
        tokens, candidates = loss_mask.shape[0], anchor_candidates(loss_mask)
        positions, row = candidates.shape[0], self.encoding.row_bytes(self.hidden_size)
        entry = self._id_dtype.itemsize + self._prob_dtype.itemsize
        features = _prefix(candidates) * len(self.taps) * row
        return 4 * tokens, tokens, features, positions * row, positions * self.top * entry

    def encode(self, target: Target, sample: Sample, states: TargetStates) -> tuple[bytes, ...]:
        candidates = anchor_candidates(sample.loss_mask)
        made = summarise(target, sample, states, self.draft_ids.to(target.info.device), top=self.top)
        rows = candidates.to(target.info.device) - made.start
        features = states.features[: _prefix(candidates)].reshape(-1, self.hidden_size)
        ids, probs = made.top_ids[rows], made.top_probs[rows]
        return (
            tensor_bytes(sample.token_ids.int()),
            mask_bytes(sample.loss_mask),
            encode_rows(features, self.encoding),
            encode_rows(made.states[rows], self.encoding),
            tensor_bytes(ids.to(self._id_dtype)) + tensor_bytes(probs.to(self._prob_dtype)),
        )

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
        """No target is needed. Positions that no slot reads, between an answer and the next, hold zeros."""
        candidates, device = anchor_candidates(sample.loss_mask), target.info.device
        positions, prefix = candidates.shape[0], _prefix(candidates)
        stored = decode_rows(arrays[2], prefix * len(self.taps), self.hidden_size, self.encoding)
        stored = stored.view(prefix, len(self.taps), self.hidden_size)
        features = stored[:, [self.taps.index(tap) for tap in taps]].flatten(1)
        states = decode_rows(arrays[3], positions, self.hidden_size, self.encoding)
        split = positions * self.top * self._id_dtype.itemsize
        ids = from_bytes(arrays[4][:split], self._id_dtype).view(positions, self.top).int()[:, :top]
        probs = from_bytes(arrays[4][split:], self._prob_dtype).view(positions, self.top)[:, :top]
        start = int(sample.loss_mask.nonzero()[0]) if bool(sample.loss_mask.any()) else 0
        rows = candidates - start
        count = sample.token_ids.shape[0] - 1 - start

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(count, values.shape[1]).index_copy_(0, rows, values).to(device)

        return SampleFeatures(features.to(device), start, spread(ids), spread(probs), spread(states))

    def check_request(
        self, *, taps: tuple[int, ...], draft_ids: Int[Tensor, "draft_vocab"], top: int, hidden_size: int
    ) -> None:
        """Some of the stored taps, the very draft vocabulary, and at most the stored number of probabilities."""
        check_taps(taps, self.taps)
        if hidden_size != self.hidden_size:
            raise DataError(f"hidden_size of the cache is {self.hidden_size}; the target's is {hidden_size}")
        if not torch.equal(draft_ids.cpu().long(), self.draft_ids.cpu().long()):
            raise DataError(
                f"draft_vocab: the cache's probabilities are of {self.draft_ids.shape[0]} tokens, the run's of "
                f"{draft_ids.shape[0]} that are not the same; build the cache with the run's answers, held_out and "
                "draft_vocab, or in the form deepspec, which serves any vocabulary"
            )
        if top > self.top:
            raise DataError(f"target_top is {top}; the cache holds {self.top} probabilities per position, take no more")

    def manifest(self, *, num_samples: int, num_shards: int, extra: Mapping[str, Any]) -> Fields:
        return {
            "kind": KIND,
            "version": VERSION,
            "num_samples": num_samples,
            "num_shards": num_shards,
            "taps": list(self.taps),
            "hidden_size": self.hidden_size,
            "encoding": self.encoding.name,
            "top": self.top,
            "draft_vocab_size": self.draft_ids.shape[0],
            "draft_ids_sha256": draft_ids_sha256(self.draft_ids),
            "index_record_size": RECORD.size,
            "shards": [{"shard_id": i, "file_name": shard_name(i)} for i in range(num_shards)],
            **extra,
        }


def _prefix(candidates: Int[Tensor, "candidates"]) -> int:
    """Feature rows that blocks can attend to: those before the last anchor."""
    return int(candidates[-1]) if candidates.shape[0] else 0


def draft_ids_bytes(draft_ids: Int[Tensor, "draft_vocab"]) -> bytes:
    return tensor_bytes(draft_ids.int())


def draft_ids_sha256(draft_ids: Int[Tensor, "draft_vocab"]) -> str:
    return hashlib.sha256(draft_ids_bytes(draft_ids)).hexdigest()


def form_of(manifest: Mapping[str, Any], draft_ids: bytes, where: str) -> SmallForm:
    """The form that a manifest describes. Raises :class:`DataError` naming the field that we cannot read."""
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{where}: version is {manifest.get('version')!r}; this reads {KIND} version {VERSION}, build it anew"
        )
    required = {"taps": list, "hidden_size": int, "encoding": str, "top": int, "draft_ids_sha256": str}
    for name, kind in required.items():
        if type(manifest.get(name)) is not kind:
            raise DataError(f"{where}: {name} is {manifest.get(name)!r}; build the cache anew")
    if manifest["encoding"] not in ENCODINGS:
        raise DataError(f"{where}: encoding is {manifest['encoding']!r}; supported: {', '.join(ENCODINGS)}")
    if hashlib.sha256(draft_ids).hexdigest() != manifest["draft_ids_sha256"]:
        raise DataError(f"{where}: draft_ids_sha256 is not that of {DRAFT_IDS_NAME}; build the cache anew")
    return SmallForm(
        taps=tuple(manifest["taps"]),
        hidden_size=manifest["hidden_size"],
        encoding=ENCODINGS[manifest["encoding"]],
        top=manifest["top"],
        draft_ids=from_bytes(bytearray(draft_ids), torch.int32).long(),
    )
