"""Rebuild a byte-level BPE tokenizer from what a GGUF file says about it.

GGUF stores tokens, merges and token types, but of the rule that cuts text before BPE only a name. A wrong rule gives
tokens that are valid and slightly off everywhere, so a name that is not in :data:`PRE_TOKENIZERS` is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dspark.errors import ModelError

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types of GGUF that matter here


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How text is cut into words before BPE."""

    pattern: str | None = None  # regex of a word; None takes GPT-2's
    digits: bool = False  # every digit is a word of its own, cut before everything else
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say


QWEN2 = PreTokenizer(pattern=rf"{WORDS}|\p{{N}}|{REST}", compose=True)
PRE_TOKENIZERS = {  # by their name in ``tokenizer.ggml.pre``
    "gpt-2": PreTokenizer(),  # not "default", which llama.cpp writes when it does not know the rule
    "smollm": PreTokenizer(digits=True),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": PreTokenizer(pattern=rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole_words=True, add_bos=True),
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer's metadata; the id of a token is its place in ``tokens``."""

    kind: str  # "gpt2" is byte-level BPE
    pre: str
    tokens: list[str]  # normal ones in the byte alphabet of GPT-2, special and added ones as plain text
    merges: list[str]  # "left right", most important first
    types: list[int] | None  # one per token; None: all are normal
    special_ids: dict[str, int]  # bos, eos, unk, pad, as far as there are
    add_bos: bool | None  # None: the file does not say
    space_prefix: bool
    chat_template: str | None


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, with control tokens special and user-defined ones added. :class:`ModelError` if we cannot."""
    if vocabulary.kind != "gpt2":
        raise ModelError(
            f"the GGUF tokenizer model is {vocabulary.kind!r}; only byte-level BPE ('gpt2') can be imported"
        )
    rule = PRE_TOKENIZERS.get(vocabulary.pre)
    if rule is None:
        raise ModelError(f"the GGUF pre-tokenizer is {vocabulary.pre!r}; known are {', '.join(PRE_TOKENIZERS)}")
    tokenizer = Tokenizer(_bpe(vocabulary, rule))
    if rule.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule, vocabulary.space_prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(vocabulary))
    add_bos = rule.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
    if add_bos and "bos" in vocabulary.special_ids:
        bos_id = vocabulary.special_ids["bos"]
        bos = vocabulary.tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer


def tokenizer_config(vocabulary: Vocabulary, *, max_length: int) -> dict[str, Any]:
    """Content of tokenizer_config.json; ``max_length`` is the model's context in tokens."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,  # or decoding would eat spaces before punctuation
        **{f"{name}_token": vocabulary.tokens[token_id] for name, token_id in vocabulary.special_ids.items()},
    }
    if vocabulary.chat_template:
        config["chat_template"] = vocabulary.chat_template
    return config


def _bpe(vocabulary: Vocabulary, rule: PreTokenizer) -> models.BPE:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise ModelError("the GGUF vocabulary holds a token twice; convert the model again")
    merges = []
    for merge in vocabulary.merges:
        # the byte alphabet has no space, so the one space of a merge parts left from right
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"the GGUF merge {merge!r} does not join two tokens to a third; convert the model again")
        merges.append((left, right))
    return models.BPE(vocab=ids, merges=merges, ignore_merges=rule.whole_words)


def _pre_tokenizer(rule: PreTokenizer, space_prefix: bool) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=space_prefix, use_regex=rule.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _added_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    types = vocabulary.types or [NORMAL] * len(vocabulary.tokens)
    if len(types) != len(vocabulary.tokens):
        raise ModelError(f"the GGUF file has {len(vocabulary.tokens)} tokens but {len(types)} token types")
    return [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(vocabulary.tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
