"""Reading a feature cache: the small files are checked when it is opened, a sample's bytes when they are first read.

Shards are mapped into memory, at most ``max_open_shards`` at a time; arrays are copied out of them. A cache without our
additions, written by DeepSpec itself, is read too: it has no digests, and its samples are known by their numbers.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dspark.artifacts import MANIFEST_NAME, read_json, read_jsonl
from dspark.data import cache_deepspec, windows
from dspark.data.cache_format import (
    BUILD_KIND,
    BUILD_NAME,
    BUILD_VERSION,
    DIGEST_BYTES,
    DRAFT_IDS_NAME,
    INDEX_NAME,
    OURS,
    SAMPLES_NAME,
    SEAL_NAME,
    Fields,
    Form,
    Record,
    TargetIdentity,
    arrays_digest,
    digests_name,
    file_sha256,
    read_records,
    sample_digest,
)
from dspark.data.cache_rows import from_bytes
from dspark.data.features import Sample
from dspark.errors import DataError

MAX_OPEN_SHARDS = 4
REBUILD = "run `dspark cache build` again"
IDENTITY_REMEDY = {
    "config_sha256": "the target's config.json is another",
    "weights_sha256": "the target's weights are others",
    "tokenizer_sha256": "the tokenizer gives other token ids",
}


class FeatureCache:
    """A finished cache. ``form`` says what it holds; ``identity`` is None where DeepSpec wrote it."""

    def __init__(self, folder: Path | str, *, max_open_shards: int = MAX_OPEN_SHARDS) -> None:
        """Open ``folder``. Raises :class:`DataError` naming what is absent, damaged, unsorted or of another version."""
        self.folder, self.max_open_shards = Path(folder), max(1, max_open_shards)
        self.manifest = self._read_manifest()
        self.ours = (self.folder / OURS).is_dir()
        if self.ours:
            self._check_seal()
        self.build = self._read_build() if self.ours else {}
        self.form = self._read_form()
        self._shards = self._find_shards()
        self.records = self._read_index()
        self._digests = self._read_digests()
        self.names, self.domains, self._tokens = self._read_names()
        self._by_name = {name: i for i, name in enumerate(self.names)}
        self._verified = bytearray(len(self.records))  # 1 where a sample's bytes were found good
        self._open: OrderedDict[int, mmap.mmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self.records)

    def __enter__(self) -> FeatureCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all shards; reading maps them again."""
        while self._open:
            self._open.popitem()[1].close()

    @property
    def open_shards(self) -> int:
        """Shards mapped right now."""
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(path.stat().st_size for path in self._shards)

    @property
    def target_name(self) -> str:
        """The target as whoever built the cache named it."""
        return str(self.manifest.get("target_model_name_or_path", ""))

    @property
    def identity(self) -> TargetIdentity | None:
        return TargetIdentity(**self.build["target"]) if self.ours else None

    # --- samples -----------------------------------------------------------------------------------------------------

    def arrays(self, index: int) -> list[bytearray]:
        """Copies of the five arrays of a sample. Raises :class:`DataError` if its bytes are not those written."""
        record = self.records[index]
        shard, where = self._shard(record.shard_id), f"{self._shards[record.shard_id]}: sample {self.names[index]}"
        begins, at = record.begins, self.form.loss_array
        mask = _slice(shard, begins[at], record.tokens, where)
        sizes = self.form.sizes(from_bytes(mask, torch.uint8).bool())
        arrays = [_slice(shard, begin, size, where) for begin, size in zip(begins, sizes, strict=True)]
        if self._digests is not None and not self._verified[index]:
            if arrays_digest(arrays) != self._digests[index]:
                raise DataError(f"{where} is corrupt: its checksum is another; delete the shard and {REBUILD}")
            self._verified[index] = 1
        return arrays

    def sample(self, index: int) -> Sample:
        """The sample itself, token ids and loss mask; a cache needs no answers to be trained from."""
        arrays = self.arrays(index)
        ids = from_bytes(arrays[0], torch.int32).long()
        mask = from_bytes(arrays[self.form.loss_array], torch.uint8).bool()
        return Sample(self.names[index], self.domains[index], ids, mask)

    def find(self, sample: Sample) -> int:
        """Number of ``sample``, by its id. Raises :class:`DataError` if it is not there, or had other tokens."""
        index = self._by_name.get(sample.id)
        if index is None:
            raise DataError(
                f"sample {sample.id} is not in the cache {self.folder}, which holds {len(self)}; build one with all of "
                "the run's answers"
            )
        if self._tokens is not None and self._tokens[index] != sample_digest(sample):
            raise DataError(
                f"sample {sample.id} has other tokens than in the cache {self.folder}: another answer, prompt, "
                "max_tokens or chat template; build the cache anew"
            )
        return index

    def check_target(self, identity: TargetIdentity) -> None:
        """Raise :class:`DataError` unless the cache was made by this target with this tokenizer.

        Hashes decide; the name may differ, as when a folder was moved. Without them, in a cache of DeepSpec's, the
        name must be the same, as DeepSpec itself demands.
        """
        mine = self.identity
        if mine is None:
            if self.target_name != identity.name:
                raise DataError(
                    f"the cache {self.folder} was made by target {self.target_name!r}, not {identity.name!r}; it has "
                    "no hashes, so the names must be the same"
                )
            return
        for name, meaning in IDENTITY_REMEDY.items():
            if getattr(mine, name) != getattr(identity, name):
                raise DataError(
                    f"the cache {self.folder} was made by another target: {meaning} ({name}; the cache's target is "
                    f"{mine.name!r}, this one {identity.name!r}); name the cache's target or build a cache for this one"
                )

    def damaged(self) -> Iterator[tuple[int, str]]:
        """Read everything; yield the number of every sample whose bytes are not those written, and why."""
        for index in range(len(self)):
            self._verified[index] = 0
            try:
                self.arrays(index)
            except DataError as error:
                yield index, str(error)

    def shard_id(self, index: int) -> int:
        return self.records[index].shard_id

    # --- opening -----------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> Fields:
        path = self.folder / MANIFEST_NAME
        if not path.is_file() and (self.folder / BUILD_NAME).is_file():
            raise DataError(f"{self.folder} is an unfinished cache; {REBUILD} to go on with it")
        return read_json(path, remedy="name the folder of a finished feature cache")

    def _check_seal(self) -> None:
        """Every small file has the bytes that the seal says, and none is missing from it."""
        hashes = read_json(self.folder / SEAL_NAME, remedy=REBUILD).get("sha256")
        if not isinstance(hashes, dict) or not {MANIFEST_NAME, INDEX_NAME, BUILD_NAME, SAMPLES_NAME} <= hashes.keys():
            raise DataError(f"{self.folder / SEAL_NAME} lacks its hashes; {REBUILD}")
        for name, expected in hashes.items():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{path} is missing; {REBUILD}")
            if file_sha256(path) != expected:
                remedy = "build the cache anew" if name == BUILD_NAME else f"delete it and {REBUILD}"
                raise DataError(f"{path} is corrupt: its checksum is not the one in {SEAL_NAME}; {remedy}")

    def _read_build(self) -> Fields:
        path = self.folder / BUILD_NAME
        content = read_json(path, remedy=REBUILD)
        if (content.get("kind"), content.get("version")) != (BUILD_KIND, BUILD_VERSION):
            raise DataError(f"{path} is not of {BUILD_KIND} version {BUILD_VERSION}; build the cache anew")
        return content["fields"]

    def _read_form(self) -> Form:
        where = str(self.folder / MANIFEST_NAME)
        if self.manifest.get("kind") != windows.KIND:
            return cache_deepspec.form_of(self.manifest, where)
        path = self.folder / DRAFT_IDS_NAME
        if not path.is_file():
            raise DataError(f"{path} is missing; build the cache anew")
        return windows.form_of(self.manifest, path.read_bytes(), where)

    def _find_shards(self) -> list[Path]:
        """Paths of all shards, in order."""
        shards, where = self.manifest.get("shards"), self.folder / MANIFEST_NAME
        if not isinstance(shards, list) or len(shards) != self.manifest.get("num_shards"):
            raise DataError(f"{where}: num_shards is {self.manifest.get('num_shards')!r}, not the number of its shards")
        paths = []
        for i, shard in enumerate(shards):
            name: Any = shard.get("file_name") if isinstance(shard, dict) and shard.get("shard_id") == i else None
            if not isinstance(name, str) or Path(name).name != name:
                raise DataError(f"{where}: shard {i} is {shard!r}; it needs shard_id {i} and a plain file_name")
            if not (self.folder / name).is_file():
                raise DataError(f"the shard {name} is missing from {self.folder}; {REBUILD} to write it again")
            paths.append(self.folder / name)
        return paths

    def _read_index(self) -> list[Record]:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            raise DataError(f"{path} is missing; {REBUILD}")
        records = read_records(path.read_bytes(), path)
        if len(records) != self.manifest.get("num_samples"):
            raise DataError(f"{path} has {len(records)} records; num_samples is {self.manifest.get('num_samples')!r}")
        for record in records:
            if record.shard_id >= len(self._shards) or record.tokens < 1:
                raise DataError(
                    f"{path}: sample {record.sample_id} has {record.tokens} tokens in shard {record.shard_id}; there "
                    f"are {len(self._shards)} shards"
                )
        return records

    def _read_digests(self) -> list[bytes] | None:
        if not self.ours:
            return None
        data = b"".join((self.folder / digests_name(i)).read_bytes() for i in range(len(self._shards)))
        if len(data) != DIGEST_BYTES * len(self.records):
            raise DataError(f"{self.folder / OURS} holds digests of other samples than {INDEX_NAME}; {REBUILD}")
        return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]

    def _read_names(self) -> tuple[list[str], list[str], list[str] | None]:
        """Ids, domains and token digests of all samples; numbers where there is nothing else."""
        if not self.ours:
            return [f"{i}#0" for i in range(len(self.records))], ["all"] * len(self.records), None
        rows = list(read_jsonl(self.folder / SAMPLES_NAME))
        if len(rows) != len(self.records):
            raise DataError(f"{self.folder / SAMPLES_NAME} has {len(rows)} lines for {len(self.records)} samples")
        return [r["id"] for r in rows], [r["domain"] for r in rows], [r["digest"] for r in rows]

    def _shard(self, shard_id: int) -> mmap.mmap:
        """The mapped shard; the one unused for longest is unmapped if too many are."""
        if shard_id in self._open:
            self._open.move_to_end(shard_id)
            return self._open[shard_id]
        path = self._shards[shard_id]
        try:
            with open(path, "rb") as file:
                self._open[shard_id] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(f"the shard {path} cannot be read ({error}); delete it and {REBUILD}") from None
        while len(self._open) > self.max_open_shards:
            self._open.popitem(last=False)[1].close()
        return self._open[shard_id]


def _slice(shard: mmap.mmap, begin: int, size: int, where: str) -> bytearray:
    if begin + size > len(shard):
        raise DataError(
            f"{where} is corrupt: it ends at byte {begin + size} of {len(shard)}; delete the shard and {REBUILD}"
        )
    return bytearray(memoryview(shard)[begin : begin + size])
