"""What the lean decoder must know about a model: the numbers and switches in which the Llama-shaped families differ.

A configuration of transformers goes in, a :class:`DecoderConfig` comes out, or a :class:`ModelError` that names the
field which the lean decoder does not cover; the loader then falls back to the library's own model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
FIXED_ROPES = ("linear", "llama3", "yarn")  # scaled kinds whose frequencies do not depend on the sequence's length


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of one kind of layer."""

    inv_freq: tuple[float, ...]  # radians per position, head_dim / 2 of them
    scale: float = 1.0  # factor on cosine and sine (yarn's attention factor)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and switches of a Llama-shaped decoder. Sizes are in elements, windows and limits in tokens."""

    family: str  # model_type of the source config, "gemma3_text" for the text part of gemma3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    max_len: int  # max_position_embeddings
    rms_eps: float
    activation: str  # one of ACTIVATIONS
    rope: Rope  # of full-attention layers
    local_rope: Rope  # of sliding layers; equal to ``rope`` in all families but Gemma 3
    sliding_window: int | None  # keys a sliding layer sees, the token's own included; None: no layer slides
    slides: tuple[bool, ...]  # per layer
    attention_scale: float  # factor on query-key products
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    final_softcap: float | None = None  # the same on logits
    embedding_scale: float | None = None  # factor on embeddings, rounded to the model's dtype as transformers does
    tied_head: bool = False  # the head is the embedding matrix
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before the rotation
    norm_offset: bool = False  # norms multiply by 1 + weight, in fp32 (Gemma)
    four_norms: bool = False  # norms after attention and feed-forward as well (Gemma 2 and 3)

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


def from_transformers(config: PretrainedConfig) -> DecoderConfig:
    """Translate a transformers configuration (version 5 names: ``rope_parameters``, ``layer_types``).

    Raises :class:`ModelError` naming the first field that the lean decoder does not cover: another ``model_type``,
    rotary scaling that depends on the sequence's length, partial rotation, bidirectional attention, quantised weights.
    """
    if config.model_type not in FAMILIES:
        raise _unsupported("model_type", config.model_type, f"one of {', '.join(FAMILIES)}")
    tied = bool(config.tie_word_embeddings)
    quantised = getattr(config, "quantization_config", None)
    text = config.text_config if config.model_type == "gemma3" else config
    family = text.model_type
    _check(text, quantised)

    gemma = family.startswith("gemma")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention_bias = bool(getattr(text, "attention_bias", False))
    slides = _sliding_layers(text)
    return DecoderConfig(
        family=family,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        max_len=text.max_position_embeddings,
        rms_eps=text.rms_norm_eps,
        activation=_activation(text),
        rope=_rope(text, "full_attention", head_dim),
        local_rope=_rope(text, "sliding_attention", head_dim),
        sliding_window=text.sliding_window if any(slides) else None,
        slides=slides,
        attention_scale=(text.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        # Gemma 3's config has the field as well, but its attention in transformers does not read it.
        attention_softcap=text.attn_logit_softcapping if family == "gemma2" else None,
        # Nor does the image-text class of Gemma 3 read this one.
        final_softcap=text.final_logit_softcapping if gemma and config.model_type != "gemma3" else None,
        embedding_scale=text.hidden_size**0.5 if gemma else None,
        tied_head=tied,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(text.mlp_bias),
        qk_norm=family in ("qwen3", "gemma3_text"),
        norm_offset=gemma,
        four_norms=gemma,
    )


def _unsupported(name: str, value: object, wanted: str) -> ModelError:
    return ModelError(f"{name} is {value!r}; the lean decoder takes {wanted}. Use implementation='transformers'")


def _check(text: PretrainedConfig, quantised: object) -> None:
    """Refuse what would otherwise be computed wrongly in silence."""
    if quantised is not None or getattr(text, "quantization_config", None) is not None:
        raise _unsupported("quantization_config", quantised, "unquantised weights")
    if getattr(text, "use_bidirectional_attention", False):
        raise _unsupported("use_bidirectional_attention", True, "causal attention")
    for kind in set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise _unsupported("layer_types", kind, "full_attention and sliding_attention")
    if text.num_attention_heads % text.num_key_value_heads:
        raise _unsupported(
            "num_key_value_heads",
            text.num_key_value_heads,
            f"a divisor of num_attention_heads {text.num_attention_heads}",
        )


def _activation(text: PretrainedConfig) -> str:
    name = "hidden_activation" if hasattr(text, "hidden_activation") else "hidden_act"
    value = str(getattr(text, name))
    if value not in ACTIVATIONS:
        raise _unsupported(name, value, f"one of {', '.join(ACTIVATIONS)}")
    return value


def _sliding_layers(text: PretrainedConfig) -> tuple[bool, ...]:
    """Which layers slide. Mistral has no layer_types: there the window holds everywhere."""
    if getattr(text, "sliding_window", None) is None:
        return (False,) * text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    if text.model_type == "mistral" or kinds is None:
        return (True,) * text.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def _rope(text: PretrainedConfig, layer_type: str, head_dim: int) -> Rope:
    """Frequencies of one kind of layer; ``rope_parameters`` is nested by kind in Gemma 3 and flat elsewhere."""
    nested = isinstance(text.rope_parameters.get("full_attention"), dict)
    parameters = text.rope_parameters[layer_type] if nested else text.rope_parameters
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _unsupported("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    if head_dim % 2:
        raise _unsupported("head_dim", head_dim, "an even number")
    if kind == "default":
        inv_freq = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        return Rope(inv_freq=tuple(inv_freq.tolist()))
    if kind not in FIXED_ROPES:
        raise _unsupported(
            "rope_type", kind, f"default, {', '.join(FIXED_ROPES)} (independent of the sequence's length)"
        )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"), layer_type=layer_type if nested else None)
    return Rope(inv_freq=tuple(inv_freq.tolist()), scale=float(scale))
