"""What a run reads: the target, the samples, and where what the target says about them comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from dspark.chat import ChatFormat
from dspark.data.answer_file import template_options_of
from dspark.data.cache_features import open_features, target_identity
from dspark.data.features import FeatureSource, Sample
from dspark.data.sample_cache import load_samples
from dspark.data.samples import split_held_out, token_counts
from dspark.errors import ConfigError
from dspark.models.loading import load_target
from dspark.models.target import Target
from dspark.models.weights import resolve_model
from dspark.train.config import TrainConfig
from dspark.train.frozen_target import load_frozen_target
from dspark.train.methods import Method
from dspark.train.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Corpus:
    """What several runs over the same answers and target can share."""

    place: Path  # the target's folder
    target: Target
    chat: ChatFormat
    training: list[Sample]
    held_out: list[Sample]
    counts: Int[Tensor, "vocab"]  # supervised tokens of the training samples


def load_corpus(config: TrainConfig, ranks: Ranks = ALONE, *, target: Target | None = None) -> Corpus:
    """The target, unless it is given, and the samples, held-out prompts set apart."""
    place = resolve_model(config.model)
    if target is None and config.whole_target:
        target = load_target(config.model, dtype=config.dtype)
    elif target is None:
        target = load_frozen_target(config.model, place, dtype=config.dtype)
    chat = ChatFormat.from_folder(place, template_options=template_options_of(config.answers))
    samples = ranks.in_turn(lambda: load_samples(config.answers, config.prompts, chat, max_tokens=config.max_tokens))
    training, held_out = split_held_out(samples, config.held_out)
    if not training or not held_out:
        raise ConfigError(
            f"held_out is {config.held_out}: of {len(samples)} answers {len(training)} are left to train on and "
            f"{len(held_out)} to hold out; give answers to more prompts"
        )
    highest = max(int(sample.token_ids.max()) for sample in samples)
    if highest >= target.info.vocab_size:
        raise ConfigError(f"the answers hold token id {highest}; {config.model} has {target.info.vocab_size} tokens")
    return Corpus(place, target, chat, training, held_out, token_counts(training, target.info.vocab_size))


def feature_source(config: TrainConfig, corpus: Corpus, method: Method) -> FeatureSource:
    """The target beside the trainer, or what it said before, from a cache; one that does not fit is refused here."""
    top, memory_bytes = config.target_top, int(config.feature_gigabytes * 2**30)
    taps, draft_ids = method.taps, method.draft_token_ids()
    if not config.cache:
        return FeatureSource(corpus.target, taps, draft_ids, top=top, memory_bytes=memory_bytes)
    return open_features(
        config.cache,
        corpus.target,
        target_identity(corpus.place, config.model, corpus.chat.tokenizer),
        [*corpus.training, *corpus.held_out],
        taps=taps,
        draft_ids=draft_ids,
        top=top,
        memory_bytes=memory_bytes,
    )


def reserved_token(tokenizer: Any, counts: Tensor) -> int:
    """A special token that no answer contains, to serve as the mask; never the padding or an end token."""
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    for token, content in sorted(tokenizer.added_tokens_decoder.items()):
        if (
            token not in taken
            and token < counts.shape[0]
            and counts[token] == 0
            and not content.content.startswith("<|im_")
        ):
            return int(token)
    raise ConfigError("mask_token_id is -1 and no reserved token is unused; name a token id that no answer contains")
