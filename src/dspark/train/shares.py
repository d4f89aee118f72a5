"""How a step is cut up: among the processes of a run, and into the passes of each.

A step's samples and anchors are a function of (seed, step) alone, and every process knows all of them. What a process
runs is a function of that and of how many there are; since all losses divide by the totals of the whole step, neither
the number of processes nor that of passes changes the step, but for the order of sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

from dspark.data.anchors import Blocks
from dspark.data.features import Sample
from dspark.train.slots import Piece


def share_out(pieces: Sequence[Piece], processes: int) -> list[list[Piece]]:
    """The pieces of every process, in their order; sample by sample, and blocks of one sample only where there are
    fewer samples than processes.

    A sample goes to its owner, which follows from its id: there its features are, once they were computed. An owner
    that has its fair number of samples passes further ones on to the process with the fewest blocks. A process may be
    left with nothing if there are too few blocks.
    """
    parts = -(-processes // max(1, len(pieces)))
    cut = [(sample, part, i) for sample, blocks in pieces for i, part in enumerate(_cut_evenly(blocks, parts))]
    room = -(-len(cut) // processes)
    place: list[int | None] = [None] * len(cut)
    count, load = [0] * processes, [0] * processes
    for turned_away in (False, True):
        for k, (sample, part, i) in enumerate(cut):
            if place[k] is not None:
                continue
            to = min(range(processes), key=load.__getitem__) if turned_away else (_owner(sample) + i) % processes
            if not turned_away and count[to] >= room:
                continue
            place[k], count[to], load[to] = to, count[to] + 1, load[to] + part.anchors.shape[0]
    return [[(s, part) for (s, part, _), at in zip(cut, place, strict=True) if at == p] for p in range(processes)]


def pass_count(shares: Sequence[Sequence[Piece]], most_blocks: int) -> int:
    """Passes that each process makes, the same for all since fsdp gathers parameters in each, so that none has more
    than ``most_blocks`` blocks; 0 is one pass whatever its size."""
    most = max(sum(blocks.anchors.shape[0] for _, blocks in share) for share in shares)
    return max(1, -(-most // most_blocks)) if most_blocks else 1


def passes_of(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """``pieces`` in ``count`` passes of as many blocks each, to one; some are empty if there are fewer blocks."""
    total = sum(blocks.anchors.shape[0] for _, blocks in pieces)
    passes: list[list[Piece]] = [[] for _ in range(count)]
    for i in range(count):
        first, end, before = total * i // count, total * (i + 1) // count, 0
        for sample, blocks in pieces:
            size = blocks.anchors.shape[0]
            start, stop = max(0, first - before), min(size, end - before)
            if start < stop:
                passes[i].append((sample, blocks.some(start, stop)))
            before += size
    return passes


def _cut_evenly(blocks: Blocks, parts: int) -> list[Blocks]:
    """At most ``parts`` runs of blocks, none empty."""
    count = blocks.anchors.shape[0]
    parts = min(parts, count)
    edges = [count * i // parts for i in range(parts + 1)] if parts else []
    return [blocks.some(start, stop) for start, stop in pairwise(edges)]


def _owner(sample: Sample) -> int:
    return zlib.crc32(sample.id.encode())
