"""The drafter's configuration: one frozen dataclass, read from and written to DeepSpec's ``config.json``.

Draft layers come in two styles. ``qwen3`` (pre-norm, SwiGLU, per-head norms on q and k) serves whatever the target is,
with the target's width, head counts, rotary base and vocabulary, so that every engine that knows ``Qwen3DSparkModel``
can load them. ``gemma4`` has the four norms, the layer scalar, the unscaled attention and the normed values of Gemma 4
(``Gemma4DSparkModel``). DFlash is the same drafter with ``markov_rank`` 0 and no confidence head.

Source: DeepSpec ``deepspec/modeling/dspark/{qwen3,gemma4}/config.py``. We add fields that DeepSpec does not have, all
optional: ``draft_vocab_size`` with the buffer ``d2t`` and ``sample_from_anchor`` (both are speculators' names).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.models.target import check_taps

ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}  # by layer style
HEAD_TYPES = ("vanilla", "gated", "rnn")
POSITIVE = (  # fields that must be 1 or more
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "block_size",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
)
REQUIRED = frozenset(POSITIVE) - {"num_hidden_layers", "max_position_embeddings"} | {
    "num_target_layers",
    "mask_token_id",
}


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
    partial_rotary_factor: float = 1.0  # share of each head that turns with the position; (0, 1], gemma4 alone
    final_soft_cap: float = 0.0  # tanh cap on base logits, before the Markov bias; 0 is off

    # the drafter's own
    layer_style: str = "qwen3"  # qwen3 | gemma4
    attention_k_eq_v: bool = False  # values are the normed output of k_proj, there is no v_proj (gemma4 alone)
    num_hidden_layers: int = 2
    block_size: int = 7  # gamma: draft tokens per block, in either convention of the anchor's slot
    sample_from_anchor: bool = True  # the anchor's slot predicts too; False is z-lab's DFlash: anchor, then gamma masks
    mask_token_id: int = 0  # a token that no answer contains
    target_layer_ids: tuple[int, ...] = ()  # taps, ascending; the last layer is refused
    markov_rank: int = 128  # 0 switches the sequential head off
    markov_head_type: str = "vanilla"  # vanilla | gated | rnn
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
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
        if self.layer_style not in ARCHITECTURES:
            raise ConfigError(f"layer_style is {self.layer_style!r}; supported: {', '.join(ARCHITECTURES)}")
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

    @property
    def block_inputs(self) -> int:
        """Slots that the backbone runs per block: one more where the anchor's predicts nothing."""
        return self.slots(self.block_size)

    def slots(self, block_size: int) -> int:
        """Slots of a block with ``block_size`` predictions."""
        return block_size + (not self.sample_from_anchor)

    @property
    def attention_scale(self) -> float:
        """Factor on query-key products."""
        return 1.0 if self.layer_style == "gemma4" else self.head_dim**-0.5

    @property
    def activation(self) -> str:
        """Of the feed-forward's gate, by its name in transformers."""
        return "gelu_pytorch_tanh" if self.layer_style == "gemma4" else "silu"

    def to_json(self) -> dict[str, Any]:
        """``config.json`` in DeepSpec's layout."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["target_layer_ids"] = list(self.target_layer_ids)
        data |= {
            "architectures": [ARCHITECTURES[self.layer_style]],
            "attention_bias": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        data |= self._gemma_fields() if self.layer_style == "gemma4" else {"model_type": "qwen3", "hidden_act": "silu"}
        del data["partial_rotary_factor"]  # DeepSpec keeps it among the rotary parameters
        if self.layer_style != "gemma4":
            del data["attention_k_eq_v"]
        if self.markov_rank == 0:
            del data["markov_head_type"]
        if not self.enable_confidence_head:
            del data["confidence_head_with_markov"]
        if self.draft_vocab_size is None:
            del data["draft_vocab_size"]
        return data

    def _gemma_fields(self) -> dict[str, Any]:
        """What Gemma 4's own classes read: there the full-attention layers have names of their own."""
        turning = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.partial_rotary_factor < 1:
            turning |= {"rope_type": "proportional", "partial_rotary_factor": self.partial_rotary_factor}
        return {
            "model_type": "gemma4_text",
            "hidden_activation": self.activation,
            "global_head_dim": self.head_dim,
            "num_global_key_value_heads": self.num_key_value_heads,
            "final_logit_softcapping": self.final_soft_cap or None,
            "rope_parameters": {"full_attention": turning},
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DraftConfig:
        """Read DeepSpec's ``config.json``; what the target's config brought along and no drafter reads is passed over.

        Raises :class:`CheckpointError` on another architecture, a missing field, or one that we would compute wrongly.
        """
        architectures = data.get("architectures") or []
        style = next((s for s, name in ARCHITECTURES.items() if architectures == [name]), None)
        if style is None:
            known = " or ".join(f"[{name!r}]" for name in ARCHITECTURES.values())
            raise CheckpointError(f"architectures is {architectures}; this reader takes {known}")
        if (given := data.get("layer_style", style)) != style:
            raise CheckpointError(f"layer_style is {given!r} and architectures {architectures}; they contradict")
        _refuse_foreign(data, style)
        names = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in names and value is not None}
        values |= _translated(data, style, values)
        values["layer_style"] = style
        values["target_layer_ids"] = tuple(values.get("target_layer_ids") or ())
        values.setdefault("markov_rank", 0)
        if not values.get("enable_confidence_head", False):
            values["enable_confidence_head"] = values["confidence_head_with_markov"] = False
        if missing := sorted(REQUIRED - values.keys()):
            raise CheckpointError(
                f"config.json lacks {', '.join(missing)}; it is not a complete {ARCHITECTURES[style]} config"
            )
        return cls(**values)


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of full-attention layers; nested by kind of layer in Gemma 4."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return rope.get("full_attention") or rope


def _refuse_foreign(data: dict[str, Any], style: str) -> None:
    """Raise :class:`CheckpointError` on what would otherwise be computed wrongly in silence."""
    if data.get("attention_bias"):
        raise CheckpointError("attention_bias is true; drafters with biased attention are not supported")
    rope = _rope(data)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and not (style == "gemma4" and kind == "proportional" and rope.get("factor", 1.0) == 1.0):
        raise CheckpointError(f"rope_type is {kind!r}; drafters with scaled rotary embeddings are not supported")
    if others := set(data.get("layer_types") or ()) - {"full_attention"}:
        raise CheckpointError(f"layer_types holds {sorted(others)}; drafters attend to the whole context here")
    name, wanted = ("hidden_activation", "gelu_pytorch_tanh") if style == "gemma4" else ("hidden_act", "silu")
    if (activation := data.get(name, wanted)) != wanted:
        raise CheckpointError(f"{name} is {activation!r}; this reader takes {wanted!r}")
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp"):
        if style == "gemma4" and data.get(name):
            raise CheckpointError(f"{name} is {data[name]}; draft layers have no such part")


def _translated(data: dict[str, Any], style: str, values: dict[str, Any]) -> dict[str, Any]:
    """Our fields that DeepSpec stores under another name, where ours is absent."""
    rope, found = _rope(data), {}
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
