"""DSpark in decoding: one parallel pass over the block, then the sequential stage, then the confidences.

What it holds per request is a context cache of projected features only:

    | range of a request's cache       | owner                                                         |
    |----------------------------------|---------------------------------------------------------------|
    | [0, length)                      | keys and values of committed tokens, one row each, never undone |
    | [length, length + block_size)    | the block being drafted; the next `extend` overwrites it        |

The anchor has no row: the target has not run it yet. Its position is ``length``. Source: seed 11.2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import draw, target_probs
from dspark.models.backbone import DraftModel, rope_table
from dspark.models.checkpoint import check_fits
from dspark.models.drafter import EMPTY
from dspark.models.linear import Linear
from dspark.models.target import Target


@dataclass
class DraftContext:
    """Per-request context of a DSpark drafter: keys and values of every layer, [layers, kv_heads, max_len + block,
    head_dim]."""

    keys: Tensor
    values: Tensor
    length: int = 0


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    qk_norm: Tensor  # [heads + kv_heads, head_dim]
    input_norm: Tensor
    post_norm: Tensor


class DsparkDrafter:
    """DSpark at batch size 1: one parallel pass over the block, then the sequential stage, then the confidences.

    ``candidates`` = M restricts each position's distribution to its M largest base logits: the Markov bias is
    computed for those alone and everything else has probability exactly zero. 0 is the full vocabulary, the paper's
    loop.
    """

    def __init__(self, model: DraftModel, target: Target, *, candidates: int = 64, name: str = "dspark") -> None:
        """Raises :class:`CheckpointError` if the drafter was trained for another target."""
        config = model.config
        check_fits(config, target.info)
        if candidates < 0:
            raise ConfigError(f"candidates is {candidates}; it must be 0 (full vocabulary) or more")
        self.name, self.config = name, config
        self.block_size, self.taps = config.block_size, config.target_layer_ids
        self.has_confidence = model.confidence_head is not None
        self.candidates = min(candidates, config.output_size)
        self.dtype, self.device = target.info.dtype, target.info.device
        self._target = target
        self._load(model, target)

    def _load(self, model: DraftModel, target: Target) -> None:
        """Fuse and pack the weights in the target's dtype on its device."""

        def place(tensor: Tensor) -> Tensor:
            return tensor.detach().to(self.device, self.dtype)

        def pack(*parts: Tensor) -> Linear:
            return Linear(place(torch.cat(parts)).contiguous())

        config = self.config
        self._fc, self._hidden_norm, self._norm = (
            pack(model.fc.weight),
            place(model.hidden_norm.weight),
            place(model.norm.weight),
        )
        self._layers, context_kv, k_norms = [], [], []
        for layer in model.draft_layers():
            attn, mlp = layer.self_attn, layer.mlp
            q_norm, k_norm = place(attn.q_norm.weight), place(attn.k_norm.weight)
            norms = torch.cat(
                (q_norm.expand(config.num_attention_heads, -1), k_norm.expand(config.num_key_value_heads, -1))
            )
            self._layers.append(
                _Layer(
                    pack(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
                    pack(attn.o_proj.weight),
                    pack(mlp.gate_proj.weight, mlp.up_proj.weight),
                    pack(mlp.down_proj.weight),
                    norms,
                    place(layer.input_layernorm.weight),
                    place(layer.post_attention_layernorm.weight),
                )
            )
            context_kv += [attn.k_proj.weight, attn.v_proj.weight]
            k_norms.append(k_norm)
        self._context_kv, self._k_norms = pack(*context_kv), torch.stack(k_norms)[:, None]
        ids = model.draft_token_ids().to(self.device)
        self._token_ids = None if model.d2t is None else ids
        self._head = Linear(place(target.head_weight().index_select(0, ids)).contiguous())
        self._mask = target.embed(torch.tensor([config.mask_token_id], device=self.device)).to(self.dtype)
        self._w1 = self._w2 = self._confidence = None
        if model.markov_head is not None:
            self._w1 = model.markov_head.markov_w1.weight.detach().to(self.device, torch.float32)
            self._w2 = model.markov_head.markov_w2.weight.detach().to(self.device, torch.float32)
        if model.confidence_head is not None:
            proj = model.confidence_head.proj
            self._confidence = (proj.weight[0].detach().to(self.device, torch.float32), float(proj.bias.detach()))
        table = rope_table(
            torch.arange(config.max_position_embeddings, device=self.device), config.head_dim, config.rope_theta
        )
        self._cos, self._sin = table.to(self.dtype)

    def open(self, *, max_len: int) -> DraftContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        config = self.config
        rows = min(max_len, config.max_position_embeddings) + config.block_size
        shape = (config.num_hidden_layers, config.num_key_value_heads, rows, config.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return DraftContext(keys, torch.zeros_like(keys))

    def extend(
        self, state: DraftContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        """Project the features of newly committed tokens into every layer's keys and values.

        Past the drafter's limit only the length is counted; proposals are empty from there on.
        """
        assert features is not None
        count, config = features.shape[0], self.config
        start, room = state.length, state.keys.shape[2] - config.block_size
        state.length += count
        if state.length > room:
            return
        with torch.inference_mode():
            context = self._rms(self._fc(features.to(self.dtype)), self._hidden_norm)
            kv = self._context_kv(context).view(count, config.num_hidden_layers, 2, config.num_key_value_heads, -1)
            k, v = kv.permute(2, 1, 3, 0, 4)  # each [layers, kv_heads, new, head_dim]
            k = self._rms(k, None) * self._k_norms[:, :, None]
            rows = slice(start, start + count)
            state.keys[:, :, rows] = self._rotate(k, self._cos[rows], self._sin[rows])
            state.values[:, :, rows] = v

    def propose(
        self, state: DraftContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """One block after ``anchor``, whose position is the context's length."""
        size = self.block_size
        if limit < 1 or state.length + size > min(state.keys.shape[2], self.config.max_position_embeddings):
            return EMPTY
        with torch.inference_mode():
            hidden = self.backbone(state, anchor)[:limit]
            base = self._head(hidden).float()
            if self.config.final_soft_cap:
                base = self.config.final_soft_cap * torch.tanh(base / self.config.final_soft_cap)
            begin = time.perf_counter()
            support = None
            if self.candidates and self.candidates < base.shape[1]:
                base, support = base.topk(self.candidates, -1)
            draft_ids, probs, prevs = self._sequential(base, support, anchor, sampling, generator)
            seconds = time.perf_counter() - begin
            confidence = self._confidences(hidden, prevs)
        token_ids = support
        if self._token_ids is not None:
            token_ids = self._token_ids.expand(base.shape) if support is None else self._token_ids[support]
        distribution = None if probs is None else DraftDistribution(probs, token_ids)
        return Proposal(draft_ids, distribution, confidence, seconds)

    def backbone(self, state: DraftContext, anchor: int) -> Float[Tensor, "block hidden"]:
        """h_k of every slot, after the last norm: the parallel stage."""
        config, size, start = self.config, self.block_size, state.length
        rows = slice(start, start + size)
        cos, sin = self._cos[rows, None], self._sin[rows, None]
        first = self._target.embed(torch.tensor([anchor], device=self.device)).to(self.dtype)
        x = torch.cat((first, self._mask.expand(size - 1, -1)))
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        groups = heads // kv_heads
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms(x, layer.input_norm)).view(size, heads + 2 * kv_heads, dim)
            qk = self._rotate(self._rms(qkv[:, : heads + kv_heads], None) * layer.qk_norm, cos, sin)
            state.keys[i, :, rows] = qk[:, heads:].transpose(0, 1)
            state.values[i, :, rows] = qkv[:, heads + kv_heads :].transpose(0, 1)
            q = (
                qk[:, :heads]
                .view(size, kv_heads, groups, dim)
                .permute(1, 2, 0, 3)
                .reshape(1, kv_heads, groups * size, dim)
            )
            seen = slice(None, start + size)
            out = F.scaled_dot_product_attention(q, state.keys[i : i + 1, :, seen], state.values[i : i + 1, :, seen])
            out = out.view(kv_heads, groups, size, dim).permute(2, 0, 1, 3).reshape(size, heads * dim)
            x = x + layer.o(out)
            gate, up = layer.gate_up(self._rms(x, layer.post_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return self._rms(x, self._norm)

    def _sequential(
        self,
        base: Float[Tensor, "block support"],
        support: Int[Tensor, "block support"] | None,
        anchor: int,
        sampling: SamplingParams,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Draw x_1..x_gamma left to right. Returns target ids, the fp32 rows they were drawn from (None when greedy),
        and the previous token of each position."""
        w1, w2 = self._w1, self._w2
        rows_of = w2 if support is None or w2 is None else w2[support]  # [block, support, rank] for candidates
        tokens: list[int] = []
        rows: list[Tensor] = []
        prevs: list[int] = []
        prev = anchor
        for k in range(base.shape[0]):
            logits = base[k]
            if w1 is not None and rows_of is not None:
                logits = torch.addmv(logits, rows_of if support is None else rows_of[k], w1[prev])
            if sampling.greedy:
                picked = int(logits.argmax())
            else:
                probs = target_probs(logits[None], sampling)[0]
                rows.append(probs)
                picked = draw(probs, generator)
            draft_id = picked if support is None else int(support[k, picked])
            prevs.append(prev)
            prev = draft_id if self._token_ids is None else int(self._token_ids[draft_id])
            tokens.append(prev)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        return ids, (torch.stack(rows) if rows else None), prevs

    def _confidences(self, hidden: Float[Tensor, "block hidden"], prevs: list[int]) -> Float[Tensor, "block"] | None:
        """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b): of the prefix alone."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        inputs = hidden.float()
        if self.config.confidence_head_with_markov and self._w1 is not None:
            inputs = torch.cat((inputs, self._w1[prevs]), 1)
        return torch.sigmoid(inputs @ weight + bias)

    def _rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin
