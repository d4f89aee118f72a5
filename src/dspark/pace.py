"""How often a command says where it stands when its output is no terminal: now and then, and at the end."""

from __future__ import annotations

import time

REPORT_SECONDS = 30.0  # between lines


class Pace:
    """Counts the time since the last line, or since it was made."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self, *, finished: bool = False) -> bool:
        """Whether a line is due now; if so it counts as written."""
        now = time.monotonic()
        if not finished and now - self._last < REPORT_SECONDS:
            return False
        self._last = now
        return True
