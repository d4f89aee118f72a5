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
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspark.models.backbone import GemmaBody, HeadProjections, LayerBody, RMSNorm, linear, rope_table
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


class ChainLayer(LayerBody):
    """The decoder layer of a chain; how its input comes about is the drafter's.

    ``inputs`` is the width of what attention reads; ``state_norm`` adds a norm of the state that it reads (Eagle3).
    """

    def __init__(self, config: ChainConfig, *, inputs: int, qk_norm: bool = True, state_norm: bool = False) -> None:
        super().__init__(config)
        self.self_attn = HeadProjections(config, inputs=inputs, qk_norm=qk_norm)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if state_norm else None


class GemmaChainLayer(ChainLayer, GemmaBody):
    """The same in Gemma 4's style."""


def make_layer(config: ChainConfig, *, inputs: int, qk_norm: bool = True, state_norm: bool = False) -> ChainLayer:
    """The layer in the style that ``config`` names."""
    style = GemmaChainLayer if config.layer_style == "gemma4" else ChainLayer
    return style(config, inputs=inputs, qk_norm=qk_norm, state_norm=state_norm)


class ChainModel(nn.Module, ABC):
    """All parameters of a chain drafter; a subclass says what the layer reads.

    Embedding and head stay the target's unless :meth:`own_embedding` or :meth:`own_head` gives one.
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

    def own_embedding(self) -> nn.Embedding | None:
        """The drafter's own trained embedding; None where the target's is shared."""
        return None

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """The drafter's own embedding of tokens, scaled where the style scales; only where it has one."""
        embedding = self.own_embedding()
        assert embedding is not None, "the embedding is the target's"
        return embedding(token_ids) * self.embedding_scale

    @property
    def embedding_scale(self) -> float:
        """Factor on an embedding of the drafter's own: Gemma's models scale theirs by the root of the width."""
        return self.config.hidden_size**0.5 if self.config.layer_style == "gemma4" else 1.0

    def next_state(
        self, states: Float[Tensor, "rows hidden"], normed: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        """The state that the next step starts from, of the layer's output before and after the last norm."""
        return states

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
        states = states[batch.starts + first.repeat_interleave(counts, output_size=batch.starts.shape[0])]
        k_own = v_own = k_rows.new_zeros(len(batch.starts), 0, *k_rows.shape[1:])
        outputs = []
        for j in range(batch.step_embeds.shape[1]):
            x, residual = self.mix(batch.step_embeds[:, j], states)
            table = self._table(batch.starts + j)
            if j > 0:  # the keys of step 0 are among the rows
                k, v = layer.self_attn.keys_values(x, table)
                k_own, v_own = torch.cat((k_own, k[:, None]), 1), torch.cat((v_own, v[:, None]), 1)
            q = layer.self_attn.queries(x, table)
            seen = _attend(q, k_rows, v_rows, k_own, v_own, batch, scale=layer.self_attn.scale)
            states = layer.finish(residual, linear(seen, layer.self_attn.o_proj))
            outputs.append(self.norm(states))
            states = self.next_state(states, outputs[-1])
        return torch.stack(outputs, 1)

    def _table(self, positions: Int[Tensor, "rows"]) -> Float[Tensor, "two rows head_dim"]:
        config = self.config
        return rope_table(positions, config.head_dim, config.rope_theta, config.partial_rotary_factor)


def _attend(
    q: Float[Tensor, "chains heads head_dim"],
    k_rows: Float[Tensor, "rows kv_heads head_dim"],
    v_rows: Float[Tensor, "rows kv_heads head_dim"],
    k_own: Float[Tensor, "chains steps kv_heads head_dim"],
    v_own: Float[Tensor, "chains steps kv_heads head_dim"],
    batch: ChainBatch,
    *,
    scale: float,
) -> Float[Tensor, "chains width"]:
    """:func:`chain_attention` of every sequence."""
    outputs, chain0, row0 = [], 0, 0
    for rows, chains in zip(batch.row_counts, batch.chain_counts, strict=True):
        own, seen = slice(chain0, chain0 + chains), slice(row0, row0 + rows)
        starts = batch.starts[own]
        outputs.append(
            chain_attention(q[own], k_rows[seen], v_rows[seen], k_own[own], v_own[own], starts=starts, scale=scale)
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
    scale: float,
) -> Float[Tensor, "chains width"]:
    """Attention of one step of one sequence's chains: row i is visible iff i <= start, and the chain's own later steps.

    Scores against the rows and against the own steps are computed apart and share one softmax, so that no chain's keys
    are ever laid out beside another's.
    """
    chains, heads, dim = q.shape
    rows, kv_heads = k_rows.shape[:2]
    groups = heads // kv_heads
    q = q.view(chains, kv_heads, groups, dim).transpose(0, 1) * scale  # kv_heads chains groups dim
    seen = q.reshape(kv_heads, chains * groups, dim) @ k_rows.permute(1, 2, 0)
    seen = seen.view(kv_heads, chains, groups, rows)
    later = torch.arange(rows, device=q.device) > starts[:, None]
    seen = seen.masked_fill(later[:, None], float("-inf"))
    own = q @ k_own.permute(2, 0, 3, 1)
    probs = torch.softmax(torch.cat((seen, own), -1), -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    out = probs[..., :rows].reshape(kv_heads, chains * groups, rows) @ v_rows.transpose(0, 1)
    out = out.view(kv_heads, chains, groups, dim) + probs[..., rows:] @ v_own.permute(2, 0, 1, 3)
    return out.transpose(0, 1).reshape(chains, heads * dim)
