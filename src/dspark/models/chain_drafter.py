"""Chain drafters in decoding: drafts left to right, one run of the layer each (Eagle3, MTP).

With n tokens that the target has run (the anchor, token n, is not among them), what is held per request is:

    | range of a request's cache  | owner                                                                       |
    |-----------------------------|-----------------------------------------------------------------------------|
    | [0, n - 1)                  | keys and values of rows whose next token is committed, never undone         |
    | [n - 1, n - 1 + block_size) | the anchor's row and those of the drafts; the next `extend` overwrites them |

A row pairs the target's states at token i with the embedding of token i + 1, so the newest committed token's states
wait in ``last`` for the anchor. Rows of drafts are made from the drafter's own states; once their tokens are
committed, `extend` makes them anew from the target's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import draw, target_probs
from dspark.maths.shaping import Shaper
from dspark.models.backbone import rope_table
from dspark.models.chain import ChainModel
from dspark.models.checkpoint import AnyConfig, check_fits
from dspark.models.drafter import EMPTY
from dspark.models.eagle3 import Eagle3Layer, Eagle3Model
from dspark.models.linear import Linear
from dspark.models.mtp import MTPModel
from dspark.models.target import Target


@dataclass
class ChainContext:
    """Per-request memory of a chain drafter; ``keys`` and ``values`` are [kv_heads, rows, head_dim]."""

    keys: Tensor
    values: Tensor
    last: Tensor | None = None  # [1, hidden]: the first state of the newest committed token
    length: int = 0  # committed tokens
    shaper: Shaper | None = None  # the request's rules, where it has any


class ChainDrafter(ABC):
    """A chain drafter at batch size 1. A subclass says what the layer reads, as its training form does.

    ``candidates`` = M draws each draft from the M largest logits of its step and reports exactly that distribution; 0
    is the full vocabulary.
    """

    has_confidence = False

    def __init__(self, model: ChainModel, target: Target, *, candidates: int = 64, name: str) -> None:
        """Raises :class:`CheckpointError` if the drafter was trained for another target."""
        config = self._shape = model.config
        assert isinstance(config, AnyConfig)
        check_fits(config, target.info)
        if candidates < 0:
            raise ConfigError(f"candidates is {candidates}; it must be 0 (full vocabulary) or more")
        self.name, self.block_size, self.candidates = name, config.block_size, candidates
        self.dtype, self.device = target.info.dtype, target.info.device
        self._target = target
        layer, attn = model.layer, model.layer.self_attn
        self._qkv = self.pack(attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        self._o, self._down = self.pack(attn.o_proj.weight), self.pack(layer.mlp.down_proj.weight)
        self._gate_up = self.pack(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)
        self._qk_norm: Tensor | None = None
        if attn.q_norm is not None and attn.k_norm is not None:
            q_norm = attn.q_norm.weight.expand(config.num_attention_heads, -1)
            k_norm = attn.k_norm.weight.expand(config.num_key_value_heads, -1)
            self._qk_norm = self.place(torch.cat((q_norm, k_norm)))
        self._input_norm = self.place(layer.input_layernorm.weight)
        self._post_norm = self.place(layer.post_attention_layernorm.weight)
        self._norm = self.place(model.norm.weight)
        ids, own = model.draft_token_ids().to(self.device), model.own_head()
        self._token_ids = None if model.d2t is None else ids
        self._columns: Tensor | None = None  # of the target's tokens in the drafter's logits
        if self._token_ids is not None:
            self._columns = torch.full((config.vocab_size,), -1, dtype=torch.long, device=self.device)
            self._columns[ids] = torch.arange(ids.shape[0], device=self.device)
        self._head = self.pack(target.head_weight().index_select(0, ids) if own is None else own.weight)
        positions = torch.arange(config.max_position_embeddings, device=self.device)
        self._cos, self._sin = rope_table(positions, config.head_dim, config.rope_theta).to(self.dtype)

    @abstractmethod
    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """As :meth:`ChainModel.first_state`."""

    @abstractmethod
    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """As :meth:`ChainModel.mix`."""

    def place(self, tensor: Tensor) -> Tensor:
        """A frozen copy in the target's dtype on its device."""
        return tensor.detach().to(self.device, self.dtype)

    def pack(self, *parts: Tensor) -> Linear:
        """One product of several weights, on its fastest path."""
        return Linear(self.place(torch.cat(parts)).contiguous())

    def rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], weight, self._shape.rms_norm_eps)

    def open(self, *, max_len: int) -> ChainContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        rows = min(max_len, self._shape.max_position_embeddings) + self.block_size
        shape = (self._shape.num_key_value_heads, rows, self._shape.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return ChainContext(keys, torch.zeros_like(keys))

    def mirror(self, state: ChainContext, shaper: Shaper) -> None:
        """Draft under the request's penalties, biases and bans too, as far as the committed text decides them."""
        state.shaper = shaper

    def extend(
        self, state: ChainContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        """Write the rows whose next token is now committed; mutates ``state``.

        Past the drafter's limit only the length is counted; proposals are empty from there on.
        """
        assert features is not None
        first, count = max(0, state.length - 1), token_ids.shape[0]
        state.length += count
        if count == 0 or state.length > state.keys.shape[1] - self.block_size:
            return
        with torch.inference_mode():
            states = self.first_state(features.to(self.dtype))
            nexts = token_ids.to(self.device)
            if state.last is None:
                nexts, before = nexts[1:], states[:-1]
            else:
                before = torch.cat((state.last, states[:-1]))
            state.last = states[-1:]
            if nexts.shape[0]:
                inputs, _ = self.mix(self._target.embed(nexts).to(self.dtype), before)
                self._write(state, self._qkv(inputs), first)

    def propose(
        self, state: ChainContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """At most ``block_size`` drafts after ``anchor``, each drawn before the next run of the layer."""
        first = state.length - 1
        room = self._shape.max_position_embeddings - first
        size = min(limit, self.block_size, room)
        if state.last is None or size < 1 or state.length > state.keys.shape[1] - self.block_size:
            return EMPTY
        begin = time.perf_counter()
        tokens: list[int] = []
        rows: list[Tensor] = []
        supports: list[Tensor] = []
        with torch.inference_mode():
            states, prev = state.last, anchor
            for j in range(size):
                states, logits = self._step(state, prev, states, first + j)
                if state.shaper is not None:  # min_tokens counts rows, so the row must be the j-th
                    logits = state.shaper.mirrored(logits.expand(j + 1, -1), self._columns)[j]
                support = self._token_ids
                if 0 < self.candidates < logits.shape[0]:
                    logits, picked = logits.topk(self.candidates)
                    support = picked if support is None else support[picked]
                if sampling.greedy:
                    place = int(logits.argmax())
                else:
                    rows.append(target_probs(logits[None], sampling)[0])
                    place = draw(rows[-1], generator)
                    if support is not None:
                        supports.append(support)
                prev = place if support is None else int(support[place])
                tokens.append(prev)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        distribution = None
        if rows:
            distribution = DraftDistribution(torch.stack(rows), torch.stack(supports) if supports else None)
        return Proposal(ids, distribution, None, time.perf_counter() - begin)

    def _step(
        self, state: ChainContext, prev: int, states: Float[Tensor, "1 hidden"], row: int
    ) -> tuple[Float[Tensor, "1 hidden"], Float[Tensor, "draft_vocab"]]:
        """One run of the layer at ``row``: its state, and fp32 logits of the token after ``prev``."""
        heads, kv_heads = self._shape.num_attention_heads, self._shape.num_key_value_heads
        embeds = self._target.embed(torch.tensor([prev], device=self.device)).to(self.dtype)
        inputs, residual = self.mix(embeds, states)
        q = self._write(state, self._qkv(inputs), row)
        seen = slice(None, row + 1)
        out = F.scaled_dot_product_attention(
            q.view(1, kv_heads, heads // kv_heads, -1), state.keys[None, :, seen], state.values[None, :, seen]
        )
        middle = residual + self._o(out.reshape(1, -1))
        gate, up = self._gate_up(self.rms(middle, self._post_norm)).chunk(2, -1)
        states = middle + self._down(F.silu(gate) * up)
        logits = self._head(self.rms(states, self._norm)).float()[0]
        if cap := self._shape.final_soft_cap:
            logits = cap * torch.tanh(logits / cap)
        return states, logits

    def _write(
        self, state: ChainContext, qkv: Float[Tensor, "new width"], first: int
    ) -> Float[Tensor, "new heads head_dim"]:
        """Put keys and values at rows ``first`` and on; returns the rotated queries."""
        heads, kv_heads = self._shape.num_attention_heads, self._shape.num_key_value_heads
        rows = slice(first, first + qkv.shape[0])
        qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
        qk = qkv[:, : heads + kv_heads]
        if self._qk_norm is not None:
            qk = self.rms(qk, None) * self._qk_norm
        left, right = qk.chunk(2, -1)
        qk = qk * self._cos[rows, None] + torch.cat((-right, left), -1) * self._sin[rows, None]
        state.keys[:, rows] = qk[:, heads:].transpose(0, 1)
        state.values[:, rows] = qkv[:, heads + kv_heads :].transpose(0, 1)
        return qk[:, :heads]


class Eagle3Drafter(ChainDrafter):
    """Eagle3 at batch size 1."""

    def __init__(self, model: Eagle3Model, target: Target, *, candidates: int = 64, name: str = "eagle3") -> None:
        super().__init__(model, target, candidates=candidates, name=name)
        self.config, self.taps = model.config, model.config.target_layer_ids
        layer = model.layer
        assert isinstance(layer, Eagle3Layer)
        self._fc, self._hidden_norm = self.pack(model.fc.weight), self.place(layer.hidden_norm.weight)

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        return self._fc(features)

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        return torch.cat((self.rms(embeds, self._input_norm), self.rms(states, self._hidden_norm)), 1), states


class MTPDrafter(ChainDrafter):
    """MTP at batch size 1."""

    def __init__(self, model: MTPModel, target: Target, *, candidates: int = 64, name: str = "mtp") -> None:
        super().__init__(model, target, candidates=candidates, name=name)
        self.config, self.taps = model.config, model.config.target_layer_ids
        self._enorm, self._hnorm = self.place(model.enorm.weight), self.place(model.hnorm.weight)
        self._eh_proj = self.pack(model.eh_proj.weight)

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        return features

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        z = self._eh_proj(torch.cat((self.rms(embeds, self._enorm), self.rms(states, self._hnorm)), 1))
        return self.rms(z, self._input_norm), z
