"""What a target's folder says about it, without loading the model: enough to judge whether a drafter fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.chat import read_eos_token_ids
from dspark.errors import ModelError
from dspark.models.target import TargetInfo
from dspark.models.weights import load_tokenizer, read_config, resolve_model

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TargetFacts:
    """A target by its files. ``reserved`` names the tokens that end or pad an answer: id -> what it is."""

    info: TargetInfo
    folder: Path
    architectures: tuple[str, ...]
    reserved: dict[int, str]

    @classmethod
    def of(cls, spec: str, *, trust_remote_code: bool = False) -> TargetFacts:
        """Facts of the model that ``spec`` names. Raises :class:`ModelError` if it cannot be found or read."""
        folder = resolve_model(spec, trust_remote_code=trust_remote_code)
        config = read_config(folder, trust_remote_code=trust_remote_code)
        text = config.get_text_config(decoder=True)
        info = TargetInfo(
            name=spec,
            family=text.model_type,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            max_len=getattr(text, "max_position_embeddings", 0) or 0,
            dtype=getattr(text, "dtype", None) or torch.float32,
            device=torch.device("cpu"),
        )
        eos = [config.eos_token_id, text.eos_token_id, read_eos_token_ids(folder)]
        pad = [config.pad_token_id, text.pad_token_id]
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
            eos, pad = [*eos, tokenizer.eos_token_id], [*pad, tokenizer.pad_token_id]
        reserved = dict.fromkeys(_flat(pad), "the pad token") | dict.fromkeys(_flat(eos), "an end token")
        return cls(info, folder, tuple(config.architectures or ()), reserved)

    @cached_property
    def embedding(self) -> Float[Tensor, "vocab hidden"]:
        """The embedding's weight as it is stored. Raises :class:`ModelError` if it is not found."""
        return self._tensor(EMBEDDINGS)

    @cached_property
    def head(self) -> Float[Tensor, "vocab hidden"]:
        """The head's weight as it is stored, the embedding's where the two are tied."""
        return self._tensor(HEADS) if self._places(HEADS) else self.embedding

    def _places(self, endings: Iterable[str]) -> list[tuple[Path, str]]:
        """Files and names of tensors that end in one of ``endings`` (families nest them differently)."""
        found = []
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    keys = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged ({error}); download or import the model again") from None
            found += [(path, key) for key in keys for end in endings if f".{key}".endswith(f".{end}")]
        return found

    def _tensor(self, endings: Iterable[str]) -> Tensor:
        found = self._places(endings)
        whole = (self.info.vocab_size, self.info.hidden_size)
        for path, key in found:
            with safe_open(path, framework="pt") as file:
                if tuple(file.get_slice(key).get_shape()) == whole:
                    return file.get_tensor(key)
        raise ModelError(
            f"{self.folder} holds no tensor of shape {list(whole)} called {' or '.join(endings)} "
            f"(seen: {[key for _, key in found] or 'none'}); the target's embedding cannot be compared or copied"
        )


def _flat(values: Iterable[object]) -> list[int]:
    """Integers out of a mixture of integers, lists of them, and None."""
    lists = [list(value) if isinstance(value, list | tuple) else [value] for value in values]
    return [value for some in lists for value in some if isinstance(value, int)]
