"""The lean target: our own decoder for the Llama-shaped families, on our own KV memory.

Batch-1 decoding reads every weight once a pass; what is left to save is the number of small operations between the
products. So queries, keys and values are one product, gate and up another, rotation serves queries and keys at once,
and the query heads of a key-value head lie on the query axis of attention, which then reads each key once.

Everything here runs eagerly and on any device; products choose their own fastest path (:mod:`dspark.models.linear`).
On CUDA a captured graph per (rows, count) would remove the launch gaps; shapes and addresses already allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.lean_weights import Weights
from dspark.models.linear import Linear
from dspark.models.ragged import AttentionShape, Plan, Run, Span, check_batch, last_tokens, plan_batch
from dspark.models.target import KVMemory, TargetInfo, TargetOutput, check_taps

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [tokens, 1, head_dim]


class LeanTarget:
    """A Llama-shaped decoder behind the :class:`dspark.models.target.Target` protocol."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, Tensor],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """``tensors`` are a checkpoint's weights under transformers' names; entries are taken out as they are used.

        Raises :class:`ModelError` naming a tensor that is missing or has the wrong shape.
        """
        self.config = config
        self.info = TargetInfo(
            name=name,
            family=config.family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_len=config.max_len,
            dtype=dtype,
            device=torch.device(device),
        )
        weights = Weights(config, tensors, dtype, self.info.device)
        self._embedding = weights.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [weights.layer(i) for i in range(config.num_layers)]
        self._final_norm = weights.norm("norm.weight", config.hidden_size)
        self._head = Linear(self._embedding if config.tied_head else weights.head(), keep_raw=True)
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(dtype).item()
        self._activation = _ACTIVATIONS[config.activation]
        self._tables: dict[Rope, Rotation] = {}
        self._attention_shape = AttentionShape(
            group=config.group,
            window=config.sliding_window,
            fused=config.attention_softcap is None,
            dtype=dtype,
            device=self.info.device,
        )

    def new_memory(self, *, rows: int, max_len: int) -> LeanMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each."""
        return LeanMemory(self.config, rows=rows, max_len=max_len, dtype=self.info.dtype, device=self.info.device)

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Input embeddings as the first layer receives them."""
        embedded = F.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def logits(self, final: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits of final-norm states, soft-cap applied."""
        with torch.no_grad():
            logits, cap = self._head(final), self.config.final_softcap
            return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """Weight of the language-model head."""
        return self._head.weight

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        """Run new tokens of one or several rows; see :meth:`dspark.models.target.Target.forward`."""
        if counts is None:
            rows = rows[:1]
        counts = check_batch(token_ids, memory, rows, counts)
        taps = check_taps(taps, self.config.num_layers)
        assert isinstance(memory, LeanMemory), "memory of another target"
        with torch.inference_mode():
            x, tapped = self._decode(token_ids, memory, plan_batch(memory, rows, counts, self._attention_shape), taps)
        memory.advance(rows, counts)
        # Outside inference mode, so that a trainer may use the results in a graph of its own.
        with torch.no_grad():
            features = torch.cat(tapped, -1) if taps else None
            final = self._final_norm(x)
            logits = self.logits(last_tokens(final, counts) if last_only else final) if want_logits else None
        return TargetOutput(logits, features, final)

    def _decode(
        self, token_ids: Tensor, memory: LeanMemory, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers over the flat batch: the last layer's output and the tapped states."""
        config = self.config
        rotation = local = self._rotation(config.rope, memory.max_len, plan)
        if config.local_rope != config.rope:
            local = self._rotation(config.local_rope, memory.max_len, plan)
        views = [memory.views(run) for run in plan.runs]
        x = self.embed(token_ids)
        tapped = [x] if -1 in taps else []
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, config.head_dim)
            h = self._attention(i, qkv, local if layer.slides else rotation, plan.runs, views)
            h = layer.o(h)
            if layer.pre_feedforward_norm is None:
                x = x + h
                h = layer.post_attention_norm(x)
            else:
                x = x + layer.post_attention_norm(h)
                h = layer.pre_feedforward_norm(x)
            gate, up = layer.gate_up(h).view(-1, 2, config.intermediate_size).unbind(1)
            h = layer.down(self._activation(gate).mul_(up))
            x = x + (h if layer.post_feedforward_norm is None else layer.post_feedforward_norm(h))
            if i in taps:
                tapped.append(x)
        return x, tapped

    def _attention(
        self, i: int, qkv: Tensor, rotation: Rotation, runs: Sequence[Run], views: Sequence[MemoryViews]
    ) -> Tensor:
        """Self-attention of layer ``i`` over the flat batch: from [tokens, heads + 2 kv_heads, head_dim] to
        [tokens, heads * head_dim]. Writes the new keys and values into the memory."""
        config, layer = self.config, self._layers[i]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if layer.qk_norm is not None:
            qkv[:, : heads + kv_heads] = layer.qk_norm(qkv[:, : heads + kv_heads])
        # Half-split pairs turn as (a, b) -> (a cos - b sin, b cos + a sin), with the sign in the sine table.
        # Values take part with cosine 1 and sine 0, so that keys and values are one tensor to be written.
        cos, sin = rotation
        states = torch.addcmul(qkv * cos, qkv.roll(config.head_dim // 2, -1), sin)
        queries, new = states[:, :heads], states[:, heads:].view(-1, 2, kv_heads, config.head_dim)
        outputs = []
        for run, view in zip(runs, views, strict=True):
            view.write(i, new if len(runs) == 1 else new[run.tokens], run)
            q = queries if len(runs) == 1 else queries[run.tokens]
            if layer.slides:
                outputs.append(self._attend(q, view.local_keys[i], view.local_values[i], run.local, run))
            else:
                outputs.append(self._attend(q, view.keys[i], view.values[i], run.full, run))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

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

    def _rotation(self, rope: Rope, max_len: int, plan: Plan) -> Rotation:
        """Cosines and signed sines of a batch's positions, from tables that cover ``max_len`` of them.

        Tables are computed in fp32 and kept in the model's dtype, as transformers applies them.
        """
        table = self._tables.get(rope)
        if table is None or table[0].shape[0] < max_len:
            angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(rope.inv_freq))
            cos = torch.cat((angles.cos(), angles.cos()), -1).mul_(rope.scale)
            sin = torch.cat((-angles.sin(), angles.sin()), -1).mul_(rope.scale)
            device, dtype = self.info.device, self.info.dtype
            self._tables[rope] = table = (cos[:, None].to(device, dtype), sin[:, None].to(device, dtype))
        cos, sin = table[0][plan.positions], table[1][plan.positions]
        turned, kept = self.config.num_heads + self.config.num_kv_heads, self.config.num_kv_heads
        return (
            torch.cat((cos.expand(-1, turned, -1), torch.ones_like(cos).expand(-1, kept, -1)), 1),
            torch.cat((sin.expand(-1, turned, -1), torch.zeros_like(sin).expand(-1, kept, -1)), 1),
        )


class LeanMemory(KVMemory):
    """KV memory as one tensor [layers, 2, rows, kv_heads, max_len, head_dim].

    ``keys`` and ``values`` are views of it. A pass takes the views that it needs of all layers in one operation each.
    """

    def __init__(
        self, config: DecoderConfig, *, rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(rows=rows, max_len=max_len, shapes=(), dtype=dtype, device=device)
        size = (config.num_layers, 2, rows, config.num_kv_heads, max_len, config.head_dim)
        self.both = torch.zeros(size, dtype=dtype, device=device)
        self.keys, self.values = list(self.both[:, 0]), list(self.both[:, 1])

    def views(self, run: Run) -> MemoryViews:
        """What a run reads and writes, of every layer."""
        both, row, end = self.both, run.rows.start, run.past + run.count
        slots = both.unbind(0) if run.scatter else both[:, :, row, :, run.past : end].unbind(0)
        full = both[:, :, run.rows, :, run.full.start : run.full.stop]
        local = full if run.local is run.full else both[:, :, run.rows, :, run.local.start : run.local.stop]
        keys, values = full[:, 0].unbind(0), full[:, 1].unbind(0)
        if local is full:
            return MemoryViews(slots, keys, values, keys, values)
        return MemoryViews(slots, keys, values, local[:, 0].unbind(0), local[:, 1].unbind(0))


class MemoryViews(NamedTuple):
    """Views of a memory for one run, a tensor per layer."""

    slots: Sequence[Tensor]  # where new keys and values go
    keys: Sequence[Tensor]  # [rows, kv_heads, keys, head_dim]
    values: Sequence[Tensor]
    local_keys: Sequence[Tensor]  # the same for sliding layers
    local_values: Sequence[Tensor]

    def write(self, i: int, new: Tensor, run: Run) -> None:
        """Put a run's new keys and values [tokens, 2, kv_heads, head_dim] into layer ``i``."""
        if run.scatter is None:
            self.slots[i].copy_(new.permute(1, 2, 0, 3))
        else:
            self.slots[i][:, run.scatter[0], :, run.scatter[1]] = new


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh, "gelu": F.gelu}
