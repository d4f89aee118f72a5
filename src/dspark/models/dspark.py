"""DSpark and DFlash in decoding: one parallel pass over the blocks, then the sequential stage, then the confidences.

What a drafter holds per request is a context cache of projected features only, a row of a :class:`LeanMemory`:

    | range of a request's cache      | owner                                                           |
    |---------------------------------|-----------------------------------------------------------------|
    | [0, length)                     | keys and values of committed tokens, one each, never undone     |
    | [length, length + block_inputs) | the block being drafted; the next `extend` overwrites it        |

The anchor has no row: the target has not run it yet. Its position is ``length``. Between the products of a layer run
the small operations of the lean decoder (:mod:`dspark.models.plain`, :mod:`dspark.models.native`). Blocks of any number
of requests are drafted together (:meth:`DsparkDrafter.draft`); one request alone is the batch of one. Source: DeepSpec
``deepspec/eval/dspark/draft_ops.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.shaping import Shaper
from dspark.models import DEFAULT_CANDIDATES
from dspark.models.backbone import DraftModel, GemmaDraftLayer
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk, stacked
from dspark.models.checkpoint import check_fits
from dspark.models.draft_ops import (
    Angles,
    ContextWriter,
    decoder_config,
    draft_columns,
    draft_native_ops,
    load_layers,
)
from dspark.models.drafter import EMPTY
from dspark.models.dspark_batch import DsparkBatch
from dspark.models.eight_bit import EightBit, compiled_for, fits
from dspark.models.intake import intake
from dspark.models.layer import Ops, feed_forward
from dspark.models.lean_memory import LeanMemory
from dspark.models.linear import Linear, Product, settle
from dspark.models.norm import RMSNorm
from dspark.models.paged_memory import PagedMemory, PageTables
from dspark.models.plain import PlainOps
from dspark.models.sequential import BlockAsk, ConfidenceWeights, SequentialStage
from dspark.models.short_pass import short_pass
from dspark.models.target import Target


@dataclass
class DraftContext:
    """Per-request context of a DSpark drafter."""

    memory: LeanMemory  # row 0; ``lengths`` are those of the context while they fit
    length: int = 0  # committed tokens, beyond the memory's room too
    shaper: Shaper | None = None  # the request's rules, where it has any


class DsparkDrafter:
    """DSpark or DFlash; the single-request form of the drafter protocol, and what its batched form is made of.

    ``candidates`` = M restricts each position's distribution to its M largest base logits: the sequential head corrects
    those alone and everything else has probability exactly zero. 0 is the full vocabulary, the paper's loop.
    """

    def __init__(
        self,
        model: DraftModel,
        target: Target,
        *,
        candidates: int = DEFAULT_CANDIDATES,
        name: str = "dspark",
        native: bool = True,
        weight_bits: int | None = None,
    ) -> None:
        """``native`` False keeps to plain PyTorch even where compiled operations are to be had.

        ``weight_bits`` 8 rounds the weights of the layers and of the head (:mod:`dspark.models.eight_bit`), 16 leaves
        them in the target's dtype; None is 8 where compiled code multiplies them and the target is in bfloat16. The
        output is exact either way, because what is reported is what the drafts were drawn from. It costs next to no
        acceptance: of the drafter we ship 0.16 % of the analytic acceptance length at temperature 1, give or take 0.13
        (234 anchors in answers to prompts it was not trained on), and takes half the bytes.

        Raises :class:`CheckpointError` if the drafter was trained for another target and :class:`ConfigError` for other
        ``weight_bits``.
        """
        if weight_bits not in (None, 8, 16):
            raise ConfigError(f"weight_bits is {weight_bits}; it must be 8, 16 or None (the faster one)")
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
        if weight_bits is None:
            weight_bits = 8 if self._fast is not None and compiled_for(self._fast.library) else 16
        self.weight_bits = weight_bits
        self._load(model, target)
        ids = None if model.d2t is None else model.draft_token_ids().to(self.device)
        self._stage = SequentialStage(
            model.markov_head,
            ids,
            width=config.output_size,
            candidates=candidates,
            device=self.device,
            native=native,
            confidence=self._confidence_weights(model),
        )
        # columns of the target's tokens in the drafter's logits
        self._columns = None if ids is None else draft_columns(ids, config.vocab_size)

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
        self._layers = load_layers(
            config, self._decoder, tensors, dtype=self.dtype, device=self.device, product=self._product
        )
        self._scalars = [float(layer.layer_scalar) if isinstance(layer, GemmaDraftLayer) else None for layer in layers]
        kv = [w for layer in layers for w in (layer.self_attn.k_proj, layer.self_attn.v_proj or layer.self_attn.k_proj)]
        self._context_kv = Linear(self._place(torch.cat([w.weight for w in kv])))
        k_norms = torch.stack([self._place(layer.self_attn.k_norm.weight) for layer in layers])
        gemma = config.layer_style == "gemma4"
        self._writer = ContextWriter(self._decoder, k_norms, norms_values=gemma, angles=self._angles)
        ids = model.draft_token_ids().to(self.device)
        self._head = self._product(self._place(target.head_weight().index_select(0, ids)), None)
        products = [linear for layer in self._layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        settle([self._fc, self._context_kv, *products, self._head])
        self._short, self._intake = None, None
        if self._fast is not None:
            self._short = short_pass(self._fast, self._layers, self._norm, head=self._head)
            self._intake = intake(self._fast, self._fc, self._hidden_norm, self._context_kv, k_norms, self._angles)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """A product of a layer or the head, in eight bits if that is wanted and its sizes allow it."""
        if self.weight_bits == 8 and fits(weight):
            library = None if self._fast is None or not compiled_for(self._fast.library) else self._fast.library
            return EightBit(weight, bias, library=library)
        return Linear(weight, bias)

    def _confidence_weights(self, model: DraftModel) -> ConfidenceWeights | None:
        if model.confidence_head is None:
            return None
        proj = model.confidence_head.proj
        return ConfidenceWeights(
            weight=proj.weight[0].detach().to(self.device, torch.float32).contiguous(),
            bias=float(proj.bias.detach()),
            looks_back=self.config.confidence_head_with_markov and model.markov_head is not None,
        )

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype).contiguous()

    def batch_form(self, target: Target) -> BatchDrafter:
        """Many requests over the shared pages; see :func:`dspark.models.batch_drafter.batched`."""
        return DsparkBatch(self)

    def room(self, max_len: int) -> int:
        """Positions that a memory needs for requests of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        return min(max_len, self.config.max_position_embeddings) + self.config.block_inputs

    def fits(self, length: int, memory: LeanMemory) -> bool:
        """Whether a block has room after ``length`` tokens, in ``memory`` and in the drafter's own context."""
        return length + self.config.block_inputs <= min(memory.max_len, self.config.max_position_embeddings)

    def open(self, *, max_len: int) -> DraftContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        rows = self.room(max_len)
        return DraftContext(LeanMemory(self._decoder, rows=1, max_len=rows, dtype=self.dtype, device=self.device))

    def paged_memory(self, tables: PageTables, *, pages: int, max_len: int) -> PagedMemory:
        """Context of all seats for requests of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        return PagedMemory(
            self._decoder, tables, pages=pages, dtype=self.dtype, device=self.device, max_len=self.room(max_len)
        )

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
        count, start = features.shape[0], state.length
        state.length += count
        if state.length > state.memory.max_len - self.config.block_inputs:
            return
        state.memory.lengths[0] = state.length
        positions = torch.arange(start, start + count)
        self.project(state.memory, torch.zeros_like(positions), positions, features)

    def project(
        self,
        memory: LeanMemory,
        rows: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        features: Float[Tensor, "tokens features"],
    ) -> None:
        """Write the context of committed tokens at ``positions`` (on the CPU) of ``rows`` into ``memory``."""
        with torch.inference_mode():
            if self._intake is not None:
                self._intake(memory, rows, positions, features.to(self.dtype))
                return
            context = self._ops.norm(self._fc(features.to(self.dtype)), self._hidden_norm)
            self._writer.write(memory, rows, positions, self._context_kv(context))

    def propose(
        self, state: DraftContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """One block after ``anchor``, whose position is the context's length.

        Raises :class:`RequestError` if a position's logits leave no token to draw.
        """
        if limit < 1 or not self.fits(state.length, state.memory):
            return EMPTY
        ask = DraftAsk(seat=0, anchor=anchor, sampling=sampling, generator=generator, limit=limit)
        proposal = self.draft(state.memory, [ask], [state.shaper])
        if not proposal.proposed[0]:
            raise RequestError("the draft logits of a position leave no token to draw (check them for nan)")
        return replace(proposal.of(0), sequential_seconds=proposal.sequential_seconds)

    def draft(self, memory: LeanMemory, asks: Sequence[DraftAsk], shapers: Sequence[Shaper | None]) -> BatchProposal:
        """A block for each ask after the context in row ``seat`` of ``memory``, where it fits (:meth:`fits`).

        Only the slots that are asked for run. A request whose logits leave nothing to draw gets no drafts. Overwrites
        rows of ``memory`` past its lengths.
        """
        sizes = [min(ask.limit, self.block_size) for ask in asks]
        with torch.inference_mode():
            hidden, base = self.parallel(memory, [ask.seat for ask in asks], [ask.anchor for ask in asks], sizes)
            blocks = self._blocks(base, sizes, asks, shapers)
            begin = time.perf_counter()
            drafted = self._stage.draft(blocks, hidden, block=self.block_size)
            seconds = time.perf_counter() - begin
        proposed = [0 if i in drafted.failed else size for i, size in enumerate(sizes)]
        certain = [size == 0 or ask.sampling.greedy for size, ask in zip(proposed, asks, strict=True)]
        return BatchProposal(
            draft_tokens=drafted.token_ids,
            proposed=np.array(proposed, dtype=np.int64),
            certain=np.array(certain, dtype=np.bool_),
            probs=drafted.probs,
            support_ids=drafted.support_ids,
            confidence=drafted.confidence,
            sequential_seconds=seconds,
        )

    def nothing(self, requests: int) -> BatchProposal:
        """A batch in which nobody gets a draft."""
        return stacked(
            [EMPTY] * requests,
            block=self.block_size,
            vocab_size=self.config.vocab_size,
            has_confidence=self.has_confidence,
            device=self.device,
        )

    def _blocks(
        self, base: Tensor, counts: Sequence[int], asks: Sequence[DraftAsk], shapers: Sequence[Shaper | None]
    ) -> list[BlockAsk]:
        """What the sequential stage is to draw: each request's base logits, under its own rules."""
        parts = [
            part if shaper is None else shaper.mirrored(part, self._columns)
            for part, shaper in zip([base] if len(counts) == 1 else base.split(list(counts)), shapers, strict=True)
        ]
        return [
            BlockAsk(base=part, anchor=ask.anchor, sampling=ask.sampling, generator=ask.generator)
            for part, ask in zip(parts, asks, strict=True)
        ]

    def parallel(
        self, memory: LeanMemory, rows: Sequence[int], anchors: Sequence[int], sizes: Sequence[int]
    ) -> tuple[Float[Tensor, "slots hidden"], Float[Tensor, "slots draft_vocab"]]:
        """The parallel stage, a block of ``sizes[i]`` predictions in row ``rows[i]``, one block after the other.

        Of every slot that predicts: h_k after the last norm, and the base logits U of the head that is shared with the
        target, over the draft vocabulary, soft-cap applied.

        A block shorter than ``block_size`` has fewer masks. That its first slots then see fewer later ones costs no
        acceptance (measured on the drafter we ship), and the pass is shorter by as much.
        """
        given = self.config.block_inputs - self.block_size  # slots of a block that predict nothing
        slots = [size + given for size in sizes]
        starts = [0, *accumulate(slots[:-1])]
        token_ids = [self.config.mask_token_id] * sum(slots)
        for start, anchor in zip(starts, anchors, strict=True):
            token_ids[start] = anchor
        ids = torch.from_numpy(np.array(token_ids, dtype=np.int64))  # a third faster than a tensor from a list
        x = self._target.embed(ids.to(self.device)).to(self.dtype)
        base = None
        if self._short is not None and len(x) <= self._short.most_tokens:
            angles = self._angles(self._decoder.rope, memory.max_len)
            h, base = self._short.with_logits(x, memory, rows, slots, (angles, angles), causal=False)
        else:
            h = self._layer_by_layer(x, memory, rows, slots, self._fast or self._ops)
        if given:
            predicting = np.ones(len(h), dtype=np.bool_)
            predicting[starts] = False
            places = torch.from_numpy(predicting.nonzero()[0]).to(self.device)
            h, base = h[places], None if base is None else base[places]
        base = self._head(h) if base is None else base
        if cap := self.config.final_soft_cap:
            base = cap * torch.tanh(base.float() / cap)
        return h, base

    def _layer_by_layer(
        self, x: Tensor, memory: LeanMemory, rows: Sequence[int], slots: Sequence[int], ops: Ops
    ) -> Float[Tensor, "slots hidden"]:
        """The layers over embedded blocks, with the last norm."""
        attend = ops.attention(
            memory, rows, slots, self._layers, lambda rope: self._angles(rope, memory.max_len), causal=False
        )
        h = ops.norm(x, self._layers[0].input_norm)
        for i, layer in enumerate(self._layers):
            x, h = feed_forward(ops, layer, x, attend(i, layer.qkv(h)))
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
            if (scalar := self._scalars[i]) is None:
                x, h = ops.add_norm(x, h, following)
            else:
                x = (x + h) * scalar
                h = ops.norm(x, following)
        return h
