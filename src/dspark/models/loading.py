"""One door to a target: resolve the name, read the config, choose dtype, device and implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dspark.errors import ConfigError, ModelError
from dspark.models.linear import choose_cpu_dtype
from dspark.models.target import Target

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from dspark.models.decoder_config import DecoderConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
IMPLEMENTATIONS = ("auto", "lean", "transformers")


def load_target(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    implementation: str = "auto",
    trust_remote_code: bool = False,
) -> Target:
    """Load the model that ``spec`` names (a Hub id, a folder, a ``.gguf`` file or ``smollm2``) as a target.

    ``dtype``: auto, bfloat16, float32 or float16; auto is bfloat16 on a GPU and the measured winner on a CPU.
    ``device``: auto (a GPU if there is one), cpu, cuda or cuda:N.
    ``implementation``: auto takes the lean decoder where it covers the model and transformers otherwise.
    Raises :class:`ConfigError` for a value outside these, :class:`ModelError` for a model that cannot be used.
    """
    from dspark.models.weights import read_config, resolve_model  # late: they pull in half of transformers

    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation is {implementation!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    folder = resolve_model(spec, trust_remote_code=trust_remote_code)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    decoder = None if implementation == "transformers" else _decoder_config(config, required=implementation == "lean")
    if decoder is None:
        return _transformers(spec, folder, chosen_dtype, chosen_device, trust_remote_code)
    return _lean(spec, folder, decoder, chosen_dtype, chosen_device)


def choose_device(name: str) -> torch.device:
    """The device that ``name`` means; raises :class:`ConfigError` if there is none such here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(
            f"device is {name!r}; it must be auto, cpu, or a GPU of this machine (cuda, cuda:1)"
        ) from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that ``name`` means on ``device``; raises :class:`ConfigError` for an unknown name."""
    if name == "auto":
        return choose_cpu_dtype() if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _decoder_config(config: PretrainedConfig, *, required: bool) -> DecoderConfig | None:
    """The lean decoder's view of a config; None where it does not cover the model and need not."""
    from dspark.models.decoder_config import from_transformers

    try:
        return from_transformers(config)
    except ModelError:
        if required:
            raise
        return None


def _lean(spec: str, folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Target:
    from dspark.models.lean import LeanTarget
    from dspark.models.weights import load_tensors

    return LeanTarget(config, load_tensors(folder), name=spec, dtype=dtype, device=device)


def _transformers(spec: str, folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Target:
    from dspark.models.transformers_target import TransformersTarget, load_model

    model = load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return TransformersTarget(model, name=spec)
