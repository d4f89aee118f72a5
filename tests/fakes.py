"""A target and a drafter that are tables, small enough to enumerate, and the exact oracles that go with them.

Every distribution here is a fixed random function of the last ``order`` tokens, so the output of whole rounds can be
computed without sampling (:class:`ExactRounds`) from the package's own acceptance, residual and scheduling functions,
and compared with what the target alone would write (:func:`target_chain`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from dspark.core import DraftDistribution, Proposal, SamplingParams
from dspark.maths import block_verification, rejection
from dspark.maths.sampling import draw, target_probs
from dspark.maths.scheduling import Scheduler
from dspark.maths.shaping import shaped_logits
from dspark.models.target import FINAL, KVMemory, TargetInfo, TargetOutput, check_taps

NextProbs = Callable[[tuple[int, ...]], Tensor]  # the target's distribution [vocab] after a prefix


def context_row(tokens: Sequence[int], order: int, vocab_size: int) -> int:
    """Number of a context in a table: the last ``order`` tokens as digits, ``vocab_size`` for "before the start"."""
    padded = [vocab_size] * order + list(tokens)
    return int(sum(token * (vocab_size + 1) ** i for i, token in enumerate(padded[len(padded) - order :])))


class TableTarget:
    """A target whose logits depend on the last ``order`` tokens alone, read back from its own KV memory.

    The memory stores token ids as keys (one layer, one head of width 1), so a loop that forgets a rollback, or rolls
    back too far, changes the logits. Final states, head and taps are consistent: ``logits = final @ head_weight().T``
    and each tap is a different bounded function of the state.
    """

    def __init__(
        self, *, vocab_size: int = 4, order: int = 2, max_len: int = 64, hidden_size: int = 6, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        contexts = (vocab_size + 1) ** order
        self.order = order
        self.states = torch.randn(contexts, hidden_size, generator=random)
        self.head = torch.randn(vocab_size, hidden_size, generator=random) * 0.6
        self.embeddings = torch.randn(vocab_size, hidden_size, generator=random)
        self.info = TargetInfo(
            name="table",
            family="table",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=6,
            max_len=max_len,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        return KVMemory(rows=rows, max_len=max_len, shapes=[(1, 1)], dtype=torch.float32, device=torch.device("cpu"))

    def forward(
        self,
        token_ids: Tensor,
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        taps = check_taps(taps, self.info.num_layers)
        counts = [len(token_ids)] if counts is None else list(counts)
        memory.check_room(rows, counts)
        contexts: list[int] = []
        for row, new in zip(rows, token_ids.split(counts), strict=True):
            start = memory.lengths[row]
            memory.keys[0][row, 0, start : start + len(new), 0] = new.float()
            seen = [int(t) for t in memory.keys[0][row, 0, : start + len(new), 0]]
            contexts += [
                context_row(seen[:end], self.order, self.info.vocab_size) for end in range(start + 1, len(seen) + 1)
            ]
        memory.advance(rows, counts)
        final = self.states[contexts]
        states = [final if tap == FINAL else torch.tanh(final * (tap + 2)) for tap in taps]
        features = torch.cat(states, dim=1) if taps else None
        wanted = final[np.cumsum(counts) - 1] if last_only else final
        return TargetOutput(self.logits(wanted) if want_logits else None, features, final)

    def logits(self, final: Tensor) -> Tensor:
        return final @ self.head.T

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embeddings[token_ids]

    def head_weight(self) -> Tensor:
        return self.head

    def next_probs(
        self, prefix: Sequence[int], params: SamplingParams, *, prompt_len: int = 0, stop_token_ids: Sequence[int] = ()
    ) -> Tensor:
        """[vocab]: distribution of the token after ``prefix``, without any memory. Its first ``prompt_len`` tokens are
        the prompt, for the rules that ask."""
        logits = self.head @ self.states[context_row(prefix, self.order, self.info.vocab_size)]
        if params.shapes_logits:
            logits = shaped_logits(
                logits, prefix[:prompt_len], prefix[prompt_len:], params, stop_token_ids=stop_token_ids
            )
        return target_probs(logits[None], params)[0]


@dataclass(kw_only=True)
class TableDrafter:
    """Proposes ``block`` tokens from a table q(x_k | prefix); its confidence c_k is a table of the same prefix.

    ``kind``: "dense" reports the whole vocabulary, "candidates" samples from two tokens only and reports those,
    "certain" takes the most likely token and reports no distribution, "reduced" knows all but one token of the
    vocabulary and reports them in another order, "sequential" has base logits from the anchor's context, one row per
    slot, and a bias from the previous token, as DSpark's own heads have.
    """

    vocab_size: int = 4
    block: int = 2
    order: int = 2
    kind: str = "dense"
    seed: int = 1
    sharpness: float = 1.0  # scale of the logits
    logits: Tensor = field(init=False)
    bias: Tensor = field(init=False)
    confidences: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        contexts = (self.vocab_size + 1) ** self.order
        self.logits = torch.randn(contexts, self.vocab_size, generator=random) * self.sharpness
        self.confidences = torch.rand(contexts, generator=random)
        self.bias = torch.randn(self.vocab_size, self.vocab_size, generator=random) * self.sharpness

    def propose(self, prefix: Sequence[int], generator: torch.Generator) -> Proposal:
        """Draw a block left to right, one uniform of ``generator`` per token (none when certain)."""
        drafts: list[int] = []
        for _ in range(self.block):
            probs = self._dense(prefix, drafts)
            drafts.append(int(probs.argmax()) if self.kind == "certain" else draw(probs, generator))
        return self.proposal_of(prefix, drafts)

    def proposal_of(self, prefix: Sequence[int], drafts: Sequence[int]) -> Proposal:
        """The proposal as it is when ``drafts`` are what was drawn."""
        confidence = torch.stack([self.confidences[self._row([*prefix, *drafts[:k]])] for k in range(len(drafts))])
        return Proposal(torch.tensor(drafts), self.distribution_of(prefix, drafts), confidence)

    def distribution_of(self, prefix: Sequence[int], drafts: Sequence[int]) -> DraftDistribution | None:
        """What each of ``drafts`` was drawn from; None if it was certain."""
        if self.kind == "certain" or not drafts:
            return None
        probs = torch.stack([self._dense(prefix, drafts[:k]) for k in range(len(drafts))])
        if self.kind in ("dense", "sequential"):
            return DraftDistribution(probs)
        ids = torch.stack([self._support([*prefix, *drafts[:k]]) for k in range(len(drafts))])
        return DraftDistribution(probs.gather(1, ids), ids)

    def chance_of(self, prefix: Sequence[int], drafts: Sequence[int]) -> float:
        """Probability that exactly ``drafts`` are drawn."""
        chance = 1.0
        for k, token in enumerate(drafts):
            probs = self._dense(prefix, drafts[:k])
            chance *= float(int(probs.argmax()) == token) if self.kind == "certain" else float(probs[token])
        return chance

    def _row(self, context: Sequence[int]) -> int:
        return context_row(context, self.order, self.vocab_size)

    def _support(self, context: Sequence[int]) -> Tensor:
        if self.kind == "reduced":
            return torch.arange(self.vocab_size - 1, 0, -1)
        return self.logits[self._row(context)].topk(2).indices

    def _dense(self, prefix: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """q of the token after ``drafts``, over the whole vocabulary."""
        if self.kind == "sequential":
            base = self.logits[self._row(prefix)].roll(len(drafts))
            return (base + self.bias[[*prefix, *drafts][-1]]).softmax(0)
        logits = self.logits[self._row([*prefix, *drafts])]
        if self.kind in ("dense", "certain"):
            return logits.softmax(0)
        ids = self._support([*prefix, *drafts])
        return torch.zeros(self.vocab_size).scatter_(0, ids, logits[ids].softmax(0))


def target_chain(prefix: tuple[int, ...], next_probs: NextProbs, horizon: int) -> np.ndarray:
    """[vocab] * horizon: joint distribution of the next ``horizon`` tokens when the target writes alone."""
    probs = next_probs(prefix).double().numpy()
    if horizon == 1:
        return probs
    return np.stack([p * target_chain((*prefix, t), next_probs, horizon - 1) for t, p in enumerate(probs)])


Outcomes = dict[tuple[int, ...], float]  # probability of each commit


class ExactVerification:
    """The exact outcome of verifying given drafts, from the package's own deterministic functions; no coins.

    ``next_probs`` gives the target's distribution after a prefix.
    """

    def __init__(self, next_probs: NextProbs, drafter: TableDrafter, rule: str = "token") -> None:
        self.next_probs, self.drafter, self.rule = cache(next_probs), drafter, rule
        self.commits = cache(self._commits)
        self._closing = cache(self._residual)

    def _commits(self, prefix: tuple[int, ...], drafts: tuple[int, ...]) -> Outcomes:
        """Probability of each commit when exactly ``drafts`` are verified after ``prefix``."""
        rows = torch.stack([self.next_probs(prefix + drafts[:k]) for k in range(len(drafts) + 1)])
        tokens = torch.tensor(drafts, dtype=torch.long)
        distribution = self.drafter.distribution_of(prefix, drafts)
        accepted, shares = self._accepted(tokens, distribution, rows)
        found: Outcomes = {}
        for k, chance in enumerate(accepted):
            if chance > 0.0:
                last = k == len(drafts)
                row = rows[k].tolist() if last else self._closing(prefix, drafts[:k], drafts[k], shares[k])
                for token, share in enumerate(row):
                    if share > 0.0:
                        found[(*drafts[:k], token)] = chance * share
        return found

    def _accepted(
        self, tokens: Tensor, distribution: DraftDistribution | None, rows: Tensor
    ) -> tuple[list[float], list[float]]:
        """Chance that exactly k drafts stand, k = 0..verify_len, and the share of p in the residual after each."""
        if self.rule == "token":
            stands = rejection.acceptance_probs(tokens, distribution, rows).tolist()
            alive = np.cumprod([1.0, *stands])
            return [*(alive[:-1] * (1.0 - np.array(stands))), alive[-1]], [1.0] * len(stands)
        coins = block_verification.block_coin_chances(tokens, distribution, rows).tolist()
        chances, none_later = [], 1.0
        for chance in reversed(coins):  # as many drafts stand as the number of the last one whose coin stands
            chances.append(none_later * chance)
            none_later *= 1.0 - chance
        return [none_later, *chances[::-1]], [
            1.0,
            *block_verification.joint_ratios(tokens, distribution, rows).tolist()[:-1],
        ]

    def _residual(self, prefix: tuple[int, ...], drafts: tuple[int, ...], draft: int, share: float) -> list[float]:
        """Distribution of the token in the place of ``draft``, which does not stand."""
        text, k = (*drafts, draft), len(drafts)
        distribution = self.drafter.distribution_of(prefix, text)
        row = rejection.draft_row(k, torch.tensor(text), distribution, vocab_size=self.drafter.vocab_size)
        target_row = self.next_probs(prefix + drafts)
        return list(rejection.residual_probs(target_row, row, share=share).tolist())


class ExactRounds:
    """The exact distribution of what drafted rounds commit under a scheduler.

    The drafter's tables depend on the last ``drafter.order`` tokens only; with ``order``, so does the target, and one
    round after each such context is enough. ``order`` None is for a target that looks at its whole history.
    """

    def __init__(
        self,
        verification: ExactVerification,
        scheduler: Scheduler,
        *,
        order: int | None = 2,
    ) -> None:
        self.verification, self.scheduler, self.order = verification, scheduler, order
        self.next_probs, self.drafter = verification.next_probs, verification.drafter
        self.outcomes = cache(self._outcomes)

    def _outcomes(self, prefix: tuple[int, ...]) -> Outcomes:
        """Probability of each commit of one round: over all drafts, all accepted lengths and all closing tokens."""
        found: Outcomes = {}
        for drafts in product(range(self.drafter.vocab_size), repeat=self.drafter.block):
            chance = self.drafter.chance_of(prefix, drafts)
            if chance > 0.0:
                verify_len = self.scheduler.choose(self.drafter.proposal_of(prefix, drafts), len(prefix))
                for commit, share in self.verification.commits(prefix, drafts[:verify_len]).items():
                    found[commit] = found.get(commit, 0.0) + chance * share
        return found

    def accepted(self, prefix: tuple[int, ...]) -> float:
        """Expected number of accepted drafts of one round."""
        return sum(chance * (len(commit) - 1) for commit, chance in self.outcomes(prefix).items())

    def output(self, prefix: tuple[int, ...], *, rounds: int, horizon: int) -> np.ndarray:
        """[vocab] * horizon: joint distribution of the next ``horizon`` tokens, ``rounds`` of them drafted.

        Where the rounds commit fewer tokens, the target alone writes the rest, so that a bias in how many are committed
        after which text shows as well.
        """
        if rounds == 0:
            return target_chain(prefix, self.next_probs, horizon)
        joint = np.zeros((self.drafter.vocab_size,) * horizon)
        tail = prefix if self.order is None else prefix[-self.order :]
        for commit, chance in self.outcomes(tail).items():
            if len(commit) >= horizon:
                joint[commit[:horizon]] += chance
            else:
                joint[commit] += chance * self.output(tail + commit, rounds=rounds - 1, horizon=horizon - len(commit))
        return joint


def chi_square_p(observed: Iterable[float], expected: Iterable[float]) -> float:
    """p-value of Pearson's test that counts ``observed`` come from ``expected`` counts (equal totals, none zero)."""
    seen, due = np.asarray(list(observed), dtype=float), np.asarray(list(expected), dtype=float)
    assert (due > 0).all() and abs(seen.sum() - due.sum()) < 1e-6 * due.sum()
    statistic = float(((seen - due) ** 2 / due).sum())
    return float(
        torch.special.gammaincc(torch.tensor((len(due) - 1) / 2).double(), torch.tensor(statistic / 2).double())
    )
