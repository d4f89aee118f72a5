"""The sequential stage: what turns parallel base logits into an autoregressive draft, and what predicts its survival.

Paper equations (4), (5), (7); seed sections 5.2 to 7.1. Both heads are tiny: a Markov head of rank r adds
``W2 @ W1[previous token]`` to the base logits of a position, the confidence head is one linear unit.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class VanillaMarkovHead(nn.Module):
    """First-order transition bias B(x_{k-1}, .) = W2 W1[x_{k-1}], of rank r (paper equation 5).

    ``markov_w1`` [vocab, rank] is read by token id of the target's vocabulary; ``markov_w2`` [draft_vocab, rank]
    speaks the drafter's own. Names are DeepSpec's.
    """

    def __init__(self, vocab_size: int, output_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, output_size, bias=False)

    def embed(self, prev_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape rank"]:
        """W1[previous token]; the confidence head reads the same vector."""
        return F.embedding(prev_ids, self.markov_w1.weight)

    def forward(self, prev_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape draft_vocab"]:
        """Bias over the whole draft vocabulary: the plain form of the sequential stage."""
        return F.linear(self.embed(prev_ids), self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b) (paper equation 7); input order as DeepSpec stores it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows"]:
        return F.linear(inputs, self.proj.weight.to(inputs.dtype), self.proj.bias.to(inputs.dtype)).squeeze(-1)


def sequential_logits(
    base_logits: Float[Tensor, "rows block draft_vocab"],
    prev_ids: Int[Tensor, "rows block"],
    head: VanillaMarkovHead | None,
) -> Float[Tensor, "rows block draft_vocab"]:
    """Teacher-forced draft logits U_k + B(x_{k-1}, .) (paper equation 4); without a head they are the base logits."""
    return base_logits if head is None else base_logits + head(prev_ids)
