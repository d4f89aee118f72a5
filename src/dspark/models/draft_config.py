"""The drafter's configuration: one frozen dataclass, read from and written to DeepSpec's ``config.json``.

The draft layers are Qwen3-shaped (pre-norm, SwiGLU, per-head norms on q and k) whatever the target is, with the
target's width, head counts, rotary base and vocabulary, so that every engine that knows ``Qwen3DSparkModel`` can load
them. Source: semantics section 1(a) of DeepSpec's layout. We add two fields that DeepSpec does not have, both
optional: ``draft_vocab_size`` with the buffer ``d2t`` (speculators' convention: target id = draft id + d2t[draft
id]).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.models.target import check_taps

ARCHITECTURE = "Qwen3DSparkModel"
HEAD_TYPES = ("vanilla",)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of a DSpark drafter. Token counts in tokens, widths in channels."""

    # the target's shape, copied
    vocab_size: int
    hidden_size: int
    num_target_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048  # drafting stops past it, decoding goes on
    embed_scale: float = 1.0  # factor on input embeddings (Gemma: sqrt of the width)
    final_soft_cap: float = 0.0  # tanh cap on base logits, before the Markov bias; 0 is off

    # the drafter's own
    num_hidden_layers: int = 2
    block_size: int = 7  # gamma: draft tokens per block, the anchor's slot predicts too
    mask_token_id: int = 0  # a token that no answer contains
    target_layer_ids: tuple[int, ...] = ()  # taps, ascending; the last layer is refused
    markov_rank: int = 128  # 0 switches the sequential head off
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None  # None: the drafter speaks the whole vocabulary

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "block_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("num_hidden_layers", "intermediate_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}; it must lie in the vocabulary of {self.vocab_size}"
            )
        if not self.target_layer_ids:
            raise ConfigError("target_layer_ids is empty; a drafter needs at least one tapped layer")
        check_taps(self.target_layer_ids, self.num_target_layers)
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank is {self.markov_rank}; it must be 0 (no sequential head) or more")
        if self.markov_head_type not in HEAD_TYPES:
            raise ConfigError(f"markov_head_type is {self.markov_head_type!r}; supported: {', '.join(HEAD_TYPES)}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}; it must lie in 1..{self.vocab_size}")

    @property
    def feature_size(self) -> int:
        """Width of one context row: number of taps times the hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def output_size(self) -> int:
        """Size of the vocabulary that the drafter's distribution covers."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def confidence_inputs(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    def to_json(self) -> dict[str, Any]:
        """``config.json`` in DeepSpec's layout."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["target_layer_ids"] = list(self.target_layer_ids)
        data |= {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        if self.markov_rank == 0:
            del data["markov_head_type"]
        if not self.enable_confidence_head:
            del data["confidence_head_with_markov"]
        if self.draft_vocab_size is None:
            del data["draft_vocab_size"]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftConfig:
        """Read DeepSpec's ``config.json``. Raises :class:`CheckpointError` on another architecture or a missing
        field."""
        architectures = data.get("architectures") or []
        if architectures != [ARCHITECTURE]:
            raise CheckpointError(f"architectures is {architectures}; this reader takes [{ARCHITECTURE!r}]")
        if data.get("attention_bias"):
            raise CheckpointError("attention_bias is true; drafters with biased attention are not supported")
        rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise CheckpointError(f"rope_type is {kind!r}; drafters with scaled rotary embeddings are not supported")
        if others := set(data.get("layer_types") or ()) - {"full_attention"}:
            raise CheckpointError(f"layer_types holds {sorted(others)}; drafters attend to the whole context here")
        if (activation := data.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"hidden_act is {activation!r}; this reader takes 'silu'")
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if "rope_theta" not in values and isinstance(data.get("rope_parameters"), dict):
            values |= {k: v for k, v in data["rope_parameters"].items() if k == "rope_theta"}
        if "final_soft_cap" not in values and data.get("final_logit_softcapping"):
            values["final_soft_cap"] = data["final_logit_softcapping"]
        if "markov_rank" not in values:
            values["markov_rank"] = 0
        if not values.get("enable_confidence_head", False):
            values["enable_confidence_head"] = values["confidence_head_with_markov"] = False
        values["target_layer_ids"] = tuple(values.get("target_layer_ids") or ())
        required = {"vocab_size", "hidden_size", "num_target_layers", "num_attention_heads", "num_key_value_heads"}
        required |= {"head_dim", "intermediate_size", "block_size", "mask_token_id"}
        missing = sorted(required - values.keys())
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}; it is not a complete {ARCHITECTURE} config")
        return cls(**values)
