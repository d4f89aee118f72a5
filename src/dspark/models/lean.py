"""The lean target: our own decoder for the Llama-shaped families, on our own KV memory.

Batch-1 decoding reads every weight once a pass; what is left to save is the number of small operations between the
products. So queries, keys and values are one product, gate and up another, rotation serves queries and keys at once,
and the query heads of a key-value head lie on the query axis of attention, which then reads each key once.

Everything here runs eagerly and on any device; products choose their own fastest path (:mod:`dspark.models.linear`).
On CUDA a captured graph per (rows, count) would remove the launch gaps; shapes and addresses already allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.lean_weights import Layer, Weights
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

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each."""
        config = self.config
        shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        return KVMemory(rows=rows, max_len=max_len, shapes=shapes, dtype=self.info.dtype, device=self.info.device)

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
        with torch.inference_mode():
            x, tapped = self._decode(token_ids, memory, plan_batch(memory, rows, counts, self._attention_shape), taps)
        memory.advance(rows, counts)
        # Outside inference mode, so that a trainer may use the results in a graph of its own.
        with torch.no_grad():
            features = torch.cat(tapped, -1) if taps else None
            final = self._norm(x, self._final_norm)
            logits = self.logits(last_tokens(final, counts) if last_only else final) if want_logits else None
        return TargetOutput(logits, features, final)

    def _decode(
        self, token_ids: Tensor, memory: KVMemory, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers over the flat batch: the last layer's output and the tapped states."""
        config = self.config
        rotation = local = self._rotation(config.rope, memory.max_len, plan)
        if config.local_rope != config.rope:
            local = self._rotation(config.local_rope, memory.max_len, plan)
        x = self.embed(token_ids)
        tapped = [x] if -1 in taps else []
        for i, layer in enumerate(self._layers):
            h = self._norm(x, layer.input_norm)
            h = self._attention(h, layer, memory.keys[i], memory.values[i], local if layer.slides else rotation, plan)
            if layer.pre_feedforward_norm is None:
                x = x + h
                h = self._norm(x, layer.post_attention_norm)
            else:
                x = x + self._norm(h, layer.post_attention_norm)
                h = self._norm(x, layer.pre_feedforward_norm)
            gate, up = layer.gate_up(h).chunk(2, -1)
            h = layer.down(self._activation(gate).mul_(up))
            x = x + (h if layer.post_feedforward_norm is None else self._norm(h, layer.post_feedforward_norm))
            if i in taps:
                tapped.append(x)
        return x, tapped

    def _attention(
        self, h: Tensor, layer: Layer, keys: Tensor, values: Tensor, rotation: Rotation, plan: Plan
    ) -> Tensor:
        """Self-attention of one layer over the flat batch; writes the new keys and values."""
        config = self.config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = layer.qkv(h).view(-1, heads + 2 * kv_heads, width)
        qk, new_values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        # Rotation of half-split pairs: (a, b) -> (a cos - b sin, b cos + a sin); the sign sits in the sine table.
        cos, sin = rotation
        partner = qk.roll(width // 2, -1)
        rotated = qk * cos
        queries = torch.addcmul(rotated[:, :heads], partner[:, :heads], sin)
        new_keys = torch.addcmul(rotated[:, heads:], partner[:, heads:], sin)
        outputs = []
        for run in plan.runs:
            _write(keys, new_keys, run)
            _write(values, new_values, run)
            span = run.local if layer.slides else run.full
            outputs.append(self._attend(queries[run.tokens], keys[run.rows], values[run.rows], span, run))
        return layer.o(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span, run: Run) -> Tensor:
        """Attention of one run; ``queries`` [tokens, heads, head_dim] to [tokens, heads * head_dim]."""
        config = self.config
        group, kv_heads, width = config.group, config.num_kv_heads, config.head_dim
        keys, values = keys[:, :, span.start : span.stop], values[:, :, span.start : span.stop]
        if run.folded:
            q = queries.view(-1, run.count * group, kv_heads, width).transpose(1, 2)
            return self._products(q, keys, values, span).transpose(1, 2).reshape(-1, config.num_heads * width)
        q = queries.view(run.count, group, kv_heads, width).permute(1, 2, 0, 3)
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

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis, computed in fp32. Gemma's weights, 1 + w, are fp32 and act before rounding."""
        if weight.dim() == 1:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.config.rms_eps).to(x.dtype)
        # A row of weights per head: those of queries, then those of keys.
        normed = F.rms_norm(x.to(weight.dtype), weight.shape[-1:], None, self.config.rms_eps)
        return normed.mul_(weight).to(x.dtype)

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
        return table[0][plan.positions], table[1][plan.positions]


def _write(memory: Tensor, new: Tensor, run: Run) -> None:
    """Put keys or values [tokens, kv_heads, head_dim] of a run into [rows, kv_heads, max_len, head_dim]."""
    if run.scatter is None:
        memory[run.rows.start, :, run.past : run.past + run.count] = new[run.tokens].transpose(0, 1)
    else:
        memory[run.scatter[0], :, run.scatter[1]] = new[run.tokens]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh, "gelu": F.gelu}
