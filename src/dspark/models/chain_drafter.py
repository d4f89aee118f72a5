"""Chain drafters in decoding: drafts left to right, one run of the layer each (Eagle3, MTP).

With n tokens that the target has run (the anchor, token n, is not among them), what is held per request is one row of
a :class:`LeanMemory`:

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
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.errors import ConfigError
from dspark.maths.sampling import draw, target_probs
from dspark.maths.shaping import Shaper
from dspark.models import DEFAULT_CANDIDATES, backbone
from dspark.models.backbone import GemmaBody
from dspark.models.chain import ChainModel
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
from dspark.models.eagle3 import Eagle3Model
from dspark.models.layer import feed_forward
from dspark.models.lean_memory import LeanMemory
from dspark.models.linear import Linear
from dspark.models.mtp import MTPModel
from dspark.models.norm import RMSNorm
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
    """A chain drafter at batch size 1. A subclass says what the layer reads, as its training form does.

    ``candidates`` = M draws each draft from the M largest logits of its step and reports exactly that distribution; 0
    is the full vocabulary.
    """

    has_confidence = False

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
        self.dtype, self.device = target.info.dtype, target.info.device
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

    def open(self, *, max_len: int) -> ChainContext:
        """Context for a request of up to ``max_len`` tokens (cut at the drafter's own limit)."""
        rows = min(max_len, self._shape.max_position_embeddings) + self.block_size
        return ChainContext(LeanMemory(self._decoder, rows=1, max_len=rows, dtype=self.dtype, device=self.device))

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
            if nexts.shape[0]:
                inputs, _ = self.mix(self.embed(nexts), before)
                positions = torch.arange(first, first + len(inputs))
                self._writer.write(state.memory, torch.zeros_like(positions), positions, self._kv(inputs))

    def propose(
        self, state: ChainContext, anchor: int, *, sampling: SamplingParams, generator: torch.Generator, limit: int
    ) -> Proposal:
        """At most ``block_size`` drafts after ``anchor``, each drawn before the next run of the layer."""
        first = state.length - 1
        room = self._shape.max_position_embeddings - first
        size = min(limit, self.block_size, room)
        if state.last is None or size < 1 or state.length > state.memory.max_len - self.block_size:
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
        """One run of the layer at ``row``: the state it hands on, and fp32 logits of the token after ``prev``."""
        ops, layer, memory = self._fast or self._ops, self._layer, state.memory
        x, residual = self.mix(self.embed(torch.tensor([prev], device=self.device)), states)
        memory.lengths[0] = row
        attend = ops.attention(memory, (0,), (1,), (layer,), lambda rope: self._angles(rope, memory.max_len))
        middle, h = feed_forward(ops, layer, residual, attend(0, layer.qkv(x)))
        if self._scalar is None:
            states, normed = ops.add_norm(middle, h, self._norm)
        else:
            states = (middle + h) * self._scalar
            normed = ops.norm(states, self._norm)
        logits = self._head(normed).float()[0]
        if cap := self._shape.final_soft_cap:
            logits = cap * torch.tanh(logits / cap)
        return self.next_state(states, normed), logits


class Eagle3Drafter(ChainDrafter):
    """Eagle3 at batch size 1."""

    def __init__(
        self,
        model: Eagle3Model,
        target: Target,
        *,
        candidates: int = DEFAULT_CANDIDATES,
        name: str = "eagle3",
        native: bool = True,
    ) -> None:
        super().__init__(model, target, candidates=candidates, name=name, native=native)
        self.config, self.taps = model.config, model.config.target_layer_ids
        assert model.layer.hidden_norm is not None
        self._fc, self._hidden_norm = self.pack(model.fc.weight), self.norm(model.layer.hidden_norm)
        self._input_norm = None if model.input_norm is None else self.norm(model.input_norm)
        self._tap_norms = [self.norm(norm) for norm in model.tap_norms()]

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        if self._input_norm is not None:
            features = self.normed(features, self._input_norm)
        if self._tap_norms:
            parts = features.split(self.config.hidden_size, 1)
            pairs = zip(parts, self._tap_norms, strict=True)
            features = torch.cat([self.normed(part, norm) for part, norm in pairs], 1)
        return self._fc(features)

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        normed = self.normed(states, self._hidden_norm)
        inputs = torch.cat((self.normed(embeds, self._layer.input_norm), normed), 1)
        return inputs, normed if self.config.norm_before_residual else states

    def next_state(
        self, states: Float[Tensor, "rows hidden"], normed: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows hidden"]:
        return normed if self.config.norm_output else states


class MTPDrafter(ChainDrafter):
    """MTP at batch size 1."""

    def __init__(
        self,
        model: MTPModel,
        target: Target,
        *,
        candidates: int = DEFAULT_CANDIDATES,
        name: str = "mtp",
        native: bool = True,
    ) -> None:
        super().__init__(model, target, candidates=candidates, name=name, native=native)
        self.config, self.taps = model.config, model.config.target_layer_ids
        self._enorm, self._hnorm = self.norm(model.enorm), self.norm(model.hnorm)
        self._eh_proj = self.pack(model.eh_proj.weight)

    def first_state(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows hidden"]:
        return features

    def mix(
        self, embeds: Float[Tensor, "rows hidden"], states: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows hidden"]]:
        z = self._eh_proj(torch.cat((self.normed(embeds, self._enorm), self.normed(states, self._hnorm)), 1))
        return self.normed(z, self._layer.input_norm), z
