"""Output that must match a schema, a regular expression, a choice or a grammar: a request's place in its text.

A constraint shapes the target's rows as a ban does: at each position the logits of tokens that the grammar does not
allow after the text so far are -inf. The mask depends on that text alone, so the constrained target is a target like
any other, and drafting, verification and scheduling stay exact. Draft k's row needs the grammar's state after the
drafts before it: the matcher walks along the drafts, takes a mask at each, and walks back.

    Constraint             a compiled one, immutable, of any number of requests (:mod:`dspark.serve.grammars` compiles)
    Matcher                how far one request's text has come in it
    ConstrainedShaper      a request's Shaper with its constraint's masks on top

The model's end tokens are allowed exactly where the text may end, and nothing else where it must.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.maths.shaping import NEVER, Shaper, ShapingTables

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraint:
    """A compiled constraint; requests take matchers of their own from it."""

    kind: str  # "json_schema", "regex", "choice" or "grammar"
    vocab_size: int
    ends: frozenset[int]  # the model's end tokens
    pristine: LLMatcher  # nothing consumed; copied, never advanced

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""
        return Matcher(self.pristine.deep_copy(), self.vocab_size, self.ends)

    def shaper(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, stop_token_ids: Collection[int] = ()
    ) -> ConstrainedShaper:
        """What goes wherever a request's :class:`dspark.maths.shaping.Shaper` goes."""
        return ConstrainedShaper(params, prompt_ids, matcher=self.matcher(), stop_token_ids=stop_token_ids)


class Matcher:
    """How far a request's text has come in its grammar. Not for two threads at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends
        self._next: NDArray[np.uint8] | None = None  # the mask after the committed text, once asked for

    def masks(self, draft_tokens: Sequence[int]) -> Bool[np.ndarray, "rows vocab"]:
        """:meth:`bits`, spread."""
        bits = np.unpackbits(self.bits(draft_tokens), axis=1, count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def bits(self, draft_tokens: Sequence[int]) -> UInt8[np.ndarray, "rows bytes"]:
        """Tokens allowed after the committed text and the first k drafts, row by row, a bit a token.

        Rows behind the first draft that is not allowed are all ones: such a draft has probability 0, and nobody reads
        them. So are those behind an end token, whose tokens nobody keeps. Raises :class:`RequestError` if the grammar
        proves too complex on the way.
        """
        if self._next is None:
            self._next = self._mask()
        found = np.full((len(draft_tokens) + 1, len(self._next)), 255, dtype=np.uint8)
        found[0] = self._next
        walked = 0
        try:
            for k, token in enumerate(draft_tokens):
                # an end token must not be consumed here: in a complete text rolling back would not count it
                allowed = found[k, token >> 3] >> (token & 7) & 1
                if token in self._ends or not allowed or not self._matcher.consume_token(token):
                    break
                walked += 1
                found[k + 1] = self._mask()
        finally:
            if walked and not self._matcher.is_error():
                self._matcher.rollback(walked)
        self._check()
        return found

    def next_mask(self) -> Bool[np.ndarray, "vocab"]:
        """Tokens allowed after the committed text."""
        return self.masks(())[0]

    def allowed(self, draft_tokens: Sequence[int]) -> int:
        """How many of ``draft_tokens`` the grammar allows, one after the other, up to the first end token."""
        tokens = self._up_to_end(draft_tokens)
        return self._matcher.validate_tokens(tokens) if tokens else 0

    def useful(self, draft_tokens: Sequence[int]) -> int:
        """See :meth:`ConstrainedShaper.useful`."""
        return min(self.allowed(draft_tokens) + 1, len(self._up_to_end(draft_tokens)))

    def _up_to_end(self, draft_tokens: Sequence[int]) -> list[int]:
        tokens = list(draft_tokens)
        return tokens[: next((k + 1 for k, token in enumerate(tokens) if token in self._ends), len(tokens))]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the output, an end token only as the last of all; an error shows when a mask is
        next asked for."""
        if token_ids:
            self._next = None
            self._matcher.consume_tokens(list(token_ids))

    @property
    def done(self) -> bool:
        """Whether the text is complete, so that nothing but an end token can follow."""
        return self._matcher.is_stopped()

    def _mask(self) -> NDArray[np.uint8]:
        self._check()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the constraint cannot be followed any further: {one_line(self._matcher.get_error())}")


class ConstrainedShaper(Shaper):
    """A request's rules and, last, its grammar."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        matcher: Matcher,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        super().__init__(params, prompt_ids, stop_token_ids=stop_token_ids)
        self.matcher = matcher

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the output."""
        super().commit(token_ids)
        self.matcher.commit(token_ids)

    def rows(self, logits: Float[Tensor, "rows vocab"], draft_tokens: Sequence[int]) -> Float[Tensor, "rows vocab"]:
        """Shaped and masked rows; raises :class:`RequestError` if the grammar cannot be followed any further."""
        shaped = super().rows(logits, draft_tokens)
        allowed = torch.from_numpy(self.matcher.masks(draft_tokens)).to(shaped.device)
        return shaped.masked_fill_(~allowed, NEVER)

    def tables(self, draft_tokens: Sequence[int]) -> ShapingTables:
        """The rules' tables and the grammar's masks; raises as :meth:`rows` does."""
        return replace(super().tables(draft_tokens), mask=self.matcher.bits(draft_tokens))

    def mirrored(
        self, draft_logits: Float[Tensor, "block draft_vocab"], columns: Int[Tensor, "vocab"] | None = None
    ) -> Float[Tensor, "block draft_vocab"]:
        """The rules' part as :meth:`Shaper.mirrored` has it; the first draft's row also has the grammar's mask, which
        the committed text decides."""
        shaped = super().mirrored(draft_logits, columns)
        allowed = torch.from_numpy(self.matcher.next_mask()).to(shaped.device)
        if columns is not None:
            known = columns >= 0
            mine = torch.zeros(shaped.shape[1], dtype=torch.bool, device=shaped.device)
            mine[columns[known]] = allowed[known]
            allowed = mine
        first = shaped[0].masked_fill(~allowed, NEVER)
        if not bool(first.isneginf().all()):
            shaped[0] = first
        return shaped

    def useful(self, draft_tokens: Sequence[int]) -> int:
        """Drafts worth verifying: those that the grammar allows up to an end token, and the first that it does not.

        That one is rejected for certain, whatever comes behind it. It must itself be verified: leaving it out would
        draw the next token from the target's row instead of the residual, and tokens that the drafter likes would come
        up too rarely. Whether a draft counts depends on the drafts before it alone.
        """
        return self.matcher.useful(draft_tokens)


def one_line(message: str) -> str:
    """An error of llguidance on one line."""
    return " ".join(message.split())
