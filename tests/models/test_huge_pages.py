"""Large pages are asked for whole, only where the system has them, and never change what lies there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.models import huge_pages
from dspark.models.linear import Linear, settle

asked: list[tuple[int, int, int]] = []


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *call: asked.append(call) or 0)


MIB = 1 << 20


def test_fresh_memory_gives_whole_large_pages_alone() -> None:
    huge_pages.before_use(3 * MIB, 8 * MIB)
    assert asked == [(4 * MIB, 6 * MIB, huge_pages.WANT_LARGE)]
    huge_pages.before_use(3 * MIB, 2 * MIB)
    assert len(asked) == 1


def test_neighbouring_weights_are_asked_for_once() -> None:
    wanted = huge_pages.gather([(5 * MIB, MIB), (11 * MIB, MIB), (4 * MIB, MIB), (41 * MIB, 3 * MIB)])
    assert wanted == 8 * MIB
    assert [call[:2] for call in asked[::2]] == [(4 * MIB, 2 * MIB), (10 * MIB, 2 * MIB), (40 * MIB, 4 * MIB)]
    assert {call[2] for call in asked} == {huge_pages.WANT_LARGE, huge_pages.COLLAPSE}


@pytest.mark.parametrize(("setting", "there"), [("always [madvise] never", True), ("always madvise [never]", False)])
def test_the_administrators_switch_is_kept(
    setting: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "enabled")
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    huge_pages._madvise.cache_clear()
    assert (huge_pages._madvise() is not None) == there
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "missing")
    huge_pages._madvise.cache_clear()
    assert huge_pages._madvise() is None and huge_pages.gather([(0, MIB)]) == 0
    huge_pages._madvise.cache_clear()


@pytest.mark.parametrize("packed", [True, False])
def test_settled_weights_stay_what_they_were(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    linears = [Linear(torch.randn(512, 384), packed=packed) for _ in range(4)]
    x = torch.randn(3, 384)
    before = [linear(x) for linear in linears]
    assert all(linear.place()[1] >= 512 * 384 * 4 for linear in linears)
    settle(linears)
    for linear, wanted in zip(linears, before, strict=True):
        assert torch.equal(linear(x), wanted)


def test_weights_elsewhere_are_left_alone() -> None:
    settle([Linear(torch.empty(4, 4, device="meta"), packed=False)])
    assert asked == []
