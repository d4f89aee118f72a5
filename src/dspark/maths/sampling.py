"""From the target's logits to the distribution it is sampled from, and from a distribution to a token.

Everything that shapes the target's distribution happens here, before verification, so exactness never depends on the
drafter. A drafter mirrors the temperature: its own distribution is ``softmax(draft_logits / temperature)``, greedy
where the request is greedy. That is a matter of acceptance only: any draft distribution is exact as long as the
reported one is the one sampled from. A drafter need not mirror the filters; a draft that they exclude has target
probability 0 and is always rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import RequestError

# A nucleus rarely holds more than a few dozen tokens, and on a CPU the 64 largest of a row of 49,152 cost a fiftieth of
# sorting it. Rows that need more look at the next HEAD_GROWTH times as many, and in the end at all.
NUCLEUS_HEAD = 64
HEAD_GROWTH = 16
BLOCK = 256  # tokens of the vocabulary that the first level of a draw takes together; about its square root
TWO_LEVELS = 16 * BLOCK  # vocabularies from here on are drawn from in two levels


def target_probs(logits: Float[Tensor, "rows vocab"], params: SamplingParams) -> Float[Tensor, "rows vocab"]:
    """Distribution that the target's next token is drawn from, in fp32; each row sums to 1 up to fp32 rounding.

    Order (that of transformers): temperature -> top_k -> top_p -> min_p -> renormalise. Each filter sees what the one
    before it left, so ``top_p`` is a share of the mass that ``top_k`` kept; ``min_p`` is relative to the largest
    probability, hence indifferent to renormalisation. (vLLM applies min_p before top_k and top_p; with min_p and top_p
    both on, its nucleus can therefore be smaller.)

    Ties, between equal fp32 weights exp((logit - max) / temperature). greedy: the lowest id. top_k: every token as
    likely as the k-th stays, so more than k may. top_p: the smallest set with the mass; among equals at its edge the
    lower ids stay. min_p: a token exactly at the limit stays.
    ``logits`` may be of any float type and hold -inf (a grammar's mask); a row without a finite logit gives nan, which
    drawing refuses.
    """
    if params.greedy:
        one_hot = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return one_hot.scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    logits = logits.float()
    weights = (logits - logits.amax(1, keepdim=True)).div_(params.temperature).exp_()  # the largest is exactly 1
    if 0 < params.top_k < weights.shape[1]:
        _cut(weights, weights.topk(params.top_k, dim=1).values[:, -1:])
    if params.top_p < 1.0:
        _keep_nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        _cut(weights, torch.full((len(weights), 1), params.min_p, device=weights.device))
    # A float64 total: over a large vocabulary an fp32 one is off by enough to show in a normalisation check.
    return weights.div_(weights.sum(1, keepdim=True, dtype=torch.float64).float())


class TargetRows:
    """:func:`target_probs` row by row, each computed when it is first asked for.

    A verification reads the rows up to the first rejection, mostly a few of many. Indexed as the tensor would be, by
    one row.
    """

    def __init__(self, logits: Float[Tensor, "rows vocab"], params: SamplingParams) -> None:
        self._logits, self._params = logits, params
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, k: int) -> Float[Tensor, "vocab"]:
        if k not in self._rows:
            self._rows[k] = target_probs(self._logits[k : k + 1], self._params)[0]
        return self._rows[k]


def _cut(weights: Float[Tensor, "rows vocab"], edge: Float[Tensor, "rows 1"]) -> None:
    """Zero, in place, what is below each row's ``edge``."""
    # A mask of floats rather than booleans: on a CPU comparing and multiplying in one type is five times as fast.
    weights.mul_(torch.ge(weights, edge, out=torch.empty_like(weights)))


def _keep_nucleus(weights: Float[Tensor, "rows vocab"], top_p: float, head: int = NUCLEUS_HEAD) -> None:
    """Zero, in place, all that lies outside each row's smallest set of tokens with a share ``top_p`` of its mass.

    ``head`` is the number of tokens looked at first; the result does not depend on it, and ``head=vocab`` is the plain
    version, one full sort.
    """
    wanted = top_p * weights.sum(1, keepdim=True, dtype=torch.float64)
    edge, room = _nucleus_edge(weights, wanted, min(head, weights.shape[1]))
    _cut(weights, edge)
    at_edge = torch.eq(weights, edge, out=torch.empty_like(weights))
    if bool((at_edge.sum(1, keepdim=True) > room).any()):
        weights.masked_fill_((at_edge == 1) & (at_edge.cumsum(1) > room), 0.0)


def _nucleus_edge(
    weights: Float[Tensor, "rows vocab"], wanted: Float[Tensor, "rows 1"], head: int
) -> tuple[Float[Tensor, "rows 1"], Int[Tensor, "rows 1"]]:
    """Smallest weight inside each row's nucleus, and how many tokens of exactly that weight belong to it.

    A token belongs iff the mass of those before it, heaviest first, is still under ``wanted``; the first always does.
    """
    heavy = weights.topk(head, dim=1).values
    mass = heavy.cumsum(1, dtype=torch.float64)
    size = 1 + (mass[:, :-1] < wanted).sum(1, keepdim=True)
    edge = heavy.gather(1, size - 1)
    room = size - (heavy > edge).sum(1, keepdim=True)
    vocab = weights.shape[1]
    short = (mass[:, -1] < wanted[:, 0]).nonzero()[:, 0]  # the nucleus goes on beyond the head
    if head < vocab and len(short):
        edge[short], room[short] = _nucleus_edge(weights[short], wanted[short], min(head * HEAD_GROWTH, vocab))
    return edge, room


def draw(weights: Float[Tensor, "vocab"], generator: torch.Generator) -> int:
    """Draw one token from non-negative ``weights`` (they need not sum to 1), using exactly one uniform of
    ``generator``.

    A token of weight 0 is never drawn. Raises :class:`RequestError` when the weights have no positive finite sum.
    """
    return int(draw_rows(weights[None], generator)[0])


def draw_rows(weights: Float[Tensor, "rows vocab"], generator: torch.Generator) -> Int[Tensor, "rows"]:
    """One token per row, as :func:`draw` row after row: row i uses the i-th of ``rows`` uniforms of ``generator``."""
    return draw_at(weights, uniforms(len(weights), generator))


def draw_at(weights: Float[Tensor, "rows vocab"], u: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """One token per row, the one at the share ``u`` of the row's mass; raises as :func:`draw` does."""
    invert = blockwise_inverse_cdf if weights.shape[1] >= TWO_LEVELS else inverse_cdf
    return invert(weights, u.to(weights.device))


def uniforms(count: int, generator: torch.Generator) -> Float[Tensor, "count"]:
    """The next ``count`` float64 uniforms in [0, 1), multiples of 2**-53, on the generator's device."""
    return torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)


def inverse_cdf(weights: Float[Tensor, "rows vocab"], u: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """First token of each row whose cumulative weight (float64) exceeds the share ``u`` of the total; weight > 0
    always.

    Strictly exceeds, so that u = 0 passes over leading zeros. The condition on the weight itself is not redundant: a
    parallel prefix sum may step by a rounding error at a token of weight 0. Raises :class:`RequestError` when a row
    has no positive finite sum.
    """
    cdf = weights.cumsum(1, dtype=torch.float64)
    total = cdf[:, -1]
    if not bool((total.isfinite() & (total > 0)).all()):
        raise RequestError(
            f"the weights of a token to draw sum to {total.tolist()}; each sum must be positive and finite "
            "(check the logits for nan, and that masks leave a token)"
        )
    positive = weights > 0
    hit = (cdf > (u * total)[:, None]) & positive
    token_ids = hit.to(torch.uint8).argmax(1)  # the first of equal maxima
    missed = (~hit.any(1)).nonzero()[:, 0]  # u x total rounded up to the total: the last token that can be drawn
    if len(missed):
        from_the_end = positive[missed].flip(1).to(torch.uint8).argmax(1)
        token_ids[missed] = weights.shape[1] - 1 - from_the_end
    return token_ids


def blockwise_inverse_cdf(
    weights: Float[Tensor, "rows vocab"], u: Float[Tensor, "rows"], *, block: int = BLOCK
) -> Int[Tensor, "rows"]:
    """:func:`inverse_cdf` in two levels: a block of tokens by its sum, then a token within it.

    A running sum over the vocabulary in float64, a comparison and a search read some twenty bytes a token; this reads
    four. The share of ``u`` that is left for the block is stretched to [0, 1) of the block's own mass, so no rounding
    between the two levels can point outside it. Raises :class:`RequestError` as the plain version does.
    """
    rows, vocab = weights.shape
    whole = vocab // block * block
    sums = weights[:, :whole].view(rows, -1, block).sum(2, dtype=torch.float64)
    if whole < vocab:
        sums = torch.cat((sums, weights[:, whole:].sum(1, keepdim=True, dtype=torch.float64)), 1)
    chosen = inverse_cdf(sums, u)[:, None]
    cdf, mass = sums.cumsum(1), sums.gather(1, chosen)
    left = (u[:, None] * cdf[:, -1:] - (cdf.gather(1, chosen) - mass)) / mass
    places = chosen * block + torch.arange(block, device=weights.device)
    part = weights.gather(1, places.clamp(max=vocab - 1)).masked_fill_(places >= vocab, 0.0)
    return chosen[:, 0] * block + inverse_cdf(part, left[:, 0].clamp(0.0, 1.0 - 2.0**-53))


@dataclass(frozen=True, kw_only=True)
class RequestStreams:
    """A request's three independent random streams, one per role; drawing from them advances them.

    One stream for everything is a known fault: where a decision can see a uniform that another decision has already
    used, the output is biased (vLLM #47386: 60 % became 63.04 %). With one stream per role it cannot happen, and what
    one role consumes never shifts another.
    """

    propose: torch.Generator  # draft tokens
    accept: torch.Generator  # one uniform per verified draft
    residual: torch.Generator  # the token that closes a round: residual or bonus; and the prefill's token

    @classmethod
    def from_seed(cls, seed: int) -> RequestStreams:
        """Streams of a request with ``seed``, any integer (reduced modulo 2**128); equal seeds give equal streams.

        The three are numpy's Mersenne twisters on the children of ``SeedSequence(seed)``, whose hash is built so that
        adjacent seeds and children give unrelated states. We set the whole 19,937-bit state, because ``manual_seed``
        reads only 32 bits of its argument: among 65,000 streams two would be expected to coincide.
        """
        children = np.random.SeedSequence(seed % 2**128).spawn(3)
        propose, accept, residual = (_twister(child) for child in children)
        return cls(propose=propose, accept=accept, residual=residual)


def _twister(sequence: np.random.SeedSequence) -> torch.Generator:
    """A torch CPU generator with the 624 words that numpy gives a Mersenne twister seeded by ``sequence``."""
    key = np.random.MT19937(sequence).state["state"]["key"]
    generator = torch.Generator()
    state = generator.get_state()
    # torch keeps: seed u64, words left i32, seeded i32, next u64, the 624 words as u64, and a cache for normals. A
    # fresh generator is due to mix its words before it hands one out, which is right for new ones too: only they go.
    words = torch.from_numpy(key.astype(np.uint64).view(np.uint8))
    assert state.numel() == 5056, "torch changed the layout of its CPU generator's state"
    state[24 : 24 + words.numel()] = words
    generator.set_state(state)
    return generator
