"""What a batch commits has the target's distribution: by enumeration, and by counting with real streams.

The verdicts of :func:`verify_batch` are a function of uniforms. Coins decide by a threshold and the closing uniform
picks tokens in the order of their ids, so both can be measured to the last places by halving intervals, all requests of
a batch at once; from thresholds and intervals follows the exact distribution of what a round commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from fakes import ExactVerification, TableDrafter, TableTarget, chi_square_p, context_row, target_chain
from torch import Tensor
from verification_fakes import Drafts, Step, plain_verdicts_at, verdicts_at

from dspark.core import DraftDistribution, SamplingParams
from dspark.maths import rejection
from dspark.maths.batch_verification import verify_batch as plain_batch
from dspark.maths.sampling import RequestStreams, target_probs
from dspark.models import native_verification

VOCAB, BLOCK = 3, 2
HALVINGS = 16  # of an interval; finer, and the compiled form hands everything to the plain one
PROMPT = (0, 1)
NATIVE = pytest.param(True, marks=pytest.mark.skipif(native_verification._library() is None, reason="no C compiler"))
SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, rule="block"),
    SamplingParams(temperature=0.6, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.8, rule="block"),
    SamplingParams(temperature=0.9, min_p=0.3),
    SamplingParams(),
]
Uniforms = tuple[Tensor, Tensor]
Measure = Callable[[Step, Tensor, Tensor], list[tuple[int, int]]]


def native_at(step: Step, coins: Tensor, closing: Tensor) -> list[tuple[int, int]]:
    verdict = verdicts_at(step, coins, closing, native_verification._library())
    assert not verdict.errors
    return list(zip(verdict.accepted.tolist(), verdict.next_tokens.tolist(), strict=True))


def joined(distributions: Sequence[DraftDistribution | None]) -> tuple[Tensor | None, Tensor | None]:
    """Probabilities and support of several requests; those that are certain have zeros."""
    some = next((d for d in distributions if d is not None), None)
    if some is None:
        return None, None
    probs = torch.stack([torch.zeros_like(some.probs) if d is None else d.probs for d in distributions])
    if some.token_ids is None:
        return probs, None
    ids = [torch.arange(some.probs.shape[1]).expand_as(some.probs) if d is None else d.token_ids for d in distributions]
    return probs, torch.stack([part for part in ids if part is not None])


class Enumeration:
    """Every pair of drafts under every set of parameters, one request each, in one mixed batch."""

    def __init__(self, target: TableTarget, drafter: TableDrafter, measure: Measure) -> None:
        self.target, self.drafter, self.measure = target, drafter, measure
        self.cases = [(params, pair) for params in SAMPLINGS for pair in product(range(VOCAB), repeat=BLOCK)]
        self.cases = [case for case in self.cases if drafter.chance_of(PROMPT, case[1]) > 0.0]
        distributions = [drafter.distribution_of(PROMPT, pair) for _, pair in self.cases]
        probs, ids = joined(distributions)
        certain = np.array([d is None for d in distributions])
        self.drafts = Drafts(torch.tensor([pair for _, pair in self.cases]), certain, probs, ids)
        head, states = target.head, target.states
        rows = [
            head @ states[context_row((*PROMPT, *pair[:k]), target.order, VOCAB)]
            for _, pair in self.cases
            for k in range(BLOCK + 1)
        ]
        params = [params for params, _ in self.cases]
        self.step = Step(torch.stack(rows), [BLOCK] * len(self.cases), self.drafts, params, 0)

    def at(self, coins: Tensor, closing: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Accepted drafts and next tokens of every case at ``coins`` [cases, block] and ``closing`` [cases]."""
        found = np.array(self.measure(self.step, coins.flatten(), closing))
        return found[:, 0], found[:, 1]

    def threshold(self, k: int, others: float) -> Tensor:
        """Coin of draft ``k`` from which on it does not stand; the other coins are ``others``."""
        count = len(self.cases)
        low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            coins = torch.full((count, BLOCK), others, dtype=torch.float64)
            coins[:, k] = middle
            stood = torch.from_numpy(self.at(coins, torch.full((count,), 0.5, dtype=torch.float64))[0] > k)
            low, high = torch.where(stood, middle, low), torch.where(stood, high, middle)
        return high

    def closings(self, coins: Tensor) -> np.ndarray:
        """[cases, vocab]: lengths of the intervals of the closing uniform that give each token."""
        count = len(self.cases)
        edges = [np.zeros(count)]
        for token in range(VOCAB - 1):
            low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                below = torch.from_numpy(self.at(coins, middle)[1] <= token)
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            edges.append(high.numpy())
        return np.diff(np.stack([*edges, np.ones(count)]), axis=0).T

    def joints(self) -> dict[SamplingParams, np.ndarray]:
        """[vocab] * 3 for each set of parameters: the next three tokens, of which the first round is enumerated."""
        never, always = 1.0 - 2.0**-53, 0.0
        # token by token a draft is asked only if those before it stand; jointly only if none after it does
        chances = np.zeros((len(self.cases), BLOCK))
        joint = np.array([params.rule == "block" for params, _ in self.cases])
        for k in range(BLOCK):
            chances[:, k] = np.where(joint, self.threshold(k, never), self.threshold(k, always))
        commits: dict[SamplingParams, np.ndarray] = {params: np.zeros((VOCAB,) * 3) for params in SAMPLINGS}
        for accepted in range(BLOCK + 1):
            coins = torch.full((len(self.cases), BLOCK), never, dtype=torch.float64)
            coins[:, :accepted] = always
            tokens = self.closings(coins)
            reached = self.at(coins, torch.full((len(self.cases),), 0.5, dtype=torch.float64))[0] == accepted
            for i, (params, pair) in enumerate(self.cases):
                h = chances[i]
                if joint[i]:
                    chance = float(np.prod(1.0 - h[accepted:])) * (h[accepted - 1] if accepted else 1.0)
                else:
                    chance = float(np.prod(h[:accepted])) * (1.0 - h[accepted] if accepted < BLOCK else 1.0)
                if chance < 5e-5:
                    continue
                assert reached[i]
                weight = self.drafter.chance_of(PROMPT, pair) * chance
                for token in range(VOCAB):
                    text = (*pair[:accepted], token)
                    if tokens[i, token] > 5e-5:
                        self._spread(commits[params], params, text, weight * tokens[i, token])
        return commits

    def _spread(self, joint: np.ndarray, params: SamplingParams, text: tuple[int, ...], weight: float) -> None:
        """The target writes what the round left of the three tokens."""
        if len(text) == 3:
            joint[text] += weight
        else:
            joint[text] += weight * target_chain(PROMPT + text, self.next_probs(params), 3 - len(text))

    def next_probs(self, params: SamplingParams) -> Callable[[tuple[int, ...]], Tensor]:
        return lambda prefix: self.target.next_probs(prefix, params)


