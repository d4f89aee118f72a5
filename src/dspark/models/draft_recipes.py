"""Which drafter to train for which target: the reference's choices for the models it was published with, and a default
shape for any other.

Numbers of a target (width, heads, vocabulary) are read from its own configuration, never written here; what is written
here is what DeepSpec decided: taps, mask token, layers, ranks, and how it trained.
Source: DeepSpec ``config/{dspark,dflash}/*.py`` and ``deepspec/modeling/dspark/{qwen3,gemma4}/config.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.errors import ConfigError
from dspark.models.draft_config import DraftConfig

METHODS = ("dspark", "dflash")


@dataclass(frozen=True, kw_only=True)
class ReferenceTraining:
    """How the reference trained all its DSpark and DFlash drafters; the defaults are DSpark's."""

    learning_rate: float = 6e-4
    warmup: float = 0.04  # fraction of the steps
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0  # global norm
    global_batch: int = 512  # sequences per step
    epochs: int = 10
    max_tokens: int = 4096  # of a sequence
    min_loss_tokens: int = 14  # supervised tokens below which a sequence is left out
    num_anchors: int = 512  # blocks per sequence
    loss_decay: float = 4.0
    alpha_ce: float = 0.1
    alpha_l1: float = 0.9
    alpha_confidence: float = 1.0
    seed: int = 42

    def steps(self, samples: int) -> int:
        """Optimiser steps over ``samples`` sequences; an epoch's incomplete last batch is left out."""
        return self.epochs * (samples // self.global_batch)


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """One drafter of the reference: for which target, of which shape, trained how."""

    target: str  # Hub id
    method: str  # one of METHODS
    num_target_layers: int  # tells a target of another size
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_hidden_layers: int = 5
    block_size: int = 7
    markov_rank: int = 256  # of the vanilla head
    training: ReferenceTraining = ReferenceTraining()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; this recipe knows {' and '.join(METHODS)}")

    def draft_config(self, target_config: Any, **changes: Any) -> DraftConfig:
        """The drafter's configuration for a target whose transformers configuration is ``target_config``.

        ``changes`` are fields of :class:`DraftConfig` that shall differ. Raises :class:`ConfigError` for a target with
        another number of layers: the taps would mean something else there.
        """
        layers = text_config(target_config).num_hidden_layers
        if layers != self.num_target_layers:
            raise ConfigError(
                f"the target has {layers} layers, {self.target} has {self.num_target_layers}; use for_target"
            )
        fields: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
            "num_hidden_layers": self.num_hidden_layers,
            "block_size": self.block_size,
            "markov_rank": self.markov_rank if self.method == "dspark" else 0,
            "enable_confidence_head": self.method == "dspark",
            "confidence_head_with_markov": self.method == "dspark",
        }
        return for_target(target_config, **{**fields, **changes})

    def train_fields(self) -> dict[str, Any]:
        """The reference's choices as fields of :class:`dspark.train.config.TrainConfig`.

        Every sequence of a step is a fresh one, nothing is warm-started, and the learning rate falls along a cosine.
        """
        training = self.training
        return {
            "model": self.target,
            "layers": self.num_hidden_layers,
            "block_size": self.block_size,
            "markov_rank": self.markov_rank if self.method == "dspark" else 0,
            "taps": self.target_layer_ids,
            "draft_vocab": 0,
            "mask_token_id": self.mask_token_id,
            "confidence": self.method == "dspark",
            "confidence_detach": False,
            "initialise": "fresh",
            "bigram_passes": 0.0,
            "soft_until": 0.0,
            "loss_decay": training.loss_decay,
            "alpha_ce": training.alpha_ce,
            "alpha_l1": training.alpha_l1,
            "alpha_confidence": training.alpha_confidence,
            "max_tokens": training.max_tokens,
            "sequences_per_step": training.global_batch,
            "fresh_per_step": training.global_batch,
            "slots_per_step": training.global_batch * training.num_anchors * self.block_size,
            "learning_rate": training.learning_rate,
            "warmup": training.warmup,
            "schedule": "cosine",
            "betas": training.betas,
            "weight_decay": training.weight_decay,
            "clip": training.clip,
            "seed": training.seed,
        }


