"""Samples ready for training, kept between runs: rendering and tokenising thousands of answers takes half a minute.

A cache file is named by the hash of everything that decides its content: the answers and prompts files, the chat
template with its options, the tokenizer, and the cut. So it is never stale, only unused; the least recently used files
go once they are too many. What is read is checked against its own hash; a damaged file is made again.
:func:`dspark.data.samples.read_samples` is the plain form.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.artifacts import atomic_write_bytes, dspark_home
from dspark.chat import ChatFormat
from dspark.data.answer_file import check_template
from dspark.data.features import Sample
from dspark.data.samples import read_prompts, read_samples
from dspark.errors import DataError

VERSION = 1  # of the file, and of what read_samples makes of its input: raise it when either changes
MOST_BYTES = 2 << 30  # of all cache files together; the newest stays whatever its size

_log = logging.getLogger(__name__)


def load_samples(
    answers: Sequence[str | Path],
    prompts: Sequence[str | Path],
    chat: ChatFormat,
    *,
    max_tokens: int,
    most_bytes: int = MOST_BYTES,
) -> list[Sample]:
    """What ``read_samples(answers, read_prompts(prompts), chat, max_tokens=...)`` gives, from the cache if it is there.

    First, the answers' manifests are checked against ``chat`` (:func:`dspark.data.answer_file.check_template`). Files
    lie in ``$DSPARK_HOME/samples``; a folder that cannot be written to costs the time and is logged. Raises what the
    plain form raises.
    """
    check_template(answers, chat)
    path = dspark_home() / "samples" / f"{_key(answers, prompts, chat, max_tokens)}.safetensors"
    if (found := _read(path)) is not None:
        return found
    samples = read_samples(answers, read_prompts(prompts), chat, max_tokens=max_tokens)
    try:
        atomic_write_bytes(path, _packed(samples))
        _prune(path, most_bytes)
    except OSError as error:
        _log.warning("the samples cannot be kept in %s (%s); the next start renders them again", path, error)
    return samples


def _key(answers: Sequence[str | Path], prompts: Sequence[str | Path], chat: ChatFormat, max_tokens: int) -> str:
    files = [[_file_sha256(path) for path in paths] for paths in (answers, prompts)]
    parts = json.dumps([VERSION, files, chat.fingerprint(), max_tokens])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _file_sha256(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _packed(samples: Sequence[Sample]) -> bytes:
    names = json.dumps([[sample.id, sample.domain] for sample in samples]).encode()
    tensors = {
        "token_ids": torch.cat([sample.token_ids for sample in samples]).to(torch.int32),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
        "lengths": torch.tensor([len(sample.token_ids) for sample in samples]),
        "names": torch.frombuffer(bytearray(names), dtype=torch.uint8),
    }
    return save(tensors, metadata={"version": str(VERSION), "sha256": _tensors_sha256(tensors)})


def _read(path: Path) -> list[Sample] | None:
    """The samples of a cache file; None if there is none, or none that is whole."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("token_ids", "loss_mask", "lengths", "names")}
            expected = (file.metadata() or {}).get("sha256")
        if _tensors_sha256(tensors) != expected:
            raise ValueError("its content does not match its hash")
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        _log.warning("%s is damaged (%s) and is made again", path, error)
        return None
    now = time.time()
    with contextlib.suppress(OSError):  # another user's cache may be read only
        os.utime(path, (now, now))  # used just now: the last to go
    lengths = tensors["lengths"].tolist()
    names = json.loads(bytes(tensors["names"].tolist()))
    ids, masks = tensors["token_ids"].long().split(lengths), tensors["loss_mask"].split(lengths)
    # clones: a sample that is kept must not keep the whole file's memory
    return [
        Sample(name, domain, part.clone(), mask.clone())
        for (name, domain), part, mask in zip(names, ids, masks, strict=True)
    ]


def _tensors_sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _prune(newest: Path, most_bytes: int) -> None:
    """Delete the least recently used files beyond ``most_bytes``, never ``newest``."""
    files = sorted(newest.parent.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = newest.stat().st_size
    for path in files:
        if path == newest:
            continue
        total += path.stat().st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)