@pytest.mark.parametrize("kind", ["dense", "candidates", "certain"])
@pytest.mark.parametrize("fast", [NATIVE])
def test_a_batch_commits_what_the_target_would_write(fast: bool, kind: str) -> None:
    """All pairs of drafts, six sets of parameters, in one batch; thresholds to 16 binary places."""
    enumeration = Enumeration(
        TableTarget(vocab_size=VOCAB, seed=4), TableDrafter(vocab_size=VOCAB, block=BLOCK, kind=kind, seed=9), native_at
    )
    for params, joint in enumeration.joints().items():
        due = target_chain(PROMPT, enumeration.next_probs(params), 3)
        assert float(np.abs(joint - due).max()) < 4e-4, params


def test_the_enumeration_sees_a_forgotten_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing from the target's row after a rejection is the fault; the plain form has it put in, and without it is
    exact by the same measure."""
    target = TableTarget(vocab_size=VOCAB, seed=4)
    drafter = TableDrafter(vocab_size=VOCAB, block=BLOCK, kind="certain", seed=9)
    gaps = []
    for fault in (False, True):
        if fault:
            monkeypatch.setattr(rejection, "residual_weights", lambda row, *_, **__: row)
        enumeration = Enumeration(target, drafter, plain_verdicts_at)
        joint = enumeration.joints()[SAMPLINGS[0]]
        gaps.append(float(np.abs(joint - target_chain(PROMPT, enumeration.next_probs(SAMPLINGS[0]), 3)).max()))
    assert gaps[0] < 4e-4 and gaps[1] > 1e-2, gaps


class Service:
    """Requests that draw one token after the same prompt again and again, through proposals and batched verdicts."""

    def __init__(self, requests: int, fault: str | None = None, *, fast: bool) -> None:
        self.params = [SamplingParams(temperature=1.0, rule=("token", "block")[i % 2], seed=i) for i in range(requests)]
        self.streams = [RequestStreams.from_seed(params.seed) for params in self.params]
        if fault == "one stream for all roles":
            equal = [[RequestStreams.from_seed(i).accept for _ in range(3)] for i in range(requests)]
            self.streams = [RequestStreams(propose=a, accept=b, residual=c) for a, b, c in equal]
        if fault == "one stream for all requests":
            self.streams = [RequestStreams.from_seed(0) for _ in range(requests)]
        self.verify = native_verification.verify_batch if fast else plain_batch
        self.target = TableTarget(vocab_size=VOCAB, seed=11)
        self.drafter = TableDrafter(vocab_size=VOCAB, block=BLOCK, seed=12)
        texts = [text for length in range(BLOCK + 1) for text in product(range(VOCAB), repeat=length)]
        self.rows = {text: self.target.next_probs(PROMPT + text, self.params[0]).log() for text in texts}
        self.draft_rows = {text: self.drafter._dense(PROMPT, text) for text in texts}

    def propose(self, i: int) -> tuple[int, ...]:
        """A block of request i, one uniform of its stream per draft; every other request takes the likeliest token."""
        text: tuple[int, ...] = ()
        for _ in range(BLOCK):
            probs = self.draft_rows[text]
            u = torch.rand(1, dtype=torch.float64, generator=self.streams[i].propose)
            drawn = int((probs.double().cumsum(0) <= u).sum()) if i % 4 < 2 else int(probs.argmax())
            text = (*text, min(drawn, VOCAB - 1))
        return text

    def first_tokens(self, rounds: int, lens: Sequence[int]) -> np.ndarray:
        """[rounds, requests]; request i has ``lens[i]`` of its drafts verified."""
        found = []
        certain = np.arange(len(lens)) % 4 >= 2
        for _ in range(rounds):
            blocks = [self.propose(i) for i in range(len(lens))]
            probs = torch.stack([torch.stack([self.draft_rows[b[:k]] for k in range(BLOCK)]) for b in blocks])
            drafts = Drafts(torch.tensor(blocks), certain, probs)
            rows = [self.rows[block[:k]] for block, length in zip(blocks, lens, strict=True) for k in range(length + 1)]
            verdict = self.verify(torch.stack(rows), lens, drafts, self.params, self.streams)
            found.append(np.where(verdict.accepted > 0, drafts.draft_tokens[:, 0].numpy(), verdict.next_tokens))
        return np.stack(found)


LENS = [0, 1, 2, 2, 1, 0, 2, 1, 2, 2, 1, 2]
ROUNDS = 300


def p_values(service: Service, tokens: np.ndarray) -> tuple[float, float]:
    """Of all requests' first tokens, and of the pairs that requests 1 and 8 drew in the same step."""
    probs = service.target.next_probs(PROMPT, service.params[0]).double().numpy()
    marginal = chi_square_p(np.bincount(tokens.flatten(), minlength=VOCAB), probs * tokens.size)
    pairs = np.bincount(tokens[:, 1] * VOCAB + tokens[:, 8], minlength=VOCAB**2)
    return marginal, chi_square_p(pairs, np.outer(probs, probs).flatten() * len(tokens))


