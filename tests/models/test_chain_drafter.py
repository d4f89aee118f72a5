"""Eagle3 and MTP in decoding: the same steps as in training at any depth, honest distributions, whole requests."""

from __future__ import annotations

import pytest
import torch
from fakes import TableTarget
from models.test_chain import KINDS, SHAPE, model
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.decode import generate
from dspark.errors import CheckpointError, ConfigError
from dspark.maths.sampling import target_probs
from dspark.maths.shaping import Shaper
from dspark.models.chain import ChainBatch, ChainModel
from dspark.models.chain_drafter import ChainContext, ChainDrafter
from dspark.models.drafter import Drafter, MirrorsShaping, NoDrafter
from dspark.models.eagle3 import Eagle3Model
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.mtp import MTPModel
from dspark.models.mtp_drafter import MTPDrafter

VOCAB, HIDDEN, GAMMA, ANCHOR = SHAPE["vocab_size"], SHAPE["hidden_size"], 4, 7
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9)
FEW = ["eagle3", "mtp"]


def target(max_len: int = 4200) -> TableTarget:
    return TableTarget(vocab_size=VOCAB, order=2, hidden_size=HIDDEN, max_len=max_len)


def made(kind: str, **changes: object) -> ChainModel:
    found = model(kind, **{"block_size": GAMMA, "max_position_embeddings": 4200, **changes}).float()
    if found.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[: len(found.d2t)].sort().values
        found.d2t.copy_(ids - torch.arange(len(ids)))
    return found


def drafter(found: ChainModel, table: TableTarget, *, candidates: int = 0, native: bool = True) -> ChainDrafter:
    if isinstance(found, MTPModel):
        return MTPDrafter(found, table, candidates=candidates, native=native)
    assert isinstance(found, Eagle3Model)
    return Eagle3Drafter(found, table, candidates=candidates, native=native)


