"""What the configurations of Eagle3 and MTP share: the shape of one causal draft layer beside a target.

Both are chains: a draft layer runs once per draft token, fed with the state it left at the token before. The layer is
Qwen3-shaped (pre-norm, SwiGLU, norms on q and k per head) with the target's width, heads, rotary base and vocabulary,
whatever the target is, so that it is described by the target's own ``config.json`` plus a few fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from dspark.errors import CheckpointError, ConfigError

Config = TypeVar("Config", bound="ChainConfig")
SIZES: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SIZES += ("intermediate_size", "max_position_embeddings", "block_size")
# Fields of a config.json that no reader here may ignore: another value would change what the layer computes.
FIXED = {"attention_bias": False, "hidden_act": "silu"}


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """Shape of a chain drafter. Token counts in tokens, widths in channels."""

    ARCHITECTURE: ClassVar[str]

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
    final_soft_cap: float = 0.0  # tanh cap on the logits of the target's head; 0 is off

    # the drafter's own
    block_size: int = 7  # draft tokens of one proposal, a run of the layer each
    draft_vocab_size: int | None = None  # None: the drafter speaks the whole vocabulary

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embeddings need it even")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}; it must lie in 1..{self.vocab_size}")

    @property
    def output_size(self) -> int:
        """Size of the vocabulary that the drafter's distribution covers."""
        return self.draft_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """``config.json``: every field, and what readers of Qwen3-shaped configs expect beside them."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data = {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}
        if self.draft_vocab_size is None:
            del data["draft_vocab_size"]
        return data | {
            "architectures": [self.ARCHITECTURE],
            "model_type": "qwen3",
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **FIXED,
        }

    @classmethod
    def from_json(cls: type[Config], data: dict[str, Any]) -> Config:
        """Read ``config.json``. Raises :class:`CheckpointError` on another architecture, a missing field, or a layer
        that this one cannot stand for."""
        if (found := data.get("architectures") or []) != [cls.ARCHITECTURE]:
            raise CheckpointError(f"architectures is {found}; this reader takes [{cls.ARCHITECTURE!r}]")
        for name, value in FIXED.items():
            if (given := data.get(name) or value) != value:
                raise CheckpointError(f"{name} is {given!r}; this reader takes {value!r}")
        layers = data.get("draft_num_hidden_layers", data.get("num_hidden_layers", 1))
        if layers != 1:
            raise CheckpointError(f"num_hidden_layers is {layers}; a chain drafter has one layer")
        if others := set(data.get("layer_types") or ()) - {"full_attention"}:
            raise CheckpointError(f"layer_types holds {sorted(others)}; drafters attend to the whole context here")
        values = cls.read_fields(data)
        missing = sorted(set(SIZES) - {"max_position_embeddings"} - values.keys())
        if missing:
            raise CheckpointError(
                f"config.json lacks {', '.join(missing)}; it is not a complete {cls.ARCHITECTURE} config"
            )
        return cls(**values)

    @classmethod
    def read_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments that ``data`` holds, other spellings translated."""
        rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise CheckpointError(f"rope_type is {kind!r}; drafters with scaled rotary embeddings are not supported")
        names = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in names}
        if "rope_theta" not in values and "rope_theta" in rope:
            values["rope_theta"] = rope["rope_theta"]
        if "final_soft_cap" not in values and data.get("final_logit_softcapping"):
            values["final_soft_cap"] = data["final_logit_softcapping"]
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
