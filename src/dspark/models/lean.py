"""The lean target: our own decoder for the Llama-shaped families, on our own KV memory.

Batch-1 decoding reads every weight once a pass; what is left to save is the time between the products. So queries, keys
and values are one product, gate and up another, and what lies between two products is one call where a C compiler is at
hand (:mod:`dspark.models.native`) and a few operations of PyTorch elsewhere (:mod:`dspark.models.plain`).

Rows. A token's numbers should not depend on what shares its pass: then greedy output with drafts, or among other
requests, equals the output without bit for bit, in bfloat16 too. The compiled operations work row by row, but a matrix
product may choose another kernel for one row than for eight. So passes are filled up to eight rows, whose weights are
read once all the same, or to the next number of rows that products run over (:func:`dspark.models.linear.filled_rows`);
whether larger products then keep a row's bits is tried (``batches_independent``).

On CUDA the plain operations serve; a captured graph per (rows, count) would remove their launch gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.models.compiled_products import compiled_product
from dspark.models.decoder_config import DecoderConfig, Rope
from dspark.models.layer import Ops, feed_forward
from dspark.models.lean_memory import LeanMemory
from dspark.models.lean_weights import Weights
from dspark.models.linear import ROW_QUANTUM, Linear, Product, filled_rows, settle
from dspark.models.native import native_ops
from dspark.models.paged_memory import PagedMemory, PageTables
from dspark.models.plain import PlainOps
from dspark.models.ragged import check_batch, last_tokens
from dspark.models.short_pass import SHORT_TOKENS, ShortPass, short_pass
from dspark.models.target import FINAL, KVMemory, TargetInfo, TargetOutput, check_max_len, check_taps

BATCHES = (16, 24, 40, 64, 104, 160)  # rows of the batches that `batches_independent` tries


def rows_alike(products: Sequence[Product], dtype: torch.dtype) -> bool:
    """Whether a row has the same bits wherever it stands in a product over eight rows, tried on random rows.

    Products over fewer rows are not tried: they may pick another kernel whose sums differ in the last bit, which
    rounding to bfloat16 hides in all but one product in hundreds. So short passes are always filled up.
    """
    generator = torch.Generator().manual_seed(0)
    for product in products[-5:]:  # one of each shape: those of the last layer, and the head
        x = torch.randn(ROW_QUANTUM, product.in_features, generator=generator).to(dtype)
        whole = product(x)
        if any(not torch.equal(product(x.roll(k, 0)), whole.roll(k, 0)) for k in range(1, ROW_QUANTUM)):
            return False
    return True


def batches_alike(products: Sequence[Product], dtype: torch.dtype) -> bool:
    """Whether a row has the same bits in products over eight rows and over any number we tried."""
    generator = torch.Generator().manual_seed(0)
    for product in products[-5:]:
        x = torch.randn(max(BATCHES), product.in_features, generator=generator).to(dtype)
        whole = torch.cat([product(eight) for eight in x.split(ROW_QUANTUM)])
        if any(not torch.equal(product(x[:rows]), whole[:rows]) for rows in BATCHES):
            return False
    return True


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
        native: bool = True,
    ) -> None:
        """``tensors`` are a checkpoint's weights under transformers' names; entries are taken out as they are used.

        ``native`` False keeps to plain PyTorch even where compiled operations are to be had.
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
        weights = Weights(config, tensors, dtype, self.info.device)
        self._embedding = weights.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [weights.layer(i) for i in range(config.num_layers)]
        self._final_norm = weights.norm("norm.weight", config.hidden_size)
        self._head = Linear(self._embedding if config.tied_head else weights.head(), keep_raw=True)
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(dtype).item()
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._plain = PlainOps(config, dtype, self.info.device)
        self._native = native_ops(config, dtype, self.info.device) if native else None
        settle(self.products)
        with torch.inference_mode():
            self._rows_alike = self._native is not None and rows_alike(self.products, dtype)
            self._short, self._short_head = None, None
            if self._native is not None and self._rows_alike:
                self._short_head = compiled_product(self._head, self._native.library)
                self._short = short_pass(
                    self._native,
                    self._layers,
                    self._final_norm,
                    head=self._head,
                    embedding=self._embedding,
                    embedding_scale=self._embedding_scale,
                )

    @property
    def native(self) -> bool:
        """Whether compiled operations run between the products."""
        return self._native is not None

    @property
    def rows_independent(self) -> bool:
        """Whether a token's numbers are the same bits in a pass of its own and among up to seven others.

        Not so without compiled operations.
        """
        return self._rows_alike

    @functools.cached_property
    def batches_independent(self) -> bool:
        """Whether a token's numbers are the same bits in a pass of its own and in any batch, prompts in pieces
        included: then requests that share passes get, in half precision too, what each would get alone.

        Tried once, at the first question, in some tens of milliseconds; depends on the library of products.
        """
        with torch.inference_mode():
            return self._rows_alike and batches_alike(self.products, self.info.dtype)

    @property
    def products(self) -> list[Product]:
        """The model's matrix products in the order of a pass."""
        return [
            *(product for layer in self._layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)),
            self._head,
        ]

    def new_memory(self, *, rows: int, max_len: int) -> LeanMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each; :class:`RequestError` past the context."""
        check_max_len(max_len, self.info)
        return LeanMemory(self.config, rows=rows, max_len=max_len, dtype=self.info.dtype, device=self.info.device)

    def new_paged_memory(self, tables: PageTables, *, pages: int) -> PagedMemory:
        """KV memory of ``pages`` pages for the seats of ``tables``, none of them past the model's context."""
        info = self.info
        return PagedMemory(self.config, tables, pages=pages, dtype=info.dtype, device=info.device, max_len=info.max_len)

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Input embeddings as the first layer receives them."""
        embedded = torch.embedding(self._embedding, token_ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def logits(self, final: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits of final-norm states, soft-cap applied."""
        with torch.no_grad():
            if self._short_head is not None and final.shape[0] <= SHORT_TOKENS:
                logits = self._short_head(final)
            else:
                logits = self._head(self._fill(final))[: final.shape[0]]
            return self._capped(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        """``logits`` with the family's soft-cap applied, in place."""
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

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
        if counts is None:
            rows = rows[:1]
        counts = check_batch(token_ids, memory, rows, counts)
        taps = check_taps(taps, self.config.num_layers)
        assert isinstance(memory, LeanMemory), "memory of another target"
        if self._short is not None and token_ids.shape[0] <= SHORT_TOKENS:
            each = want_logits and (not last_only or len(counts) == token_ids.shape[0])
            output = self._in_one_call(self._short, token_ids, memory, rows, counts, taps, want_logits=each)
            if not want_logits or output.logits is not None:
                return output
            return replace(output, logits=self.logits(last_tokens(output.final, counts) if last_only else output.final))
        with torch.inference_mode():
            normed, tapped = self._decode(token_ids, memory, rows, counts, taps)
        memory.advance(rows, counts)
        # Outside inference mode, so that a trainer may use the results in a graph of its own.
        with torch.no_grad():
            features = torch.cat(tapped, -1) if taps else None
            final = normed.clone()
            logits = self.logits(last_tokens(final, counts) if last_only else final) if want_logits else None
        return TargetOutput(logits, features, final)

    def _in_one_call(
        self,
        short: ShortPass,
        token_ids: Tensor,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        taps: tuple[int, ...],
        *,
        want_logits: bool,
    ) -> TargetOutput:
        """A short pass; its logits are None where the call has no head, or they are not wanted."""
        tables = (self._angles(self.config.rope, memory.max_len), self._angles(self.config.local_rope, memory.max_len))
        with torch.no_grad():
            out = short(token_ids, memory, rows, counts, tables, taps=taps, want_logits=want_logits)
            memory.advance(rows, counts)
            return TargetOutput(None if out.logits is None else self._capped(out.logits), out.features, out.final)

    def _decode(
        self,
        token_ids: Tensor,
        memory: LeanMemory,
        rows: Sequence[int],
        counts: Sequence[int],
        taps: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers over the flat batch: the final-norm states and the tapped ones."""
        ops: Ops = self._native or self._plain
        attend = ops.attention(memory, rows, counts, self._layers, lambda rope: self._angles(rope, memory.max_len))
        tokens = token_ids.shape[0]
        x = self._fill(self.embed(token_ids))
        tapped = [x] if -1 in taps else []
        h = ops.norm(x, self._layers[0].input_norm)
        for i, layer in enumerate(self._layers):
            x, h = feed_forward(ops, layer, x, attend(i, layer.qkv(h)))
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._final_norm
            x, h = ops.add_norm(x, h, following)
            if i in taps:
                tapped.append(x)
        if FINAL in taps:
            tapped.append(h)
        return h[:tokens], [state[:tokens] for state in tapped]

    def _fill(self, x: Tensor) -> Tensor:
        """``x`` with rows of zeros up to the next number of rows for products, where that makes rows independent."""
        missing = filled_rows(max(x.shape[0], ROW_QUANTUM)) - x.shape[0] if self._rows_alike else 0
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def _angles(self, rope: Rope, max_len: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least ``max_len`` positions, fp32 [positions, head_dim / 2]."""
        table = self._tables.get(rope)
        if table is None or table[0].shape[0] < max_len:
            angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(rope.inv_freq))
            device = self.info.device
            table = ((angles.cos() * rope.scale).to(device), (angles.sin() * rope.scale).to(device))
            self._tables[rope] = table
        return table
