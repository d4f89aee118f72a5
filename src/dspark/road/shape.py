"""A sensible drafter for any target: how many layers and taps, which start, which token is the mask.

The numbers lean on two drafters that are known to work: the reference's five layers of five taps for models of billions
of parameters on GPUs, and the two layers of three taps that pay on a small machine (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import safe_open
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.backbone import DraftModel
from dspark.models.draft_config import DraftConfig
from dspark.models.draft_recipes import default_taps, for_target
from dspark.models.target import TargetInfo

WHOLE_VOCABULARY = 16384  # up to here a drafter speaks all of it
CPU_VOCABULARY, GPU_VOCABULARY = 12288, 32768
BLOCKS = (7, 5, 3)  # block sizes to choose from; equal ones favour the reference's


def draft_shape(target_config: Any, info: TargetInfo, *, block_size: int = 7) -> DraftConfig:
    """The drafter's shape for a target; ``target_config`` is its transformers configuration.

    On a GPU a seventh of the target's layers, at most five; on a CPU, where drafting and training compete with the
    target for the same cores, two. The mask token is a place holder here: :func:`mask_token` needs the answers.
    """
    gpu = info.device.type != "cpu"
    wanted = min(5, max(2, info.num_layers // 7)) if gpu else 2
    layers = max(1, min(wanted, info.num_layers // 3))
    vocabulary = GPU_VOCABULARY if gpu else CPU_VOCABULARY
    return for_target(
        target_config,
        mask_token_id=0,
        vocab_size=info.vocab_size,
        max_position_embeddings=info.max_len,
        num_hidden_layers=layers,
        block_size=block_size,
        target_layer_ids=spread_taps(info.num_layers, 5 if layers >= 4 else 3),
        markov_rank=min(256 if gpu else 128, info.hidden_size),
        draft_vocab_size=None if info.vocab_size <= WHOLE_VOCABULARY else vocabulary,
    )


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """At most ``count`` taps by z-lab's formula, within the layers that may be tapped however few there are; the
    embedding (-1) where there is only one layer."""
    taps = default_taps(num_layers, max(1, min(count, num_layers - 2)))
    return tuple(sorted({max(-1, min(tap, num_layers - 2)) for tap in taps}))


def parameters(shape: DraftConfig) -> int:
    """Parameters of a drafter of this shape, without the embedding and head that it shares with the target."""
    with torch.device("meta"):
        return sum(p.numel() for p in DraftModel(shape).parameters())


def draft_start(shape: DraftConfig, target_config: Any, folder: Path) -> str:
    """``target`` where the last layers of the target in ``folder`` can be copied as they are, else ``fresh``.

    That takes Llama's tensor names and the drafter's shapes, and norms that multiply by their weight alone (Gemma's
    multiply by one more). Only the headers of the files are read.
    """
    if shape.layer_style != "qwen3" or "gemma" in getattr(target_config, "model_type", ""):
        return "fresh"
    stored = tensor_shapes(folder)
    first = shape.num_target_layers - shape.num_hidden_layers
    with torch.device("meta"):
        own = {name: tuple(tensor.shape) for name, tensor in DraftModel(shape).state_dict().items()}
    needed = {"model.norm.weight": own["norm.weight"]}
    for name, size in own.items():
        if name.startswith("layers."):
            _, i, part = name.split(".", 2)
            source = f"model.layers.{first + int(i)}.{part}"
            if source in stored or not part.endswith(("q_norm.weight", "k_norm.weight")):
                needed[source] = size
    return "target" if all(stored.get(name) == size for name, size in needed.items()) else "fresh"


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder's safetensors, from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def mask_token(tokenizer: Any, seen: Int[Tensor, "vocab"], *, never: Collection[int]) -> int:
    """The token that stands for "to be drafted": one that no conversation contains.

    ``seen`` counts how often each token occurs in prompts and answers; ``never`` are tokens that it must not be (end
    and padding tokens). A special token of the tokenizer's is best, then a row of the embedding that the tokenizer does
    not use, then the highest id that does not occur. Raises :class:`ConfigError` if every token occurs.
    """
    names = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    taken = {*never, *(getattr(tokenizer, name) for name in names)}
    size = seen.shape[0]
    special = sorted(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    unused = range(len(tokenizer), size)
    for token in (*special, *unused, *range(min(size, len(tokenizer)) - 1, -1, -1)):
        if token < size and token not in taken and int(seen[token]) == 0:
            return int(token)
    raise ConfigError("every token of the vocabulary occurs in the answers, so none can be the drafter's mask")
