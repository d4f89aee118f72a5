"""Prompts and answers on disk become training samples; vocabulary and held-out set are chosen from them.

Prompts: JSONL rows {id, turns, domain?, source?}. Answers: rows {id, sample, answer_ids, finish_reason, ...} as
`dspark answers` writes them; ``answer_ids`` end with the stop token unless the answer was cut by its length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from dspark.artifacts import read_jsonl
from dspark.chat import ChatFormat
from dspark.data.features import Sample
from dspark.errors import DataError


def read_prompts(paths: Iterable[str | Path]) -> dict[str, dict]:
    """Prompt rows by id. Raises :class:`DataError` on a row without id or turns, and on an id given twice with other
    turns."""
    prompts: dict[str, dict] = {}
    for path in paths:
        for number, row in enumerate(read_jsonl(Path(path)), 1):
            turns = row.get("turns")
            texts = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
            if not isinstance(row.get("id"), str) or not texts:
                raise DataError(f"{path}:{number}: a prompt needs a string `id` and a non-empty list of texts, `turns`")
            if row["id"] in prompts and prompts[row["id"]]["turns"] != turns:
                raise DataError(f"{path}:{number}: id {row['id']!r} was given before with other turns")
            prompts[row["id"]] = row
    return prompts


def read_samples(
    answers: Iterable[str | Path], prompts: dict[str, dict], chat: ChatFormat, *, max_tokens: int
) -> list[Sample]:
    """All answers as samples, prompt and answer cut together at ``max_tokens`` on the right; an answer cut away is
    left out.

    Raises :class:`DataError` for a row that is no answer, or names an unknown prompt: prompts and answers then do not
    belong together.
    """
    samples, seen = [], set()
    for path in answers:
        for number, row in enumerate(read_jsonl(Path(path)), 1):
            prompt = prompts.get(row["id"]) if isinstance(row.get("id"), str) else None
            if prompt is None:
                raise DataError(f"{path}:{number}: answer to {row.get('id')!r}, which no prompts file holds")
            answer_ids = row.get("answer_ids")
            if not isinstance(answer_ids, list) or not all(type(token) is int for token in answer_ids):
                raise DataError(f"{path}:{number}: an answer needs a list of token ids, `answer_ids`")
            messages = [{"role": "user", "content": prompt["turns"][0]}]
            encoded = chat.training_example(messages, answer_ids)
            ids = torch.tensor(encoded.token_ids[:max_tokens], dtype=torch.long)
            mask = torch.tensor(encoded.loss_mask[:max_tokens], dtype=torch.bool)
            if int(mask.sum()) >= 2:
                name = f"{row['id']}#{row.get('sample', 0)}"
                if name in seen:
                    raise DataError(f"{path}:{number}: answer {name} was given before; number the samples apart")
                seen.add(name)
                samples.append(Sample(name, prompt.get("domain", "all"), ids, mask))
    if not samples:
        raise DataError("no usable answers; give --answers files that `dspark answers` wrote")
    return samples


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
