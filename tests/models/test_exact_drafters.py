"""Exact enumeration with the real drafters: whatever they draft, a round commits what the target alone would write.

Every draw of a drafter is one uniform turned into a token. Here the uniforms are chosen instead of drawn, one in each
cell, so that all drafts of a round come up; the reported distributions give their chances, the package's own
deterministic functions the outcome of verifying each (``fakes.ExactVerification``). Together that is the exact
distribution of a round's output, under either rule, every transformation of the target and every causal scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fakes import ExactRounds, ExactVerification, Outcomes, TableTarget, target_chain
from tiny_drafter import fill, tiny_config, tiny_eagle3_config, tiny_mtp_config
from torch import Tensor, nn

from dspark.core import RULES, DraftDistribution, Proposal, SamplingParams
from dspark.maths.scheduling import FixedScheduler, Scheduler, ThresholdScheduler
from dspark.maths.shaping import Shaper
from dspark.models.backbone import DraftModel
from dspark.models.draft_config import HEAD_TYPES
from dspark.models.drafter import Drafter, MirrorsShaping
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3 import Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.lookup_drafter import LookupDrafter
from dspark.models.mtp import MTPModel
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.ngram import NgramDrafter

VOCAB, BLOCK, PROMPT, STOPS = 4, 2, (2, 0), (3,)
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 6, "block_size": BLOCK}  # Any: fields of every type
TAPS = (0, 2)
TRANSFORMATIONS = {
    "none": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.5),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p and min_p": SamplingParams(temperature=1.3, top_p=0.8, min_p=0.15),
    "shaped": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        logit_bias=((1, 0.8),),
        banned_token_ids=(0,),
        min_tokens=3,
    ),
    "greedy": SamplingParams(),
}
HEADS: dict[str, dict[str, Any]] = {
    **{head: {"markov_head_type": head, "markov_rank": 3} for head in HEAD_TYPES},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "dflash, slot given": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
}
SUPPORTS: dict[str, tuple[dict[str, Any], int]] = {  # fields of the configuration, and candidates
    "full": ({}, 0),
    "candidates": ({}, 2),
    "reduced": ({"draft_vocab_size": 3}, 0),
    "reduced, candidates": ({"draft_vocab_size": 3}, 2),
}
CHAINS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"own_head": True, "own_embedding": True, "fc_norm": True, "norm_output": True},
    "gemma eagle3": {"layer_style": "gemma4", "attention_k_eq_v": True, "final_soft_cap": 2.0},
    "mtp": {},
}


def filled(model: nn.Module, seed: int) -> Any:
    fill(model, torch.Generator().manual_seed(seed), scale=0.4, norms=1.0)
    if "d2t" in dict(model.named_buffers()):
        model.get_buffer("d2t").copy_(torch.tensor([0, 1, 3]) - torch.arange(3))
    return model


def make(name: str, support: str, table: TableTarget, seed: int = 0) -> Drafter:
    """The drafter ``name`` with random parameters."""
    fields, candidates = SUPPORTS[support]
    if name == "ngram":
        return NgramDrafter(block_size=BLOCK, min_match=1, max_match=2)
    if name in HEADS:
        config = tiny_config(**{**SHAPE, **HEADS[name], **fields, "target_layer_ids": TAPS, "mask_token_id": 1})
        return DsparkDrafter(filled(DraftModel(config), seed), table, candidates=candidates)
    if name == "mtp":
        return MTPDrafter(filled(MTPModel(tiny_mtp_config(**SHAPE, **fields)), seed), table, candidates=candidates)
    model = Eagle3Model(tiny_eagle3_config(**{**SHAPE, **CHAINS[name], **fields, "target_layer_ids": TAPS}))
    return Eagle3Drafter(filled(model, seed), table, candidates=candidates)


@contextmanager
def chosen(shares: Sequence[float]) -> Iterator[None]:
    """Let the next draws use ``shares`` of their distributions; 0.5 from there on."""
    left = list(shares)

    def uniforms(count: int, generator: torch.Generator) -> Tensor:
        return torch.tensor([left.pop(0) if left else 0.5 for _ in range(count)], dtype=torch.float64)

    with ExitStack() as patches:
        for module in ("maths.sampling", "models.sequential", "models.chain_batch"):
            patches.enter_context(patch(f"dspark.{module}.uniforms", uniforms))
        yield


@dataclass(frozen=True)
class Path:
    """One proposal of all those that can come up."""

    proposal: Proposal
    chance: float
    lows: tuple[float, ...]  # just inside each token's cell of the unit interval, from below
    highs: tuple[float, ...]


class Enumerated:
    """A real drafter as the oracles of ``fakes`` know one: its proposals after a prefix, with their chances."""

    def __init__(self, drafter: Drafter, table: TableTarget, params: SamplingParams) -> None:
        self.drafter, self.table, self.params = drafter, table, params
        self.vocab_size, self.block = VOCAB, BLOCK
        self.paths = cache(self._paths)

    def propose(self, state: Any, anchor: int, shares: Sequence[float]) -> Proposal:
        with chosen(shares):
            return self.drafter.propose(
                state, anchor, sampling=self.params, generator=torch.Generator(), limit=self.block
            )

    def state_after(self, prefix: tuple[int, ...]) -> Any:
        """The drafter's state of a request whose last committed token, the anchor, has not been run yet."""
        state, memory = self.drafter.open(max_len=20), self.table.new_memory(rows=1, max_len=20)
        if self.params.shapes_logits and isinstance(self.drafter, MirrorsShaping):
            shaper = Shaper(self.params, PROMPT, stop_token_ids=STOPS)
            shaper.commit(prefix[len(PROMPT) :])
            self.drafter.mirror(state, shaper)
        for part in (prefix[: len(PROMPT)], prefix[len(PROMPT) : -1]):
            ids = torch.tensor(part, dtype=torch.long)
            if len(ids):
                self.drafter.extend(state, ids, self.table.forward(ids, memory, taps=self.drafter.taps).features)
        return state

    def _paths(self, prefix: tuple[int, ...]) -> dict[tuple[int, ...], Path]:
        """Every proposal after ``prefix``, by its tokens; all from one state, which drafting must not change."""
        state = self.state_after(prefix)
        found: dict[tuple[int, ...], Path] = {}

        def explore(known: Path) -> None:
            proposal = self.propose(state, prefix[-1], known.lows)
            k, distribution = len(known.lows), proposal.distribution
            if k == proposal.block or distribution is None:
                tokens = tuple(proposal.draft_tokens.tolist())
                assert tokens not in found
                found[tokens] = replace(known, proposal=proposal)
                return
            row = distribution.probs[k].double()
            edges = (row.cumsum(0) / row.sum()).tolist()
            for low, high in zip([0.0, *edges], edges, strict=False):
                if high > low:
                    inset = (high - low) * 1e-3
                    lows, highs = (*known.lows, low + inset), (*known.highs, high - inset)
                    explore(Path(proposal, known.chance * (high - low), lows, highs))

        explore(Path(self.propose(state, prefix[-1], ()), 1.0, (), ()))
        if self.params == TRANSFORMATIONS["none"]:  # the others turn uniforms into tokens in the same way
            self._check_cells(state, prefix[-1], found)
        return found

    def _check_cells(self, state: Any, anchor: int, found: dict[tuple[int, ...], Path]) -> None:
        """The cells are those that the drafter draws from: both ends of each give the tokens of the path, and the same
        report of them."""
        for tokens, path in found.items():
            again = self.propose(state, anchor, path.highs)
            assert tuple(again.draft_tokens.tolist()) == tokens
            if (report := path.proposal.distribution) is not None and again.distribution is not None:
                torch.testing.assert_close(again.distribution.probs, report.probs)
                assert bool((report.of(path.proposal.draft_tokens) > 0).all())

    def distribution_of(self, prefix: tuple[int, ...], drafts: tuple[int, ...]) -> DraftDistribution | None:
        """What each of ``drafts``, the first of some proposal's, was drawn from."""
        proposals = (path.proposal for tokens, path in self.paths(prefix).items() if tokens[: len(drafts)] == drafts)
        return next(proposals).distribution


