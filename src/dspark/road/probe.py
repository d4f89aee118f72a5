"""What a plan is made from: a short measurement of the target on this machine, and the room that there is."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from dspark.core import SamplingParams
from dspark.data.draws import draw_tokens
from dspark.errors import ModelError
from dspark.models.target import Target

ROWS = {"cpu": 64, "gpu": 256}  # answers under way at a time, where memory allows
SAMPLE_TOKENS = 256  # of the pass that stands for a training sample
CONTEXT = 64


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The target's speed, in seconds as measured, and the room on this machine, in bytes."""

    pass_seconds: tuple[tuple[int, float], ...]  # (tokens of one request, median seconds of the pass)
    rows: int  # requests of a sampling pass
    sampling_seconds: float  # of a pass that draws a token for each of them
    sample_tokens: int
    sample_seconds: float  # of a pass over so many tokens, without the head
    target_parameters: int
    memory_free: int
    disk_free: int

    def of(self, tokens: int) -> float:
        """Seconds of a pass over ``tokens`` tokens of one request, on the line between measured numbers."""
        points = list(self.pass_seconds)
        for (a, at_a), (b, at_b) in pairwise(points):
            if a <= tokens <= b:
                return at_a + (at_b - at_a) * (tokens - a) / (b - a)
        return points[-1][1] * max(1.0, tokens / points[-1][0])

    @property
    def tokens_per_second(self) -> float:
        """Of the batched sampler."""
        return self.rows / self.sampling_seconds


@torch.no_grad()
def measure(target: Target, *, parameters: int, out: Path, answer_tokens: int, repeats: int = 5) -> Probe:
    """Time a few passes of ``target`` and look at the room for ``out``; seconds of work.

    ``answer_tokens`` is the length of prompt and answer that the sampler's memory is sized by. Each figure is a median
    of ``repeats`` passes, taken in rounds over all kinds so that a slow moment spoils no single one.
    """
    info = target.info
    free = memory_free(info.device)
    row_bytes = target.new_memory(rows=1, max_len=min(answer_tokens, info.max_len)).nbytes
    most = ROWS["cpu" if info.device.type == "cpu" else "gpu"]
    rows = max(1, min(most, int(0.25 * free) // max(1, row_bytes)))
    sizes = sorted({size for size in (1, 4, 6, 8) if size < info.max_len})
    sample = min(SAMPLE_TOKENS, info.max_len - 1)
    kinds = [_Pass(target, rows=1, tokens=size) for size in sizes]
    kinds += [_Pass(target, rows=rows, tokens=1, draw=True), _Pass(target, rows=1, tokens=sample, head=False)]
    rounds = [[kind.seconds() for kind in kinds] for _ in range(repeats + 1)][1:]  # the first one warms up
    *passes, sampling, whole = (statistics.median(each[i] for each in rounds) for i in range(len(kinds)))
    return Probe(
        pass_seconds=tuple(zip(sizes, passes, strict=True)),
        rows=rows,
        sampling_seconds=sampling,
        sample_tokens=sample,
        sample_seconds=whole,
        target_parameters=parameters,
        memory_free=free,
        disk_free=disk_free(out),
    )


class _Pass:
    """A kind of pass, to be timed again and again: ``tokens`` tokens of each of ``rows`` requests behind others."""

    def __init__(self, target: Target, *, rows: int, tokens: int, draw: bool = False, head: bool = True) -> None:
        self.target, self.draw, self.head = target, draw, head
        self.places, self.counts = tuple(range(rows)), [tokens] * rows
        self.context = max(1, min(CONTEXT, target.info.max_len - tokens))
        self.memory = target.new_memory(rows=rows, max_len=self.context + tokens)
        ids = torch.arange(rows * max(self.context, tokens), device=target.info.device) % target.info.vocab_size
        self.ids = ids[: rows * tokens]
        before = [self.context] * rows
        target.forward(ids[: rows * self.context], self.memory, rows=self.places, counts=before, want_logits=False)

    def seconds(self) -> float:
        begin = time.perf_counter()
        output = self.target.forward(
            self.ids, self.memory, rows=self.places, counts=self.counts, last_only=self.draw, want_logits=self.head
        )
        if self.draw and output.logits is not None:
            shares = torch.full((len(self.places),), 0.5, dtype=torch.float64, device=output.logits.device)
            draw_tokens(output.logits, SamplingParams(temperature=0.8), shares)
        output.final[-1, 0].item()  # waits for the device
        for row in self.places:
            self.memory.rollback(row, self.context)
        return time.perf_counter() - begin


def memory_free(device: torch.device) -> int:
    """Bytes of memory that can still be taken on ``device``: the GPU's, or what the system calls available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().split("\n"):
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else 1 << 62  # unknown: nothing can be refused for it


def disk_free(path: Path) -> int:
    """Bytes free on the disk where ``path`` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_fits(folder: Path, *, itemsize: int, parameters: int, device: torch.device) -> None:
    """Raise :class:`ModelError` if the model in ``folder`` will not fit into memory; before it is loaded.

    ``itemsize`` is the bytes of a parameter once loaded.
    """
    needed, free = parameters * itemsize, memory_free(device)
    if needed > 0.9 * free:
        raise ModelError(
            f"{folder.name} takes {needed / 1e9:.1f} GB as {itemsize}-byte numbers on {device}, where "
            f"{free / 1e9:.1f} GB are free; free some memory, or take another --device or a smaller model"
        )
