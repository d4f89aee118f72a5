"""Constraints that a body asks for, compiled once for all its answers."""

from __future__ import annotations

import json
import threading

from dspark.errors import ConfigError, RequestError
from dspark.serve.api.config import ServedModel
from dspark.serve.api.errors import bad_request, unsupported
from dspark.serve.api.schemas import ChatRequest, CompletionRequest, JsonSchemaFormat, StructuredOutputs
from dspark.serve.constraint import Constraint
from dspark.serve.grammars import Grammars

NAMES = ("json", "json_object", "regex", "choice", "grammar")


class Compiler:
    """The model's :class:`dspark.serve.grammars.Grammars`, made when the first constraint is asked for."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    def constraint(self, body: CompletionRequest | ChatRequest) -> Constraint | None:
        """What the body's output must match; None if it may be anything. Slow: not for the event loop.

        Raises :class:`ApiError` 400 for a constraint that cannot be compiled, or where there is no compiler.
        """
        if isinstance(body, ChatRequest) and body.response_format is not None and body.response_format.type != "text":
            place = "response_format"
        elif body.structured_outputs is not None:
            place = "structured_outputs"
        else:
            return None
        if body.ignore_eos:
            raise bad_request(f"ignore_eos and {place} are both given; the end of the text is {place}'s", "ignore_eos")
        try:
            return self._compile(self._ready(place), body)
        except RequestError as error:
            raise bad_request(str(error), place) from None

    def _ready(self, place: str) -> Grammars:
        with self._lock:
            if self._grammars is None:
                try:
                    self._grammars = Grammars(self._model.chat, self._model.vocab_size)
                except ConfigError as error:
                    raise unsupported(place, str(error)) from None
            return self._grammars

    def _compile(self, grammars: Grammars, body: CompletionRequest | ChatRequest) -> Constraint:
        if isinstance(body, ChatRequest) and body.response_format is not None and body.response_format.type != "text":
            if isinstance(body.response_format, JsonSchemaFormat):
                return grammars.json_schema(body.response_format.json_schema.schema_)
            return grammars.json_object()
        assert body.structured_outputs is not None
        return _structured(grammars, body.structured_outputs)


def _structured(grammars: Grammars, wanted: StructuredOutputs) -> Constraint:
    """As vLLM names them; exactly one of :data:`NAMES`."""
    given = [name for name in NAMES if getattr(wanted, "json_" if name == "json" else name) not in (None, False)]
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs has {' and '.join(given) or 'nothing'}; give one of {', '.join(NAMES)}",
            "structured_outputs",
        )
    if wanted.json_ is not None:
        return grammars.json_schema(_schema(wanted.json_))
    if wanted.json_object:
        return grammars.json_object()
    if wanted.regex is not None:
        return grammars.regex(wanted.regex)
    if wanted.choice is not None:
        return grammars.choice(wanted.choice)
    assert wanted.grammar is not None
    return grammars.lark(wanted.grammar)


def _schema(given: dict[str, object] | str) -> dict[str, object] | bool:
    """A schema, or its text."""
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the schema is no JSON: {str(error)[:100]}", "structured_outputs.json") from None
    if not isinstance(schema, dict | bool):
        raise bad_request("the schema must be an object, true or false", "structured_outputs.json")
    return schema
