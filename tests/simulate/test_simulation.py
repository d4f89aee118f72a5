"""The simulated engine against figures that can be worked out by hand, and against laws of queues."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from simulation_scenes import CERTAIN, NEVER, flat_costs, scene

from dspark.errors import ConfigError
from dspark.simulate.acceptance import AcceptanceModel, ModelledRounds
from dspark.simulate.arrivals import OpenLoop
from dspark.simulate.costs import SyntheticCosts
from dspark.simulate.loop import Engine, EngineShape
from dspark.simulate.sweep import closed_loop, open_loop, trace
from dspark.simulate.ways import ALL, read_way
from dspark.simulate.workload import Lengths, Requests

HERE = EngineShape(seats=4, prefill_tokens=10)


def requests(*rows: tuple[float, int, int]) -> Requests:
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrival=arrival.astype(float), prompt_tokens=prompt, output_tokens=output)


def played(name: str, arrivals: Requests, *, model: AcceptanceModel = CERTAIN, shape: EngineShape = HERE) -> Engine:
    """An engine that has worked off all of ``arrivals``; a step takes 10 ms."""
    engine = Engine(
        read_way(name),
        source=ModelledRounds(model),
        costs=flat_costs(),
        arrivals=OpenLoop(arrivals),
        shape=shape,
        rng=np.random.default_rng(0),
    )
    while engine.step():
        pass
    return engine


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_one_request_by_hand() -> None:
    """25 prompt tokens in chunks of 10 are three steps, the last of which gives a token; six more take six steps."""
    engine = played("none", requests((0.5, 25, 7)))
    assert len(engine.log) == 9 and engine.now == pytest.approx(0.5 + 0.09)
    point = engine.log.point(scheduler="none", loop="trace", load=1.0, seats=4, warm_up=0.0)
    assert point.first_token.p50 == pytest.approx(0.03)
    assert point.throughput == pytest.approx(7 / 0.59) and point.busy == pytest.approx(0.09 / 0.59)
    assert point.batch_tokens == pytest.approx((25 + 6) / 9)
    assert (point.finished, point.steps, point.waiting_at_end) == (1, 9, 0)


def test_certain_drafts_by_hand() -> None:
    """A first token and two full rounds of four make nine; the tenth token needs a round that drafts nothing."""
    engine = played("fixed", requests((0.0, 5, 10)))
    assert len(engine.log) == 4
    point = engine.log.point(scheduler="fixed", loop="trace", load=1.0, seats=4, warm_up=0.0)
    assert point.acceptance_length == pytest.approx(9 / 3) and point.verify_tokens == pytest.approx(9 / 3)
    assert point.committed_per_verified == 1.0 and point.drafted_share == pytest.approx(2 / 3)


def test_prompts_are_worked_off_in_order_beside_the_decoding() -> None:
    """The second prompt waits for the rest of the first one's; its chunk shares the step with a round."""
    engine = played("none", requests((0.0, 15, 3), (0.0, 10, 1)))
    point = engine.log.point(scheduler="none", loop="trace", load=2.0, seats=4, warm_up=0.0)
    assert point.first_token.p5 == pytest.approx(0.02, rel=0.1) and point.first_token.p95 == pytest.approx(
        0.03, rel=0.1
    )
    assert len(engine.log) == 4  # 10, 5 + 5, 5 + a round, a round


def test_who_comes_first_is_served_first() -> None:
    one_seat = EngineShape(seats=1, prefill_tokens=10)
    engine = played("none", requests((0.0, 10, 5), (0.01, 10, 5), (0.02, 10, 5)), shape=one_seat)
    point = engine.log.point(scheduler="none", loop="trace", load=3.0, seats=1, warm_up=0.0)
    # first tokens at 10, 60 and 110 ms
    assert point.first_token.p50 == pytest.approx(0.05) and point.first_token.mean == pytest.approx(
        (10 + 50 + 90) / 3000
    )
    assert engine.now == pytest.approx(0.15) and point.busy == 1.0


@pytest.mark.parametrize("name", ALL)
def test_every_answer_has_exactly_its_tokens(name: str) -> None:
    rng = np.random.default_rng(5)
    arrivals = requests(*((0.004 * i, int(rng.integers(1, 40)), int(rng.integers(1, 30))) for i in range(40)))
    engine = played(name, arrivals, model=AcceptanceModel())
    rows = np.array(engine.log._steps)
    committed = rows[:, 3].sum() + rows[:, 6].sum() + rows[:, 8].sum()
    assert committed == arrivals.output_tokens.sum()
    assert rows[:, 7].sum() == arrivals.prompt_tokens.sum()
    assert all(finished for _, finished, *_ in engine.log._requests) and len(engine.log._requests) == 40


# --- laws ------------------------------------------------------------------------------------------------------------


def test_plain_decoding_goes_at_the_speed_of_its_steps() -> None:
    costs = SyntheticCosts(ns_per_context_token=0.0)
    for users in (1, 8, 200):
        step = float(costs.target_seconds(users, users, requests=users, context=0)[0]) + costs.host_seconds
        point = closed_loop(scene(costs=costs), read_way("none"), users)
        assert point.throughput == pytest.approx(users / step, rel=0.01)
        assert point.user_speed.p50 == pytest.approx(1 / step, rel=0.01) and point.verify_tokens == 1.0