class Rounds(ExactRounds):
    """:class:`ExactRounds` over the proposals that a real drafter makes."""

    def _outcomes(self, prefix: tuple[int, ...]) -> Outcomes:
        found: Outcomes = {}
        assert isinstance(self.drafter, Enumerated)
        for drafts, path in self.drafter.paths(prefix).items():
            verify_len = self.scheduler.choose(path.proposal, len(prefix))
            for commit, share in self.verification.commits(prefix, drafts[:verify_len]).items():
                found[commit] = found.get(commit, 0.0) + path.chance * share
        return found


def check(drafter: Drafter, table: TableTarget, params: SamplingParams, prefix: tuple[int, ...]) -> None:
    """A round after ``prefix`` under both rules and all schedulers: the next three tokens are the target's own."""
    enumerated = Enumerated(drafter, table, params)

    def next_probs(text: tuple[int, ...]) -> Tensor:
        return table.next_probs(text, params, prompt_len=len(PROMPT), stop_token_ids=STOPS)

    alone = target_chain(prefix, next_probs, BLOCK + 1)
    assert sum(path.chance for path in enumerated.paths(prefix).values()) == pytest.approx(1.0, abs=1e-9)
    schedulers: list[Scheduler] = [FixedScheduler(), FixedScheduler(1)]
    if drafter.has_confidence:
        schedulers.append(ThresholdScheduler(0.5))
    for rule in RULES:
        verification = ExactVerification(next_probs, enumerated, rule)  # type: ignore[arg-type]
        for scheduler in schedulers:
            drafted = Rounds(verification, scheduler, order=None).output(prefix, rounds=1, horizon=BLOCK + 1)
            assert float(np.abs(drafted - alone).max()) < 1e-6, (rule, scheduler)


