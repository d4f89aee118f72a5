"""Output that must match a schema, a regular expression, a choice or a grammar, through llguidance.

A constraint shapes the target's rows as a ban does: at each position the logits of tokens that the grammar does not
allow after the text so far are -inf. The mask depends on that text alone, so the constrained target is a target like
any other, and drafting, verification and scheduling stay exact. Draft k's row needs the grammar's state after the
drafts before it: the matcher walks along the drafts, takes a mask at each, and walks back.

    Grammars               of one tokenizer: compiles constraints, within limits of size and time
    Constraint             a compiled one, immutable, of any number of requests
    ConstrainedShaper      a request's Shaper with its constraint's masks on top

The model's end tokens are allowed exactly where the text may end, and nothing else where it must.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.shaping import NEVER, Shaper, ShapingTables

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from dspark.chat import ChatFormat

Schema = Mapping[str, Any] | bool  # JSON Schema; Any: JSON
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"  # between JSON's tokens: room to indent, but an end to it


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Bounds of what a request may ask of the compiler and of each mask."""

    max_chars: int = 65_536  # of a schema as JSON, a regular expression, a grammar, or all choices
    max_depth: int = 64  # of a schema's nesting
    max_choices: int = 1_024
    compile_fuel: int = 1_000_000  # llguidance's measure of work on regular expressions; about 20 ms
    mask_fuel: int = 200_000  # the same for one mask; about 15 ms
    mask_items: int = 50_000  # parser items of one mask; about 3 ms
    lexer_states: int = 50_000  # 1 to 2 kB each
    grammar_size: int = 100_000  # symbols

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")


