"""Other engines on the same model, as a third column of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dspark.core import SamplingParams
from dspark.errors import ConfigError, ModelError


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """What another engine made of a prompt."""

    token_ids: tuple[int, ...]  # empty if the engine does not tell them
    tokens_per_second: float  # after its first token; nan if that was its only one


@runtime_checkable
class Peer(Protocol):
    """An engine to compare with."""

    name: str

    def run(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop_token_ids: Collection[int],
    ) -> PeerRun:
        """Answer one prompt under the same settings as ours."""
        ...


class TransformersPeer:
    """``generate`` of the transformers library: SDPA attention, its own growing cache, the dtype and device of ours.

    These are its fastest settings that need no compiling; a static cache compiles for longer than a benchmark runs.
    """

    name = "transformers"

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the model in ``folder`` (safetensors). Raises :class:`ModelError` if the library cannot."""
        import transformers  # heavy, and not needed without a peer

        transformers.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"transformers cannot load {folder}: {str(error).splitlines()[0]}") from error
        self._model = model.to(device).eval()
        # the folder's own generation defaults (a temperature, a penalty) would make it another task than ours
        self._model.generation_config = transformers.GenerationConfig()

    def run(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop_token_ids: Collection[int],
    ) -> PeerRun:
        if sampling.shapes_logits:
            raise ConfigError("transformers is compared without penalties, logit_bias, bans and min_tokens; unset them")
        clock = _TokenClock()
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        stops = sorted(stop_token_ids)
        options: dict[str, Any] = {"do_sample": not sampling.greedy}  # Any: the library's keywords are of every type
        if not sampling.greedy:
            torch.manual_seed(sampling.seed)
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            options |= {"min_p": sampling.min_p} if sampling.min_p > 0 else {}
        if stops:
            options |= {"eos_token_id": stops, "pad_token_id": stops[0]}
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=clock, **options
            )
        return PeerRun(token_ids=tuple(output[0, ids.shape[1] :].tolist()), tokens_per_second=clock.tokens_per_second)


class _TokenClock:
    """A streamer that notes when tokens arrive: generate hands it the prompt first, then each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        arrivals = self.times[1:]
        if len(arrivals) < 2:
            return float("nan")
        return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
