"""The scheduler `skip` for one request: a bundle whose drafter sits rounds out while its drafts keep dying."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chat import BLOCK, save_chat_model, save_random_drafter

from dspark.bundle import Bundle, check_scheduler
from dspark.core import SamplingParams
from dspark.errors import ConfigError
from dspark.maths.scheduling import FixedScheduler
from dspark.models.skipping_drafter import SkippingDrafter
from dspark.schedule_files import Profile, Setting, drafter_fingerprint, folder_fingerprint


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("skip")
    model, drafter = save_chat_model(folder / "model"), save_random_drafter(folder / "drafter")
    return Bundle.load(str(model), str(drafter), dtype="float32", device="cpu")


def answered(bundle: Bundle) -> tuple[tuple[int, ...], list[int]]:
    """An answer, and how many drafts each of its rounds had."""
    ids = bundle.prompt_ids("Say something long.")
    settings = {"sampling": SamplingParams(), "max_new_tokens": 60}
    done = bundle.answer(ids, scheduler=FixedScheduler(), **settings).finish()
    return done.token_ids, [len(each.draft_tokens) for each in done.rounds]


def test_bad_drafts_are_left_out_and_the_text_stays(bundle: Bundle) -> None:
    scheduled = bundle.scheduled("skip")
    skipping = scheduled.bundle
    assert isinstance(skipping.drafter, SkippingDrafter) and skipping.drafter.policy.break_even > 0
    assert isinstance(scheduled.scheduler, FixedScheduler)
    assert skipping.scheduled("skip").bundle is skipping  # measured once
    (plain, always), (same, sometimes) = answered(bundle), answered(skipping)
    assert plain == same
    assert sum(map(bool, sometimes)) < 0.7 * sum(map(bool, always))


def a_profile(bundle: Bundle) -> Profile:
    """A pass of one token takes 10 ms, one of a whole block 12 ms, drafting 3 ms."""
    return Profile(
        model=bundle.model,
        setting=Setting.of(bundle.target, model_fingerprint=folder_fingerprint(bundle.folder)),
        contexts=(100,),
        tokens_per_request=BLOCK + 1,
        sps=((0.0, 100.0, *(100.0 for _ in range(BLOCK - 1)), 1 / 0.012),),
        drafter=bundle.drafter.name,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        draft_requests=(1,),
        draft_seconds=(0.003,),
        repeats=3,
    )


def test_a_profile_says_where_drafting_breaks_even(bundle: Bundle, tmp_path: Path) -> None:
    a_profile(bundle).write(tmp_path / "profile.json")
    drafter = bundle.scheduled("skip", profile=tmp_path / "profile.json").bundle.drafter
    assert isinstance(drafter, SkippingDrafter) and drafter.policy.break_even == pytest.approx(0.5)


def test_every_other_rule_leaves_the_drafter_as_it_is(bundle: Bundle) -> None:
    fixed = bundle.scheduled("fixed", verify_len=2)
    assert fixed.bundle is bundle and fixed.scheduler == FixedScheduler(2)
    assert bundle.scheduled("greedy").bundle is bundle


def test_refusals(bundle: Bundle) -> None:
    nothing: dict[str, None] = {"verify_len": None, "threshold": None}
    check_scheduler("skip", **nothing, profile=Path("profile.json"))
    with pytest.raises(ConfigError, match="the skip scheduler would not read"):
        check_scheduler("skip", **nothing, calibration=Path("calibration.json"))
    with pytest.raises(ConfigError, match="verify_len is 3, which only the fixed scheduler uses, not skip"):
        check_scheduler("skip", verify_len=3, threshold=None)
    undrafted = Bundle.load(bundle.model, "none", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="which proposes nothing"):
        undrafted.scheduled("skip")
