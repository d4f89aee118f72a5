"""The lean target: our own decoder for the Llama-shaped families, on our own KV memory.

Batch-1 decoding reads every weight once a pass; what is left to save is the number of small operations between the
products. So queries, keys and values are one product, gate and up another, rotation serves queries and keys together, and
the query heads of a key-value head are folded into the query axis of attention, which then reads each key once.

Layout. Query heads are stored as (group, kv_head) rather than (kv_head, group): rows of ``q_proj`` and columns of
``o_proj`` are permuted at loading, and then neither folding the heads nor unfolding the result needs a copy.

One pass over a ragged batch: products run over all tokens at once; attention runs per :class:`_Run`, a stretch of
neighbouring memory rows with equal counts, so 96 rows with a token each are one call, and eight whole sequences are eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import ModelError, RequestError
from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.linear import Linear
from dspark.models.target import KVMemory, TargetInfo, TargetOutput, check_taps

CALL_TOKENS = 256  # padded keys worth one more attention call: about 15 us on the CPUs we measured
FOLD_LIMIT = 32  # tokens per row up to which query heads are folded; longer runs take one causal call per group


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Weights of one decoder layer."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_attention_norm: Tensor  # before the feed-forward part, unless the family has four norms
    pre_feedforward_norm: Tensor | None
    post_feedforward_norm: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    slides: bool


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Keys that a run's queries look at in one kind of layer."""

    start: int
    stop: int
    mask: Tensor | None  # additive; None where every query sees every key, or where ``causal`` says enough
    causal: bool


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Neighbouring memory rows with equal counts that share one attention call."""

    tokens: slice  # in the flat batch
    rows: slice  # in the memory
    count: int  # new tokens per row
    past: int  # of a single row
    folded: bool  # query heads folded into the query axis
    scatter: tuple[Tensor, Tensor] | None  # memory row and position of each token, for runs of several rows
    full: _Span
    local: _Span  # the same object as ``full`` where no layer slides


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
        weights = _Weights(config, tensors, dtype, self.info.device)
        self._embedding = weights.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [weights.layer(i) for i in range(config.num_layers)]
        self._final_norm = weights.norm("norm.weight", config.hidden_size)
        head = self._embedding if config.tied_head else weights.head()
        self._head = Linear(head, keep_raw=True)
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(dtype).item()
        self._activation = _ACTIVATIONS[config.activation]
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each."""
        config = self.config
        shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        return KVMemory(rows=rows, max_len=max_len, shapes=shapes, dtype=self.info.dtype, device=self.info.device)

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Input embeddings as the first layer receives them."""
        embedded = F.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

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
        counts = (token_ids.shape[0],) if counts is None else tuple(counts)
        check_batch(token_ids, memory, rows, counts)
        taps = check_taps(taps, self.config.num_layers)
        with torch.inference_mode():
            runs = self._plan(memory, rows, counts)
            x, tapped = self._decode(token_ids, memory, rows, counts, runs, taps)
        memory.advance(rows, counts)
        # Outside inference mode, so that a trainer may use the results in its own graph.
        with torch.no_grad():
            features = torch.cat(tapped, -1) if taps else None
            final = self._norm(x, self._final_norm)
            logits = None
            if want_logits:
                logits = self._logits(last_tokens(final, counts) if last_only else final)
        return TargetOutput(logits, features, final)

    def _decode(
        self,
        token_ids: Tensor,
        memory: KVMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        runs: list[_Run],
        taps: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers over the flat batch; returns the last layer's output and the tapped states."""
        config = self.config
        rotation = self._rotation(config.rope, memory, rows, counts)
        local = rotation
        if config.sliding_window is not None and config.local_rope != config.rope:
            local = self._rotation(config.local_rope, memory, rows, counts)
        x = self.embed(token_ids)
        tapped = [x] if -1 in taps else []
        for i, layer in enumerate(self._layers):
            h = self._norm(x, layer.input_norm)
            h = self._attention(h, layer, memory.keys[i], memory.values[i], local if layer.slides else rotation, runs)
            if layer.pre_feedforward_norm is None:
                x = x + h
                h = self._norm(x, layer.post_attention_norm)
            else:
                x = x + self._norm(h, layer.post_attention_norm)
                h = self._norm(x, layer.pre_feedforward_norm)
            gate_up = layer.gate_up(h)
            size = config.intermediate_size
            h = layer.down(self._activation(gate_up[:, :size]).mul_(gate_up[:, size:]))
            x = x + (h if layer.post_feedforward_norm is None else self._norm(h, layer.post_feedforward_norm))
            if i in taps:
                tapped.append(x)
        return x, tapped

    def _attention(
        self, h: Tensor, layer: _Layer, keys: Tensor, values: Tensor, rotation: tuple[Tensor, Tensor], runs: list[_Run]
    ) -> Tensor:
        """Self-attention of one layer for the flat batch; writes the new keys and values."""
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
        for run in runs:
            _write(keys, new_keys, run)
            _write(values, new_values, run)
            span = run.local if layer.slides else run.full
            outputs.append(self._attend(queries[run.tokens], keys[run.rows], values[run.rows], span, run))
        return layer.o(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: _Span, run: _Run) -> Tensor:
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

    def _products(self, q: Tensor, k: Tensor, v: Tensor, span: _Span) -> Tensor:
        """softmax(q k^T) v. The soft-capped form is explicit, because fused kernels cannot cap."""
        scale, cap = self.config.attention_scale, self.config.attention_softcap
        if cap is None:
            return F.scaled_dot_product_attention(q, k, v, span.mask, is_causal=span.causal, scale=scale)
        scores = (q @ k.transpose(-1, -2)).mul_(scale).div_(cap).tanh_().mul_(cap)
        if span.mask is not None:
            scores += span.mask
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm, computed in fp32; Gemma's weights (1 + w) are kept in fp32 and applied before rounding."""
        width = x.shape[-1]
        if weight.dim() > 1:  # per-head weights of queries and keys
            normed = F.rms_norm(x.to(weight.dtype), (width,), None, self.config.rms_eps).mul_(weight)
            return normed.to(x.dtype)
        return F.rms_norm(x.to(weight.dtype), (width,), weight, self.config.rms_eps).to(x.dtype)

    def _logits(self, final: Tensor) -> Tensor:
        logits, cap = self._head(final), self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _rotation(
        self, rope: Rope, memory: KVMemory, rows: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [tokens, 1, head_dim] of the batch's positions."""
        cos, sin = self._table(rope, max(memory.max_len, 256))
        if len(rows) == 1:
            begin = memory.lengths[rows[0]]
            return cos[begin : begin + counts[0]], sin[begin : begin + counts[0]]
        index = torch.cat(
            [torch.arange(memory.lengths[r], memory.lengths[r] + c) for r, c in zip(rows, counts, strict=True)]
        )
        index = index.to(cos.device)
        return cos[index], sin[index]

    def _table(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        """Tables for at least ``length`` positions, computed in fp32 and kept in the model's dtype."""
        table = self._tables.get(rope)
        if table is None or table[0].shape[0] < length:
            half = torch.outer(torch.arange(length, dtype=torch.float32), torch.tensor(rope.inv_freq))
            cos = torch.cat((half.cos(), half.cos()), -1) * rope.scale
            sin = torch.cat((-half.sin(), half.sin()), -1) * rope.scale
            table = (
                cos[:, None].to(self.info.device, self.info.dtype),
                sin[:, None].to(self.info.device, self.info.dtype),
            )
            self._tables[rope] = table
        return table

    def _plan(self, memory: KVMemory, rows: Sequence[int], counts: Sequence[int]) -> list[_Run]:
        """Cut the batch into runs."""
        runs, first, begin = [], 0, 0
        for last in range(1, len(rows) + 1):
            if last < len(rows) and _joins(memory, rows, counts, first, last):
                continue
            pasts = [memory.lengths[row] for row in rows[first:last]]
            runs.append(self._run(begin, rows[first], counts[first], pasts))
            begin += counts[first] * (last - first)
            first = last
        return runs

    def _run(self, begin: int, row: int, count: int, pasts: list[int]) -> _Run:
        config, device = self.config, self.info.device
        several = len(pasts) > 1
        folded = several or count <= FOLD_LIMIT
        positions = scatter = None
        if several:
            positions = torch.tensor(pasts, device=device)[:, None] + torch.arange(count, device=device)
            row_ids = torch.arange(row, row + len(pasts), device=device).repeat_interleave(count)
            scatter = (row_ids, positions.reshape(-1))
        full = self._span(count, pasts, folded, None)
        return _Run(
            tokens=slice(begin, begin + count * len(pasts)),
            rows=slice(row, row + len(pasts)),
            count=count,
            past=pasts[0],
            folded=folded,
            scatter=scatter,
            full=full,
            local=full if config.sliding_window is None else self._span(count, pasts, folded, config.sliding_window),
        )

    def _span(self, count: int, pasts: list[int], folded: bool, window: int | None) -> _Span:
        """Key range and mask of a run, for a full layer (``window`` None) or a sliding one."""
        start = 0 if window is None else max(0, min(pasts) - window + 1)
        stop = max(pasts) + count
        slid = window is not None and stop - start > window
        if len(pasts) == 1 and not slid and count == 1:
            return _Span(start=start, stop=stop, mask=None, causal=False)
        if len(pasts) == 1 and not slid and not folded and stop == count and self.config.attention_softcap is None:
            return _Span(start=start, stop=stop, mask=None, causal=True)
        device = self.info.device
        queries = torch.tensor(pasts, device=device)[:, None, None] + torch.arange(count, device=device)[:, None]
        keys = torch.arange(start, stop, device=device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self.info.dtype, device=device).masked_fill_(hidden, float("-inf"))
        if folded:
            mask = mask.repeat_interleave(self.config.group, 1)
        return _Span(start=start, stop=stop, mask=mask[:, None], causal=False)


def check_batch(token_ids: Tensor, memory: KVMemory, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Raise :class:`RequestError` unless the batch is well formed and fits the memory."""
    if len(rows) != len(counts) or sum(counts) != token_ids.shape[0] or min(counts, default=0) < 1:
        raise RequestError(
            f"counts is {list(counts)} for rows {list(rows)} and {token_ids.shape[0]} tokens; "
            "give one positive count per row that sum to the tokens"
        )
    if len(set(rows)) != len(rows) or not all(0 <= row < memory.rows for row in rows):
        raise RequestError(f"rows is {list(rows)}; rows must be distinct and lie in 0..{memory.rows - 1}")
    memory.check_room(rows, counts)


def last_tokens(states: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of ``states`` that belong to each request's last token."""
    if len(counts) == 1:
        return states[-1:]
    if len(counts) == states.shape[0]:
        return states
    return states[torch.tensor(counts, device=states.device).cumsum(0) - 1]


def _joins(memory: KVMemory, rows: Sequence[int], counts: Sequence[int], first: int, last: int) -> bool:
    """Whether row ``last`` of the batch may join the run that starts at ``first``.

    It must be the memory's next row with the same count, and padding it and its companions to a common number of keys
    must cost less than an attention call of its own. Long runs (whole prompts) stay alone and keep the causal kernel.
    """
    if rows[last] != rows[last - 1] + 1 or counts[last] != counts[first] or counts[first] > FOLD_LIMIT:
        return False
    pasts = [memory.lengths[row] for row in rows[first : last + 1]]
    longest = max(pasts[:-1])
    return max(pasts[-1], longest) - pasts[-1] + max(0, pasts[-1] - longest) * (last - first) <= CALL_TOKENS


def _write(memory: Tensor, new: Tensor, run: _Run) -> None:
    """Put a run's keys or values [tokens, kv_heads, head_dim] into their places of [rows, kv_heads, max_len, head_dim]."""
    if run.scatter is None:
        memory[run.rows.start, :, run.past : run.past + run.count] = new[run.tokens].transpose(0, 1)
    else:
        memory[run.scatter[0], :, run.scatter[1]] = new[run.tokens]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh, "gelu": F.gelu}


class _Weights:
    """Takes a checkpoint's tensors one by one, checks them and brings them into our layout."""

    def __init__(
        self, config: DecoderConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.tensors, self.dtype, self.device = config, tensors, dtype, device
        ending = "embed_tokens.weight"
        # "model." for causal models, "model.language_model." or "language_model.model." inside image-text models.
        self.prefix = next((name.removesuffix(ending) for name in tensors if name.endswith(ending)), "model.")

    def take(self, name: str, *shape: int) -> Tensor:
        return self._take(self.prefix + name, shape)

    def head(self) -> Tensor:
        name = next((name for name in self.tensors if name.endswith("lm_head.weight")), "lm_head.weight")
        return self._take(name, (self.config.vocab_size, self.config.hidden_size))

    def norm(self, name: str, width: int) -> Tensor:
        weight = self.take(name, width)
        return 1.0 + weight.float() if self.config.norm_offset else weight

    def layer(self, i: int) -> _Layer:
        config, prefix = self.config, f"layers.{i}."
        hidden, size = config.hidden_size, config.intermediate_size
        four = config.four_norms
        qk_norm = None
        if config.qk_norm:
            q_norm = self.norm(prefix + "self_attn.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
            k_norm = self.norm(prefix + "self_attn.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
            qk_norm = torch.cat((q_norm, k_norm))
        return _Layer(
            qkv=self._qkv(prefix + "self_attn."),
            o=self._output(prefix + "self_attn.o_proj."),
            gate_up=self._stack([(prefix + "mlp.gate_proj.", size), (prefix + "mlp.up_proj.", size)], config.mlp_bias),
            down=self._linear(prefix + "mlp.down_proj.", hidden, size, config.mlp_bias),
            input_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            post_attention_norm=self.norm(prefix + "post_attention_layernorm.weight", hidden),
            pre_feedforward_norm=self.norm(prefix + "pre_feedforward_layernorm.weight", hidden) if four else None,
            post_feedforward_norm=self.norm(prefix + "post_feedforward_layernorm.weight", hidden) if four else None,
            qk_norm=qk_norm,
            slides=config.slides[i],
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name!r}; download it again or use another checkpoint")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, its config says {shape}")
        return tensor.detach().to(self.device, self.dtype)

    def _linear(self, name: str, out_size: int, in_size: int, bias: bool) -> Linear:
        weight = self.take(name + "weight", out_size, in_size)
        return Linear(weight, self.take(name + "bias", out_size) if bias else None)

    def _stack(self, parts: list[tuple[str, int]], bias: bool) -> Linear:
        weight = torch.cat([self.take(name + "weight", size, self.config.hidden_size) for name, size in parts])
        return Linear(weight, torch.cat([self.take(name + "bias", size) for name, size in parts]) if bias else None)

    def _qkv(self, prefix: str) -> Linear:
        config = self.config
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        parts = [self._group_first(self.take(prefix + "q_proj.weight", q_size, config.hidden_size))]
        parts += [self.take(f"{prefix}{x}_proj.weight", kv_size, config.hidden_size) for x in "kv"]
        bias = None
        if config.qkv_bias:
            q_bias = self._group_first(self.take(prefix + "q_proj.bias", q_size))
            bias = torch.cat([q_bias] + [self.take(f"{prefix}{x}_proj.bias", kv_size) for x in "kv"])
        return Linear(torch.cat(parts), bias)

    def _output(self, name: str) -> Linear:
        config = self.config
        weight = self.take(name + "weight", config.hidden_size, config.num_heads * config.head_dim)
        weight = self._group_first(weight.T).T.contiguous()
        return Linear(weight, self.take(name + "bias", config.hidden_size) if config.o_bias else None)

    def _group_first(self, rows: Tensor) -> Tensor:
        """Reorder head-wise rows from (kv_head, group) to (group, kv_head)."""
        config = self.config
        heads = rows.reshape(config.num_kv_heads, config.group, config.head_dim, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)
