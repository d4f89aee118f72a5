"""What the configurations of all trained drafters share: the shape of a draft layer beside a target, in two styles.

``qwen3`` (pre-norm, SwiGLU, norms on q and k per head) serves whatever the target is, with the target's width, head
counts, rotary base and vocabulary, so that every engine that knows Qwen3-shaped drafters can load them. ``gemma4`` has
the four norms, the layer scalar, the unscaled attention and the normed values of Gemma 4's full-attention layers.

Source: DeepSpec ``deepspec/modeling/{dspark,eagle3}/{qwen3,gemma4}/config.py``. ``draft_vocab_size`` is speculators'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.errors import CheckpointError, ConfigError

STYLES = ("qwen3", "gemma4")
POSITIVE: tuple[str, ...] = (  # fields that must be 1 or more
    "vocab_size",
    "hidden_size",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
POSITIVE += ("intermediate_size", "max_position_embeddings", "block_size")
NEEDED = frozenset(POSITIVE) - {"max_position_embeddings"}  # fields that a config.json cannot leave out


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Shape of a trained drafter. Token counts in tokens, widths in channels."""

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
    partial_rotary_factor: float = 1.0  # share of each head that turns with the position; (0, 1], gemma4 alone
    final_soft_cap: float = 0.0  # tanh cap on the head's logits, before any sequential head's bias; 0 is off

    # the drafter's own
    layer_style: str = "qwen3"  # one of STYLES
    attention_k_eq_v: bool = False  # values are the normed output of k_proj, there is no v_proj (gemma4 alone)
    block_size: int = 7  # gamma: draft tokens of one proposal
    draft_vocab_size: int | None = None  # None: the drafter speaks the whole vocabulary

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.layer_style not in STYLES:
            raise ConfigError(f"layer_style is {self.layer_style!r}; supported: {', '.join(STYLES)}")
        if self.layer_style != "gemma4" and (self.attention_k_eq_v or self.partial_rotary_factor != 1):
            raise ConfigError(
                f"attention_k_eq_v is {self.attention_k_eq_v} and partial_rotary_factor {self.partial_rotary_factor}; "
                f"layers of style {self.layer_style!r} have neither, set layer_style='gemma4'"
            )
        if self.head_dim % 2 or not 0 < self.partial_rotary_factor <= 1:
            raise ConfigError(
                f"head_dim is {self.head_dim} and partial_rotary_factor {self.partial_rotary_factor}; the first must "
                "be even, the second in (0, 1]"
            )
        if self.final_soft_cap < 0:
            raise ConfigError(f"final_soft_cap is {self.final_soft_cap}; it must be positive, or 0 for none")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}; it must lie in 1..{self.vocab_size}")

    @property
    def output_size(self) -> int:
        """Size of the vocabulary that the drafter's distribution covers."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def attention_scale(self) -> float:
        """Factor on query-key products."""
        return 1.0 if self.layer_style == "gemma4" else self.head_dim**-0.5

    @property
    def activation(self) -> str:
        """Of the feed-forward's gate, by its name in transformers."""
        return "gelu_pytorch_tanh" if self.layer_style == "gemma4" else "silu"


def style_json(shape: DrafterShape) -> dict[str, Any]:
    """What readers of the style's own config class look for in ``config.json``, besides our fields.

    In Gemma 4's class the full-attention layers, which draft layers are, have names of their own.
    """
    common = {"attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    if shape.layer_style != "gemma4":
        return common | {"model_type": "qwen3", "hidden_act": "silu"}
    turning: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.partial_rotary_factor < 1:
        turning |= {"rope_type": "proportional", "partial_rotary_factor": shape.partial_rotary_factor}
    return common | {
        "model_type": "gemma4_text",
        "hidden_activation": shape.activation,
        "global_head_dim": shape.head_dim,
        "num_global_key_value_heads": shape.num_key_value_heads,
        "final_logit_softcapping": shape.final_soft_cap or None,
        "rope_parameters": {"full_attention": turning},
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }


def without_defaults(data: dict[str, Any], shape: DrafterShape) -> dict[str, Any]:
    """``data`` without our fields that say nothing for this shape, or that DeepSpec keeps elsewhere."""
    silent = {"partial_rotary_factor"}  # among the rotary parameters
    if shape.layer_style != "gemma4":
        silent.add("attention_k_eq_v")
    if shape.draft_vocab_size is None:
        silent.add("draft_vocab_size")
    return {key: value for key, value in data.items() if key not in silent}


def style_of(data: dict[str, Any], architectures: dict[str, str]) -> str:
    """The layer style that ``architectures`` of a ``config.json`` names; ``architectures`` maps styles to names.

    Raises :class:`CheckpointError` for another architecture, or if the file contradicts itself.
    """
    found = data.get("architectures") or []
    style = next((s for s, name in architectures.items() if found == [name]), None)
    if style is None:
        known = " or ".join(f"[{name!r}]" for name in architectures.values())
        raise CheckpointError(f"architectures is {found}; this reader takes {known}")
    if (given := data.get("layer_style") or style) != style:
        raise CheckpointError(f"layer_style is {given!r} and architectures {found}; they contradict")
    return style


def refuse_foreign(data: dict[str, Any], style: str) -> None:
    """Raise :class:`CheckpointError` on what would otherwise be computed wrongly in silence."""
    if data.get("attention_bias"):
        raise CheckpointError("attention_bias is True; drafters with biased attention are not supported")
    rope = _rope(data)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and not (style == "gemma4" and kind == "proportional" and rope.get("factor", 1.0) == 1.0):
        raise CheckpointError(f"rope_type is {kind!r}; drafters with scaled rotary embeddings are not supported")
    if others := set(data.get("layer_types") or ()) - {"full_attention"}:
        raise CheckpointError(f"layer_types holds {sorted(others)}; drafters attend to the whole context here")
    name, wanted = ("hidden_activation", "gelu_pytorch_tanh") if style == "gemma4" else ("hidden_act", "silu")
    if (activation := data.get(name) or wanted) != wanted:
        raise CheckpointError(f"{name} is {activation!r}; this reader takes {wanted!r}")
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"):
        if style == "gemma4" and data.get(name):
            raise CheckpointError(f"{name} is {data[name]}; draft layers have no such part")


def translated(data: dict[str, Any], style: str, values: dict[str, Any]) -> dict[str, Any]:
    """Our fields that DeepSpec stores under another name, where ``values`` lacks ours; also the style itself."""
    rope = _rope(data)
    found: dict[str, Any] = {"layer_style": style}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in values and rope.get(name) is not None:
            found[name] = rope[name]
    if "final_soft_cap" not in values and data.get("final_logit_softcapping"):
        found["final_soft_cap"] = data["final_logit_softcapping"]
    if style == "gemma4":  # the draft layers are full-attention ones, whose heads Gemma 4 names apart
        found["head_dim"] = data.get("global_head_dim") or values.get("head_dim")
        if data.get("attention_k_eq_v") and data.get("num_global_key_value_heads"):
            found["num_key_value_heads"] = data["num_global_key_value_heads"]
    return {name: value for name, value in found.items() if value is not None}


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of full-attention layers; nested by kind of layer in Gemma 4."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return rope.get("full_attention") or rope
