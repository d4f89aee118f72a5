"""Chain drafters in training: one causal layer, unrolled over its own states (Eagle3, MTP).

Row i of a sequence pairs what the target said at token i with the embedding of token i + 1, and predicts token i + 2.
A chain starts at a row i and goes on: its step j reads token i + 1 + j and the state of its step j - 1, at rotary
position i + j, and predicts token i + 2 + j. Step 0 sees the rows up to its own; a later step sees the same rows, and
of later steps those of its own chain alone. So when drafting, the rows are the committed tokens, the chain's start is
that of the anchor (token i + 1), and its steps are the drafts.

The layer is a single one, so rows need no more than keys and values: queries, mlp and head run at the chains alone.
This module is the training form, over many chains of several sequences; the decoding form is in
:mod:`dspark.models.chain_drafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspark.models.backbone import RMSNorm, rope_table, rotate
from dspark.models.chain_config import ChainConfig


@dataclass(frozen=True)
class ChainBatch:
    """Chains of one or several sequences, flat; sequence s owns ``row_counts[s]`` rows and ``chain_counts[s]`` chains.

    ``starts`` are rows within the chain's own sequence. A sequence's rows may end with its last start: later ones are
    seen by nobody. Embeddings are the frozen target's, already scaled where the family scales.
    """

    features: Float[Tensor, "rows features"]  # of token i
    next_embeds: Float[Tensor, "rows hidden"]  # of token i + 1
    row_counts: Sequence[int]
    starts: Int[Tensor, "chains"]
    step_embeds: Float[Tensor, "chains steps hidden"]  # of token start + 1 + j; j = 0 is the start's own next token
    chain_counts: Sequence[int]


class ChainAttention(nn.Module):
    """Causal attention whose queries, keys and values read inputs of any width."""

    def __init__(self, config: ChainConfig, *, inputs: int, qk_norm: bool) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(inputs, heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None

    def queries(
        self, x: Float[Tensor, "rows inputs"], table: Float[Tensor, "two rows head_dim"]
    ) -> Float[Tensor, "rows heads head_dim"]:
        q = linear(x, self.q_proj).unflatten(1, (self.heads, -1))
        return rotate(q if self.q_norm is None else self.q_norm(q), table)

    def keys_values(
        self, x: Float[Tensor, "rows inputs"], table: Float[Tensor, "two rows head_dim"]
    ) -> tuple[Float[Tensor, "rows kv_heads head_dim"], Float[Tensor, "rows kv_heads head_dim"]]:
        k = linear(x, self.k_proj).unflatten(1, (self.kv_heads, -1))
        v = linear(x, self.v_proj).unflatten(1, (self.kv_heads, -1))
        return rotate(k if self.k_norm is None else self.k_norm(k), table), v


class ChainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ChainConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class ChainLayer(nn.Module):
    """The decoder layer of a chain; how its input comes about is the drafter's."""

    def __init__(self, config: ChainConfig, *, inputs: int, qk_norm: bool) -> None:
        super().__init__()
        self.self_attn = ChainAttention(config, inputs=inputs, qk_norm=qk_norm)
        self.mlp = ChainMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class ChainModel(nn.Module, ABC):
    """All parameters of a chain drafter; a subclass says what the layer reads.

    The embedding stays the target's. So does the head, unless :meth:`own_head` gives one.
    """

    def __init__(self, config: ChainConfig, layer: ChainLayer) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.d2t: Tensor | None
        size = config.draft_vocab_size
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.long))

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """States of the target that features consist of."""

    @abstractmethod
    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """The state u that a chain starts from, of the target's tapped states."""

    @abstractmethod
    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """What attention reads, and the residual stream it is added to."""

    def own_head(self) -> nn.Linear | None:
        """The drafter's own trained head; None where the target's is shared."""
        return None

    @property
    def layer(self) -> ChainLayer:
        layer = self.layers[0]
        assert isinstance(layer, ChainLayer)
        return layer

    def draft_token_ids(self) -> Int[Tensor, "draft_vocab"]:
        """Target id of every draft id, ascending."""
        ids = torch.arange(self.config.output_size)
        return ids if self.d2t is None else ids.to(self.d2t.device) + self.d2t

    def forward(self, batch: ChainBatch) -> Float[Tensor, "chains steps hidden"]:
        """The normed state of every step of every chain: what the head reads."""
        layer, device = self.layer, batch.starts.device
        rows = torch.cat([torch.arange(n, device=device) for n in batch.row_counts])
        first = torch.tensor([0, *batch.row_counts[:-1]], device=device).cumsum(0)
        counts = torch.tensor(list(batch.chain_counts), device=device)
        states = self.first_state(batch.features)
        row_inputs, _ = self.mix(batch.next_embeds, states)
        k_rows, v_rows = layer.self_attn.keys_values(row_inputs, self._table(rows))
        states = states[batch.starts + first.repeat_interleave(counts)]
        k_own = v_own = k_rows.new_zeros(len(batch.starts), 0, *k_rows.shape[1:])
        outputs = []
        for j in range(batch.step_embeds.shape[1]):
            x, residual = self.mix(batch.step_embeds[:, j], states)
            table = self._table(batch.starts + j)
            if j > 0:  # the keys of step 0 are among the rows
                k, v = layer.self_attn.keys_values(x, table)
                k_own, v_own = torch.cat((k_own, k[:, None]), 1), torch.cat((v_own, v[:, None]), 1)
            seen = _attend(layer.self_attn.queries(x, table), k_rows, v_rows, k_own, v_own, batch)
            middle = residual + linear(seen, layer.self_attn.o_proj)
            states = middle + layer.mlp(layer.post_attention_layernorm(middle))
            outputs.append(self.norm(states))
        return torch.stack(outputs, 1)

    def _table(self, positions: Int[Tensor, "rows"]) -> Float[Tensor, "two rows head_dim"]:
        return rope_table(positions, self.config.head_dim, self.config.rope_theta)