def prompt(tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids, and features wide enough for two taps; MTP takes the first half."""
    random = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (tokens,), generator=random), torch.randn(tokens, 2 * HIDDEN, generator=random)


def fed(one: ChainDrafter, tokens: int, pieces: list[int], *, start: int = 0) -> ChainContext:
    state = one.open(max_len=tokens + 20)
    ids, features = prompt(tokens)
    width = HIDDEN * len(one.taps)
    for new_ids, new in zip(ids.split(pieces), features.split(pieces), strict=True):
        one.extend(state, new_ids, new[:, :width])
    return state


def propose(
    one: ChainDrafter, state: ChainContext, sampling: SamplingParams, *, seed: int = 0, limit: int = 99
) -> Proposal:
    random = torch.Generator().manual_seed(seed)
    return one.propose(state, ANCHOR, sampling=sampling, generator=random, limit=limit)


def trained_logits(found: ChainModel, table: TableTarget, tokens: int, drafts: Tensor) -> Tensor:
    """What the training form says after ``tokens`` committed ones, the anchor and the drafts before each step."""
    ids, features = prompt(tokens)
    known = torch.cat((ids, torch.tensor([ANCHOR]), drafts))
    width = found.config.feature_size
    embed = table.embed if found.own_embedding() is None else found.embed
    head = found.own_head()
    weight = table.head_weight()[found.draft_token_ids()] if head is None else head.weight
    with torch.no_grad():
        nexts, steps = embed(known[1 : tokens + 1]), embed(known[tokens : tokens + len(drafts)])
        batch = ChainBatch(features[:, :width], nexts, [tokens], torch.tensor([tokens - 1]), steps[None], [1])
        logits = found(batch)[0] @ weight.T
    cap = found.config.final_soft_cap
    return cap * torch.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 90, 4000])
def test_every_draft_at_any_depth_is_drawn_from_what_training_computes(kind: str, tokens: int) -> None:
    found, table = made(kind), target()
    one = drafter(found, table)
    pieces = [tokens - tokens // 3, *([1] * (tokens // 3))] if tokens < 100 else [tokens - 8, 3, 5]
    state = fed(one, tokens, pieces)
    drawn = propose(one, state, SAMPLED)
    expected = target_probs(trained_logits(found, table, tokens, drawn.draft_tokens), SAMPLED)
    assert drawn.distribution is not None and drawn.block == GAMMA
    torch.testing.assert_close(drawn.distribution.probs, expected, rtol=2e-4, atol=2e-5)
    greedy = propose(one, state, GREEDY)
    assert greedy.distribution is None
    logits = trained_logits(found, table, tokens, greedy.draft_tokens)
    assert greedy.draft_tokens.tolist() == found.draft_token_ids()[logits.argmax(1)].tolist()


def test_a_soft_cap_of_the_target_is_kept() -> None:
    found, table = made("mtp", final_soft_cap=0.7), target()
    one = drafter(found, table)
    drawn = propose(one, fed(one, 9, [9]), SAMPLED)
    expected = target_probs(trained_logits(found, table, 9, drawn.draft_tokens), SAMPLED)
    torch.testing.assert_close(drawn.distribution.probs, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_leaves_the_context_as_it_was(kind: str) -> None:
    found, table = made(kind), target()
    one = drafter(found, table)
    once = propose(one, fed(one, 30, [30]), SAMPLED)
    ids, features = prompt(30)
    state = one.open(max_len=60)
    width = HIDDEN * len(one.taps)
    one.extend(state, ids[:20], features[:20, :width])
    propose(one, state, SAMPLED)  # its rows are overwritten by the next extend
    one.extend(state, ids[20:22], features[20:22, :width])  # fewer than were drafted
    propose(one, state, SAMPLED, seed=1)
    one.extend(state, ids[22:], features[22:, :width])
    again = propose(one, state, SAMPLED)
    assert torch.equal(once.draft_tokens, again.draft_tokens)
    torch.testing.assert_close(once.distribution.probs, again.distribution.probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("candidates", [0, 5, 17, 99])
@pytest.mark.parametrize("draft_vocab", [None, 17])
def test_distributions_name_their_support_and_sum_to_one(kind: str, candidates: int, draft_vocab: int | None) -> None:
    found, table = made(kind, draft_vocab_size=draft_vocab), target()
    one = drafter(found, table, candidates=candidates)
    state = fed(one, 12, [12])
    for seed in range(5):
        drawn = propose(one, state, SAMPLED, seed=seed)
        logits = trained_logits(found, table, 12, drawn.draft_tokens)
        ids = found.draft_token_ids()
        for k in range(GAMMA):
            row = drawn.distribution.dense(k, VOCAB)
            assert float(row.sum()) == pytest.approx(1.0, abs=1e-6)
            kept = logits[k].topk(min(candidates or 99, len(ids)))
            expected = torch.zeros(VOCAB)
            expected[ids[kept.indices]] = target_probs(kept.values[None], SAMPLED)[0]
            torch.testing.assert_close(row, expected, rtol=2e-4, atol=2e-5)
            assert float(row[drawn.draft_tokens[k]]) > 0
        assert bool((drawn.distribution.of(drawn.draft_tokens) > 0).all())


def test_a_limit_shortens_the_block_and_does_not_change_it() -> None:
    one = drafter(made("eagle3"), target())
    state = fed(one, 12, [12])
    whole, short = propose(one, state, SAMPLED), propose(one, state, SAMPLED, limit=2)
    assert torch.equal(short.draft_tokens, whole.draft_tokens[:2])
    assert propose(one, state, SAMPLED, limit=0).block == 0


@pytest.mark.parametrize("kind", FEW)
def test_past_its_own_context_limit_it_drafts_less_and_then_stops(kind: str) -> None:
    """The row of the anchor is one before its position, so the last row that has a rotary angle drafts once more."""
    one = drafter(made(kind, max_position_embeddings=20), target())
    blocks = [propose(one, fed(one, n, [n - 1, 1]), SAMPLED).block for n in (16, 17, 18, 19, 20, 21, 40)]
    assert blocks == [GAMMA, GAMMA, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize(("draft_vocab", "candidates"), [(None, 0), (17, 4)])
def test_greedy_output_with_drafts_is_the_targets_own(kind: str, draft_vocab: int | None, candidates: int) -> None:
    table = target(max_len=64)
    one = drafter(made(kind, draft_vocab_size=draft_vocab), table, candidates=candidates)
    assert isinstance(one, Drafter) and not one.has_confidence
    start = torch.randint(VOCAB, (5,), generator=torch.Generator().manual_seed(0)).tolist()
    plain, drafted = (generate(table, d, start, sampling=GREEDY, max_new_tokens=16) for d in (NoDrafter(), one))
    assert drafted.token_ids == plain.token_ids
    assert sum(len(r.draft_tokens) for r in drafted.rounds) > 0


def test_a_drafter_that_knows_the_target_is_always_accepted() -> None:
    """Taps, rows, positions and head as one: the next token follows from the last one alone, and so do the drafts."""
    table = TableTarget(vocab_size=6, order=1, hidden_size=HIDDEN, max_len=60)
    random = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=random)).Q[:6].contiguous()
    table.embeddings, table.head = basis, basis
    table.states = basis[torch.tensor([3, 0, 5, 1, 2, 4, 0])] * 4  # row t: the state after token t, which decides
    found = made("mtp", vocab_size=6)
    for parameter in found.parameters():
        parameter.data.fill_(1.0 if parameter.dim() == 1 else 0.0)  # no attention, no mlp: the residual alone
    assert isinstance(found, MTPModel)
    found.eh_proj.weight.data[:, :HIDDEN] = table.states[:6].T @ basis  # the embedding's half comes first
    answer = generate(table, drafter(found, table), [1, 2], sampling=GREEDY, max_new_tokens=41)
    assert answer.acceptance_length == GAMMA + 1


@pytest.mark.parametrize("draft_vocab", [None, 17])
def test_the_requests_rules_are_mirrored_row_by_row(draft_vocab: int | None) -> None:
    found, table = made("mtp", draft_vocab_size=draft_vocab), target()
    one, ids = drafter(found, table), found.draft_token_ids()
    assert isinstance(one, MirrorsShaping)
    banned, stop = int(ids[3]), int(ids[5])
    rules = SamplingParams(
        temperature=0.9, banned_token_ids=(banned,), min_tokens=2, logit_bias=((int(ids[7]), 1.5), (stop, 9.0))
    )
    shaper = Shaper(rules, [1, 2], stop_token_ids=[stop])
    state = fed(one, 12, [12])
    one.mirror(state, shaper)
    drawn = propose(one, state, rules)
    logits = trained_logits(found, table, 12, drawn.draft_tokens)
    for k in range(GAMMA):
        row = logits[k].clone()
        row[7] += 1.5
        row[5] = row[5] + 9.0 if k >= 2 else -torch.inf  # the first two drafts are held back from stopping
        row[3] = -torch.inf
        expected = torch.zeros(VOCAB)
        expected[ids] = target_probs(row[None], SAMPLED)[0]
        torch.testing.assert_close(drawn.distribution.dense(k, VOCAB), expected, rtol=2e-4, atol=2e-5)


NATIVE_SHAPE = {"hidden_size": 32, "head_dim": 32, "intermediate_size": 48}  # of which compiled operations exist


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 without q/k norms", "eagle3.1", "gemma eagle3", "mtp"])
def test_compiled_operations_draft_as_the_plain_ones_do(kind: str) -> None:
    table = TableTarget(vocab_size=VOCAB, order=2, hidden_size=32, max_len=64)
    found = made(kind, **NATIVE_SHAPE)
    plain, fast = (drafter(found, table, native=native) for native in (False, True))
    assert not plain.native and not (fast.native and kind.startswith("gemma"))
    if not fast.native and not kind.startswith("gemma"):
        pytest.skip("no compiled operations here: no C compiler, or DSPARK_NATIVE=0")
    drawn = []
    for one in (plain, fast):
        state, random = one.open(max_len=40), torch.Generator().manual_seed(3)
        features = torch.randn(20, 32 * len(one.taps), generator=random)
        ids = torch.randint(VOCAB, (20,), generator=random)
        for part in (slice(0, 15), slice(15, 20)):
            one.extend(state, ids[part], features[part])
        drawn.append(propose(one, state, SAMPLED))
    assert torch.equal(drawn[0].draft_tokens, drawn[1].draft_tokens)
    torch.testing.assert_close(drawn[0].distribution.probs, drawn[1].distribution.probs, rtol=1e-4, atol=1e-6)


def test_another_targets_drafter_and_bad_candidates_are_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size"):
        drafter(made("mtp", vocab_size=VOCAB + 1), target())
    with pytest.raises(ConfigError, match="candidates is -1"):
        drafter(made("mtp"), target(), candidates=-1)
