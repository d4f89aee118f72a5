"""Prompts and answers on disk become training samples; vocabulary and held-out set are chosen from them.

Answers: JSONL rows {id, sample, turn?, answer, answer_ids, finish_reason, ...} as `dspark answers` writes them;
``answer_ids`` end with the stop token unless the answer was cut by its length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.data.features import Sample
from dspark.data.prompts import prompt_messages
from dspark.data.prompts import read_prompts as read_prompts  # samples and their prompts are read together
from dspark.errors import DataError


def read_samples(
    answers: Iterable[str | Path], prompts: Mapping[str, Mapping[str, Any]], chat: ChatFormat, *, max_tokens: int
) -> list[Sample]:
    """All answers as samples, prompt and answer cut together at ``max_tokens`` on the right; an answer cut away is
    left out.

    An answer to a later turn is a sample of its own, behind the conversation as the template renders it at that point.
    Raises :class:`DataError` for a row that is no answer, or names an unknown prompt: prompts and answers then do not
    belong together.
    """
    rows = _answer_rows(answers, prompts)
    samples = []
    for (key, number, turn), (place, row) in rows.items():
        before = []
        for earlier in range(turn):
            _, past = rows.get((key, number, earlier), ("", {}))
            if not isinstance(past.get("answer"), str):
                raise DataError(f"{place}: answer to turn {turn} of {key!r} without the text of turn {earlier}")
            before.append(past["answer"])
        encoded = chat.training_example(prompt_messages(prompts[key], before), row["answer_ids"])
        ids = torch.tensor(encoded.token_ids[:max_tokens], dtype=torch.long)
        mask = torch.tensor(encoded.loss_mask[:max_tokens], dtype=torch.bool)
        if int(mask.sum()) >= 2:
            name = f"{key}#{number}.{turn}" if turn else f"{key}#{number}"
            samples.append(Sample(name, prompts[key].get("domain", "all"), ids, mask))
    if not samples:
        raise DataError("no usable answers; give --answers files that `dspark answers` wrote")
    return samples


def _answer_rows(
    answers: Iterable[str | Path], prompts: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, int, int], tuple[str, dict[str, Any]]]:
    """Checked rows with their places in the files, by prompt id, sample and turn."""
    rows: dict[tuple[str, int, int], tuple[str, dict[str, Any]]] = {}
    for path in answers:
        for number, row in enumerate(read_jsonl(Path(path)), 1):
            place, key = f"{path}:{number}", row.get("id")
            prompt = prompts.get(key) if isinstance(key, str) else None
            if prompt is None or not isinstance(key, str):
                raise DataError(f"{place}: answer to {key!r}, which no prompts file holds")
            answer_ids = row.get("answer_ids")
            if not isinstance(answer_ids, list) or not all(type(token) is int for token in answer_ids):
                raise DataError(f"{place}: an answer needs a list of token ids, `answer_ids`")
            sample, turn = row.get("sample", 0), row.get("turn", 0)
            if type(sample) is not int or type(turn) is not int or not 0 <= turn < len(prompt["turns"]):
                raise DataError(f"{place}: `sample` is {sample!r} and `turn` {turn!r}; {key!r} has no such answer")
            if (key, sample, turn) in rows:
                raise DataError(f"{place}: answer {key}#{sample} was given before; number the samples apart")
            rows[key, sample, turn] = (place, row)
    return rows


def prompt_id(sample: Sample) -> str:
    """The prompt a sample answers; two samples of one prompt share it."""
    return sample.id.rsplit("#", 1)[0]


def split_held_out(samples: Sequence[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held out): ``count`` samples of distinct prompts, evenly over the domains, chosen by a hash of the
    prompt id.

    No prompt is on both sides, whatever its number of samples, and the choice does not depend on the order of the
    files.
    """
    by_domain: dict[str, dict[str, Sample]] = {}
    for sample in samples:
        by_domain.setdefault(sample.domain, {}).setdefault(prompt_id(sample), sample)
    held: list[Sample] = []
    domains = sorted(by_domain)
    for i, domain in enumerate(domains):
        share = count // len(domains) + (i < count % len(domains))
        ordered = sorted(by_domain[domain], key=lambda key: hashlib.sha256(key.encode()).digest())
        held += [by_domain[domain][key] for key in ordered[: min(share, len(ordered) // 2)]]
    taken = {prompt_id(sample) for sample in held}
    return [s for s in samples if prompt_id(s) not in taken], held


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Int[Tensor, "vocab"]:
    """How often each token is supervised."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for sample in samples:
        counts += torch.bincount(sample.token_ids[sample.loss_mask], minlength=vocab_size)
    return counts


def choose_draft_vocab(
    counts: Int[Tensor, "vocab"], size: int, always: Iterable[int] = ()
) -> Int[Tensor, "draft_vocab"]:
    """Target ids of the ``size`` most frequent tokens, ascending; ``always`` (stop tokens) are in it. Ties favour
    small ids."""
    keys = counts.clone()
    keys[torch.tensor(sorted(set(always)), dtype=torch.long)] = counts.max() + 1
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:size].sort().values


def bigram_pairs(samples: Sequence[Sample]) -> tuple[Int[Tensor, "pairs"], Int[Tensor, "pairs"]]:
    """(previous, next) token ids over all supervised positions."""
    previous, following = [], []
    for sample in samples:
        where = sample.loss_mask.nonzero().squeeze(1)
        where = where[where > 0]
        previous.append(sample.token_ids[where - 1])
        following.append(sample.token_ids[where])
    return torch.cat(previous), torch.cat(following)
