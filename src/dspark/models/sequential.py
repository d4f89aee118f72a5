"""The sequential stage of a draft: tokens drawn left to right from base logits that a head corrects (paper equation 4).

Three equal forms. Over the full vocabulary, the paper's loop. Over candidates: only the M largest base logits of each
position are corrected and all other tokens have probability exactly zero, which is as exact, because what is reported
is what was drawn from. And the latter as one call of compiled C (``sequential.c``), where there is a compiler, the head
is the vanilla one or none, and the request filters nothing; elsewhere the plain form serves, which is its reference.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import DraftDistribution, SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.sampling import draw, target_probs, uniforms
from dspark.models.heads import SequentialHead, VanillaMarkovHead
from dspark.models.native import compiled, native_wanted

SOURCE = Path(__file__).with_name("sequential.c")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What the stage drew. All ids are the target's."""

    token_ids: Int[Tensor, "block"]
    prev_ids: Int[Tensor, "block"]  # token before each: the anchor, then the drafts
    distribution: DraftDistribution | None  # None: greedy


class SequentialStage:
    """Draws blocks. ``candidates`` 0 is the full vocabulary; ``native`` False keeps to the plain form."""

    def __init__(
        self,
        head: SequentialHead | None,
        token_ids: Int[Tensor, "draft_vocab"] | None,
        *,
        width: int,
        candidates: int,
        device: torch.device,
        native: bool = True,
    ) -> None:
        """``token_ids`` names the target id of every draft id, None where they are the same; ``width`` counts them.

        Raises :class:`ConfigError` if ``candidates`` is negative.
        """
        if candidates < 0:
            raise ConfigError(f"candidates is {candidates}; it must be 0 (full vocabulary) or more")
        self.head = None if head is None else copy.deepcopy(head).requires_grad_(False).to(device, torch.float32)
        self.candidates = 0 if candidates >= width else candidates  # as many as tokens: nothing is left out
        self.device = device
        self._token_ids = None if token_ids is None else token_ids.to(device).contiguous()
        fused = (
            native and self.candidates and device.type == "cpu" and type(self.head) in (VanillaMarkovHead, type(None))
        )
        self._library = _library() if fused and native_wanted() else None

    @property
    def native(self) -> bool:
        """Whether requests without filters are drafted by compiled code."""
        return self._library is not None

    def draft(
        self,
        base: Float[Tensor, "block draft_vocab"],
        hidden: Float[Tensor, "block hidden"],
        anchor: int,
        *,
        sampling: SamplingParams,
        generator: torch.Generator,
    ) -> Drafted:
        """Draw a block after ``anchor`` from fp32 ``base`` logits; advances ``generator`` by one uniform per draft.

        Greedy requests draw nothing. Raises :class:`RequestError` if a position's logits leave no token.
        """
        filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        if self._library is not None and (sampling.greedy or not filters):
            return self._fused(self._library, base, anchor, sampling, generator)
        return self._plain(base, hidden, anchor, sampling, generator)

    def _plain(
        self,
        base: Float[Tensor, "block draft_vocab"],
        hidden: Float[Tensor, "block hidden"],
        anchor: int,
        sampling: SamplingParams,
        generator: torch.Generator,
    ) -> Drafted:
        """The loop of the paper, over the full vocabulary or over candidates."""
        columns = support = None
        if self.candidates:
            base, columns = base.topk(self.candidates, -1)
            support = columns if self._token_ids is None else self._token_ids[columns]
        elif self._token_ids is not None:
            support = self._token_ids.expand(base.shape)
        tokens, rows, state = [anchor], [], None
        for k in range(base.shape[0]):
            logits = base[k]
            if self.head is not None:
                latent, state = self.head.step(tokens[-1], hidden[k].float(), state)
                w2 = self.head.markov_w2.weight
                logits = torch.addmv(logits, w2 if columns is None else w2[columns[k]], latent)
            if sampling.greedy:
                place = int(logits.argmax())
            else:
                rows.append(target_probs(logits[None], sampling)[0])
                place = draw(rows[-1], generator)
            tokens.append(place if support is None else int(support[k, place]))
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        distribution = DraftDistribution(torch.stack(rows), support) if rows else None
        return Drafted(token_ids=ids[1:], prev_ids=ids[:-1], distribution=distribution)

    def _fused(
        self,
        library: ctypes.CDLL,
        base: Float[Tensor, "block draft_vocab"],
        anchor: int,
        sampling: SamplingParams,
        generator: torch.Generator,
    ) -> Drafted:
        """The same over candidates, in one call."""
        base, block = base.contiguous(), base.shape[0]
        shape = (block, self.candidates)
        support, probs = torch.empty(shape, dtype=torch.long), torch.empty(shape)
        ids = torch.empty(block + 1, dtype=torch.long)
        ids[0] = anchor
        shares = None if sampling.greedy else uniforms(block, generator).to(self.device)
        call = _Sequential(block=block, width=base.shape[1], candidates=self.candidates, anchor=anchor)
        call.base, call.support, call.probs = base.data_ptr(), support.data_ptr(), probs.data_ptr()
        call.tokens, call.temperature = ids[1:].data_ptr(), sampling.temperature
        call.names = None if self._token_ids is None else self._token_ids.data_ptr()
        call.uniforms = None if shares is None else shares.data_ptr()
        if self.head is not None:
            w1, w2 = self.head.markov_w1.weight, self.head.markov_w2.weight
            call.w1, call.w2, call.rank = w1.data_ptr(), w2.data_ptr(), w1.shape[1]
        if error := library.draft(ctypes.byref(call)):
            if error == 1:
                raise MemoryError("no memory to choose candidates; lower candidates or block_size")
            raise RequestError("the draft logits of a position leave no token to draw (check them for nan)")
        distribution = None if sampling.greedy else DraftDistribution(probs, support)
        return Drafted(token_ids=ids[1:], prev_ids=ids[:-1], distribution=distribution)


class _Sequential(ctypes.Structure):
    """``struct sequential`` of sequential.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("base", "w1", "w2", "names", "uniforms", "support", "probs", "tokens")),
        *((name, _int64) for name in ("block", "width", "rank", "candidates", "anchor")),
        ("temperature", ctypes.c_float),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compiled(SOURCE, ())
    if library is not None:
        library.draft.argtypes = [ctypes.POINTER(_Sequential)]
    return library
