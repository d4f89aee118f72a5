"""The nouns of the method, and the legend of the shape words used in every signature.

Shape words (jaxtyping dimension names)
    tokens     flat tokens of a ragged batch, all requests one after the other
    requests   requests that share a forward pass
    block      draft positions of one round, 0-based (the paper counts from 1); at most ``block_size`` (gamma)
    rows       any number of independent distributions or states
    context    committed tokens whose features the drafter holds
    vocab      the target's vocabulary; ``draft_vocab`` where the drafter has a smaller one
    support    tokens a draft distribution can put mass on (the whole vocabulary, or the candidates)
    hidden     width d of the target's residual stream; ``features`` is (number of taps) x hidden

Names
    target      the large frozen model that decides; ``drafter`` the small one that proposes
    anchor      last committed token, x_0 of a block; the same token is the round before's bonus token
    confidence  c_k: chance that draft k survives given that its prefix did; ``survival`` a_k: their cumulative product
    verify_len  number of drafts the scheduler lets through
    acceptance_length  tokens committed per round, bonus included
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.errors import ConfigError

MAX_BIAS = 1e30  # of a logit; keeps every sum of a logit and its bias finite in fp32
RULES = ("token", "block")  # of verification: dspark.maths.rejection and dspark.maths.block_verification


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn from the target's logits.

    The fields down to ``presence_penalty`` shape the logits of a position by the text before it, in this order
    (:mod:`dspark.maths.shaping`); they apply to greedy decoding too. Then come the temperature, 0 being greedy, and the
    filters, which do nothing to a greedy request. ``rule`` decides which drafts stand; either leaves the output's
    distribution as it is, and a greedy output token for token.
    """

    banned_token_ids: tuple[int, ...] = ()  # never drawn
    min_tokens: int = 0  # no stop token before the output has so many tokens; >= 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, finite number added to its logit); an id at most once
    repetition_penalty: float = 1.0  # > 0; divides positive logits of tokens in prompt or output, multiplies others
    frequency_penalty: float = 0.0  # finite; subtracted once per occurrence in the output
    presence_penalty: float = 0.0  # finite; subtracted if the token occurs in the output
    temperature: float = 0.0  # >= 0; 0 takes the argmax
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set with this mass; (0, 1]
    min_p: float = 0.0  # drop tokens below min_p times the largest probability; [0, 1)
    rule: str = "token"  # one of RULES: each draft by itself, or the block jointly, which accepts at least as many
    seed: int = 0  # of the request's three streams

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive finite number")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0.0 <= self.min_p < 1.0:
            raise ConfigError(f"min_p is {self.min_p}; it must be in [0, 1)")
        if self.rule not in RULES:
            raise ConfigError(f"rule is {self.rule!r}; it must be one of {', '.join(RULES)}")
        self._check_shaping()

    def _check_shaping(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; it must be positive, 1 for none")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a finite number, 0 for none")
        if self.min_tokens < 0:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be 0 (off) or more")
        if self.banned_token_ids and min(self.banned_token_ids) < 0:
            raise ConfigError(f"banned_token_ids holds {min(self.banned_token_ids)}; token ids are 0 or more")
        ids = [token for token, _ in self.logit_bias]
        if ids and min(ids) < 0:
            raise ConfigError(f"logit_bias names token {min(ids)}; token ids are 0 or more")
        if len(set(ids)) < len(ids):
            raise ConfigError("logit_bias names a token twice; give each token one bias")
        for token, bias in self.logit_bias:
            if not abs(bias) <= MAX_BIAS:
                raise ConfigError(
                    f"logit_bias of token {token} is {bias}; it must lie in -{MAX_BIAS:g}..{MAX_BIAS:g} "
                    "(to exclude a token for good, name it in banned_token_ids)"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def shapes_logits(self) -> bool:
        """Whether any field changes the logits before temperature and filters."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.banned_token_ids or self.logit_bias or self.min_tokens)


@dataclass(frozen=True)
class DraftDistribution:
    """The exact fp32 distribution that each draft token was drawn from, dense or on a support of candidates.

    ``probs`` [block, support] sums to 1 along the support. ``token_ids`` [block, support] names the support's tokens
    (each at most once in a row); None means that the support is the target's vocabulary in order.
    """

    probs: Float[Tensor, "block support"]
    token_ids: Int[Tensor, "block support"] | None = None

    def of(self, draft_tokens: Int[Tensor, "block"]) -> Float[Tensor, "block"]:
        """Probability of each drawn token; 0 for a token outside its row's support."""
        if self.token_ids is None:
            return self.probs.gather(1, draft_tokens[:, None]).squeeze(1)
        return (self.probs * (self.token_ids == draft_tokens[:, None])).sum(1)

    def dense(self, k: int, vocab_size: int) -> Float[Tensor, "vocab"]:
        """Row ``k`` over the whole vocabulary."""
        if self.token_ids is None:
            return self.probs[k]
        row = torch.zeros(vocab_size, dtype=self.probs.dtype, device=self.probs.device)
        return row.scatter_(0, self.token_ids[k], self.probs[k])


@dataclass(frozen=True)
class Proposal:
    """What a drafter offers for one round; an empty block means "decode plainly".

    ``distribution`` None states that every token was chosen with certainty given its prefix (greedy, n-gram lookup).
    ``confidence`` [block] is c_k; it may depend on x_0 and x_<k, never on x_k, or scheduling would bias the output.
    """

    draft_tokens: Int[Tensor, "block"]
    distribution: DraftDistribution | None = None
    confidence: Float[Tensor, "block"] | None = None
    sequential_seconds: float = 0.0  # part of the proposal's time spent left to right
    looked_up: bool = False  # from the request's own text; then ``confidence`` is a chance that no calibration changes

    @property
    def block(self) -> int:
        return self.draft_tokens.shape[0]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One draft-verify-commit round of one request, as statistics, streaming and calibration need it."""

    draft_tokens: tuple[int, ...]  # everything the drafter proposed
    confidence: tuple[float, ...]  # c_k of each, empty if the drafter has none
    verify_len: int  # drafts that the target checked
    accepted: int  # drafts committed (cut at a stop token or a length limit)
    committed: tuple[int, ...]  # accepted drafts, then the target's own token if one was kept
    draft_seconds: float
    sequential_seconds: float  # the part of draft_seconds spent left to right
    verify_seconds: float
    host_seconds: float  # everything else in the round
    looked_up: bool = False  # the drafts are from the request's own text and say nothing of the drafter


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. ``token_ids`` end with the stop token when ``finish_reason`` is "stop"."""

    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "context"
    rounds: tuple[RoundRecord, ...] = field(repr=False)
    prefill_seconds: float
    decode_seconds: float  # after the first token

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round, bonus included (the prefill's token is not counted); nan without rounds."""
        return sum(len(r.committed) for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token."""
        return (len(self.token_ids) - 1) / self.decode_seconds if self.decode_seconds > 0 else float("nan")
