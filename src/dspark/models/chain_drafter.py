"""Chain drafters in decoding: drafts left to right, one run of the layer each (Eagle3, MTP).

Drafts of any number of requests are made together (:meth:`ChainDrafter.draft`); one request alone is the batch of one.
With n tokens that the target has run (the anchor, token n, is not among them), what is held per request is one row of
a :class:`LeanMemory`, or a seat of a paged one (:mod:`dspark.models.chain_batch`):

    | range of a request's cache  | owner                                                                       |
    |-----------------------------|-----------------------------------------------------------------------------|
    | [0, n - 1)                  | keys and values of rows whose next token is committed, never undone         |
    | [n - 1, n - 1 + block_size) | the anchor's row and those of the drafts; the next `extend` overwrites them |

A row pairs the target's states at token i with the embedding of token i + 1, so the newest committed token's states
wait in ``last`` for the anchor. Rows of drafts are made from the drafter's own states; once their tokens are
committed, `extend` makes them anew from the target's. Between the products of a step run the small operations of the
lean decoder (:mod:`dspark.models.plain`, :mod:`dspark.models.native`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.shaping import Shaper
from dspark.models import DEFAULT_CANDIDATES, backbone
from dspark.models.backbone import GemmaBody
from dspark.models.batch_drafter import BatchDrafter, BatchProposal, DraftAsk
from dspark.models.chain import ChainModel
from dspark.models.chain_batch import Chain, ChainDraftBatch
from dspark.models.checkpoint import AnyConfig, check_fits
from dspark.models.draft_ops import (
    Angles,
    ContextWriter,
    decoder_config,
    draft_columns,
    draft_native_ops,
    load_layers,
)
from dspark.models.drafter import EMPTY
from dspark.models.layer import feed_forward
from dspark.models.lean_memory import LeanMemory
from dspark.models.linear import Linear
from dspark.models.norm import RMSNorm
from dspark.models.paged_memory import PagedMemory, PageTables
from dspark.models.plain import PlainOps
from dspark.models.target import Target


@dataclass
class ChainContext:
    """Per-request memory of a chain drafter."""

    memory: LeanMemory  # row 0
    last: Tensor | None = None  # [1, hidden]: the first state of the newest committed token
    length: int = 0  # committed tokens, beyond the memory's room too
    shaper: Shaper | None = None  # the request's rules, where it has any


class ChainDrafter(ABC):
    """The single-request form of a chain drafter, and what its batched form is made of. A subclass says what the layer
    reads, as its training form does.

    ``candidates`` = M draws each draft from the M largest logits of its step and reports exactly that distribution; 0
    is the full vocabulary.
    """

    has_confidence = False
    taps: tuple[int, ...]  # the subclass's

    def __init__(
        self, model: ChainModel, target: Target, *, candidates: int = DEFAULT_CANDIDATES, name: str, native: bool = True
    ) -> None:
        """``native`` False keeps to plain PyTorch even where compiled operations are to be had.

        Raises :class:`CheckpointError` if the drafter was trained for another target.
        """
        config = self._shape = model.config
        assert isinstance(config, AnyConfig)
        check_fits(config, target.info)
        if candidates < 0:
            raise ConfigError(f"candidates is {candidates}; it must be 0 (full vocabulary) or more")
        self.name, self.block_size, self.candidates = name, config.block_size, candidates
        self.dtype, self.device, self.width = target.info.dtype, target.info.device, config.hidden_size
        self._target = target
        normed = model.layer.self_attn.q_norm is not None
        self._decoder = decoder_config(config, layers=1, qk_norm=normed)
        self._ops = PlainOps(self._decoder, self.dtype, self.device)
        self._fast = draft_native_ops(config, self._decoder, self.dtype, self.device) if native else None
        self._angles = Angles(self.device)
        self._load(model)
        ids, own = model.draft_token_ids().to(self.device), model.own_head()
        self._token_ids = None if model.d2t is None else ids
        # columns of the target's tokens in the drafter's logits
        self._columns = None if model.d2t is None else draft_columns(ids, config.vocab_size)
        self._head = self.pack(target.head_weight().index_select(0, ids) if own is None else own.weight)

    @property
    def native(self) -> bool:
        """Whether compiled operations run between the products."""
        return self._fast is not None

    def _load(self, model: ChainModel) -> None:
        """Fuse and pack the layer's weights in the target's dtype on its device."""
        layer, attn = model.layer, model.layer.self_attn
        (self._layer,) = load_layers(
            self._shape,
            self._decoder,
            model.state_dict(),
            dtype=self.dtype,
            device=self.device,
            inputs=attn.q_proj.in_features,
        )
        self._scalar = float(layer.layer_scalar) if isinstance(layer, GemmaBody) else None
        self._kv = self.pack(attn.k_proj.weight, (attn.v_proj or attn.k_proj).weight)
        k_norm = None if attn.k_norm is None else self.place(attn.k_norm.weight)[None]
        self._writer = ContextWriter(self._decoder, k_norm, norms_values=attn.norms_values, angles=self._angles)
        self._norm = self.norm(model.norm)
        embedding = model.own_embedding()
        self._embedding = None if embedding is None else self.place(embedding.weight * model.embedding_scale)

    @abstractmethod
    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        """As :meth:`ChainModel.first_state`."""

    @abstractmethod
    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        """As :meth:`ChainModel.mix`."""

    def next_state(
        self, states: Float[Tensor, "rows hidden"], normed: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        """As :meth:`ChainModel.next_state`."""
        return states

    def place(self, tensor: Tensor) -> Tensor:
        """A frozen copy in the target's dtype on its device."""
        return tensor.detach().to(self.device, self.dtype)

    def pack(self, *parts: Tensor) -> Linear:
        """One product of several weights, on its fastest path."""
        return Linear(self.place(torch.cat(parts)).contiguous())

    def norm(self, module: backbone.RMSNorm) -> RMSNorm:
        """A norm of the training form, as the small operations take it."""
        return RMSNorm(self.place(module.weight), module.eps)

    def normed(self, x: Float[Tensor, "rows width"], norm: RMSNorm) -> Float[Tensor, "rows width"]:
        """``norm`` of ``x``."""
        return (self._fast or self._ops).norm(x.contiguous(), norm)

    def embed(self, token_ids: Int[Tensor, "rows"]) -> Float[Tensor, "rows hidden"]:
        """Embeddings as the layer reads them: the target's, unless the drafter has its own."""
        embeds = self._target.embed(token_ids) if self._embedding is None else self._embedding[token_ids]
        return embeds.to(self.dtype)

    def room(self, max_len: int) -> int:
        """Rows that a memory needs for requests of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        return min(max_len, self._shape.max_position_embeddings) + self.block_size

    def size(self, limit: int, length: int, memory: LeanMemory) -> int:
        """Drafts after ``length`` tokens, of ``limit`` that are asked for; 0 past the drafter's limit, and before the
        first token."""
        if not 1 <= length <= memory.max_len - self.block_size:
            return 0
        return max(0, min(limit, self.block_size, self._shape.max_position_embeddings - length + 1))

    def open(self, *, max_len: int) -> ChainContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        rows = self.room(max_len)
        return ChainContext(LeanMemory(self._decoder, rows=1, max_len=rows, dtype=self.dtype, device=self.device))

    def paged_memory(self, tables: PageTables, *, pages: int, max_len: int) -> PagedMemory:
        """Rows of all seats of ``tables`` for requests of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        room = self.room(max_len)
        return PagedMemory(self._decoder, tables, pages=pages, dtype=self.dtype, device=self.device, max_len=room)

    def batch_form(self, target: Target) -> BatchDrafter:
        """Many requests over the shared pages; see :func:`dspark.models.batch_drafter.batched`."""
        return ChainDraftBatch(self)

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
        if count == 0 or state.length > state.memory.max_len - self.block_size:
            return
        with torch.inference_mode():
            states = self.first_state(features.to(self.dtype))
            nexts = token_ids.to(self.device)
            if state.last is None:
                nexts, before = nexts[1:], states[:-1]
            else:
                before = torch.cat((state.last, states[:-1]))
            state.last = states[-1:]
            positions = torch.arange(first, first + len(nexts))
            self.write_rows(state.memory, torch.zeros_like(positions), positions, nexts, before)

    def write_rows(
        self,
        memory: LeanMemory,
        rows: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        next_ids: Int[Tensor, "tokens"],
        states: Float[Tensor, "tokens hidden"],
    ) -> None:
        """Write keys and values of committed rows: ``states`` are those of the tokens at ``positions`` (on the CPU) of
        ``rows`` of ``memory``, ``next_ids`` the tokens behind these."""
        if len(rows):
            inputs, _ = self.mix(self.embed(next_ids), states)
            self._writer.write(memory, rows, positions, self._kv(inputs))

    def propose(
        self, state: ChainContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """At most ``block_size`` drafts after ``anchor``, each drawn before the next run of the layer.

        Raises :class:`RequestError` if a position's logits leave no token to draw.
        """
        if state.last is None or not self.size(limit, state.length, state.memory):
            return EMPTY
        ask = DraftAsk(seat=0, anchor=anchor, sampling=sampling, generator=generator, limit=limit)
        proposal = self.draft(state.memory, [ask], [state.length], state.last, [state.shaper])
        if not proposal.proposed[0]:
            raise RequestError("the draft logits of a position leave no token to draw (check them for nan)")
        return replace(proposal.of(0), sequential_seconds=proposal.sequential_seconds)

    def draft(
        self,
        memory: LeanMemory,
        asks: Sequence[DraftAsk],
        lengths: Sequence[int],
        states: Float[Tensor, "requests hidden"],
        shapers: Sequence[Shaper | None],
    ) -> BatchProposal:
        """Drafts for each ask, whose :meth:`size` is 1 or more: one run of the layer per position for all that want a
        draft there. ``lengths`` are committed tokens, ``states`` the first states of the newest of them.

        A request whose logits leave nothing to draw gets no drafts. Overwrites rows of ``memory`` from lengths - 1 on.
        """
        begin = time.perf_counter()
        sizes = [self.size(ask.limit, length, memory) for ask, length in zip(asks, lengths, strict=True)]
        order = sorted(range(len(asks)), key=lambda i: -sizes[i])  # at later positions some of the last are done
        chain = Chain(asks, sizes, block=self.block_size, device=self.device)
        with torch.inference_mode():
            states = states if len(asks) == 1 else states[order]
            prev = torch.tensor([asks[i].anchor for i in order], device=self.device)
            for j in range(sizes[order[0]]):
                here = [i for i in order if sizes[i] > j]
                for i in here:
                    memory.lengths[asks[i].seat] = lengths[i] - 1 + j
                seats = [asks[i].seat for i in here]
                states, logits = self._step(memory, seats, prev[: len(here)], states[: len(here)])
                logits = self._mirrored(logits, [shapers[i] for i in here], j)
                support = None if self._token_ids is None else self._token_ids.expand(len(here), -1)
                if 0 < self.candidates < logits.shape[1]:
                    logits, picked = logits.topk(self.candidates)
                    support = picked if self._token_ids is None else self._token_ids[picked]
                prev = chain.draw(here, j, logits, support)
        return chain.proposal(time.perf_counter() - begin)

    def _mirrored(
        self, logits: Float[Tensor, "requests draft_vocab"], shapers: Sequence[Shaper | None], position: int
    ) -> Float[Tensor, "requests draft_vocab"]:
        """The logits of draft ``position`` under the rules of the requests that have any."""
        if all(shaper is None for shaper in shapers):
            return logits
        rows = [  # min_tokens counts rows, so the row must be the one of that number
            row if shaper is None else shaper.mirrored(row.expand(position + 1, -1), self._columns)[position]
            for row, shaper in zip(logits, shapers, strict=True)
        ]
        return torch.stack(rows)

    def _step(
        self,
        memory: LeanMemory,
        rows: Sequence[int],
        prev: Int[Tensor, "requests"],
        states: Float[Tensor, "requests hidden"],
    ) -> tuple[Float[Tensor, "requests hidden"], Float[Tensor, "requests draft_vocab"]]:
        """One run of the layer for a row each, behind the lengths of ``memory``: the states that the next run starts
        from, and the logits of the token after ``prev``."""
        ops, layer = self._fast or self._ops, self._layer
        x, residual = self.mix(self.embed(prev), states)
        counts = [1] * len(rows)
        attend = ops.attention(memory, rows, counts, (layer,), lambda rope: self._angles(rope, memory.max_len))
        middle, h = feed_forward(ops, layer, residual, attend(0, layer.qkv(x)))
        if self._scalar is None:
            states, normed = ops.add_norm(middle, h, self._norm)
        else:
            states = (middle + h) * self._scalar
            normed = ops.norm(states, self._norm)
        logits = self._head(normed).float()
        if cap := self._shape.final_soft_cap:
            logits = cap * torch.tanh(logits / cap)
        return self.next_state(states, normed), logits
