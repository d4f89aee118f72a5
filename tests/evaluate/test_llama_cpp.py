"""The llama.cpp column of the benchmark, against a stand-in for its library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspark.core import SamplingParams
from dspark.errors import ConfigError, ModelError
from dspark.evaluate.llama_cpp import LlamaCppPeer

FAKE = """
import json
class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = (type("Part", (), {})() for _ in range(3))
class Server:
    def __init__(self, params):
        assert params.cpuparams.n_threads == 2 and params.model.path.endswith(".gguf")
    def handle_completions(self, request):
        if request["prompt"] == [9]:
            return {"error": "too long"}
        assert request["temperature"] == 0.0 and request["cache_prompt"] is False
        return json.dumps({"timings": {"predicted_n": request["n_predict"], "predicted_ms": 500.0}})
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaCppPeer:
    (tmp_path / "xllamacpp.py").write_text(FAKE)
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return LlamaCppPeer(Path(sys.executable), tmp_path / "model.gguf", threads=2)


def test_speed_counts_tokens_after_the_first(peer: LlamaCppPeer) -> None:
    sampling = SamplingParams()
    run = peer.run([1, 2], sampling=sampling, max_new_tokens=11, stop_token_ids=())
    assert run.tokens_per_second == pytest.approx(20.0)
    with pytest.raises(ModelError, match="too long"):
        peer.run([9], sampling=sampling, max_new_tokens=11, stop_token_ids=())
    peer.close()


def test_missing_files_and_a_library_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="peer_model"):
        LlamaCppPeer(Path(sys.executable), tmp_path / "none.gguf", threads=1)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="xllamacpp"):
        LlamaCppPeer(Path(sys.executable), tmp_path / "model.gguf", threads=1)
