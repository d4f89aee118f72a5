"""OpenMP's threads: a pool for each thread that computes, and what one pool too many costs."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

SOFT = 1  # omp_pause_soft: what the program has set stays, threads and other resources go

_forked: list[int] = []  # this process, if a fork made it


def _note_fork() -> None:
    _forked.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def release_pool() -> bool:
    """End the OpenMP threads that the calling thread has had; it gets others when it next computes in parallel.

    libgomp keeps a pool for every thread that has ever run a parallel region. Once all pools together have more threads
    than the process has cores, a thread that waits at a barrier goes to sleep at once, whatever ``GOMP_SPINCOUNT``
    says. A pass of SmolLM2 has two hundred barriers; on two cores it took 14 ms instead of 11 for nothing but a pool
    that had loaded the model and was idle since. So whoever leaves the computing to an engine's thread lets go of its
    own pool. Without one the call takes microseconds. False where there is no libgomp, or one older than GCC 9, and in
    a forked process: a fork copies the books of its parent's pools without their threads, and libgomp would wait for
    those for ever.
    """
    pausing = [] if _forked else _pausing()
    return bool(pausing) and not any([pause(SOFT) for pause in pausing])  # all of them, whatever one says


@cache
def _pausing() -> list[ctypes._NamedFuncPointer]:
    """``omp_pause_resource_all`` (OpenMP 5.0) of every libgomp in the process; PyTorch may bring one of its own."""
    try:
        mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    except OSError:
        return []
    libraries = [ctypes.CDLL(str(path)) for path in sorted(mapped) if path.name.startswith("libgomp") and path.exists()]
    return [library.omp_pause_resource_all for library in libraries if hasattr(library, "omp_pause_resource_all")]
