"""What the decoding forms of all trained drafters share with the lean decoder: its layers and small operations.

A draft layer runs as a layer of the lean decoder does, between the same products (:mod:`dspark.models.plain`,
:mod:`dspark.models.native`), over a :class:`LeanMemory` of the drafter's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.backbone import rotary_rates
from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.drafter_shape import DrafterShape
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Layer, MakeProduct, Weights
from dspark.models.linear import Linear
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
    product: MakeProduct = Linear,
) -> list[Layer]:
    """A drafter's layers from its ``state_dict``, fused and packed; ``inputs`` is the width that attention reads.
    ``product`` makes their products.

    Keys serve as values where the layer has no v_proj. In Gemma 4's style values are among the heads that are normed,
    with weight 1.
    """
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for i in range(config.num_layers):
        attn = f"model.layers.{i}.self_attn."
        named.setdefault(attn + "v_proj.weight", named[attn + "k_proj.weight"])
    weights = Weights(config, named, dtype, device, product=product)
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


def draft_columns(token_ids: Int[Tensor, "draft_vocab"], vocab_size: int) -> Int[Tensor, "vocab"]:
    """The draft id of every target id, -1 outside the draft vocabulary; ``token_ids`` are the target ids of it."""
    columns = torch.full((vocab_size,), -1, dtype=torch.long, device=token_ids.device)
    columns[token_ids] = torch.arange(token_ids.shape[0], device=token_ids.device)
    return columns


class ContextWriter:
    """Puts the keys and values of committed tokens into a drafter's memory, normed and rotated as attention wants them.

    ``k_norms`` [layers, head_dim]: weights of the keys' norm, None without one; ``norms_values``: Gemma 4's style norms
    values too, without a weight.
    """

    def __init__(
        self,
        config: DecoderConfig,
        k_norms: Float[Tensor, "layers head_dim"] | None,
        *,
        norms_values: bool,
        angles: Angles,
    ) -> None:
        self._config, self._norms_values, self._angles = config, norms_values, angles
        self._k_norms = None if k_norms is None else k_norms[:, None]

    def write(
        self,
        memory: LeanMemory,
        rows: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        projected: Float[Tensor, "tokens width"],
    ) -> None:
        """Write tokens of any rows, in all layers at once; ``projected`` holds keys, then values, layer after layer.

        ``rows`` and ``positions`` lie on the CPU. Mutates ``memory``, but not its lengths.
        """
        config = self._config
        shape = (len(rows), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        k, v = projected.view(shape).unbind(2)
        if self._k_norms is not None:
            k = self._norm(k) * self._k_norms
        if self._norms_values:
            v = self._norm(v)
        table = self._angles(config.rope, memory.max_len)
        cos, sin = (part[positions.to(part.device)].to(k.dtype)[:, None, None] for part in table)
        left, right = k.chunk(2, -1)
        states = torch.stack((torch.cat((left * cos - right * sin, right * cos + left * sin), -1), v), 2)
        page, offset = memory.slots(rows, positions)
        memory.both[:, :, page, :, offset] = states

    def _norm(self, x: Tensor) -> Tensor:
        """RMSNorm per head, without a weight."""
        return F.rms_norm(x, x.shape[-1:], None, self._config.rms_eps)