@pytest.mark.parametrize("fast", [False, NATIVE])
def test_mixed_batches_have_the_targets_distribution(fast: bool) -> None:
    """Twelve requests of both rules, drafts drawn and certain, 3,600 tokens; two requests are independent."""
    service = Service(len(LENS), fast=fast)
    marginal, pairs = p_values(service, service.first_tokens(ROUNDS, LENS))
    assert marginal > 0.001 and pairs > 0.001


def test_the_counts_see_a_stream_shared_by_roles() -> None:
    """Equal states for proposing and accepting: a draft's coin is the uniform that drew it."""
    service = Service(12, "one stream for all roles", fast=True)
    assert p_values(service, service.first_tokens(ROUNDS, [BLOCK] * 12))[0] < 1e-6


def test_the_counts_see_a_stream_shared_by_requests() -> None:
    service = Service(len(LENS), "one stream for all requests", fast=True)
    assert p_values(service, service.first_tokens(ROUNDS, LENS))[1] < 1e-4


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """Alone and in a batch, at fixed lengths, request 2 commits the same."""
    together, alone = Service(len(LENS), fast=True), Service(3, fast=True)
    lens = [LENS[0], LENS[1], LENS[2]]
    assert np.array_equal(together.first_tokens(30, LENS)[:, 2], alone.first_tokens(30, lens)[:, 2])


def test_rows_of_the_service_are_the_targets() -> None:
    """The tables' probabilities as logits give the same probabilities again."""
    service = Service(1, fast=False)
    probs = service.target.next_probs(PROMPT, service.params[0])
    torch.testing.assert_close(target_probs(probs.log()[None], service.params[0])[0], probs)


def test_enumerations_agree_with_the_packages_own() -> None:
    """Thresholds found by halving are the acceptance chances that the rule states."""
    target, drafter = TableTarget(vocab_size=VOCAB, seed=4), TableDrafter(vocab_size=VOCAB, block=BLOCK, seed=9)
    enumeration = Enumeration(target, drafter, plain_verdicts_at)
    found = enumeration.threshold(0, 0.0)
    exact = ExactVerification(enumeration.next_probs(SAMPLINGS[0]), drafter)
    for i, (params, pair) in enumerate(enumeration.cases):
        if params is SAMPLINGS[0]:
            stood = sum(share for commit, share in exact.commits(PROMPT, pair).items() if len(commit) > 1)
            assert abs(float(found[i]) - stood) < 1e-4
