"""What the decoding forms of all trained drafters share with the lean decoder: its layers and small operations.

A draft layer runs as a layer of the lean decoder does, between the same products (:mod:`dspark.models.plain`,
:mod:`dspark.models.native`), over a :class:`LeanMemory` of the drafter's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dspark.models.backbone import rotary_rates
from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.drafter_shape import DrafterShape
from dspark.models.lean_weights import Layer, Weights
from dspark.models.native import NativeOps, native_ops
from dspark.models.norm import RMSNorm


def decoder_config(shape: DrafterShape, *, layers: int, qk_norm: bool = True) -> DecoderConfig:
    """The draft layers as the lean decoder's operations know them."""
    rates = rotary_rates(shape.head_dim, shape.rope_theta, shape.partial_rotary_factor)
    rope = Rope(inv_freq=tuple(rates.tolist()))
    return DecoderConfig(
        family=f"dspark-{shape.layer_style}",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=layers,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_len=shape.max_position_embeddings,
        rms_eps=shape.rms_norm_eps,
        activation=shape.activation,
        rope=rope,
        local_rope=rope,
        sliding_window=None,
        slides=(False,) * layers,
        attention_scale=shape.attention_scale,
        qk_norm=qk_norm,
        four_norms=shape.layer_style == "gemma4",
    )


def draft_native_ops(
    shape: DrafterShape, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> NativeOps | None:
    """Compiled operations, where there are any for the style: the compiled attention does not norm values."""
    return native_ops(config, dtype, device) if shape.layer_style == "qwen3" else None


def load_layers(
    shape: DrafterShape,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    inputs: int | None = None,
) -> list[Layer]:
    """A drafter's layers from its ``state_dict``, fused and packed; ``inputs`` is the width that attention reads.

    Keys serve as values where the layer has no v_proj. In Gemma 4's style values are among the heads that are normed,
    with weight 1.
    """
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for i in range(config.num_layers):
        attn = f"model.layers.{i}.self_attn."
        named.setdefault(attn + "v_proj.weight", named[attn + "k_proj.weight"])
    weights = Weights(config, named, dtype, device)
    layers = [weights.layer(i, inputs=inputs) for i in range(config.num_layers)]
    return [_norming_values(layer, shape) for layer in layers] if shape.layer_style == "gemma4" else layers


def _norming_values(layer: Layer, shape: DrafterShape) -> Layer:
    assert layer.qk_norm is not None
    ones = torch.ones(shape.num_key_value_heads, shape.head_dim)
    weight = torch.cat((layer.qk_norm.weight, ones.to(layer.qk_norm.weight)))
    return replace(layer, qk_norm=RMSNorm(weight, shape.rms_norm_eps))


class Angles:
    """Cosines and sines of positions, fp32 [positions, head_dim / 2], made once for as many as were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, rope: Rope, max_len: int) -> tuple[Tensor, Tensor]:
        """The tables of at least ``max_len`` positions."""
        if self._table is None or self._table[0].shape[0] < max_len:
            rates = torch.tensor(rope.inv_freq, dtype=torch.float64)
            angles = torch.outer(torch.arange(max_len, dtype=torch.float64), rates)
            self._table = (angles.cos().float().to(self._device), angles.sin().float().to(self._device))
        return self._table
