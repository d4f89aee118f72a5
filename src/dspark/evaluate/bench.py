"""Drafted against undrafted decoding, in one process: the same prompts, interleaved, the order alternating.

Speeds of two processes, or of one after the other, differ by more than what we want to see: other load, clock, cache.
So every prompt is answered both ways back to back, the first way changing from prompt to prompt, after a warm-up that
is not counted. What is computed from the runs lives in :mod:`dspark.evaluate.figures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.artifacts import read_jsonl
from dspark.core import Completion, SamplingParams
from dspark.decode import generate
from dspark.errors import ConfigError, DataError
from dspark.evaluate.figures import Divergence, Pair
from dspark.evaluate.peer import Peer
from dspark.maths.scheduling import Scheduler
from dspark.models.drafter import Drafter, NoDrafter
from dspark.models.target import Target

WARM_UP_TOKENS = 16
NEAR_TIES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.75}  # logits


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt of a benchmark: the first user turn, and the domain whose figures it counts towards."""

    domain: str
    text: str


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What all ways of answering have in common."""

    max_new_tokens: int = 128  # per prompt and way; >= 2, or there is no speed
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; a speed takes 2 or more")


def prompts_of(domains: Mapping[str, Sequence[str]], *, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts of each domain, taken in turn so that a slow minute of the machine touches all domains alike."""
    rows = {name: list(texts[:limit]) for name, texts in domains.items()}
    longest = max((len(texts) for texts in rows.values()), default=0)
    return [BenchPrompt(domain=d, text=t[i]) for i in range(longest) for d, t in rows.items() if i < len(t)]


def read_prompts(paths: Sequence[Path], *, limit: int | None = None) -> list[BenchPrompt]:
    """Read prompt files, at most ``limit`` rows per domain. A row holds ``turns`` (the first is asked) or ``prompt``.

    The domain is the row's ``domain``, or else the file's name. Raises :class:`DataError` naming file and row.
    """
    domains: dict[str, list[str]] = {}
    for path in paths:
        for number, row in enumerate(read_jsonl(path), start=1):
            turns = row.get("turns")
            text = row.get("prompt") if turns is None else turns[0] if isinstance(turns, list) and turns else None
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{path}: row {number} needs `prompt` (text) or `turns` (a list of texts), not empty")
            domains.setdefault(str(row.get("domain", path.stem)), []).append(text)
    if not domains:
        raise DataError(f"{', '.join(map(str, paths))}: no prompts inside")
    return prompts_of(domains, limit=limit)


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[tuple[str, Sequence[int]]],
    config: BenchConfig,
    *,
    scheduler: Scheduler,
    peer: Peer | None = None,
) -> Iterator[Pair]:
    """Answer every (domain, prompt ids) with ``drafter``, without drafts and by ``peer``; yield a pair per prompt.

    The first pair comes after a warm-up of every way on the first prompt. For greedy output the pair says where the two
    answers part, if they do. The undrafted way is the same loop with a drafter that proposes nothing.
    """
    undrafted = NoDrafter()
    settings: dict[str, Any] = {"sampling": config.sampling, "stop_token_ids": config.stop_token_ids}

    def answer(by: Drafter, ids: Sequence[int], max_new_tokens: int = config.max_new_tokens) -> Completion:
        return generate(target, by, ids, max_new_tokens=max_new_tokens, scheduler=scheduler, **settings)

    if prompts:
        few = min(WARM_UP_TOKENS, config.max_new_tokens)
        answer(drafter, prompts[0][1], few)
        answer(undrafted, prompts[0][1], few)
        if peer:
            peer.run(prompts[0][1], max_new_tokens=few, **settings)
    for index, (domain, ids) in enumerate(prompts):
        if index % 2 == 0:
            drafted, plain = answer(drafter, ids), answer(undrafted, ids)
        else:
            plain, drafted = answer(undrafted, ids), answer(drafter, ids)
        theirs = peer.run(ids, max_new_tokens=config.max_new_tokens, **settings) if peer else None
        yield Pair(
            domain=domain,
            drafted=drafted,
            plain=plain,
            divergence=near_tie_gap(target, ids, drafted.token_ids, plain.token_ids)
            if config.sampling.greedy
            else None,
            peer_tokens_per_second=theirs.tokens_per_second if theirs else None,
        )


def near_tie_gap(
    target: Target, prompt_ids: Sequence[int], tokens_a: Sequence[int], tokens_b: Sequence[int]
) -> Divergence | None:
    """Where two outputs for one prompt first differ, and how far the tokens taken are from the target's best logit.

    None when one output continues the other. A pass over eight tokens rounds otherwise than a pass over one, so in bf16
    a greedy choice between logits closer than that rounding may fall either way; a gap well above it is a fault. With
    the best two tokens taken, as a near-tie has it, the gap is the one between their logits.
    """
    position = next((i for i, (a, b) in enumerate(zip(tokens_a, tokens_b, strict=False)) if a != b), None)
    if position is None:
        return None
    ids = torch.tensor([*prompt_ids, *tokens_a[:position]], device=target.info.device)
    memory = target.new_memory(rows=1, max_len=len(ids))
    output = target.forward(ids, memory, last_only=True)
    assert output.logits is not None  # asked for
    logits = output.logits[-1].float()
    lesser = min(float(logits[tokens_a[position]]), float(logits[tokens_b[position]]))
    return Divergence(position=position, gap=float(logits.max()) - lesser)


def near_tie_tolerance(dtype: torch.dtype) -> float:
    """Gap in logits up to which rounding in ``dtype`` may decide a greedy choice.

    For bf16 it was measured: between passes over 1, 8 and all tokens, the gap between SmolLM2's best two logits moved
    by up to 0.5 in 192 positions.
    """
    return NEAR_TIES[dtype]
