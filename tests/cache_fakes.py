"""A small corpus for the cache's tests, and a reader of DeepSpec's format that shares no code with the package."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from fakes import TableTarget
from torch import Tensor

from dspark.data.cache_deepspec import DeepSpecForm
from dspark.data.cache_format import Form, TargetIdentity
from dspark.data.cache_rows import ENCODINGS
from dspark.data.cache_writer import CacheBuild
from dspark.data.features import Sample
from dspark.data.windows import SmallForm

VOCAB, TAPS = 11, (0, 2)
IDENTITY = TargetIdentity(name="table", config_sha256="c", weights_sha256="w", tokenizer_sha256="t")


def table_target() -> TableTarget:
    return TableTarget(vocab_size=VOCAB, order=2)


def table_samples(count: int = 7) -> list[Sample]:
    """Conversations of different lengths; every third one has a second prompt in its middle."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        tokens = 8 + 3 * i
        mask = torch.arange(tokens) >= 4
        if i % 3 == 2:
            mask[8:11] = False
        samples.append(Sample(f"s{i}#0", "ab"[i % 2], torch.randint(VOCAB, (tokens,), generator=random), mask))
    return samples


def table_form(name: str, encoding: str = "bfloat16", *, top: int = 5, draft_ids: Tensor | None = None) -> Form:
    if name == "deepspec":
        return DeepSpecForm(layer_ids=TAPS, hidden_size=6)
    ids = torch.tensor([1, 2, 4, 5, 7, 8, 10]) if draft_ids is None else draft_ids
    return SmallForm(taps=TAPS, hidden_size=6, encoding=ENCODINGS[encoding], top=top, draft_ids=ids)


def table_build(
    folder: Path, form: Form, samples: Sequence[Sample], *, shard_bytes: int = 1500, reserve_bytes: int = 0
) -> CacheBuild:
    notes: dict[str, str | int | list[str] | None] = {"target_model_name_or_path": "table"}
    return CacheBuild(
        folder,
        form,
        samples,
        identity=IDENTITY,
        dtype="float32",
        notes=notes,
        shard_bytes=shard_bytes,
        reserve_bytes=reserve_bytes,
    )


def independent_read(folder: Path) -> list[dict[str, Tensor]]:
    """Samples of a DeepSpec target cache v2, by its documented layout alone: manifest, 56-byte records, five arrays."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2 and manifest["index_record_size"] == 56
    kinds = (manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"])
    assert kinds == ("bfloat16", "int32", "uint8")
    layers, hidden = manifest["target_layer_ids"], manifest["hidden_size"]
    assert layers == sorted(layers) and manifest["num_shards"] == len(manifest["shards"])
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * manifest["num_samples"]
    found, ends = [], {}
    for number in range(manifest["num_samples"]):
        sample_id, shard_id, tokens, *at = struct.unpack("<QIIQQQQQ", index[56 * number : 56 * number + 56])
        assert sample_id == number
        shard = manifest["shards"][shard_id]
        assert shard["shard_id"] == shard_id
        data = (folder / shard["file_name"]).read_bytes()
        widths = (4, 1, 1, 2 * len(layers) * hidden, 2 * hidden)
        kinds = (torch.int32, torch.uint8, torch.uint8, torch.bfloat16, torch.bfloat16)
        arrays = []
        for i, (begin, width, kind) in enumerate(zip(at, widths, kinds, strict=True)):
            assert begin == (at[i - 1] + tokens * widths[i - 1] if i else ends.get(shard_id, 0)), "not contiguous"
            arrays.append(torch.frombuffer(bytearray(data[begin : begin + tokens * width]), dtype=kind))
        ends[shard_id] = at[-1] + tokens * widths[-1]
        names = ("ids", "attention", "loss", "features", "last")
        sample = dict(zip(names, arrays, strict=True))
        sample["features"] = sample["features"].view(tokens, len(layers) * hidden)
        sample["last"] = sample["last"].view(tokens, hidden)
        found.append(sample)
    for shard_id, end in ends.items():
        assert (folder / manifest["shards"][shard_id]["file_name"]).stat().st_size == end
    return found
