"""``name=value`` texts of the command line as typed fields of a config: the options that are too many for flags."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.artifacts import tuples
from dspark.core import SamplingParams
from dspark.errors import ConfigError

Fields = dict[str, Any]  # Any: fields of every type


def read_sampling(given: Mapping[str, Any], assignments: Sequence[str]) -> SamplingParams:
    """Sampling parameters from fields already typed and ``name=value`` texts for the others.

    Raises :class:`ConfigError` for what :func:`read_fields` refuses and for values out of range.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    fields = read_fields(given, assignments, defaults)
    # JSON has no pair of an id and a number but in lists, and whole numbers where a bias is one
    if not all(type(token) is int for token in fields.get("banned_token_ids", ())):
        raise ConfigError("banned_token_ids must be a list of token ids, as in --set banned_token_ids=[5,17]")
    bias = fields.get("logit_bias", ())
    if not all(
        isinstance(b, tuple) and [type(b[0]), type(b[-1]) in (int, float), len(b)] == [int, True, 2] for b in bias
    ):
        raise ConfigError("logit_bias must be a list of pairs, as in --set logit_bias=[[5,-2.5],[17,1]]")
    if bias:
        fields["logit_bias"] = tuple((token, float(value)) for token, value in bias)
    return SamplingParams(**fields)


def read_fields(given: Mapping[str, Any], assignments: Sequence[str], defaults: Mapping[str, object]) -> Fields:
    """``given`` and what ``assignments`` say of the fields in ``defaults``; values are JSON, or else plain words.

    Raises :class:`ConfigError` for an unknown field, a value of another type than its default, or a field given twice.
    """
    fields = dict(given)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment} has no value; write --set {assignment}=VALUE")
        if name not in defaults:
            raise ConfigError(f"--set {name}: no such field; there are {', '.join(defaults)}")
        if name in fields:
            raise ConfigError(f"{name} is given twice; leave one out")
        fields[name] = typed(name, text, defaults[name])
    return fields


def typed(name: str, text: str, default: object) -> object:
    """``text`` as a value of the type of ``default``; raises :class:`ConfigError` if it is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if isinstance(default, tuple):
        value = tuples(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(default, str) and not isinstance(value, str):
        value = text
    if type(value) is not type(default):
        raise ConfigError(f"{name} is {text!r}; it must be like its default, {json.dumps(default)}")
    return value
