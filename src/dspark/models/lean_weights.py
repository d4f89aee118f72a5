"""A checkpoint's tensors in the lean decoder's layout.

Queries, keys and values become one product, gate and up another. Query heads are stored as (group, kv_head) rather
than (kv_head, group): rows of ``q_proj`` and columns of ``o_proj`` are permuted here, once, and then neither folding
the query heads of a key-value head into the query axis nor unfolding the result needs a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.decoder_config import DecoderConfig
from dspark.models.linear import Linear, Product
from dspark.models.norm import RMSNorm

MakeProduct = Callable[[Tensor, Tensor | None], Product]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one decoder layer."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    input_norm: RMSNorm
    feedforward_norm: RMSNorm
    attention_out_norm: RMSNorm | None  # of families with four norms: on what attention and feed-forward add
    feedforward_out_norm: RMSNorm | None
    qk_norm: RMSNorm | None  # weights [heads + kv_heads, head_dim]
    slides: bool


class Weights:
    """Takes a checkpoint's tensors one by one, checks them and brings them into our layout."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        product: MakeProduct = Linear,
    ) -> None:
        """``product`` makes a layer's products of weights and biases."""
        self._product = product
        self.config, self.tensors, self.dtype, self.device = config, tensors, dtype, device
        ending = "embed_tokens.weight"
        # "model." for causal models, "model.language_model." or "language_model.model." inside image-text models.
        self.prefix = next((name.removesuffix(ending) for name in tensors if name.endswith(ending)), "model.")

    def take(self, name: str, *shape: int) -> Tensor:
        return self._take(self.prefix + name, shape)

    def head(self) -> Tensor:
        name = next((name for name in self.tensors if name.endswith("lm_head.weight")), "lm_head.weight")
        return self._take(name, (self.config.vocab_size, self.config.hidden_size))

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self._norm_weight(name, width), self.config.rms_eps)

    def _norm_weight(self, name: str, width: int) -> Tensor:
        weight = self.take(name, width)
        return 1.0 + weight.float() if self.config.norm_offset else weight

    def layer(self, i: int, *, inputs: int | None = None) -> Layer:
        """Layer ``i``; its attention reads ``inputs`` channels (None: the residual stream's width)."""
        config, prefix = self.config, f"layers.{i}."
        hidden, size = config.hidden_size, config.intermediate_size
        four = config.four_norms
        qk_norm = None
        if config.qk_norm:
            q_norm = self._norm_weight(prefix + "self_attn.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
            k_norm = self._norm_weight(prefix + "self_attn.k_norm.weight", config.head_dim).expand(
                config.num_kv_heads, -1
            )
            qk_norm = RMSNorm(torch.cat((q_norm, k_norm)), config.rms_eps)
        return Layer(
            qkv=self._qkv(prefix + "self_attn.", inputs or hidden),
            o=self._output(prefix + "self_attn.o_proj."),
            gate_up=self._stack([(prefix + "mlp.gate_proj.", size), (prefix + "mlp.up_proj.", size)], config.mlp_bias),
            down=self._linear(prefix + "mlp.down_proj.", hidden, size, config.mlp_bias),
            input_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            feedforward_norm=self.norm(
                f"{prefix}{'pre_feedforward' if four else 'post_attention'}_layernorm.weight", hidden
            ),
            attention_out_norm=self.norm(prefix + "post_attention_layernorm.weight", hidden) if four else None,
            feedforward_out_norm=self.norm(prefix + "post_feedforward_layernorm.weight", hidden) if four else None,
            qk_norm=qk_norm,
            slides=config.slides[i],
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name!r}; download it again or use another checkpoint")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, its config says {shape}")
        return tensor.detach().to(self.device, self.dtype)

    def _linear(self, name: str, out_size: int, in_size: int, bias: bool) -> Product:
        weight = self.take(name + "weight", out_size, in_size)
        return self._product(weight, self.take(name + "bias", out_size) if bias else None)

    def _stack(self, parts: list[tuple[str, int]], bias: bool) -> Product:
        weight = torch.cat([self.take(name + "weight", size, self.config.hidden_size) for name, size in parts])
        return self._product(
            weight, torch.cat([self.take(name + "bias", size) for name, size in parts]) if bias else None
        )

    def _qkv(self, prefix: str, inputs: int) -> Product:
        config = self.config
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        parts = [self._group_first(self.take(prefix + "q_proj.weight", q_size, inputs))]
        parts += [self.take(f"{prefix}{x}_proj.weight", kv_size, inputs) for x in "kv"]
        bias = None
        if config.qkv_bias:
            q_bias = self._group_first(self.take(prefix + "q_proj.bias", q_size))
            bias = torch.cat([q_bias] + [self.take(f"{prefix}{x}_proj.bias", kv_size) for x in "kv"])
        return self._product(torch.cat(parts), bias)

    def _output(self, name: str) -> Product:
        config = self.config
        weight = self.take(name + "weight", config.hidden_size, config.num_heads * config.head_dim)
        weight = self._group_first(weight.T).T.contiguous()
        return self._product(weight, self.take(name + "bias", config.hidden_size) if config.o_bias else None)

    def _group_first(self, rows: Tensor) -> Tensor:
        """Reorder head-wise rows from (kv_head, group) to (group, kv_head)."""
        config = self.config
        heads = rows.reshape(config.num_kv_heads, config.group, config.head_dim, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)
