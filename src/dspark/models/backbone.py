"""The drafter's parallel backbone: a few decoder layers that predict a whole block in one pass.

The target's tapped states are projected once, C = RMSNorm(fc . F), and injected into the keys and values of every
layer. A block is the anchor's embedding followed by masks. Slot k predicts the token at anchor + k + 1, so the anchor's
slot predicts too; in z-lab's DFlash convention (``sample_from_anchor`` false) there is one mask more, slot k predicts
the token at anchor + k, and the anchor's slot is given. Every query sees the context strictly before its anchor and all
slots of its own block.

This module is the training form: it runs many blocks of several sequences at once and autograd works through it. The
decoding form, one block after another over cached context keys and values, is in :mod:`dspark.models.dspark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from dspark.models.block_flex import block_mask, flex_packed_attention, token_indices
from dspark.models.draft_config import DraftConfig
from dspark.models.drafter_shape import DrafterShape
from dspark.models.heads import ConfidenceHead, SequentialHead, make_head


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of one or several sequences, flat; sequence s owns ``context_counts[s]`` rows and ``block_counts[s]``
    blocks.

    ``anchors`` are positions within their own sequence. A context may be cut after its last anchor: later rows are seen
    by nobody.
    """

    features: Float[Tensor, "context features"]
    context_counts: Sequence[int]
    anchors: Int[Tensor, "blocks"]
    block_counts: Sequence[int]


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean is taken in fp32 (or finer) whatever the compute dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return _rms(x, self.eps, self.weight)


