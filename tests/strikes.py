"""SIGKILL at random moments of a stage that adds lines to a file, in forked children that save themselves the imports.

``DSPARK_KILLS`` raises the number of kills of every such test: 20 make a proof, the usual few a check.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 240.0  # seconds, for a machine that is busy with other things


def kills(usual: int) -> int:
    """How often a test strikes."""
    return max(usual, int(os.environ.get("DSPARK_KILLS", "0")))


def forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a child, silently; returns its process id. Its exit code is 0 if it came to its end."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the child ends with it
        work()
        code = 0
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """Exit status of a child, None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return status if done else None


def lines_of(path: Path) -> list[bytes]:
    """The whole lines of a file."""
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def whole_lines(path: Path) -> list[bytes]:
    return [line for line in lines_of(path) if line.endswith(b"\n")]


def killed_until_done(path: Path, work: Callable[[], object], *, kills: int, source: random.Random) -> int:
    """Start ``work``, kill it once some lines came, start it again, until it ends by itself; returns the kills."""
    struck, deadline = 0, time.monotonic() + DEADLINE
    while True:
        before = whole_lines(path)
        child = forked(work)
        wanted, pause = len(before) + source.randrange(0, 5), source.uniform(0.0, 0.01)
        while (status := ended(child)) is None:
            assert time.monotonic() < deadline, "the runs take too long"
            if struck < kills and len(whole_lines(path)) >= wanted:
                time.sleep(pause)
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                break
            time.sleep(0.002)
        after = whole_lines(path)
        assert after[: len(before)] == before, "an answer that was on disk is lost or changed"
        if os.WIFSIGNALED(status):
            struck += 1
            continue
        assert os.WEXITSTATUS(status) == 0, "a resumed run failed"
        return struck