PREFIX = (*PROMPT, 1, 0)  # ends as it begins to do, so that prompt lookup finds something
CASES = [
    *((name, support) for name in HEADS if name != "dflash, slot given" for support in SUPPORTS),
    ("dflash, slot given", "full"),
    *((name, support) for name in CHAINS for support in ("full", "reduced, candidates")),
    ("ngram", "full"),
]


@pytest.mark.parametrize(
    ("name", "support", "transformation"),
    [
        (name, support, transformation)
        for name, support in CASES
        for transformation in TRANSFORMATIONS
        if not support.startswith("reduced") or transformation in ("none", "shaped")
    ],
)
def test_a_round_is_distributed_as_the_target(name: str, support: str, transformation: str) -> None:
    table = TableTarget(vocab_size=VOCAB, seed=len(transformation))
    check(make(name, support, table), table, TRANSFORMATIONS[transformation], PREFIX)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_a_round_of_drafts_from_the_text_is_distributed_as_the_target(
    transformation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.maths.lookup.TRUSTED", 0.0)
    table, params = TableTarget(vocab_size=VOCAB, seed=len(transformation)), TRANSFORMATIONS[transformation]
    drafter = LookupDrafter(make("vanilla", "full", table))
    twice, once = (*PROMPT, 1, 0, *PROMPT, 1), (*PROMPT, 1, 0, 1, 1)
    for prefix, looked_up in ((twice, True), (once, False)):
        enumerated = Enumerated(drafter, table, params)
        assert {path.proposal.looked_up for path in enumerated.paths(prefix).values()} == {looked_up}
        check(drafter, table, params, prefix)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*HEAD_TYPES, "eagle3.1", "mtp"])
def test_other_parameters_and_histories(name: str, seed: int) -> None:
    table = TableTarget(vocab_size=VOCAB, seed=seed)
    history = torch.randint(VOCAB, (1 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
    check(make(name, "candidates", table, seed + 1), table, TRANSFORMATIONS["none"], (*PROMPT, *history))


def test_the_enumeration_covers_drafts_that_stand_and_that_do_not() -> None:
    """Not all of them alike: the drafts are many, and neither always accepted nor never."""
    table = TableTarget(vocab_size=VOCAB, seed=4)
    for name in ("rnn", "eagle3", "mtp"):
        enumerated = Enumerated(make(name, "full", table), table, TRANSFORMATIONS["none"])
        assert len(enumerated.paths(PREFIX)) == VOCAB**BLOCK

        def next_probs(text: tuple[int, ...]) -> Tensor:
            return table.next_probs(text, TRANSFORMATIONS["none"])

        verification = ExactVerification(next_probs, enumerated)  # type: ignore[arg-type]
        assert 0.15 < Rounds(verification, FixedScheduler(), order=None).accepted(PREFIX) < BLOCK - 0.05


class Misreporting(DsparkDrafter):
    """The fault that the enumeration must see: tokens drawn from one distribution, another one reported."""

    def propose(self, state: Any, anchor: int, **options: Any) -> Proposal:
        honest = super().propose(state, anchor, **options)
        assert honest.distribution is not None
        flat = honest.distribution.probs.sqrt()
        return replace(honest, distribution=DraftDistribution(flat / flat.sum(1, keepdim=True)))


def test_the_enumeration_sees_a_report_that_is_not_what_was_drawn_from() -> None:
    table = TableTarget(vocab_size=VOCAB)
    honest = make("vanilla", "full", table)
    config = tiny_config(**{**SHAPE, **HEADS["vanilla"], "target_layer_ids": TAPS, "mask_token_id": 1})
    flawed = Misreporting(filled(DraftModel(config), 0), table, candidates=0)
    assert type(honest) is DsparkDrafter
    with pytest.raises(AssertionError):
        check(flawed, table, TRANSFORMATIONS["none"], PREFIX)
