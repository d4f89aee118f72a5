"""The plan of a cache: contiguous, complete, and an index that cannot be out of order unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.cache_format import RECORD, make_records, plan_shards, read_records
from dspark.errors import DataError

SIZES = st.lists(st.tuples(*[st.integers(0, 40)] * 5).filter(lambda size: sum(size) > 0), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 200))
def test_shards_cover_all_samples_once_and_are_as_full_as_they_may_be(sizes: list, limit: int) -> None:
    shards = plan_shards(sizes, limit)
    assert [i for shard in shards for i in range(shard.first, shard.end)] == list(range(len(sizes)))
    totals = [sum(size) for size in sizes]
    for i, shard in enumerate(shards):
        assert shard.id == i and shard.nbytes == sum(totals[shard.first : shard.end])
        assert shard.nbytes <= limit or shard.end - shard.first == 1
        if shard.end < len(sizes):
            assert shard.nbytes + totals[shard.end] > limit


@given(SIZES, st.integers(1, 200))
def test_arrays_follow_each_other_without_gaps(sizes: list, limit: int) -> None:
    shards = plan_shards(sizes, limit)
    records = list(make_records(shards, sizes, [7] * len(sizes)))
    ends = dict.fromkeys(range(len(shards)), 0)
    for record, size in zip(records, sizes, strict=True):
        for begin, width in zip(record.begins, size, strict=True):
            assert begin == ends[record.shard_id]
            ends[record.shard_id] += width
    assert [ends[shard.id] for shard in shards] == [shard.nbytes for shard in shards]
    assert read_records(b"".join(record.pack() for record in records), Path("samples.idx")) == records


def test_a_record_has_56_bytes_and_an_unsorted_index_is_refused() -> None:
    assert RECORD.size == 56
    records = [
        record.pack()
        for record in make_records(plan_shards([(4, 1, 1, 8, 4)] * 3, 100), [(4, 1, 1, 8, 4)] * 3, [1] * 3)
    ]
    with pytest.raises(DataError, match="not sorted: record 1 has sample_id 2"):
        read_records(records[0] + records[2] + records[1], Path("samples.idx"))
    with pytest.raises(DataError, match="no multiple of 56"):
        read_records(b"".join(records)[:-1], Path("samples.idx"))
