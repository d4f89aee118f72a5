"""The lean decoder's small operations in plain PyTorch: every device, every family, and the reference of native.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dspark.models.decoder_config import DecoderConfig
from dspark.models.layer import AngleTables, Attend
from dspark.models.lean_memory import LeanMemory, Views
from dspark.models.lean_weights import Layer
from dspark.models.norm import RMSNorm
from dspark.models.ragged import AttentionShape, Run, Span, plan_batch

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines of a batch, [tokens, heads + 2 kv_heads, head_dim]


class PlainOps:
    """What lies between the products of a layer."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._activation = _ACTIVATIONS[config.activation]
        self._shape = AttentionShape(
            group=config.group,
            window=config.sliding_window,
            fused=config.attention_softcap is None,
            dtype=dtype,
            device=device,
        )

    def norm(self, x: Float[Tensor, "tokens hidden"], norm: RMSNorm) -> Float[Tensor, "tokens hidden"]:
        """RMSNorm of ``x``."""
        return norm(x)

    def add_norm(
        self, x: Float[Tensor, "tokens hidden"], added: Float[Tensor, "tokens hidden"], norm: RMSNorm
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
        """x + added, and the RMSNorm of that."""
        total = x + added
        return total, norm(total)

    def gate(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens width"]:
        """activation(gate) * up; may write into ``gate_up``."""
        gate, up = gate_up.view(gate_up.shape[0], 2, -1).unbind(1)
        return self._activation(gate).mul_(up)

    def attention(
        self,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[Layer],
        tables: AngleTables,
        *,
        causal: bool = True,
    ) -> Attend:
        """Self-attention for one pass: a function from layer index and [tokens, q, k and v] to [tokens, heads].

        The function writes the new keys and values into the memory. Attention runs once per run of the batch. A token
        sees its row's keys up to its own; with ``causal`` False up to the last of its row in the pass.
        """
        plan = plan_batch(memory, rows, counts, self._shape, causal=causal, scattered=memory.scattered)
        views = [memory.views(run) for run in plan.runs]
        rotation = local = self._rotation(tables(self.config.rope), plan.positions)
        if self.config.local_rope != self.config.rope:
            local = self._rotation(tables(self.config.local_rope), plan.positions)

        def attend(i: int, qkv: Tensor) -> Tensor:
            queries, new = self._turn(layers[i], qkv, local if layers[i].slides else rotation)
            if len(plan.runs) == 1:
                return self._run(i, layers[i].slides, queries, new, plan.runs[0], views[0])
            return torch.cat(
                [
                    self._run(i, layers[i].slides, queries[run.tokens], new[run.tokens], run, view)
                    for run, view in zip(plan.runs, views, strict=True)
                ]
            )

        return attend

    def _rotation(self, angles: tuple[Tensor, Tensor], positions: slice | Tensor) -> Rotation:
        """A batch's rotation in the model's dtype, as transformers applies it, for queries, keys and values at once.

        Half-split pairs turn as (a, b) -> (a cos - b sin, b cos + a sin); the sign sits in the sines. Values take part
        with cosine 1 and sine 0, so that keys and values come out as one tensor to be written.
        """
        config = self.config
        cos, sin = (table[positions, None].to(self._shape.dtype) for table in angles)
        turned, kept = config.num_heads + config.num_kv_heads, config.num_kv_heads
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return (
            torch.cat((cos.expand(-1, turned, -1), torch.ones_like(cos).expand(-1, kept, -1)), 1),
            torch.cat((sin.expand(-1, turned, -1), torch.zeros_like(sin).expand(-1, kept, -1)), 1),
        )

    def _turn(self, layer: Layer, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated queries [tokens, heads, head_dim], and keys with values [tokens, 2, kv_heads, head_dim]."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, config.head_dim)
        if layer.qk_norm is not None:
            normed = layer.qk_norm.weight.shape[0]  # queries and keys; in drafters of Gemma 4's style values too
            qkv[:, :normed] = layer.qk_norm(qkv[:, :normed])
        cos, sin = rotation
        states = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
        return states[:, :heads], states[:, heads:].view(-1, 2, kv_heads, config.head_dim)

    def _run(self, i: int, slides: bool, queries: Tensor, new: Tensor, run: Run, view: Views) -> Tensor:
        """Write a run's new keys and values, then attend."""
        view.write(i, new)
        keys, values = view.read(i, slides)
        return self._attend(queries, keys, values, run.local if slides else run.full, run)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span, run: Run) -> Tensor:
        """Attention of one run; ``queries`` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        config = self.config
        group, kv_heads, width = config.group, config.num_kv_heads, config.head_dim
        if run.folded:
            q = queries.reshape(-1, run.count * group, kv_heads, width).transpose(1, 2)
            return self._products(q, keys, values, span).transpose(1, 2).reshape(-1, config.num_heads * width)
        q = queries.reshape(run.count, group, kv_heads, width).permute(1, 2, 0, 3)
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        return self._products(q, keys, values, span).permute(2, 0, 1, 3).reshape(run.count, config.num_heads * width)

    def _products(self, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """softmax(q k^T) v. The soft-capped form is explicit, because fused kernels cannot cap."""
        scale, cap = self.config.attention_scale, self.config.attention_softcap
        if cap is None:
            return F.scaled_dot_product_attention(q, k, v, span.mask, is_causal=span.causal, scale=scale)
        scores = (q @ k.transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
        if span.mask is not None:
            scores += span.mask
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh, "gelu": F.gelu}