def qwen3_4b(method: str = "dspark") -> DraftRecipe:
    return _recipe("Qwen/Qwen3-4B", method, 36, (1, 9, 17, 25, 33), mask_token_id=QWEN3_MASK)


def qwen3_8b(method: str = "dspark") -> DraftRecipe:
    return _recipe("Qwen/Qwen3-8B", method, 36, (1, 9, 17, 25, 33), mask_token_id=QWEN3_MASK)


def qwen3_14b(method: str = "dspark") -> DraftRecipe:
    return _recipe("Qwen/Qwen3-14B", method, 40, (1, 10, 19, 28, 37), mask_token_id=QWEN3_MASK)


def gemma4_12b(method: str = "dspark") -> DraftRecipe:
    return _recipe("google/gemma-4-12B-it", method, 48, (5, 17, 29, 41, 46), mask_token_id=4)


QWEN3_MASK = 151669  # the first row of the embedding that the tokenizer leaves unused; Gemma 4 has a `<mask>`


def _recipe(target: str, method: str, layers: int, taps: tuple[int, ...], *, mask_token_id: int) -> DraftRecipe:
    training = ReferenceTraining()
    if method == "dflash":
        training = ReferenceTraining(alpha_ce=1.0, alpha_l1=0.0, alpha_confidence=0.0)
    return DraftRecipe(
        target=target,
        method=method,
        num_target_layers=layers,
        target_layer_ids=taps,
        mask_token_id=mask_token_id,
        training=training,
    )


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Ids spread over the target by z-lab's formula: n = 1 -> L // 2, else round(1 + i (L - 4) / (n - 1))."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(sorted({round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)}))


def for_target(target_config: Any, *, mask_token_id: int, num_taps: int = 5, **changes: Any) -> DraftConfig:
    """A drafter's configuration for any target: the target's width, heads, rotary base and vocabulary.

    ``target_config`` is its transformers configuration (the text part is found inside), ``num_taps`` counts layers
    spread by :func:`default_taps` where ``target_layer_ids`` is not among ``changes``, which are fields of
    :class:`DraftConfig`. Targets of Gemma 4's shape get draft layers of its style, all others Qwen3's.
    """
    text = text_config(target_config)
    gemma4 = text.model_type.startswith("gemma4")
    heads = text.per_layer_config["full_attention"] if gemma4 else text  # Gemma 4 gives each kind of layer its own
    fields: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(heads, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": getattr(heads, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "intermediate_size": _feed_forward(text),
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,  # families with other norms name theirs otherwise
        "rope_theta": _full_rope(text).get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
        "final_soft_cap": getattr(text, "final_logit_softcapping", None) or 0.0,
        "mask_token_id": mask_token_id,
        "target_layer_ids": default_taps(text.num_hidden_layers, num_taps),
    }
    if gemma4:
        fields |= {
            "layer_style": "gemma4",
            "attention_k_eq_v": bool(text.attention_k_eq_v),
            "partial_rotary_factor": _full_rope(text).get("partial_rotary_factor") or 1.0,
        }
    return DraftConfig(**{**fields, **changes})


def text_config(target_config: Any) -> Any:
    """The language model's part of a transformers configuration."""
    return getattr(target_config, "text_config", target_config)


def _feed_forward(text: Any) -> int:
    """Width of the feed-forward part; four times the hidden size where the family does not say (GPT-2), and the widest
    where it differs from layer to layer."""
    size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return max(size) if isinstance(size, list | tuple) else int(size)


def _full_rope(text: Any) -> dict[str, Any]:
    """Rotary parameters of full-attention layers, which draft layers are."""
    rope = getattr(text, "rope_parameters", None) or {}
    return rope.get("full_attention") or rope