class Grammars:
    """Compiles constraints for one tokenizer and one target's vocabulary.

    Making one takes about a second for a vocabulary of 50,000; compiling a constraint takes milliseconds, bounded by
    ``limits``, most of them outside Python's lock.
    """

    def __init__(
        self,
        chat: ChatFormat,
        vocab_size: int,
        *,
        limits: GrammarLimits | None = None,
    ) -> None:
        """``vocab_size`` is the target's; ids that the tokenizer lacks are never allowed.

        Raises :class:`ConfigError` for a tokenizer that llguidance cannot read, or without an end token.
        """
        import llguidance as ll  # late: only requests with a constraint need it

        self.limits, self.vocab_size = limits or GrammarLimits(), vocab_size
        self._ends = frozenset(token for token in chat.stop_token_ids if token < vocab_size)
        if not self._ends:
            raise ConfigError("the model has no end token, so constrained output could not end; set its eos_token_id")
        backend = getattr(chat.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("constrained output needs a fast tokenizer; convert it with the tokenizers library")
        known = max(chat.tokenizer.get_vocab().values()) + 1
        try:
            self._tokenizer = ll.LLTokenizer(
                backend.to_str(), n_vocab=max(vocab_size, known), eos_token=sorted(self._ends)
            )
        except ValueError as error:
            raise ConfigError(f"llguidance cannot read the model's tokenizer: {error}") from None
        self._new = ll.LLMatcher
        self._parser_limits: LLParserLimits = ll.LLParserLimits(
            initial_lexer_fuel=self.limits.compile_fuel,
            step_lexer_fuel=self.limits.mask_fuel,
            step_max_items=self.limits.mask_items,
            max_lexer_states=self.limits.lexer_states,
            max_grammar_size=self.limits.grammar_size,
            verbose_errors=False,  # they would quote the text
        )

    def json_schema(self, schema: Any) -> Constraint:  # Any: a request's JSON, right or wrong
        """JSON that ``schema`` allows, with at most 64 characters of whitespace in one place.

        Raises :class:`RequestError` naming the place for a schema that is malformed, too large, refers outside itself
        or uses a keyword that cannot be enforced; keywords of no effect on validity are taken.
        """
        if not isinstance(schema, (Mapping, bool)):
            raise RequestError(f"the schema is {type(schema).__name__!r}; it must be an object, true or false")
        if schema is False:
            raise RequestError("the schema is false, which no JSON satisfies")
        self._check_nesting(schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the schema is not JSON: {error}") from None
        self._check_size(len(text), "the schema")
        try:
            return self._compile("json_schema", self._schema_grammar(schema))
        except RequestError as error:
            place, reason = self._place(schema) or ("", str(error))
            raise RequestError(f"the schema is refused at #{place}: {reason}") from None

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Constraint:
        """Text that ``pattern`` matches as a whole, in the syntax of Rust's regex crate: without look-around and
        references, and with all of Unicode's digits, letters and spaces in their classes."""
        self._check_size(len(pattern), "the regular expression")
        try:
            return self._compile("regex", self._new.grammar_from_regex(pattern))
        except RequestError as error:
            raise RequestError(f"the regular expression is refused: {error}") from None

    def choice(self, options: Sequence[str]) -> Constraint:
        """One of ``options``, character by character."""
        if not 1 <= len(options) <= self.limits.max_choices:
            raise RequestError(f"choice has {len(options)} options; give 1 to {self.limits.max_choices}")
        for i, option in enumerate(options):
            if not option:
                raise RequestError(f"option {i} of choice is empty; each needs at least one character")
        self._check_size(sum(map(len, options)), "choice")
        pattern = "|".join("".join(_escaped(character) for character in option) for option in options)
        return replace(self._compile("choice", self._new.grammar_from_regex(f"({pattern})")), kind="choice")

    def lark(self, grammar: str) -> Constraint:
        """Text of a context-free grammar in llguidance's variant of Lark; its first rule is ``start``."""
        self._check_size(len(grammar), "the grammar")
        try:
            return self._compile("grammar", self._new.grammar_from_lark(grammar))
        except RequestError as error:
            raise RequestError(f"the grammar is refused: {error}") from None

    def _compile(self, kind: str, grammar: str) -> Constraint:
        failed, messages = self._new.validate_grammar_with_warnings(
            grammar, self._tokenizer, limits=self._parser_limits
        )
        if failed:
            raise RequestError(_tidy(messages[0]))
        matcher = self._new(self._tokenizer, grammar, log_level=0, limits=self._parser_limits)
        if matcher.is_error():
            raise RequestError(_tidy(matcher.get_error()))
        constraint = Constraint(kind=kind, vocab_size=self.vocab_size, ends=self._ends, pristine=matcher)
        if not constraint.matcher().masks(())[0].any():
            raise RequestError("no text satisfies it")
        return constraint

    def _schema_grammar(self, schema: Schema) -> str:
        text = json.dumps({} if schema is True else schema)
        options = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True}
        try:
            return self._new.grammar_from_json_schema(text, overrides=options)
        except ValueError as error:
            raise RequestError(_tidy(str(error))) from None

    def _check_size(self, chars: int, what: str) -> None:
        if chars > self.limits.max_chars:
            raise RequestError(f"{what} has {chars} characters; at most {self.limits.max_chars} are taken")

    def _check_nesting(self, schema: Any) -> None:
        """Refuse what is nested too deeply to be walked; not recursive itself."""
        level, depth = [schema], 0
        while level:
            depth += 1
            if depth > self.limits.max_depth:
                raise RequestError(f"the schema is nested deeper than {self.limits.max_depth} levels; flatten it")
            level = (
                [
                    child
                    for value in level
                    for child in (value.values() if isinstance(value, Mapping) else value)
                    if isinstance(child, (Mapping, list, tuple))
                ]
                if any(isinstance(value, (Mapping, list, tuple)) for value in level)
                else []
            )

    def _place(self, schema: Schema) -> tuple[str, str] | None:
        """Pointer and reason of the innermost part of a refused schema that is refused by itself."""
        root = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema}
        found = None
        pending = [("", schema)]
        tried = 0
        while pending and tried < 256:
            pointer, part = pending.pop(0)
            tried += 1
            alone = part if pointer == "" or not isinstance(part, Mapping) else {**root, **part}
            try:
                self._compile("json_schema", self._schema_grammar(alone))
            except RequestError as error:
                found = pointer, str(error)
                pending = list(_children(part, pointer))
        return found


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
            raise RequestError(f"the constraint cannot be followed any further: {_tidy(self._matcher.get_error())}")


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


def _escaped(character: str) -> str:
    return character if re.fullmatch(r"[A-Za-z0-9 ]", character) else f"\\x{{{ord(character):X}}}"


def _children(schema: Any, pointer: str) -> Iterator[tuple[str, Schema]]:  # Any: JSON
    """Subschemas of ``schema`` and their pointers."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        here = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            for name, part in value.items():
                yield f"{here}/{name.replace('~', '~0').replace('/', '~1')}", part
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, (list, tuple)):
            yield from ((f"{here}/{i}", part) for i, part in enumerate(value))
        elif key in ("items", "additionalProperties", "additionalItems") and isinstance(value, (Mapping, bool)):
            yield here, value


def _tidy(message: str) -> str:
    """An error of llguidance on one line."""
    return " ".join(message.split())
