"""The decoding form of DSpark equals its training form, at any depth, and reports what it drew from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import TableTarget
from tiny_drafter import tiny_drafter
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.errors import CheckpointError
from dspark.maths.sampling import target_probs
from dspark.maths.shaping import Shaper
from dspark.models import native
from dspark.models.backbone import BlockBatch, DraftModel, GemmaDraftLayer
from dspark.models.dspark import DraftContext, DsparkDrafter
from dspark.models.heads import sequential_logits

VOCAB, HIDDEN, GAMMA = 29, 16, 5
SHAPES: dict[str, dict] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "dflash, anchor's slot given": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
    "anchor's slot given, rnn": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "gemma4": {"layer_style": "gemma4", "head_dim": 8, "partial_rotary_factor": 0.25, "final_soft_cap": 3.0},
    "gemma4, keys as values": {"layer_style": "gemma4", "attention_k_eq_v": True, "markov_head_type": "gated"},
    "confidence of the state alone": {"confidence_head_with_markov": False},
}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9)


def target(max_len: int = 4200) -> TableTarget:
    return TableTarget(vocab_size=VOCAB, order=1, hidden_size=HIDDEN, max_len=max_len)


def model(**changes: object) -> DraftModel:
    fields: dict = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "block_size": GAMMA,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2),
        "markov_rank": 6,
        "max_position_embeddings": 4200,
    }
    made = tiny_drafter(norms=1.0, **{**fields, **changes})
    if made.d2t is not None:
        ids = torch.randperm(VOCAB)[: made.d2t.shape[0]].sort().values
        made.d2t.copy_(ids - torch.arange(len(ids)))
    for i, layer in enumerate(made.layers):
        if isinstance(layer, GemmaDraftLayer):
            layer.layer_scalar.fill_(0.6 + 0.2 * i)
    return made


def training_form(made: DraftModel, table: TableTarget, features: Tensor, size: int = GAMMA) -> Tensor:
    """States of a block of ``size`` predictions behind ``features`` with anchor 7, by the training forward."""
    depth = features.shape[0]
    batch = BlockBatch(features, [depth], torch.tensor([depth]), [1])
    with torch.no_grad():
        return made(batch, table.embed(torch.tensor([7])), table.embed(torch.tensor([3]))[0], size)[0]


def fed(drafter: DsparkDrafter, features: Tensor, pieces: list[int]) -> DraftContext:
    state = drafter.open(max_len=features.shape[0] + 20)
    for part in features.split(pieces):
        drafter.extend(state, torch.zeros(len(part), dtype=torch.long), part)
    return state


def states_of(drafter: DsparkDrafter, state: DraftContext, size: int = GAMMA) -> Tensor:
    """States of the block with anchor 7."""
    with torch.inference_mode():
        return drafter.parallel(state.memory, [0], [7], [size])[0]


def propose(
    drafter: DsparkDrafter, state: DraftContext, sampling: SamplingParams, *, seed: int = 0, limit: int = 99
) -> Proposal:
    random = torch.Generator().manual_seed(seed)
    return drafter.propose(state, 7, sampling=sampling, generator=random, limit=limit)


@pytest.mark.parametrize("depth", [1, 100, 1000, 4000])
def test_a_block_at_any_depth_equals_the_training_forward(depth: int) -> None:
    made, table = model(), target()
    drafter = DsparkDrafter(made, table)
    features = torch.randn(depth, 2 * HIDDEN)
    pieces = [depth - depth // 3, *([1] * (depth // 3))] if depth < 1000 else [depth - 8, 3, 5]
    state = fed(drafter, features, pieces)
    expected = training_form(made, table, features)
    torch.testing.assert_close(states_of(drafter, state), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("depth", [0, 5, 250])
@pytest.mark.parametrize("name", SHAPES)
def test_every_drafter_decodes_what_its_training_form_says(name: str, depth: int) -> None:
    """States, distributions and confidences, with nothing before the anchor, at depth 5 and at the context's limit."""
    changes = SHAPES[name]
    inputs = GAMMA + (not changes.get("sample_from_anchor", True))
    made, table = model(max_position_embeddings=250 + inputs, **changes), target()
    features = torch.randn(depth, 2 * HIDDEN)
    states = training_form(made, table, features)
    base = states @ table.head_weight().T
    if cap := made.config.final_soft_cap:
        base = cap * (base / cap).tanh()
    for candidates, sampling in ((0, SAMPLED), (8, SAMPLED), (8, GREEDY)):
        drafter = DsparkDrafter(made, table, candidates=candidates)
        state = fed(drafter, features, [depth // 2, depth - depth // 2])
        torch.testing.assert_close(states_of(drafter, state), states, rtol=2e-4, atol=2e-4)
        proposal = propose(drafter, state, sampling)
        assert proposal.block == GAMMA
        prev = torch.cat((torch.tensor([7]), proposal.draft_tokens[:-1]))
        with torch.no_grad():
            logits = sequential_logits(base[None], states[None], prev[None], made.markov_head)[0]
        if candidates:
            kept = base >= base.topk(candidates).values[:, -1:]
            logits = logits.masked_fill(~kept, float("-inf"))
        if sampling.greedy:
            assert proposal.draft_tokens.tolist() == logits.argmax(1).tolist()
        else:
            dense = torch.stack([proposal.distribution.dense(k, VOCAB) for k in range(GAMMA)])
            torch.testing.assert_close(dense, target_probs(logits, sampling), rtol=2e-3, atol=1e-5)
        if made.confidence_head is not None:
            rows = states
            if made.config.confidence_head_with_markov:
                rows = torch.cat((states, made.markov_head.markov_w1.weight[prev]), 1)
            with torch.no_grad():
                torch.testing.assert_close(
                    proposal.confidence, made.confidence_head(rows).sigmoid(), rtol=1e-3, atol=1e-4
                )
    drafter.extend(state, torch.zeros(251 - depth, dtype=torch.long), torch.randn(251 - depth, 2 * HIDDEN))
    assert propose(drafter, state, SAMPLED).block == 0  # one past the last place where a block fits


@pytest.mark.skipif(native._compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_operations_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    table = TableTarget(vocab_size=400, order=1, hidden_size=32, max_len=4200)
    table.info = replace(table.info, dtype=dtype)
    made = model(vocab_size=400, hidden_size=32, head_dim=32, intermediate_size=48, sample_from_anchor=False)
    for parameter in made.parameters():  # widths that keep states of the size of real ones
        parameter.data *= 0.5 if parameter.dim() > 1 else 1.0
    features = torch.randn(300, 64)
    fast, plain = (DsparkDrafter(made, table, candidates=20, native=wanted) for wanted in (True, False))
    assert fast.native and not plain.native
    states = [fed(drafter, features, [290, 1, 9]) for drafter in (fast, plain)]
    one, two = (states_of(drafter, state).float() for drafter, state in zip((fast, plain), states, strict=True))
    assert float((one - two).norm() / two.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)
    if dtype == torch.float32:
        one, two = (propose(d, s, SAMPLED) for d, s in zip((fast, plain), states, strict=True))
        assert torch.equal(one.draft_tokens, two.draft_tokens)
        torch.testing.assert_close(one.distribution.probs, two.distribution.probs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("draft_vocab", [None, 17])
def test_the_requests_rules_are_mirrored(draft_vocab: int | None) -> None:
    """A token with a large bias is drafted, a banned one is not: by both forms, in the target's ids."""
    made, table = model(draft_vocab_size=draft_vocab, markov_rank=0, enable_confidence_head=False), target()
    ids = made.draft_token_ids().tolist()
    liked, banned = ids[3], ids[:3]
    params = SamplingParams(temperature=1.0, logit_bias=((liked, 40.0),), banned_token_ids=tuple(banned))
    for candidates in (0, 8):
        drafter = DsparkDrafter(made, table, candidates=candidates)
        state = fed(drafter, torch.randn(12, 2 * HIDDEN), [12])
        before = propose(drafter, state, params)
        drafter.mirror(state, Shaper(params, [1, 2]))
        assert set(propose(drafter, state, params).draft_tokens.tolist()) == {liked}
        assert before.draft_tokens.tolist() != [liked] * GAMMA
        drafter.mirror(state, Shaper(replace(params, logit_bias=()), [1, 2]))
        rows = propose(drafter, state, params).distribution
        for k in range(GAMMA):
            assert float(rows.dense(k, VOCAB)[banned].sum()) == 0.0


def test_drafting_leaves_the_context_as_it_was() -> None:
    drafter = DsparkDrafter(model(), target())
    features = torch.randn(30, 2 * HIDDEN)
    once = propose(drafter, fed(drafter, features, [30]), SAMPLED)
    state = fed(drafter, features[:20], [20])
    propose(drafter, state, SAMPLED)  # a block whose rows the next features overwrite
    drafter.extend(state, torch.zeros(10, dtype=torch.long), features[20:])
    again = propose(drafter, state, SAMPLED)
    assert torch.equal(once.draft_tokens, again.draft_tokens)
    torch.testing.assert_close(once.distribution.probs, again.distribution.probs)


@pytest.mark.parametrize("draft_vocab", [None, 17])
def test_full_vocabulary_loop_follows_equation_4(draft_vocab: int | None) -> None:
    made, table = model(draft_vocab_size=draft_vocab), target()
    drafter = DsparkDrafter(made, table, candidates=0)
    state = fed(drafter, torch.randn(12, 2 * HIDDEN), [12])
    proposal = propose(drafter, state, SAMPLED)
    ids = made.draft_token_ids()
    with torch.no_grad():
        base = states_of(drafter, state) @ table.head_weight()[ids].T
        prev = torch.cat((torch.tensor([7]), proposal.draft_tokens[:-1]))
        expected = target_probs(base + made.markov_head.bias(made.markov_head.embed(prev)), SAMPLED)
    torch.testing.assert_close(proposal.distribution.probs, expected, rtol=1e-4, atol=1e-6)
    if draft_vocab is not None:
        assert torch.equal(proposal.distribution.token_ids[0], ids)
        assert set(proposal.draft_tokens.tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("draft_vocab", [None, 17])
def test_as_many_candidates_as_tokens_change_nothing(draft_vocab: int | None) -> None:
    made, table = model(draft_vocab_size=draft_vocab), target()
    size, features = draft_vocab or VOCAB, torch.randn(12, 2 * HIDDEN)
    full = DsparkDrafter(made, table, candidates=0)
    almost = DsparkDrafter(made, table, candidates=size - 1)
    dense = propose(full, fed(full, features, [12]), GREEDY)
    for drafter in (almost, DsparkDrafter(made, table, candidates=size)):
        assert torch.equal(propose(drafter, fed(drafter, features, [12]), GREEDY).draft_tokens, dense.draft_tokens)


def test_candidates_are_the_largest_base_logits_and_the_rest_is_exactly_zero() -> None:
    made, table = model(), target()
    drafter = DsparkDrafter(made, table, candidates=4)
    state = fed(drafter, torch.randn(12, 2 * HIDDEN), [12])
    proposal = propose(drafter, state, SAMPLED)
    base = states_of(drafter, state) @ table.head_weight().T
    for k in range(GAMMA):
        row = proposal.distribution.dense(k, VOCAB)
        assert set(row.nonzero().squeeze(1).tolist()) <= set(base[k].topk(4).indices.tolist())
        assert float(row.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(
        proposal.distribution.of(proposal.draft_tokens),
        torch.stack([proposal.distribution.dense(k, VOCAB)[t] for k, t in enumerate(proposal.draft_tokens)]),
    )


def test_confidence_is_of_the_prefix_alone() -> None:
    made, table = model(), target()
    drafter = DsparkDrafter(made, table)
    state = fed(drafter, torch.randn(12, 2 * HIDDEN), [12])
    proposals = [propose(drafter, state, SamplingParams(temperature=3.0), seed=seed) for seed in range(40)]
    for k in range(GAMMA):
        by_prefix: dict[tuple[int, ...], set[float]] = {}
        for p in proposals:
            by_prefix.setdefault(tuple(p.draft_tokens[:k].tolist()), set()).add(round(float(p.confidence[k]), 6))
        assert all(len(values) == 1 for values in by_prefix.values())
    with torch.no_grad():
        first = proposals[0]
        prev = torch.cat((torch.tensor([7]), first.draft_tokens[:-1]))
        inputs = torch.cat((states_of(drafter, state), made.markov_head.embed(prev)), 1)
        torch.testing.assert_close(first.confidence, made.confidence_head(inputs).sigmoid(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "dflash, anchor's slot given", "gemma4"])
def test_a_limit_runs_a_shorter_block(name: str) -> None:
    """The states of a limited proposal are those of a training block that ends as early."""
    made, table = model(**SHAPES[name]), target()
    drafter = DsparkDrafter(made, table)
    features = torch.randn(12, 2 * HIDDEN)
    state = fed(drafter, features, [12])
    for size in (1, 2, 4):
        expected = training_form(made, table, features, size)
        torch.testing.assert_close(states_of(drafter, state, size), expected, rtol=2e-4, atol=2e-4)
        proposal = propose(drafter, state, SAMPLED, limit=size)
        assert proposal.block == size
        assert proposal.confidence is None or proposal.confidence.shape == (size,)
    assert propose(drafter, state, SAMPLED, limit=0).block == 0


def test_past_its_own_context_limit_it_stops_drafting() -> None:
    drafter = DsparkDrafter(model(max_position_embeddings=20), target())
    assert propose(drafter, fed(drafter, torch.randn(15, 2 * HIDDEN), [15]), SAMPLED).block == GAMMA
    assert propose(drafter, fed(drafter, torch.randn(16, 2 * HIDDEN), [16]), SAMPLED).block == 0
    assert propose(drafter, fed(drafter, torch.randn(50, 2 * HIDDEN), [18, 5, 27]), SAMPLED).block == 0


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_target_layers"])
def test_a_drafter_of_another_target_is_refused_by_field(field: str) -> None:
    changes = {"vocab_size": VOCAB + 1, "hidden_size": HIDDEN + 8, "num_target_layers": 7}
    with pytest.raises(CheckpointError, match=field):
        DsparkDrafter(model(**{field: changes[field]}), target())
