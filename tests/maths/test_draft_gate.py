"""The draft gate: never worse than not drafting by its own numbers, and nothing but committed rounds in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dspark.errors import ScheduleError
from dspark.maths import draft_gate, survival_history
from dspark.maths.draft_gate import Consents, ProbeClock, Refusals, choose_depths, could_pay
from dspark.maths.global_scheduling import greedy_lens
from dspark.maths.step_costs import StepCosts, convex_from, interpolated, step_costs
from dspark.maths.survival_history import SurvivalHistory, round_survivals

BLOCK, MOST, OTHERS = 4, 6, 5
TOKENS = MOST * (1 + BLOCK) + OTHERS
seconds = st.floats(1e-3, 1e3)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, MOST), st.integers(0, OTHERS))
def test_it_is_never_below_not_drafting_by_its_own_numbers(data: st.DataObject, requests: int, others: int) -> None:
    survival = data.draw(arrays(float, (requests, BLOCK), elements=st.floats(0, 1))).cumprod(1)
    limits = data.draw(arrays(np.int64, requests, elements=st.integers(0, BLOCK)))
    passes = data.draw(arrays(float, (1, TOKENS + 1), elements=seconds))
    drafts = data.draw(arrays(float, (MOST + 1, BLOCK + 1), elements=st.floats(0, 1e3)))
    drafts = np.maximum.accumulate(np.maximum.accumulate(drafts, 0), 1)  # more of them never take less
    costs = StepCosts(contexts=(10,), passes=passes, drafts=drafts)
    choice = choose_depths(survival, limits, costs, other_tokens=others, context=5.0)
    assert (choice.depth >= 0).all() and (choice.depth <= limits).all()
    assert choice.throughput >= choice.plain
    own = costs.own(context=5.0, other_tokens=others, requests=requests)
    if requests:
        assert choice.plain == pytest.approx(requests / costs.passes[0, requests]), (
            "prompts are nobody's drafts' business"
        )
    if choice.depth.any():  # the quick look refuses nothing that pays
        assert could_pay(survival, limits, costs, other_tokens=others, context=5.0)
    if not choice.depth.any():
        assert choice.throughput == choice.plain
        return
    # what it promises is what its numbers give for the choice it made, over all numbers of drafts
    some, depth = int((choice.depth > 0).sum()), int(choice.depth.max())
    allowed = np.where(np.arange(BLOCK) < choice.depth[:, None], survival, 0.0)
    chances = sorted(allowed[allowed > 0].tolist(), reverse=True)
    promised = max(
        (requests + sum(chances[:c])) / (costs.drafts[m, d] + own[requests + c])
        for c in range(len(chances) + 1)
        for m in range(some, MOST + 1)  # some of the asked may have no room
        for d in range(depth, BLOCK + 1)
    )
    assert promised >= choice.throughput * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, MOST), st.integers(0, OTHERS))
def test_few_drafts_are_weighed_to_the_same_last_bit(data: st.DataObject, requests: int, others: int) -> None:
    chances = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0])
    survival = data.draw(arrays(float, (requests, BLOCK), elements=chances)).cumprod(1)
    limits = data.draw(arrays(np.int64, requests, elements=st.integers(0, BLOCK)))
    passes = data.draw(arrays(float, (1, TOKENS + 1), elements=st.floats(1.0, 1.5))).cumsum(1)
    judged = data.draw(st.none() | st.just(convex_from(passes[0], requests)))
    drafts = data.draw(arrays(float, (MOST + 1, BLOCK + 1), elements=st.floats(0, 0.5)))
    costs = StepCosts(contexts=(10,), passes=passes, drafts=drafts)

    def chosen() -> tuple[list[int], float, float, bool]:
        choice = choose_depths(survival, limits, costs, other_tokens=others, context=5.0, judged=judged)
        could = could_pay(survival, limits, costs, other_tokens=others, context=5.0)
        return choice.depth.tolist(), choice.throughput, choice.plain, could

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_gate, "FEW", 100)
        few = chosen()
        patch.setattr(draft_gate, "FEW", 0)
        assert few == chosen()


@pytest.mark.parametrize("few", [0, 100])
def test_what_is_no_survival_is_refused_however_few(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_gate, "FEW", few)
    costs = step_costs(contexts=[9], passes=[{1: 1.0}], drafts={1: 0.1}, max_tokens=9, max_requests=1, block_size=2)
    for row in ([0.5, 0.6], [0.5, np.nan], [1.5, 0.5], [0.5, -0.1]):
        for asked in (choose_depths, could_pay):
            with pytest.raises(ScheduleError, match="survival"):
                asked(np.array([row]), np.full(1, 2), costs, other_tokens=0, context=1.0)


def test_it_drafts_where_drafts_live_and_passes_are_flat_and_not_where_they_die_or_cost() -> None:
    survival = np.tile(0.9 ** np.arange(1, 5), (4, 1))
    flat = step_costs(
        contexts=[9], passes=[{1: 1.0, 64: 1.1}], drafts={1: 0.1, 6: 0.3}, max_tokens=64, max_requests=6, block_size=4
    )
    limits = np.array([4, 4, 2, 0])
    assert choose_depths(survival, limits, flat, other_tokens=0, context=5.0).depth.tolist() == [4, 4, 2, 0]
    assert not choose_depths(survival * 0.05, limits, flat, other_tokens=0, context=5.0).depth.any()
    steep = step_costs(
        contexts=[9], passes=[{1: 1.0, 64: 64.0}], drafts={1: 1.0, 6: 6.0}, max_tokens=64, max_requests=6, block_size=4
    )
    assert not choose_depths(survival, limits, steep, other_tokens=0, context=5.0).depth.any()
    mixed = np.vstack([survival[:1], survival[:1] * 0.0, survival[:1] * 0.0])
    dear = step_costs(
        contexts=[9], passes=[{1: 1.0, 64: 1.2}], drafts={1: 0.2, 3: 2.0}, max_tokens=64, max_requests=6, block_size=4
    )
    assert choose_depths(mixed, np.full(3, 4), dear, other_tokens=0, context=5.0).depth.tolist() == [4, 0, 0]


def test_prompts_in_the_step_do_not_make_drafts_look_cheap() -> None:
    """A draft that is dear beside decoding requests is as dear beside a prompt that makes the step ten times longer."""
    costs = step_costs(
        contexts=[9],
        passes=[{1: 1.0, 400: 400.0}],
        drafts={1: 0.5, 6: 1.0},
        max_tokens=400,
        max_requests=6,
        block_size=4,
    )
    survival, limits = np.tile(0.6 ** np.arange(1, 5), (6, 1)), np.full(6, 4)
    for others in (0, 60, 300):
        choice = choose_depths(survival, limits, costs, other_tokens=others, context=5.0)
        assert not choice.depth.any() and choice.plain == pytest.approx(1.0)
        assert not could_pay(survival, limits, costs, other_tokens=others, context=5.0)


def test_a_table_too_short_for_the_step_is_refused() -> None:
    costs = step_costs(contexts=[9], passes=[{1: 1.0}], drafts={}, max_tokens=8, max_requests=2, block_size=4)
    with pytest.raises(ScheduleError, match="cover 8 tokens"):
        choose_depths(np.zeros((2, 4)), np.full(2, 4), costs, other_tokens=0, context=1.0)


# --- history ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_a_round_tells_never_rises_and_shows_no_more_than_was_checked(data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 4))
    whole = st.integers(0, BLOCK)
    asked = data.draw(arrays(np.int64, requests, elements=whole))
    proposed = np.minimum(asked, data.draw(arrays(np.int64, requests, elements=whole)))
    verified = np.minimum(proposed, data.draw(arrays(np.int64, requests, elements=whole)))
    accepted = np.minimum(verified, data.draw(arrays(np.int64, requests, elements=whole)))
    confidence = data.draw(st.none() | arrays(float, (requests, BLOCK), elements=st.floats(0, 1)))
    usual = data.draw(arrays(float, BLOCK, elements=st.floats(0, 1))).cumprod()
    told = round_survivals(
        asked=asked, proposed=proposed, verified=verified, accepted=accepted, confidence=confidence, usual=usual
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survival_history, "FEW", 0)
        many = round_survivals(
            asked=asked, proposed=proposed, verified=verified, accepted=accepted, confidence=confidence, usual=usual
        )
    assert np.array_equal(told, many), "few drafts are told on Python's numbers, to the last bit"
    assert ((told >= 0) & (told <= 1)).all() and (told[:, 1:] <= told[:, :-1]).all()
    for r in range(requests):
        assert told[r, : accepted[r]].tolist() == [1.0] * accepted[r]
        if accepted[r] < verified[r]:
            assert not told[r, accepted[r] :].any()
        elif proposed[r] < asked[r]:
            assert not told[r, proposed[r] :].any()


def test_estimates_follow_the_rounds_and_fall_back_to_what_is_usual() -> None:
    history = SurvivalHistory(3, block_size=2, guess=0.5)
    assert history.estimate(np.array([0])).tolist() == [[0.5, 0.25]]
    for _ in range(40):
        history.observe(np.array([0, 1]), np.array([[1.0, 1.0], [0.0, 0.0]]))
    good, bad, new = history.estimate(np.array([0, 1, 2]))
    assert good.min() > 0.85 and bad.max() < 0.15 and new.tolist() == pytest.approx([0.5, 0.5], abs=0.05)
    assert np.allclose(history.confidence(np.array([0, 1])).cumprod(1), history.estimate(np.array([0, 1])))
    for _ in range(500):
        history.rest(np.array([1]))
    assert history.estimate(np.array([1]))[0] == pytest.approx(history.usual, abs=0.01)  # old knowledge has rusted
    history.open(0)
    assert history.estimate(np.array([0]))[0] == pytest.approx(history.usual)


@settings(max_examples=25, deadline=None)
@given(st.lists(arrays(float, (3, BLOCK), elements=st.floats(0, 1)), max_size=12))
def test_estimates_are_survivals(rounds: list[np.ndarray]) -> None:
    history, rows = SurvivalHistory(3, block_size=BLOCK), np.arange(3)
    for confidence in rounds:
        history.observe(rows, confidence.cumprod(1))
        history.rest(rows[:1])
    estimate = history.estimate(rows)
    assert ((estimate >= 0) & (estimate <= 1)).all() and (estimate[:, 1:] <= estimate[:, :-1] + 1e-15).all()


# --- probes ----------------------------------------------------------------------------------------------------------


def test_probes_come_back_in_doubling_pauses_and_take_turns() -> None:
    clock, rows = ProbeClock(4, first_pause=2, longest_pause=8, requests=2), np.arange(4)
    refused, limits = np.zeros(4, dtype=np.int64), np.full(4, 3)
    steps = [clock.due(rows, refused, limits).tolist() for _ in range(30)]
    assert [i for i, probed in enumerate(steps) if probed] == [1, 5, 13, 21, 29]
    assert [probed for probed in steps if probed][:4] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert not len(clock.due(rows, limits, limits))  # all are drafted for: the clock starts again
    again = [clock.due(rows, refused, limits).tolist() for _ in range(2)]
    assert again[0] == [] and len(again[1]) == 2


def test_a_request_without_room_is_never_probed() -> None:
    clock = ProbeClock(2, first_pause=1, longest_pause=1)
    depth, limits = np.zeros(2, dtype=np.int64), np.array([0, 3])
    assert [clock.due(np.arange(2), depth, limits).tolist() for _ in range(3)] == [[1]] * 3


def test_a_probe_takes_no_more_than_its_share_of_the_time() -> None:
    clock, rows = ProbeClock(4, first_pause=2, longest_pause=8, requests=2, share=0.05), np.arange(4)
    refused, limits = np.zeros(4, dtype=np.int64), np.full(4, 3)
    probed = [len(clock.due(rows, refused, limits, cost=1.5)) > 0 for _ in range(300)]
    assert sum(probed) == 10 and probed.index(True) == 29  # a step and a half in thirty
    assert [len(clock.due(rows, refused, limits)) > 0 for _ in range(8)].index(True) == 7, "free ones come as before"
    with pytest.raises(ScheduleError, match="share"):
        ProbeClock(4, share=0.0)


def test_a_refusal_holds_for_some_steps_and_not_where_drafts_may_pay_again() -> None:
    refusals = Refusals(steps=3)
    assert not refusals.holds(4)
    refusals.refuse(4)
    assert [refusals.holds(count) for count in (4, 5, 4, 4)] == [True, True, True, False]
    refusals.refuse(4)
    assert not refusals.holds(3) and refusals.holds(4)  # fewer requests are looked at anew
    refusals.refuse(16)
    assert refusals.holds(14) and not refusals.holds(13)  # but not for one of many that ended
    for _ in range(2):  # or came
        assert refusals.holds(16)
        refusals.come()
    assert not refusals.holds(16)
    refusals.end()
    assert not refusals.holds(4)


def test_a_rest_of_all_is_a_rest_of_each() -> None:
    one, other = (SurvivalHistory(3, block_size=2) for _ in range(2))
    rng, rows = np.random.default_rng(0), np.arange(3)
    for step in range(40):
        some, told = rng.permutation(3)[: rng.integers(1, 4)], rng.random((3, 2)).cumprod(1)
        if step % 3:
            one.rest_all()
            other.rest(rows)
        else:
            one.observe(some, told[: len(some)])
            other.observe(some, told[: len(some)])
        if step == 20:
            one.open(1)
            other.open(1)
    assert one.estimate(rows) == pytest.approx(other.estimate(rows))


# --- costs -----------------------------------------------------------------------------------------------------------


def test_costs_are_measured_points_lines_between_them_and_a_slope_beyond() -> None:
    values = interpolated({1: 1.0, 3: 2.0, 8: 4.5}, 10)
    assert values[[1, 2, 3, 8]].tolist() == [1.0, 1.5, 2.0, 4.5]
    assert values[10] > values[9] > values[8]
    assert interpolated({4: 2.0}, 8).tolist() == [2.0, 2.0, 2.0, 2.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert interpolated({1: 1.0, 2: 1.0}, 4)[4] > 1.0  # nothing is free beyond what was measured
    with pytest.raises(ScheduleError, match="no size"):
        interpolated({}, 3)


def test_steps_per_second_count_the_other_tokens_and_the_drafting() -> None:
    costs = step_costs(
        contexts=[10, 20],
        passes=[{1: 1.0, 9: 9.0}, {1: 2.0, 9: 18.0}],
        drafts={1: 1.0, 2: 1.5},
        draft_depths={1: 0.5, 2: 1.0},
        max_tokens=9,
        max_requests=2,
        block_size=2,
    )
    assert costs.drafting(2, 2) == 1.5 and costs.drafting(2, 1) == 0.75 and costs.drafting(0, 2) == 0.0
    sps = costs.sps(context=15.0, other_tokens=3, requests=1, draft_seconds=1.0)
    assert sps[0] == 0.0 and sps[1] == pytest.approx(1 / (2 * 1 + 1)) and len(sps) == 7  # an anchor as if alone
    assert sps[3] == pytest.approx(1 / (2 * 3 + 1))  # and a draft what it adds
    with pytest.raises(ScheduleError, match="contexts"):
        StepCosts(contexts=(2, 1), passes=np.ones((2, 3)), drafts=np.zeros((1, 1)))
    with pytest.raises(ScheduleError, match="positive"):
        StepCosts(contexts=(2,), passes=np.zeros((1, 3)), drafts=np.zeros((1, 1)))


@settings(max_examples=40, deadline=None)
@given(arrays(float, st.integers(2, 30), elements=st.floats(0.01, 100)), st.integers(0, 8))
def test_the_hull_is_convex_below_the_curve_and_leaves_what_is_before_it(seconds: np.ndarray, start: int) -> None:
    hull = convex_from(seconds, start)
    assert (hull[:start] == seconds[:start]).all() and (hull <= seconds * (1 + 1e-12)).all()
    if len(seconds) - start > 2:
        assert (np.diff(hull[start:], 2) >= -1e-9).all()


def test_the_gate_judges_by_the_rule_that_follows() -> None:
    """On a curve in steps Algorithm 1 stops at the first; over its hull it goes on, and the true time counts."""
    tokens = np.arange(65)
    steps = (1.0 + 0.2 * np.ceil(tokens / 16))[None]
    costs = StepCosts(contexts=(9,), passes=steps, drafts=np.zeros((9, 8)))
    survival = np.tile(0.9 ** np.arange(1, 8), (8, 1))
    limits = np.full(8, 7)
    free = choose_depths(survival, limits, costs, other_tokens=0, context=5.0)
    judged = convex_from(steps[0], 8)
    bound = choose_depths(survival, limits, costs, other_tokens=0, context=5.0, judged=judged)
    assert bound.plain <= bound.throughput <= free.throughput and bound.depth.all()
    rate = 1.0 / judged
    lens = greedy_lens(survival, rate)
    count = int(lens.sum())
    expected = (8 + sum(sorted(survival.ravel().tolist(), reverse=True)[:count])) / steps[0, 8 + count]
    assert bound.throughput == pytest.approx(expected)


def test_consent_is_kept_for_few_requests_for_a_few_steps_and_for_the_same_ones_alone() -> None:
    some, none = np.array([3, 2]), np.array([3, 0])
    consents = Consents(steps=3, requests=2)
    assert consents.held([4, 7]) is None
    consents.keep([4, 7], some)
    assert [consents.held(numbers) is some for numbers in ([4, 7], [4], [4, 7], [4, 7])] == [True, False, True, False]
    consents.keep([4, 7], none)
    assert consents.held([4, 7]) is None
    consents.keep([1, 2, 3], np.array([1, 1, 1]))
    assert consents.held([1, 2, 3]) is None
