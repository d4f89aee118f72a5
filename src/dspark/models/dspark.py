"""DSpark and DFlash in decoding: one parallel pass over the block, then the sequential stage, then the confidences.

What it holds per request is a context cache of projected features only, one row of a :class:`LeanMemory`:

    | range of a request's cache      | owner                                                           |
    |---------------------------------|-----------------------------------------------------------------|
    | [0, length)                     | keys and values of committed tokens, one each, never undone     |
    | [length, length + block_inputs) | the block being drafted; the next `extend` overwrites it        |

The anchor has no row: the target has not run it yet. Its position is ``length``. Between the products of a layer run
the small operations of the lean decoder (:mod:`dspark.models.plain`, :mod:`dspark.models.native`). Source: DeepSpec
``deepspec/eval/dspark/draft_ops.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.maths.shaping import Shaper
from dspark.models.backbone import DraftModel, GemmaDraftLayer
from dspark.models.checkpoint import check_fits
from dspark.models.draft_ops import Angles, decoder_config, draft_native_ops, load_layers
from dspark.models.drafter import EMPTY
from dspark.models.lean_memory import LeanMemory
from dspark.models.linear import Linear
from dspark.models.norm import RMSNorm
from dspark.models.plain import PlainOps
from dspark.models.sequential import SequentialStage
from dspark.models.target import Target


@dataclass
class DraftContext:
    """Per-request context of a DSpark drafter."""

    memory: LeanMemory  # row 0; ``lengths`` are those of the context while they fit
    length: int = 0  # committed tokens, beyond the memory's room too
    shaper: Shaper | None = None  # the request's rules, where it has any


class DsparkDrafter:
    """DSpark or DFlash at batch size 1.

    ``candidates`` = M restricts each position's distribution to its M largest base logits: the sequential head corrects
    those alone and everything else has probability exactly zero. 0 is the full vocabulary, the paper's loop.
    """

    def __init__(
        self, model: DraftModel, target: Target, *, candidates: int = 64, name: str = "dspark", native: bool = True
    ) -> None:
        """``native`` False keeps to plain PyTorch even where compiled operations are to be had.

        Raises :class:`CheckpointError` if the drafter was trained for another target.
        """
        config = model.config
        check_fits(config, target.info)
        self.name, self.config = name, config
        self.block_size, self.taps = config.block_size, config.target_layer_ids
        self.has_confidence = model.confidence_head is not None
        self.dtype, self.device = target.info.dtype, target.info.device
        self._target, self._decoder = target, decoder_config(config, layers=config.num_hidden_layers)
        self._ops = PlainOps(self._decoder, self.dtype, self.device)
        self._fast = draft_native_ops(config, self._decoder, self.dtype, self.device) if native else None
        self._angles = Angles(self.device)
        self._load(model, target)
        ids = None if model.d2t is None else model.draft_token_ids()
        self._stage = SequentialStage(
            model.markov_head,
            ids,
            width=config.output_size,
            candidates=candidates,
            device=self.device,
            native=native,
        )
        self._columns: Tensor | None = None  # of the target's tokens in the drafter's logits
        if ids is not None:
            self._columns = torch.full((config.vocab_size,), -1, dtype=torch.long, device=self.device)
            self._columns[ids.to(self.device)] = torch.arange(ids.shape[0], device=self.device)

    @property
    def native(self) -> bool:
        """Whether compiled operations run between the products and in the sequential stage."""
        return self._fast is not None and self._stage.native

    def _load(self, model: DraftModel, target: Target) -> None:
        """Fuse and pack the weights in the target's dtype on its device."""
        config = self.config
        self._fc = Linear(self._place(model.fc.weight))
        self._hidden_norm = RMSNorm(self._place(model.hidden_norm.weight), config.rms_norm_eps)
        self._norm = RMSNorm(self._place(model.norm.weight), config.rms_norm_eps)
        layers = model.draft_layers()
        tensors = model.state_dict()
        self._layers = load_layers(config, self._decoder, tensors, dtype=self.dtype, device=self.device)
        self._scalars = [float(layer.layer_scalar) if isinstance(layer, GemmaDraftLayer) else None for layer in layers]
        kv = [w for layer in layers for w in (layer.self_attn.k_proj, layer.self_attn.v_proj or layer.self_attn.k_proj)]
        self._context_kv = Linear(self._place(torch.cat([w.weight for w in kv])))
        self._k_norms = torch.stack([self._place(layer.self_attn.k_norm.weight) for layer in layers])
        ids = model.draft_token_ids().to(self.device)
        self._head = Linear(self._place(target.head_weight().index_select(0, ids)))
        self._mask = target.embed(torch.tensor([config.mask_token_id], device=self.device)).to(self.dtype)
        self._confidence = None
        if model.confidence_head is not None:
            weight = model.confidence_head.proj.weight[0].detach().to(self.device, torch.float32)
            self._confidence = (weight, float(model.confidence_head.proj.bias.detach()))

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype).contiguous()

    def open(self, *, max_len: int) -> DraftContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        rows = min(max_len, self.config.max_position_embeddings) + self.config.block_inputs
        return DraftContext(LeanMemory(self._decoder, rows=1, max_len=rows, dtype=self.dtype, device=self.device))

    def mirror(self, state: DraftContext, shaper: Shaper) -> None:
        """Follow the request's penalties, biases and bans in the base logits: it can only help acceptance."""
        state.shaper = shaper

    def extend(
        self, state: DraftContext, token_ids: Int[Tensor, "new"], features: Float[Tensor, "new features"] | None
    ) -> None:
        """Project the committed tokens' features into keys and values of every layer; mutates ``state``.

        Past the drafter's limit only the length is counted; proposals are empty from there on.
        """
        assert features is not None
        count, config, start = features.shape[0], self.config, state.length
        state.length += count
        if state.length > state.memory.max_len - config.block_inputs:
            return
        state.memory.lengths[0] = state.length
        with torch.inference_mode():
            context = self._ops.norm(self._fc(features.to(self.dtype)), self._hidden_norm)
            kv = self._context_kv(context).view(
                count, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim
            )
            k, v = kv.permute(2, 1, 3, 0, 4)  # each [layers, kv_heads, new, head_dim]
            k = self._heads_norm(k) * self._k_norms[:, None, None]
            v = self._heads_norm(v) if config.layer_style == "gemma4" else v
            table = self._angles(self._decoder.rope, state.memory.max_len)
            cos, sin = (part[start : start + count].to(self.dtype) for part in table)
            left, right = k.chunk(2, -1)
            rows = state.memory.both[:, :, 0, :, start : start + count]  # [layers, 2, kv_heads, new, head_dim]
            rows[:, 0] = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
            rows[:, 1] = v

    def propose(
        self, state: DraftContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """One block after ``anchor``, whose position is the context's length."""
        room = min(state.memory.max_len, self.config.max_position_embeddings)
        if limit < 1 or state.length + self.config.block_inputs > room:
            return EMPTY
        with torch.inference_mode():
            hidden = self.backbone(state, anchor)[:limit]
            base = self._head(hidden).float()
            if cap := self.config.final_soft_cap:
                base = cap * torch.tanh(base / cap)
            if state.shaper is not None:
                base = state.shaper.mirrored(base, self._columns)
            begin = time.perf_counter()
            drafted = self._stage.draft(base, hidden, anchor, sampling=sampling, generator=generator)
            seconds = time.perf_counter() - begin
            confidence = self._confidences(hidden, drafted.prev_ids)
        return Proposal(drafted.token_ids, drafted.distribution, confidence, seconds)

    def backbone(self, state: DraftContext, anchor: int) -> Float[Tensor, "block hidden"]:
        """h_k of every slot that predicts, after the last norm: the parallel stage."""
        ops, inputs = self._fast or self._ops, self.config.block_inputs
        first = self._target.embed(torch.tensor([anchor], device=self.device)).to(self.dtype)
        x = torch.cat((first, self._mask.expand(inputs - 1, -1)))
        attend = ops.attention(
            state.memory,
            (0,),
            (inputs,),
            self._layers,
            lambda rope: self._angles(rope, state.memory.max_len),
            causal=False,
        )
        h = ops.norm(x, self._layers[0].input_norm)
        for i, layer in enumerate(self._layers):
            h = layer.o(attend(i, layer.qkv(h)))
            if layer.attention_out_norm is not None:
                h = ops.norm(h, layer.attention_out_norm)
            x, h = ops.add_norm(x, h, layer.feedforward_norm)
            h = layer.down(ops.gate(layer.gate_up(h)))
            if layer.feedforward_out_norm is not None:
                h = ops.norm(h, layer.feedforward_out_norm)
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
            if (scalar := self._scalars[i]) is None:
                x, h = ops.add_norm(x, h, following)
            else:
                x = (x + h) * scalar
                h = ops.norm(x, following)
        return h[inputs - self.block_size :]

    def _heads_norm(self, x: Tensor) -> Tensor:
        """RMSNorm per head, without a weight."""
        return F.rms_norm(x, x.shape[-1:], None, self.config.rms_norm_eps)

    def _confidences(
        self, hidden: Float[Tensor, "block hidden"], prev_ids: Int[Tensor, "block"]
    ) -> Float[Tensor, "block"] | None:
        """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b): of the prefix alone."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        inputs = hidden.float()
        if self.config.confidence_head_with_markov and self._stage.head is not None:
            inputs = torch.cat((inputs, self._stage.head.embed(prev_ids)), 1)
        return torch.sigmoid(inputs @ weight + bias)