def _attend(
    q: Float[Tensor, "chains heads head_dim"],
    k_rows: Float[Tensor, "rows kv_heads head_dim"],
    v_rows: Float[Tensor, "rows kv_heads head_dim"],
    k_own: Float[Tensor, "chains steps kv_heads head_dim"],
    v_own: Float[Tensor, "chains steps kv_heads head_dim"],
    batch: ChainBatch,
) -> Float[Tensor, "chains width"]:
    """:func:`chain_attention` of every sequence."""
    outputs, chain0, row0 = [], 0, 0
    for rows, chains in zip(batch.row_counts, batch.chain_counts, strict=True):
        own, seen = slice(chain0, chain0 + chains), slice(row0, row0 + rows)
        outputs.append(
            chain_attention(q[own], k_rows[seen], v_rows[seen], k_own[own], v_own[own], starts=batch.starts[own])
        )
        chain0, row0 = chain0 + chains, row0 + rows
    return torch.cat(outputs)


def chain_attention(
    q: Float[Tensor, "chains heads head_dim"],
    k_rows: Float[Tensor, "rows kv_heads head_dim"],
    v_rows: Float[Tensor, "rows kv_heads head_dim"],
    k_own: Float[Tensor, "chains steps kv_heads head_dim"],
    v_own: Float[Tensor, "chains steps kv_heads head_dim"],
    *,
    starts: Int[Tensor, "chains"],
) -> Float[Tensor, "chains width"]:
    """Attention of one step of one sequence's chains: row i is visible iff i <= start, and the chain's own later steps.

    Scores against the rows and against the own steps are computed apart and share one softmax, so that no chain's keys
    are ever laid out beside another's.
    """
    chains, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[:2]
    groups = heads // kv_heads
    q = q.view(chains, kv_heads, groups, dim).transpose(0, 1) * dim**-0.5  # kv_heads chains groups dim
    seen = q.reshape(kv_heads, chains * groups, dim) @ k_rows.permute(1, 2, 0)
    seen = seen.view(kv_heads, chains, groups, rows)
    later = torch.arange(rows, device=q.device) > starts[:, None]
    seen = seen.masked_fill(later[:, None], float("-inf"))
    own = q @ k_own.permute(2, 0, 3, 1)
    probs = torch.softmax(torch.cat((seen, own), -1), -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    out = probs[..., :rows].reshape(kv_heads, chains * groups, rows) @ v_rows.transpose(0, 1)
    out = out.view(kv_heads, chains, groups, dim) + probs[..., rows:] @ v_own.permute(2, 0, 1, 3)
    return out.transpose(0, 1).reshape(chains, heads * dim)


def linear(x: Float[Tensor, "rows inputs"], module: nn.Linear) -> Float[Tensor, "rows outputs"]:
    """Product in the dtype of the activations; masters may be finer, their gradients then arrive in the masters'
    dtype."""
    return F.linear(x, module.weight.to(x.dtype))
