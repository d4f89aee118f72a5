"""Lines of progress: one every half minute, and one at the end."""

from __future__ import annotations

import pytest

from dspark import pace


def test_a_line_is_due_after_its_time_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    one, due = pace.Pace(), []
    for second in range(0, 100, 10):
        now[0] = 100.0 + second
        due.append(one.due())
    assert [10 * i for i, each in enumerate(due) if each] == [30, 60, 90]
    assert one.due(finished=True) and not one.due()
