"""Reading a cache: what does not belong together is refused by name, and few files are open."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_fakes import IDENTITY, TAPS, VOCAB, table_build, table_form, table_samples, table_target

from dspark.data.cache_features import CachedFeatureSource
from dspark.data.cache_reader import FeatureCache
from dspark.data.cache_writer import CacheBuild
from dspark.data.features import FeatureSource, Sample
from dspark.errors import DataError
from dspark.models.target import FINAL


def built(folder: Path, form: str = "deepspec") -> Path:
    assert table_build(folder, table_form(form), table_samples()).run(table_target())
    return folder


@pytest.fixture(scope="module", params=["deepspec", "small"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("pristine") / "cache", request.param)


@pytest.fixture
def cache(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(pristine, tmp_path / "cache")
    return tmp_path / "cache"


def again(folder: Path) -> CacheBuild:
    """The build that made ``folder``."""
    form = "small" if (folder / "dspark" / "draft_ids.bin").exists() else "deepspec"
    return table_build(folder, table_form(form), table_samples())


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_samples_come_back_and_few_shards_are_open(pristine: Path) -> None:
    with FeatureCache(pristine, max_open_shards=2) as cache:
        assert len(cache) == 7 and len(list(pristine.glob("shard-*.bin"))) > 3
        for i in (6, 0, 3, 1, 5, 2, 4, 0):
            sample, expected = cache.sample(i), table_samples()[i]
            assert (sample.id, sample.domain) == (expected.id, expected.domain)
            assert torch.equal(sample.token_ids, expected.token_ids)
            assert torch.equal(sample.loss_mask, expected.loss_mask)
            assert 1 <= cache.open_shards <= 2
        assert not list(cache.damaged())
    assert cache.open_shards == 0


def test_every_single_byte_is_under_a_checksum(cache: Path) -> None:
    shard = cache / "shard-00001.bin"
    pristine = shard.read_bytes()
    for at in range(0, len(pristine), 7):
        flip(shard, at)
        damaged = list(FeatureCache(cache).damaged())
        assert len(damaged) == 1 and "shard-00001.bin" in damaged[0][1] and "corrupt" in damaged[0][1]
        shard.write_bytes(pristine)


def test_corrupt_bytes_are_refused_when_training_reads_them(cache: Path) -> None:
    flip(cache / "shard-00000.bin")
    source = CachedFeatureSource(FeatureCache(cache), table_target(), TAPS, torch.tensor([1, 2, 4, 5, 7, 8, 10]), top=5)
    refused = []
    for sample in table_samples():
        try:
            source.get(sample)
        except DataError as error:
            refused.append(str(error))
    assert len(refused) == 1 and "checksum" in refused[0] and "sample s" in refused[0]


@pytest.mark.parametrize(
    "name", ["manifest.json", "samples.idx", "dspark/build.json", "dspark/samples.jsonl", "dspark/shard-00001.sum"]
)
def test_damage_to_a_small_file_is_named_and_mended(cache: Path, name: str) -> None:
    flip(cache / name, 9)
    with pytest.raises(DataError, match=rf"{name} is corrupt"):
        FeatureCache(cache)
    (cache / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing|unfinished"):
        FeatureCache(cache)
    if name != "dspark/build.json":
        assert again(cache).run(table_target())
        assert not list(FeatureCache(cache).damaged())


def test_a_missing_or_cut_shard_is_named_and_written_again(cache: Path) -> None:
    (cache / "shard-00001.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.bin is missing"):
        FeatureCache(cache)
    seen: list[str] = []
    assert again(cache).run(table_target(), on_sample=lambda s: seen.append(s.id))
    assert 0 < len(seen) < 7
    whole = (cache / "shard-00002.bin").read_bytes()
    (cache / "shard-00002.bin").write_bytes(whole[:-3])
    assert ["corrupt" in why for _, why in FeatureCache(cache).damaged()] == [True]


def change_manifest(folder: Path, **fields: object) -> None:
    """As another writer would have it: no seal of ours."""
    shutil.rmtree(folder / "dspark", ignore_errors=True)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **fields}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 3}, "version is 3"),
        ({"hidden_dtype": "int4"}, "hidden_dtype is 'int4'"),
        ({"index_record_size": 48}, "index_record_size is 48"),
        ({"target_layer_ids": [2, 0]}, "target_layer_ids"),
        ({"num_samples": 6}, "7 records; num_samples is 6"),
        ({"num_shards": 1}, "num_shards is 1"),
        ({"shards": [{"shard_id": 0, "file_name": "../x"}], "num_shards": 1}, "plain file_name"),
    ],
)
def test_another_format_is_refused_by_field(tmp_path: Path, fields: dict, words: str) -> None:
    change_manifest(built(tmp_path / "cache"), **fields)
    with pytest.raises(DataError, match=words):
        FeatureCache(tmp_path / "cache")


def test_an_unsorted_index_is_refused(tmp_path: Path) -> None:
    folder = built(tmp_path / "cache")
    change_manifest(folder)
    index = (folder / "samples.idx").read_bytes()
    (folder / "samples.idx").write_bytes(index[56:112] + index[:56] + index[112:])
    with pytest.raises(DataError, match="not sorted"):
        FeatureCache(folder)


def test_a_cache_of_deepspecs_own_is_read_and_its_target_known_by_name(tmp_path: Path) -> None:
    ours = FeatureCache(built(tmp_path / "cache"))
    states = ours.form.states(ours.arrays(3), (2, FINAL))
    change_manifest(tmp_path / "cache")
    theirs = FeatureCache(tmp_path / "cache")
    assert theirs.identity is None and theirs.sample(3).id == "3#0"
    again = theirs.form.states(theirs.arrays(3), (2, FINAL))
    assert torch.equal(again.features, states.features) and torch.equal(again.final, states.final)
    assert torch.equal(again.features[:, 6:], again.final)
    theirs.check_target(IDENTITY)
    with pytest.raises(DataError, match="made by target 'table', not 'other'"):
        theirs.check_target(replace(IDENTITY, name="other"))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_the_references_later_8_bit_states_are_read(tmp_path: Path, kind: str) -> None:
    dtype, random = getattr(torch, kind), torch.Generator().manual_seed(1)
    features, last = (torch.randn(5, n, generator=random).to(dtype) for n in (12, 6))
    head = torch.arange(5, dtype=torch.int32).numpy().tobytes() + bytes([1] * 5) + bytes([0, 0, 1, 1, 1])
    body = b"".join(x.view(torch.uint8).numpy().tobytes() for x in (features, last))
    (tmp_path / "shard-00000.bin").write_bytes(head + body)
    begins = (0, 20, 25, 30, 30 + 60)
    (tmp_path / "samples.idx").write_bytes(struct.pack("<QIIQQQQQ", 0, 0, 5, *begins))
    manifest = {"version": 2, "num_samples": 1, "num_shards": 1, "target_layer_ids": [0, 2], "hidden_dtype": kind}
    manifest |= {"token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56, "hidden_size": 6}
    manifest |= {"shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    cache = FeatureCache(tmp_path)
    states = cache.form.states(cache.arrays(0), (0, 2))
    assert torch.equal(states.features, features.bfloat16()) and torch.equal(states.final, last.bfloat16())


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("config_sha256", "config.json is another"),
        ("weights_sha256", "weights are others"),
        ("tokenizer_sha256", "tokenizer gives other"),
    ],
)
def test_another_target_or_tokenizer_is_refused_by_name(pristine: Path, field: str, words: str) -> None:
    cache = FeatureCache(pristine)
    cache.check_target(replace(IDENTITY, name="/moved/table"))
    with pytest.raises(DataError, match=rf"{words}.*{field}.*'table'.*'mine'"):
        cache.check_target(replace(IDENTITY, name="mine", **{field: "x"}))


def test_samples_that_are_not_in_it_or_changed_are_named(pristine: Path) -> None:
    cache, sample = FeatureCache(pristine), table_samples()[2]
    assert cache.find(sample) == 2
    for other, words in (
        (replace(sample, id="new#0"), "new#0 is not in the cache"),
        (replace(sample, token_ids=(sample.token_ids + 1) % VOCAB), "s2#0 has other tokens"),
        (replace(sample, loss_mask=~sample.loss_mask), "s2#0 has other tokens"),
        (Sample(sample.id, "a", sample.token_ids[:-1], sample.loss_mask[:-1]), "s2#0 has other tokens"),
    ):
        with pytest.raises(DataError, match=words):
            cache.find(other)


@pytest.mark.parametrize(
    ("taps", "ids", "top", "words"),
    [
        ((0, 3), [1, 2, 4, 5, 7, 8, 10], 5, "lacks the target layers 3; it holds 0, 2"),
        ((0, 2), [1, 2, 4, 5, 7, 8, 9], 5, "draft_vocab"),
        ((0, 2), [1, 2, 4], 3, "draft_vocab"),
        ((0, 2), [1, 2, 4, 5, 7, 8, 10], 6, "target_top is 6; the cache holds 5"),
    ],
)
def test_what_the_small_form_cannot_serve_is_refused(
    tmp_path: Path, taps: tuple[int, ...], ids: list[int], top: int, words: str
) -> None:
    cache = FeatureCache(built(tmp_path / "cache", "small"))
    with pytest.raises(DataError, match=words):
        CachedFeatureSource(cache, table_target(), taps, torch.tensor(ids), top=top)


def test_the_deepspec_form_serves_any_vocabulary_but_not_other_layers(tmp_path: Path) -> None:
    cache = FeatureCache(built(tmp_path / "cache"))
    with pytest.raises(DataError, match="lacks the target layers -1; it holds 0, 2, final"):
        CachedFeatureSource(cache, table_target(), (-1, 0), torch.arange(VOCAB))
    source = CachedFeatureSource(cache, table_target(), (2, FINAL), torch.tensor([3, 9]), top=2)
    online = FeatureSource(table_target(), (2, FINAL), torch.tensor([3, 9]), top=2)
    for sample in table_samples():
        ours, theirs = source.get(sample), online.get(sample)
        torch.testing.assert_close(ours.features.float(), theirs.features, atol=0.0, rtol=2**-8)
        torch.testing.assert_close(ours.top_probs, theirs.top_probs, atol=0.01, rtol=0.02)
    assert source.read == 7 and source.computed == 0