@pytest.mark.parametrize("length", [0, 1, 3])
def test_independent_drafts_have_the_textbook_acceptance_length(length: int) -> None:
    model = AcceptanceModel(conditional=(0.7,) * 3, spread=0.0, sharpness=0.0)
    long = Lengths(output_tokens=5000.0, variety=0.0)  # the ends of answers hardly count
    point = closed_loop(scene(acceptance=model, lengths=long, steps=250), read_way(f"fixed:{length}"), 64)
    assert point.acceptance_length == pytest.approx(sum(0.7**k for k in range(length + 1)), rel=0.02)
    assert point.verify_tokens == pytest.approx(1 + length, rel=0.01)


def test_an_idle_engine_follows_the_offered_load() -> None:
    """Far under capacity nobody waits, throughput is what comes in, and the seats are as full as Little's law says."""
    lengths = Lengths(prompt_tokens=64.0, output_tokens=50.0, variety=0.0)
    plain = scene(costs=flat_costs(), lengths=lengths, requests=150)
    point = open_loop(plain, read_way("none"), 8.0)
    assert point.throughput == pytest.approx(8.0 * 50, rel=0.15) and point.waiting < 0.01
    in_flight = point.seats_used * 32 * point.busy  # mean over all time
    assert in_flight == pytest.approx(8.0 * 0.5, rel=0.15)


def test_too_much_load_queues_up() -> None:
    lengths = Lengths(prompt_tokens=64.0, output_tokens=50.0, variety=0.0)
    point = open_loop(scene(costs=flat_costs(), lengths=lengths, requests=300), read_way("none"), 400.0)
    assert point.waiting_at_end > 100 and point.seats_used > 0.95
    assert point.throughput == pytest.approx(32 * 100, rel=0.15)  # all seats, one token each 10 ms


def test_one_seed_one_result_and_all_ways_meet_the_same_requests() -> None:
    for name in ("gate:lagged", "skip"):
        first, again = (closed_loop(scene(steps=40), read_way(name), 8) for _ in range(2))
        assert repr(first) == repr(again)
    other = closed_loop(scene(steps=40, seed=1), read_way("lagged"), 8)
    assert other.throughput != closed_loop(scene(steps=40), read_way("lagged"), 8).throughput
    many = requests(*((0.01 * i, 10, 20) for i in range(50)))
    points = [trace(scene(), read_way(name), many) for name in ("none", "fixed")]
    assert points[0].load == points[1].load == 50.0


def test_the_paper_s_figures_as_shapes() -> None:
    """Figure 8: the load-aware budget shrinks as users come, the fixed one does not. Figure 7: at an equal speed per
    user, more of them are served than by MTP-1 or without drafts."""
    costs, lengths = SyntheticCosts(draft_us_per_slot=1.0, ns_per_context_token=0.0), Lengths(output_tokens=2000.0)
    users = (1, 16, 64, 256)
    by_name = {
        name: [closed_loop(scene(costs=costs, lengths=lengths, steps=60), read_way(name), n) for n in users]
        for name in ("none", "mtp-1", "fixed", "lagged")
    }
    budgets = [point.verify_tokens for point in by_name["lagged"]]
    assert budgets[0] > 7 and all(a >= b for a, b in pairwise(budgets)) and budgets[-1] < 5
    assert min(point.verify_tokens for point in by_name["fixed"]) > 7
    for other in ("none", "mtp-1"):
        for mine, theirs in zip(by_name["lagged"][:3], by_name[other][:3], strict=True):
            assert mine.user_speed.p50 > 1.1 * theirs.user_speed.p50 and mine.throughput > 1.1 * theirs.throughput
    assert by_name["fixed"][-1].throughput < 0.7 * by_name["none"][-1].throughput
    assert by_name["fixed"][-1].throughput < 0.8 * by_name["lagged"][-1].throughput


def test_guards_leave_hopeless_drafts_alone() -> None:
    """Where no draft ever survives, pauses and gate make drafting rare, and cost little against plain decoding."""
    hopeless = scene(acceptance=NEVER, lengths=Lengths(output_tokens=2000.0), steps=160)
    plain, blind = (closed_loop(hopeless, read_way(name), 8) for name in ("none", "fixed"))
    assert blind.throughput < 0.9 * plain.throughput
    for name in ("skip", "gate:lagged"):
        guarded = closed_loop(hopeless, read_way(name), 8)
        assert guarded.drafted_share < 0.15 and guarded.throughput > 0.95 * plain.throughput, name


def test_a_gate_is_never_a_loss_on_a_crowded_machine() -> None:
    """256 users on a curve in steps, where drafting for all costs more than it brings: blind greedy loses a fifth."""
    crowded = scene(lengths=Lengths(output_tokens=2000.0), costs=SyntheticCosts(ns_per_context_token=0.0), steps=60)
    plain, blind = (closed_loop(crowded, read_way(name), 256) for name in ("none", "greedy"))
    assert blind.throughput < 0.85 * plain.throughput
    for name in ("gate:greedy", "gate:lagged"):
        assert closed_loop(crowded, read_way(name), 256).throughput > 0.95 * plain.throughput, name


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="seats is 0"):
        EngineShape(seats=0)
    with pytest.raises(ConfigError, match="concurrency is 0"):
        closed_loop(scene(), read_way("none"), 0)
    with pytest.raises(ConfigError, match="rate is 0"):
        open_loop(scene(), read_way("none"), 0.0)
    with pytest.raises(ConfigError, match=r"warm_up is 1\.0"):
        scene(warm_up=1.0)
