"""Building a feature cache: planned to the byte before anything is written, resumable by shard, shared by processes.

A shard is written under a temporary name, flushed, and renamed, its digests before it; so it is there whole or not at
all. A kill costs the shard under way in each process. Whoever finds all shards there writes the index, the seal and,
last, the manifest; if two processes do so at once they write the same bytes.

The disk is asked before every sample whether it holds what the shard still needs and a reserve; if not, the build stops
with everything finished kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dspark.artifacts import MANIFEST_NAME, atomic_write_bytes, atomic_write_text, provenance, read_json
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
    Shard,
    TargetIdentity,
    arrays_digest,
    digests_name,
    file_sha256,
    identity_fields,
    json_text,
    make_records,
    plan_shards,
    sample_line,
    shard_name,
)
from dspark.data.features import Sample, target_states
from dspark.data.windows import SmallForm, draft_ids_bytes
from dspark.errors import ConfigError, DataError
from dspark.models.target import Target

SHARD_BYTES = 256 << 20  # small, so that a kill costs little; DeepSpec's own writer takes 64 GiB
RESERVE_BYTES = 1 << 30  # left free on the disk
OTHERS = "choose another folder"
MEANINGS = {  # fields whose values tell a user nothing
    "samples_sha256": "the samples (answers, prompts, max_tokens or chat template)",
    "draft_ids_sha256": "the tokens of the draft vocabulary (draft_vocab, held_out, answers or initialise)",
}


class CacheBuild:
    """A cache being built in ``folder``. ``shards`` is the whole plan; ``todo`` lists what is not there yet."""

    def __init__(
        self,
        folder: Path | str,
        form: Form,
        samples: Sequence[Sample],
        *,
        identity: TargetIdentity,
        dtype: str,
        notes: Mapping[str, str | int | list[str] | None] | None = None,
        shard_bytes: int = SHARD_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """Plan a cache, or find the one begun in ``folder`` with the same data, target and form.

        ``dtype`` names the target's compute dtype. ``notes`` go into the manifest under DeepSpec's names and are not
        compared. Nothing is written yet. Raises :class:`ConfigError` naming the field in which a begun build differs,
        for a folder that holds something else, and for a number out of range.
        """
        for name, value, least in (("shard_bytes", shard_bytes, 1), ("reserve_bytes", reserve_bytes, 0)):
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if not samples:
            raise ConfigError("there are no samples to cache; give answers")
        self.folder, self.form, self.samples, self.reserve_bytes = Path(folder), form, samples, reserve_bytes
        self.sizes = [form.sizes(sample.loss_mask) for sample in samples]
        self.shards = plan_shards(self.sizes, shard_bytes)
        self._lines = "".join(json.dumps(sample_line(s), ensure_ascii=False) + "\n" for s in samples)
        self._notes = dict(notes or {})
        described = form.manifest(num_samples=len(samples), num_shards=len(self.shards), extra={})
        self.fields: Fields = {
            "form": form.name,
            "samples_sha256": hashlib.sha256(self._lines.encode()).hexdigest(),
            **{name: value for name, value in described.items() if name not in ("shards", "kind", "version")},
            "target": identity_fields(identity),
            "dtype": dtype,
            "shard_bytes": shard_bytes,
        }
        self._check_folder()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, finished or not."""
        return sum(shard.nbytes for shard in self.shards)

    def todo(self, rank: int = 0, world: int = 1) -> list[Shard]:
        """Shards that process ``rank`` of ``world`` still has to write: of its contiguous share of all of them."""
        if not 0 <= rank < world:
            raise ConfigError(f"rank is {rank} of {world} processes; it must lie in 0..{world - 1}")
        count = len(self.shards)
        return [
            shard for shard in self.shards[count * rank // world : count * (rank + 1) // world] if not self._has(shard)
        ]

    def run(
        self,
        target: Target,
        *,
        rank: int = 0,
        world: int = 1,
        on_sample: Callable[[Sample], object] = lambda sample: None,
    ) -> bool:
        """Write this process's shards, and finish the cache if no other has work left; returns whether it is finished.

        Raises :class:`ConfigError` when the disk is too full, before it is; the same call goes on once there is room.
        """
        todo = self.todo(rank, world)
        self._check_room(sum(shard.nbytes for shard in todo))
        self._claim()
        for shard in todo:
            self._write_shard(shard, target, on_sample)
        if self.todo():
            return False
        with open(self.folder / BUILD_NAME, "rb") as file:  # one process at a time, so that none sweeps another's files
            _lock(file, wait=True)
            self._finish()
        return True

    # --- a folder of ours --------------------------------------------------------------------------------------------

    def _check_folder(self) -> None:
        """Refuse to mix with another build, or with files that are not ours."""
        path = self.folder / BUILD_NAME
        if not path.is_file():
            if any(path.is_file() and not path.name.startswith(".") for path in self.folder.rglob("*")):
                raise ConfigError(f"out is {self.folder}, which holds files but no {BUILD_NAME}; {OTHERS}")
            return
        before = read_json(path, remedy=OTHERS)
        if (before.get("kind"), before.get("version")) != (BUILD_KIND, BUILD_VERSION):
            raise DataError(f"{path} is not of {BUILD_KIND} version {BUILD_VERSION}; {OTHERS}")
        begun = before.get("fields")
        begun = begun if isinstance(begun, dict) else {}
        for name, value in self.fields.items():
            if begun.get(name) != value:
                if name in MEANINGS:
                    raise ConfigError(
                        f"{MEANINGS[name]} are not what {self.folder} was begun with; give the same, or {OTHERS}"
                    )
                raise ConfigError(
                    f"{name} is {value!r}, but {self.folder} was begun with {begun.get(name)!r}; give the same, or "
                    f"{OTHERS}"
                )

    def _claim(self) -> None:
        """Write what the build is, unless it was begun before."""
        if not (self.folder / BUILD_NAME).is_file():
            content = {"kind": BUILD_KIND, "version": BUILD_VERSION, "fields": self.fields, "notes": self._notes}
            atomic_write_text(self.folder / BUILD_NAME, json_text({**content, "provenance": provenance()}))

    def _has(self, shard: Shard) -> bool:
        """Whether a shard is finished, by its size and that of its digests; its bytes are checked on reading."""
        path, digests = self.folder / shard_name(shard.id), self.folder / digests_name(shard.id)
        try:
            return (path.stat().st_size, digests.stat().st_size) == (
                shard.nbytes,
                DIGEST_BYTES * (shard.end - shard.first),
            )
        except FileNotFoundError:
            return False

    # --- one shard ---------------------------------------------------------------------------------------------------

    def _write_shard(self, shard: Shard, target: Target, on_sample: Callable[[Sample], object]) -> None:
        name = shard_name(shard.id)
        partial = self.folder / f".{name}.partial"
        digests, left = [], shard.nbytes
        with self._naming_full_disk(shard.nbytes), _open_alone(partial) as file:
            for i in range(shard.first, shard.end):
                self._check_room(left)
                sample = self.samples[i]
                try:
                    arrays = self.form.encode(target, sample, target_states(target, sample, self.form.taps))
                except DataError as error:
                    raise DataError(f"sample {sample.id}: {error}") from None
                assert tuple(map(len, arrays)) == self.sizes[i], "a form wrote other sizes than it planned"
                file.writelines(arrays)
                digests.append(arrays_digest(arrays))
                left -= sum(self.sizes[i])
                on_sample(sample)
            file.flush()
            os.fsync(file.fileno())
            atomic_write_bytes(self.folder / digests_name(shard.id), b"".join(digests))
            os.replace(partial, self.folder / name)

    def _check_room(self, needed: int) -> None:
        """Raise :class:`ConfigError` unless the disk holds ``needed`` more bytes and the reserve."""
        place = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if needed + self.reserve_bytes > free:
            raise ConfigError(
                f"out is {self.folder}, whose disk has {free:,} bytes free; {needed:,} are still needed, and "
                f"{self.reserve_bytes:,} are kept free: make room or {OTHERS}; what is finished is kept, and the same "
                "command goes on from it"
            )

    @contextmanager
    def _naming_full_disk(self, needed: int) -> Iterator[None]:
        """Another process may fill the disk between the question and the write."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"out is {self.folder}, whose disk is full or whose quota is used up, with {needed:,} bytes of the "
                f"shard under way to write: make room or {OTHERS}; what is finished is kept, and the same command goes "
                "on from it"
            ) from None

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Index, lists, seal, and then the manifest, which makes the cache a cache. Written even where they exist, so
        that a damaged one is mended and not sealed."""
        for leftover in (*self.folder.glob(".*.tmp"), *(self.folder / OURS).glob(".*.tmp")):
            leftover.unlink(missing_ok=True)  # of killed processes: no other writes any more
        atomic_write_text(self.folder / SAMPLES_NAME, self._lines)
        if isinstance(self.form, SmallForm):
            atomic_write_bytes(self.folder / DRAFT_IDS_NAME, draft_ids_bytes(self.form.draft_ids))
        tokens = [sample.token_ids.shape[0] for sample in self.samples]
        records = make_records(self.shards, self.sizes, tokens)
        atomic_write_bytes(self.folder / INDEX_NAME, b"".join(record.pack() for record in records))
        begun = read_json(self.folder / BUILD_NAME, remedy=OTHERS)
        extra = {**begun["notes"], "git_sha": begun["provenance"]["git_commit"]}
        described = self.form.manifest(num_samples=len(self.samples), num_shards=len(self.shards), extra=extra)
        manifest = json_text(described)
        names = [INDEX_NAME, BUILD_NAME, SAMPLES_NAME, *(digests_name(shard.id) for shard in self.shards)]
        names += [DRAFT_IDS_NAME] if isinstance(self.form, SmallForm) else []
        hashes = {name: file_sha256(self.folder / name) for name in names}
        hashes[MANIFEST_NAME] = hashlib.sha256(manifest.encode()).hexdigest()
        atomic_write_text(self.folder / SEAL_NAME, json_text({"sha256": hashes, "provenance": provenance()}))
        atomic_write_text(self.folder / MANIFEST_NAME, manifest)


@contextmanager
def _open_alone(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that no other process writes, from its beginning; what a killed one left is dropped.

    An exception deletes it: half a shard is of no use, and the disk may be full.
    """
    busy = ConfigError(
        f"{path} is being written by another process; wait for it, or give every process a rank of its own"
    )
    with open(path, "ab") as file:
        if not _lock(file) or not _is_at(file, path):  # or its last owner finished it before our lock
            raise busy
        file.truncate(0)
        try:
            yield file
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _lock(file: BinaryIO, *, wait: bool = False) -> bool:
    """Keep other processes out until ``file`` is closed, or this process dies; False if another is in."""
    try:
        import fcntl
    except ImportError:  # Windows: one process there, and nobody keeps it from being two
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
