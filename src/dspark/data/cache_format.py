"""The feature cache on disk: its files, its index, and what a form of it must say. No tensors are computed here.

| file                   | holds                                                                                      |
|------------------------|--------------------------------------------------------------------------------------------|
| manifest.json          | the form's own description; written last, so a folder without it is an unfinished build    |
| samples.idx            | a record of 56 bytes per sample, sorted: where its five arrays lie                         |
| shard-00000.bin, ...   | the arrays, sample after sample, without gaps; a sample never crosses shards               |
| dspark/build.json      | what was asked for: data, target, form; written first, and compared when a build goes on   |
| dspark/samples.jsonl   | a line per sample: id, domain, digest of its tokens                                        |
| dspark/draft_ids.bin   | small form only: int32 target ids of the draft vocabulary                                  |
| dspark/shard-00000.sum | a digest of 16 bytes per sample of that shard; there iff the shard is finished             |
| dspark/seal.json       | SHA-256 of every file but the shards, and where the cache comes from                       |

Two forms share all of this: DeepSpec's target cache v2 (:mod:`dspark.data.cache_deepspec`), whose files are the first
three, byte for byte, so that DeepSpec reads it and ours reads DeepSpec's; and the small form
(:mod:`dspark.data.windows`), which keeps only what anchors need.

Which sample lies where follows from the samples' lengths alone. So a shard is the unit of resuming and of sharing the
work: whichever process writes it, its bytes and its place are the same.

Source of the index and the first three files: DeepSpec ``deepspec/data/target_cache_dataset.py``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dspark.data.cache_rows import tensor_bytes
from dspark.data.features import Sample, SampleFeatures, TargetStates
from dspark.errors import DataError
from dspark.models.target import Target

RECORD = struct.Struct("<QIIQQQQQ")  # sample id, shard id, tokens, then where each of the five arrays begins
DIGEST_BYTES = 16
INDEX_NAME, OURS = "samples.idx", "dspark"
BUILD_NAME, SAMPLES_NAME, SEAL_NAME = f"{OURS}/build.json", f"{OURS}/samples.jsonl", f"{OURS}/seal.json"
DRAFT_IDS_NAME = f"{OURS}/draft_ids.bin"
BUILD_KIND, BUILD_VERSION = "feature-cache", 1

Fields = dict[str, Any]  # Any: whatever JSON holds
Sizes = tuple[int, int, int, int, int]  # bytes of a sample's five arrays, which lie one after the other


def shard_name(shard_id: int) -> str:
    return f"shard-{shard_id:05d}.bin"


def digests_name(shard_id: int) -> str:
    return f"{OURS}/shard-{shard_id:05d}.sum"


# --- what is stored --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Which target made a cache: its name, and hashes of what decides its numbers and its token ids."""

    name: str  # as the user named it
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str


@runtime_checkable
class Form(Protocol):
    """How a sample's states become five arrays, and how training gets its features back from them.

    The first array is always the token ids, int32; array ``loss_array`` is the loss mask, a byte per token.
    """

    name: ClassVar[str]
    loss_array: ClassVar[int]

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps that the target is asked for when a cache is built."""
        ...

    def sizes(self, loss_mask: Bool[Tensor, "tokens"]) -> Sizes:
        """Bytes of each array of a sample with this mask."""
        ...

    def encode(self, target: Target, sample: Sample, states: TargetStates) -> tuple[bytes, ...]:
        """The five arrays."""
        ...

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
        """What training reads, from the arrays; the request was found good by :meth:`check_request`."""
        ...

    def check_request(
        self, *, taps: tuple[int, ...], draft_ids: Int[Tensor, "draft_vocab"], top: int, hidden_size: int
    ) -> None:
        """Raise :class:`DataError` naming the field if this cache cannot serve it."""
        ...

    def manifest(self, *, num_samples: int, num_shards: int, extra: Mapping[str, Any]) -> Fields:
        """Content of ``manifest.json``."""
        ...


# --- which sample lies where -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of samples ``first`` .. ``end`` - 1."""

    id: int
    first: int
    end: int
    nbytes: int


def plan_shards(sizes: Sequence[Sizes], shard_bytes: int) -> tuple[Shard, ...]:
    """Fill shards in order up to ``shard_bytes`` each; a larger sample has a shard of its own."""
    shards: list[Shard] = []
    first = total = 0
    for i, size in enumerate(map(sum, sizes)):
        if i > first and total + size > shard_bytes:
            shards.append(Shard(id=len(shards), first=first, end=i, nbytes=total))
            first, total = i, 0
        total += size
    if len(sizes) > first:
        shards.append(Shard(id=len(shards), first=first, end=len(sizes), nbytes=total))
    return tuple(shards)


@dataclass(frozen=True)
class Record:
    """Where a sample lies. ``begins`` are byte offsets of the five arrays within the shard."""

    sample_id: int
    shard_id: int
    tokens: int
    begins: tuple[int, int, int, int, int]

    def pack(self) -> bytes:
        return RECORD.pack(self.sample_id, self.shard_id, self.tokens, *self.begins)


def make_records(shards: Iterable[Shard], sizes: Sequence[Sizes], tokens: Sequence[int]) -> Iterator[Record]:
    """The index of a planned cache, in order."""
    for shard in shards:
        at = 0
        for i in range(shard.first, shard.end):
            begins = [at]
            for size in sizes[i]:
                begins.append(begins[-1] + size)
            at = begins.pop()
            yield Record(i, shard.id, tokens[i], (begins[0], begins[1], begins[2], begins[3], begins[4]))


def read_records(data: bytes, path: Path) -> list[Record]:
    """An index from its bytes. Raises :class:`DataError` if ids are not 0, 1, 2, ... or a record is torn."""
    if len(data) % RECORD.size:
        raise DataError(f"{path} has {len(data)} bytes, no multiple of {RECORD.size}; it was cut, build the cache anew")
    records = []
    for i, (sample_id, shard_id, tokens, *begins) in enumerate(RECORD.iter_unpack(data)):
        if sample_id != i:
            raise DataError(
                f"{path} is not sorted: record {i} has sample_id {sample_id}; ids must run 0, 1, 2, ... without gaps"
            )
        records.append(Record(sample_id, shard_id, tokens, (begins[0], begins[1], begins[2], begins[3], begins[4])))
    return records


# --- digests and small files -----------------------------------------------------------------------------------------


def arrays_digest(arrays: Iterable[bytes | bytearray]) -> bytes:
    """Digest of a sample's bytes as they lie in the shard."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in arrays:
        found.update(array)
    return found.digest()


def sample_digest(sample: Sample) -> str:
    """Digest of a sample's token ids and loss mask: what its features depend on."""
    arrays = (tensor_bytes(sample.token_ids.int()), tensor_bytes(sample.loss_mask))
    return arrays_digest(arrays).hex()


def sample_line(sample: Sample) -> Fields:
    """The sample's line in ``samples.jsonl``."""
    return {"id": sample.id, "domain": sample.domain, "digest": sample_digest(sample)}


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def identity_fields(identity: TargetIdentity) -> Fields:
    return asdict(identity)


def mask_bytes(mask: Bool[Tensor, "tokens"]) -> bytes:
    """A byte per token, 0 or 1."""
    return tensor_bytes(mask.to(torch.uint8))
