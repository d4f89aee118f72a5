"""Compiling constraints through llguidance, within limits of size and time: JSON schemas, regular expressions, choices
and grammars become a :class:`dspark.serve.constraint.Constraint`, or are refused with the place that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.errors import ConfigError, RequestError
from dspark.serve.constraint import Constraint, one_line

if TYPE_CHECKING:
    from llguidance import LLParserLimits

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
            raise RequestError(one_line(messages[0]))
        matcher = self._new(self._tokenizer, grammar, log_level=0, limits=self._parser_limits)
        if matcher.is_error():
            raise RequestError(one_line(matcher.get_error()))
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
            raise RequestError(one_line(str(error))) from None

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
