"""The sequential stage: what turns parallel base logits into an autoregressive draft, and what predicts its survival.

Paper equations (4), (5), (7); DeepSpec ``deepspec/modeling/dspark/markov_head.py``. Three heads of rank r share one
form: the bias of position k is ``W2 @ latent_k``, and they differ in the latent. With e = W1[previous token] and h the
backbone's state of the position:

    vanilla   latent = e
    gated     latent = sigmoid(Wg [h ; e] + b) * e
    rnn       latent = tanh(o), where [g ; c ; o] = Wj [s ; e ; h] + b and the state moves on,
              s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), from s = 0 before the first position

``latents`` is the training form (teacher forced, a whole block at once), ``step`` the decoding form; a test ties them.
Whatever the head, the confidence head reads h and e, never the latent: c_k must depend on nothing that x_k decides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

State = Float[Tensor, "blocks rank"] | None  # what a head remembers of a block's drafts; None: nothing, or nothing yet


class SequentialHead(nn.Module):
    """What the heads have in common: W1 is read by ids of the target's vocabulary, W2 speaks the drafter's own.

    ``markov_w1`` is [vocab, rank], ``markov_w2`` [draft_vocab, rank]. Tensor names are DeepSpec's in all subclasses.
    """

    def __init__(self, vocab_size: int, output_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, output_size, bias=False)

    def embed(self, prev_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape rank"]:
        """e = W1[previous token]; the confidence head reads the same vector."""
        return F.embedding(prev_ids, self.markov_w1.weight)

    def bias(self, latents: Float[Tensor, "*shape rank"]) -> Float[Tensor, "*shape draft_vocab"]:
        """W2 @ latent over the whole draft vocabulary."""
        return F.linear(latents, self.markov_w2.weight.to(latents.dtype))

    def latents(
        self, hidden: Float[Tensor, "blocks block hidden"], prev_ids: Int[Tensor, "blocks block"]
    ) -> Float[Tensor, "blocks block rank"]:
        """Latents of whole blocks whose previous tokens are known, in the dtype of ``hidden``; differentiable."""
        raise NotImplementedError

    def step(
        self, prev_ids: Int[Tensor, "blocks"], hidden: Float[Tensor, "blocks hidden"], state: State
    ) -> tuple[Float[Tensor, "blocks rank"], State]:
        """Latents of one position of many blocks, and the state for the next one; ``state`` is None at the first.

        Heads without memory return None again.
        """
        raise NotImplementedError


class VanillaMarkovHead(SequentialHead):
    """First-order transition bias B(x_{k-1}, .) = W2 W1[x_{k-1}] (paper equation 5)."""

    def latents(
        self, hidden: Float[Tensor, "blocks block hidden"], prev_ids: Int[Tensor, "blocks block"]
    ) -> Float[Tensor, "blocks block rank"]:
        return self.embed(prev_ids).to(hidden.dtype)

    def step(
        self, prev_ids: Int[Tensor, "blocks"], hidden: Float[Tensor, "blocks hidden"], state: State
    ) -> tuple[Float[Tensor, "blocks rank"], State]:
        return self.embed(prev_ids).to(hidden.dtype), None


class GatedMarkovHead(SequentialHead):
    """The backbone's state decides, rank by rank, how much of the transition applies."""

    def __init__(self, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, output_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latents(
        self, hidden: Float[Tensor, "blocks block hidden"], prev_ids: Int[Tensor, "blocks block"]
    ) -> Float[Tensor, "blocks block rank"]:
        e = self.embed(prev_ids).to(hidden.dtype)
        return torch.sigmoid(_linear(torch.cat((hidden, e), -1), self.gate_proj)) * e

    def step(
        self, prev_ids: Int[Tensor, "blocks"], hidden: Float[Tensor, "blocks hidden"], state: State
    ) -> tuple[Float[Tensor, "blocks rank"], State]:
        e = self.embed(prev_ids).to(hidden.dtype)
        return torch.sigmoid(_linear(torch.cat((hidden, e), -1), self.gate_proj)) * e, None


class RNNHead(SequentialHead):
    """A gated recurrence over the block: the latent depends on every token drafted so far."""

    def __init__(self, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, output_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def latents(
        self, hidden: Float[Tensor, "blocks block hidden"], prev_ids: Int[Tensor, "blocks block"]
    ) -> Float[Tensor, "blocks block rank"]:
        # All that does not wait for the state is one product over all positions; the loop adds the state's part.
        inputs = torch.cat((self.embed(prev_ids).to(hidden.dtype), hidden), -1)
        rank = self.markov_w1.embedding_dim
        weight = self.joint_proj.weight.to(hidden.dtype)
        fixed = F.linear(inputs, weight[:, rank:], self.joint_proj.bias.to(hidden.dtype))
        state, latents = hidden.new_zeros(hidden.shape[0], rank), []
        for k in range(hidden.shape[1]):
            latent, state = _advance(fixed[:, k] + F.linear(state, weight[:, :rank]), state)
            latents.append(latent)
        return torch.stack(latents, 1)

    def step(
        self, prev_ids: Int[Tensor, "blocks"], hidden: Float[Tensor, "blocks hidden"], state: State
    ) -> tuple[Float[Tensor, "blocks rank"], State]:
        e = self.embed(prev_ids).to(hidden.dtype)
        state = torch.zeros_like(e) if state is None else state
        return _advance(_linear(torch.cat((state, e, hidden), -1), self.joint_proj), state)


def _advance(joint: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Latent and new state from [g ; c ; o]; o was computed from the old state."""
    g, c, o = joint.chunk(3, -1)
    keep = torch.sigmoid(g)
    return torch.tanh(o), keep * state + (1 - keep) * torch.tanh(c)


def make_head(kind: str, *, vocab_size: int, output_size: int, rank: int, hidden_size: int) -> SequentialHead:
    """The head that ``markov_head_type`` names."""
    if kind == "vanilla":
        return VanillaMarkovHead(vocab_size, output_size, rank)
    heads: dict[str, type[GatedMarkovHead | RNNHead]] = {"gated": GatedMarkovHead, "rnn": RNNHead}
    return heads[kind](vocab_size, output_size, rank, hidden_size)


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b) (paper equation 7); input order as DeepSpec stores it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows"]:
        return F.linear(inputs, self.proj.weight.to(inputs.dtype), self.proj.bias.to(inputs.dtype)).squeeze(-1)


def sequential_logits(
    base_logits: Float[Tensor, "blocks block draft_vocab"],
    hidden: Float[Tensor, "blocks block hidden"],
    prev_ids: Int[Tensor, "blocks block"],
    head: SequentialHead | None,
) -> Float[Tensor, "blocks block draft_vocab"]:
    """Teacher-forced draft logits U_k + B_k (paper equation 4); without a head they are the base logits.

    The plain form, dense over the vocabulary; the training loss takes the latents instead and never builds it whole.
    """
    return base_logits if head is None else base_logits + head.bias(head.latents(hidden, prev_ids))


def _linear(x: Float[Tensor, "*rows inputs"], module: nn.Linear) -> Float[Tensor, "*rows outputs"]:
    """Product in the dtype of the activations; masters may be finer."""
    return F.linear(x, module.weight.to(x.dtype), None if module.bias is None else module.bias.to(x.dtype))
