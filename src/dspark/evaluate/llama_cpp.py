"""llama.cpp on the same model, as a column of the benchmark: a worker process in an environment of its own.

The worker's Python needs the package ``xllamacpp`` (llama.cpp's server as a library) and nothing of ours.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dspark.core import SamplingParams
from dspark.errors import ConfigError, ModelError
from dspark.evaluate.peer import PeerRun


class LlamaCppPeer:
    """A GGUF file served by llama.cpp, one request at a time, with the prompt as token ids and no prompt cache."""

    name = "llama.cpp"

    def __init__(self, python: Path, gguf: Path, *, threads: int, context: int = 4096) -> None:
        """Start the worker. Raises :class:`ConfigError` for a missing file, :class:`ModelError` if it does not come
        up."""
        for what, path in (("peer_python", python), ("peer_model", gguf)):
            if not path.is_file():
                raise ConfigError(f"{what} is {path}, which is no file")
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        self._process = subprocess.Popen(
            [str(python), str(worker), str(gguf), str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._receive()
        except ModelError as error:
            raise ModelError(
                f"llama.cpp did not start with {python} on {gguf}; run `{python} {worker} {gguf} {threads} {context}` "
                "to see why (it needs the package xllamacpp)"
            ) from error

    def run(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop_token_ids: Collection[int],
    ) -> PeerRun:
        """Answer one prompt; llama.cpp stops at the file's own end token. It does not tell its token ids."""
        if sampling.shapes_logits:
            raise ConfigError("llama.cpp is compared without penalties, logit_bias, bans and min_tokens; unset them")
        request = {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens, "seed": sampling.seed % 2**32}
        request |= {"temperature": 0.0 if sampling.greedy else sampling.temperature, "top_k": sampling.top_k}
        request |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ModelError(
                "llama.cpp's process has ended; see its own message by running the worker alone"
            ) from error
        timings = self._receive().get("timings")
        if not timings or not timings["predicted_ms"]:
            raise ModelError("llama.cpp answered without timings; use another version of xllamacpp")
        # its clock starts with the first token at hand, as ours does
        return PeerRun(token_ids=(), tokens_per_second=1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"])

    def close(self) -> None:
        """End the worker."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ModelError("llama.cpp's process has ended without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise ModelError(f"llama.cpp refused the request: {answer['error']}")
        return answer
