"""Shape and type checks on, one thread, and the ``gpu`` marker; everything else a test needs is in ``fakes.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# The hook rewrites modules as they are imported, so it must be there before the first of them.
assert "dspark" not in sys.modules, "dspark was imported before its shape checks were installed"
install_import_hook("dspark", "beartype.beartype")

sys.path.insert(0, str(Path(__file__).parent))  # `from fakes import ...` under every import mode of pytest
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
