"""Log-probabilities of tokens as an API reports them.

They are the model's own: the natural logarithm of the softmax of the target's logits, before bias, penalties, bans,
grammar, temperature and filters. So does vLLM by default (``logprobs_mode`` "raw_logprobs"), and so does OpenAI's API,
where neither the temperature nor ``logit_bias`` shows in them; they say what the model thinks, whatever a request then
makes of it. A consequence: the chosen token of a sampled or constrained request may be unlikely, and even outside the
alternatives, which are the likeliest tokens of the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

ROWS_AT_ONCE = 64  # rows of the vocabulary that are held in fp32 together


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of one position: the log-probability of its token, and the likeliest tokens in its place.

    ``top`` holds (token id, log-probability), likeliest first and the lower id first among equals; as many as were
    asked for, or as the vocabulary has.
    """

    token_id: int
    logprob: float  # natural logarithm, <= 0; -inf where the model gives the token no probability
    top: tuple[tuple[int, float], ...] = ()


def row_logprobs(logits: Float[Tensor, "rows vocab"], token_ids: Sequence[int], *, top: int = 0) -> list[RowLogprobs]:
    """Log-probabilities at each row: of ``token_ids[i]`` (what follows row i), and of the ``top`` likeliest tokens.

    ``logits`` are the target's own rows, bf16 or fp32, those that ask and no others; sums are float64. For a block
    give the rows of the committed tokens (the first accepted + 1), for a prompt the rows before each of its tokens.
    """
    assert len(logits) == len(token_ids), "one token per row"
    found: list[RowLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _few_rows(logits[part].float(), list(token_ids[part]), min(top, logits.shape[1]))
    return found


def _few_rows(logits: Tensor, token_ids: list[int], top: int) -> list[RowLogprobs]:
    normaliser = log_normalisers(logits)
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].double() - normaliser
    ranked = _ranked(logits, normaliser, top) if top else [()] * len(token_ids)
    return [RowLogprobs(*row) for row in zip(token_ids, own.tolist(), ranked, strict=True)]


def log_normalisers(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
    """Logarithm of each row's sum of exponentials, in float64."""
    largest = logits.amax(1, keepdim=True)
    return (logits - largest).exp_().sum(1, dtype=torch.float64).log_() + largest[:, 0].double()


def _ranked(logits: Tensor, normaliser: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The ``top`` likeliest of each row. The library's top-k leaves the order of equals open, so it only gives the
    limit: all tokens that reach it are ranked by falling logit and rising id."""
    limit = logits.topk(top, dim=1).values[:, -1:]
    rows, ids = (logits >= limit).nonzero(as_tuple=True)  # ids rise within a row
    values = logits[rows, ids]
    order = values.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    counts = torch.bincount(rows, minlength=len(logits)).tolist()
    logprobs = (values.double() - normaliser[rows])[order].split(counts)
    return [
        tuple(zip(some.tolist()[:top], theirs.tolist()[:top], strict=True))
        for some, theirs in zip(ids[order].split(counts), logprobs, strict=True)
    ]
