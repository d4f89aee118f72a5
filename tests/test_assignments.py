"""Fields of sampling parameters from the command line's ``name=value`` texts."""

from __future__ import annotations

import pytest

from dspark.assignments import read_sampling
from dspark.core import SamplingParams
from dspark.errors import ConfigError


def test_fields_of_every_type() -> None:
    texts = ["repetition_penalty=1.2", "presence_penalty=1", "banned_token_ids=[3,4]", "min_tokens=5", "rule=block"]
    assert read_sampling({"temperature": 0.5}, [*texts, "logit_bias=[[5,-2.5],[6,1]]"]) == SamplingParams(
        temperature=0.5,
        repetition_penalty=1.2,
        presence_penalty=1.0,
        banned_token_ids=(3, 4),
        min_tokens=5,
        rule="block",
        logit_bias=((5, -2.5), (6, 1.0)),
    )
    assert read_sampling({}, []) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_tokens", "has no value; write --set min_tokens=VALUE"),
        ("penalty=1", "no such field; there are banned_token_ids, min_tokens"),
        ("temperature=1", "temperature is given twice"),
        ("min_tokens=2.5", "min_tokens is '2.5'; it must be like its default, 0"),
        ("banned_token_ids=7", "banned_token_ids is '7'; it must be like its default"),
        ("banned_token_ids=[1.5]", "list of token ids"),
        ("logit_bias=[[1]]", "list of pairs"),
        ("logit_bias=[1,2]", "list of pairs"),
        ('logit_bias=[["a",2]]', "list of pairs"),
        ("rule=both", "rule is 'both'"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sampling({"temperature": 0.5}, [text])