def _rms(
    x: Float[Tensor, "*rows size"], eps: float, weight: Float[Tensor, "size"] | None = None
) -> Float[Tensor, "*rows size"]:
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotary_rates(head_dim: int, theta: float, partial: float = 1.0) -> Float[Tensor, "pairs"]:
    """Radians per position of each pair of a head, float64; pairs past the first ``partial`` of them do not turn.

    Source: "proportional" rotary embedding of transformers, which with ``partial`` 1 is the usual one.
    """
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rates[int(partial * head_dim // 2) :] = 0.0
    return rates


def rope_table(
    positions: Int[Tensor, "rows"], head_dim: int, theta: float, partial: float = 1.0
) -> Float[Tensor, "two rows head_dim"]:
    """Cosines and sines of the rotary embedding, float64, halves repeated (``rotate_half`` of transformers)."""
    angles = positions.double()[:, None] * rotary_rates(head_dim, theta, partial).to(positions.device)
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(
    x: Float[Tensor, "rows heads head_dim"], table: Float[Tensor, "two rows head_dim"]
) -> Float[Tensor, "rows heads head_dim"]:
    """Apply the rotary embedding of each row's position."""
    cos, sin = table.to(x.dtype)[:, :, None]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


@dataclass(frozen=True)
class Tables:
    """What all layers of a pass share: rotary tables of the slots and of the context rows, and, where flex_attention
    runs, who sees whom."""

    slots: Float[Tensor, "two slots head_dim"]
    context: Float[Tensor, "two context head_dim"]
    mask: BlockMask | None = None  # None: the loop over sequences


class HeadProjections(nn.Module):
    """Queries, keys and values of a draft layer's attention, and the way back; they read ``inputs`` channels."""

    def __init__(self, config: DrafterShape, *, inputs: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        d, h = config.hidden_size, config.head_dim
        inputs = inputs or d
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, h
        self.scale, self.eps = config.attention_scale, config.rms_norm_eps
        self.norms_values = config.layer_style == "gemma4"
        self.q_proj = nn.Linear(inputs, self.heads * h, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * h, bias=False)
        self.v_proj = None if config.attention_k_eq_v else nn.Linear(inputs, self.kv_heads * h, bias=False)
        self.o_proj = nn.Linear(self.heads * h, d, bias=False)
        self.q_norm = RMSNorm(h, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps) if qk_norm else None

    def queries(
        self, x: Float[Tensor, "rows inputs"], table: Float[Tensor, "two rows head_dim"]
    ) -> Float[Tensor, "rows heads head_dim"]:
        """Normed and rotated queries."""
        q = linear(x, self.q_proj).unflatten(1, (self.heads, -1))
        return rotate(q if self.q_norm is None else self.q_norm(q), table)

    def keys_values(
        self, x: Float[Tensor, "rows inputs"], table: Float[Tensor, "two rows head_dim"]
    ) -> tuple[Float[Tensor, "rows kv_heads head_dim"], Float[Tensor, "rows kv_heads head_dim"]]:
        """Normed and rotated keys, and values; Gemma norms values too, without a weight."""
        raw = linear(x, self.k_proj).unflatten(1, (self.kv_heads, -1))
        v = raw if self.v_proj is None else linear(x, self.v_proj).unflatten(1, (self.kv_heads, -1))
        k = rotate(raw if self.k_norm is None else self.k_norm(raw), table)
        return k, _rms(v, self.eps) if self.norms_values else v


class DraftAttention(HeadProjections):
    """Attention over [context ; own block]; keys and values of both come from the same projections."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def forward(
        self,
        x: Float[Tensor, "slots hidden"],
        context: Float[Tensor, "context hidden"],
        batch: BlockBatch,
        tables: Tables,
    ) -> Float[Tensor, "slots hidden"]:
        q = self.queries(x, tables.slots)
        k, v = self.keys_values(x, tables.slots)
        k_ctx, v_ctx = self.keys_values(context, tables.context)
        if tables.mask is not None:
            keys, values = torch.cat((k_ctx, k)), torch.cat((v_ctx, v))
            return linear(flex_packed_attention(q, keys, values, tables.mask, self.scale), self.o_proj)
        size = x.shape[0] // max(1, batch.anchors.shape[0])
        outputs, slot0, row0, block0 = [], 0, 0, 0
        for rows, blocks in zip(batch.context_counts, batch.block_counts, strict=True):
            slots = slice(slot0, slot0 + blocks * size)
            ctx = slice(row0, row0 + rows)
            anchors = batch.anchors[block0 : block0 + blocks]
            outputs.append(block_attention(q[slots], k[slots], v[slots], k_ctx[ctx], v_ctx[ctx], anchors, self.scale))
            slot0, row0, block0 = slot0 + blocks * size, row0 + rows, block0 + blocks
        return linear(torch.cat(outputs), self.o_proj)


def block_attention(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "slots kv_heads head_dim"],
    v: Float[Tensor, "slots kv_heads head_dim"],
    k_ctx: Float[Tensor, "context kv_heads head_dim"],
    v_ctx: Float[Tensor, "context kv_heads head_dim"],
    anchors: Int[Tensor, "blocks"],
    scale: float,
) -> Float[Tensor, "slots width"]:
    """Attention of one sequence's packed blocks: context index i is visible iff i < anchor, and the own block entirely.

    Scores against the context and against the own block are computed apart and share one softmax, so nothing of size
    slots x slots exists. Blocks are told apart by their index, never by position.
    """
    slots, heads, dim = q.shape
    kv_heads, blocks = k.shape[1], anchors.shape[0]
    size, groups, rows = slots // blocks, heads // kv_heads, k_ctx.shape[0]
    q = q.view(blocks, size, kv_heads, groups, dim).permute(2, 0, 3, 1, 4) * scale  # kv_heads blocks groups size dim
    own_k = k.view(blocks, size, kv_heads, dim).permute(2, 0, 3, 1)
    own_v = v.view(blocks, size, kv_heads, dim).permute(2, 0, 1, 3)
    q = q.reshape(kv_heads, blocks, groups * size, dim)
    own = q @ own_k  # kv_heads blocks groups*size size
    seen = q.reshape(kv_heads, slots * groups, dim) @ k_ctx.permute(1, 2, 0)
    seen = seen.view(kv_heads, blocks, groups * size, rows)
    hidden = torch.arange(rows, device=q.device) >= anchors[:, None]
    seen = seen.masked_fill(hidden[:, None], float("-inf"))
    probs = torch.softmax(torch.cat((seen, own), -1), -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    from_ctx = probs[..., :rows].reshape(kv_heads, slots * groups, rows) @ v_ctx.transpose(0, 1)
    out = from_ctx.view(kv_heads, blocks, groups * size, dim) + probs[..., rows:] @ own_v
    out = out.view(kv_heads, blocks, groups, size, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(slots, heads * dim)


class DraftMLP(nn.Module):
    """activation(gate) * up, then down; the activation is silu, or the tanh form of gelu in Gemma's style."""

    def __init__(self, config: DrafterShape) -> None:
        super().__init__()
        self.gelu = config.layer_style == "gemma4"
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "slots hidden"]) -> Float[Tensor, "slots hidden"]:
        gate = linear(x, self.gate_proj)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return linear(gate * linear(x, self.up_proj), self.down_proj)


class LayerBody(nn.Module):
    """All of a pre-norm decoder layer but its attention."""

    def __init__(self, config: DrafterShape) -> None:
        super().__init__()
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(
        self, residual: Float[Tensor, "rows hidden"], attended: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        """The layer's output, of what attention adds to the residual stream."""
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaBody(LayerBody):
    """Gemma 4's layer: what attention and feed-forward add is normed too, and the sum is scaled by a frozen number.

    Source: ``Gemma4TextDecoderLayer`` of transformers; DeepSpec ``Gemma4DSparkDecoderLayer``.
    """

    layer_scalar: Tensor

    def __init__(self, config: DrafterShape) -> None:
        super().__init__(config)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def finish(
        self, residual: Float[Tensor, "rows hidden"], attended: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        x = residual + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class DraftLayer(LayerBody):
    """Layer of a block drafter; the context passes through ``hidden_norm`` once, never through ``input_layernorm``."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.self_attn = DraftAttention(config)

    def forward(
        self,
        x: Float[Tensor, "slots hidden"],
        context: Float[Tensor, "context hidden"],
        batch: BlockBatch,
        tables: Tables,
    ) -> Float[Tensor, "slots hidden"]:
        return self.finish(x, self.self_attn(self.input_layernorm(x), context, batch, tables))


class GemmaDraftLayer(DraftLayer, GemmaBody):
    """The same in Gemma 4's style."""


class DraftModel(nn.Module):
    """All parameters of a DSpark drafter under DeepSpec's tensor names; embedding and head stay the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer = GemmaDraftLayer if config.layer_style == "gemma4" else DraftLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head: SequentialHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if config.markov_rank:
            self.markov_head = make_head(
                config.markov_head_type,
                vocab_size=config.vocab_size,
                output_size=config.output_size,
                rank=config.markov_rank,
                hidden_size=config.hidden_size,
            )
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config.confidence_inputs)
        self.flex: bool | None = None  # whether flex_attention runs instead of the loop; None: on CUDA
        self.d2t: Tensor | None
        size = config.draft_vocab_size
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.long))

    def draft_layers(self) -> list[DraftLayer]:
        """``layers`` under their own type."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def draft_token_ids(self) -> Int[Tensor, "draft_vocab"]:
        """Target id of every draft id, ascending."""
        ids = torch.arange(self.config.output_size)
        return ids if self.d2t is None else ids.to(self.d2t.device) + self.d2t

    def context(self, features: Float[Tensor, "context features"]) -> Float[Tensor, "context hidden"]:
        """C = RMSNorm(fc . F), shared by all layers."""
        return self.hidden_norm(linear(features, self.fc))

    def _mask(self, batch: BlockBatch, slots: int) -> BlockMask | None:
        if not (self.flex or (self.flex is None and batch.anchors.is_cuda)):
            return None
        return block_mask(token_indices(batch.context_counts, batch.block_counts, batch.anchors, slots))

    def _turns(self, positions: Int[Tensor, "rows"]) -> Float[Tensor, "two rows head_dim"]:
        config = self.config
        return rope_table(positions, config.head_dim, config.rope_theta, config.partial_rotary_factor)

    def forward(
        self,
        batch: BlockBatch,
        anchor_embeds: Float[Tensor, "blocks hidden"],
        mask_embed: Float[Tensor, "hidden"],
        block_size: int | None = None,
    ) -> Float[Tensor, "blocks block hidden"]:
        """Hidden states of every slot that predicts, after the last norm: row k is h_k, which predicts anchor + k + 1.

        Embeddings are the frozen target's, already scaled where the family scales. ``block_size`` may be smaller than
        the config's: the block then ends early, as a curriculum wants.
        """
        size = block_size or self.config.block_size
        slots = self.config.slots(size)
        masks = mask_embed.expand(anchor_embeds.shape[0], slots - 1, -1)
        x = torch.cat((anchor_embeds[:, None], masks), 1).flatten(0, 1)
        device = x.device
        positions = (batch.anchors[:, None] + torch.arange(slots, device=device)).flatten()
        rows = torch.cat([torch.arange(n, device=device) for n in batch.context_counts])
        tables = Tables(self._turns(positions), self._turns(rows), self._mask(batch, slots))
        context = self.context(batch.features)
        for layer in self.draft_layers():
            x = layer(x, context, batch, tables)
        return self.norm(x).unflatten(0, (-1, slots))[:, slots - size :]


def linear(x: Float[Tensor, "rows inputs"], module: nn.Linear) -> Float[Tensor, "rows outputs"]:
    """Product in the dtype of the activations; masters may be finer, their gradients then arrive in the masters'
    dtype."""
    return F.linear(x, module.weight.to(x.dtype))
