"""The interactive page: its arithmetic against the Python schedulers, and its use by keyboard, mouse and touch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium

from dspark.errors import ConfigError
from dspark.maths.global_scheduling import (
    admit_likeliest,
    choose_capacity,
    greedy_lens,
    survivals,
)
from dspark.schedule_files import Profile, Setting
from dspark.simulate import desk
from dspark.simulate.page import MARK, PAGE, page_with

PHONE = (360, 740)
BOX = "const b = arguments[0].getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with chromium() as driver:
        driver.get(PAGE.as_uri())
        yield driver
        severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not severe


# --- arithmetic ------------------------------------------------------------------------------------------------------

DECIDE = """
const { rules } = dspark;
return arguments[0].map(({ now, then, sps }) => {
  const survival = rules.survivals(now), before = rules.survivals(then);
  const order = rules.order(survival), greedy = rules.greedy(survival, sps);
  return {
    survival, greedy, lagged: rules.lagged(survival, before, sps), retrospective: rules.retrospective(survival, sps),
    capacity: rules.capacity(before, sps, now.length), expected: rules.expected(survival, greedy),
    throughputs: rules.throughputs(order, now.length, sps),
  };
});
"""


def random_case(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Confidences with ties and certainties among them, on any curve at all."""
    requests, block = int(rng.integers(1, 5)), int(rng.integers(1, 8))
    now, then = rng.uniform(0.0, 1.0, (2, requests, block))
    if rng.random() < 0.5:
        now, then = np.round(now * 4) / 4, np.round(then * 4) / 4
    return {"now": now, "then": then, "sps": rng.uniform(0.2, 1.2, requests * (1 + block) + 1)}


def test_its_arithmetic_is_the_schedulers_own(page: Any) -> None:
    rng = np.random.default_rng(11)
    cases = [random_case(rng) for _ in range(400)]
    found = page.execute_script(DECIDE, [{name: values.tolist() for name, values in case.items()} for case in cases])
    for case, js in zip(cases, found, strict=True):
        survival, before, sps = survivals(case["now"]), survivals(case["then"]), case["sps"]
        requests = len(survival)
        assert js["survival"] == survival.tolist()
        assert js["greedy"] == greedy_lens(survival, sps).tolist()
        capacity = choose_capacity(before, sps, requests)
        assert js["capacity"] == capacity and js["lagged"] == admit_likeliest(survival, capacity).tolist()
        best = choose_capacity(survival, sps, requests)  # by today's survivals: what no engine may do
        assert js["retrospective"] == admit_likeliest(survival, best).tolist()
        gains = np.sort(survival[survival > 0])[::-1]
        expected = np.cumsum(np.concatenate(([float(requests)], gains)))
        assert js["throughputs"] == (expected * sps[requests : requests + len(expected)]).tolist()
        mine = sum(float(row[:length].sum()) for row, length in zip(survival, js["greedy"], strict=True))
        assert js["expected"] == pytest.approx(requests + mine, rel=1e-12)


def first_token(target: float, draft: float, lengths: list[int]) -> float:
    """Chance that A comes out if ``lengths`` drafts are checked after x = A and x = B, by enumeration."""
    p, q = np.array([target, 1 - target]), np.array([draft, 1 - draft])
    residual = np.maximum(p - q, 0.0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    chance = 0.0
    for x in (0, 1):
        kept = min(1.0, p[x] / q[x])
        outcome = kept * np.eye(2)[x] + (1 - kept) * residual if lengths[x] else p
        chance += q[x] * outcome[0]
    return float(chance)


def test_the_bias_is_what_enumeration_says(page: Any) -> None:
    rng = np.random.default_rng(12)
    cases, chances = [], rng.uniform(0.02, 0.98, (300, 4))
    for target, draft, after_a, after_b in chances.tolist():
        sps = [0.0, 1.0, *sorted(rng.uniform(0.35, 0.65, 2).tolist(), reverse=True)]
        cases.append({"target": target, "draft": draft, "ifA": after_a, "ifB": after_b, "sps": sps})
    found = page.execute_script("return arguments[0].map(dspark.rules.bias)", cases)
    biased = 0
    for case, js in zip(cases, found, strict=True):
        sps = np.array(case["sps"])
        first = min(case["target"], case["draft"]) + min(1 - case["target"], 1 - case["draft"])
        for name in ("greedy", "retrospective"):
            lengths = []
            for second in (case["ifA"], case["ifB"]):
                survival = survivals(np.array([[first, second]]))
                best = choose_capacity(survival, sps, 1)
                lengths.append(int(greedy_lens(survival, sps)[0]) if name == "greedy" else best)
            assert js[name]["lengths"] == lengths
            assert js[name]["chance"] == pytest.approx(first_token(case["target"], case["draft"], lengths), abs=1e-12)
        assert js["greedy"]["chance"] == pytest.approx(case["target"], abs=1e-12)  # exact, whatever the numbers
        biased += abs(js["retrospective"]["chance"] - case["target"]) > 0.01
    assert biased > 10


def test_appendix_a(page: Any) -> None:
    preset = page.find_element("xpath", "//button[text()='Appendix A']")
    preset.click()
    assert page.find_element("id", "bias-sentence").text.startswith(
        "The retrospective search checks the first draft only if it is A, so A comes out with chance "
        "0.50 \u00d7 1.00 + 0.50 \u00d7 0.70 = 0.85 instead of 0.70"
    )
    assert "0.85 / 0.15" in page.find_element("id", "chances").text
    rows = [row.text for row in page.find_elements("css selector", "#choice tr")]
    assert rows[1].startswith("greedy 0 1 1.00 1.00 1.00") and rows[3].startswith("retrospective 2 3 2.60 0.45 1.17")
    assert "Greedy checks nothing" in page.find_element("id", "sentence").text


# --- use -------------------------------------------------------------------------------------------------------------


def value(page: Any, r: int, k: int) -> float:
    return float(page.execute_script("return dspark.scene.now[arguments[0]][arguments[1]]", r, k))


def track(page: Any, r: int, k: int) -> Any:
    return page.find_element("css selector", f'.track[data-r="{r}"][data-k="{k}"]')


def test_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    page.find_element("xpath", "//button[text()='Three requests']").click()
    bar = track(page, 0, 0)
    bar.send_keys(Keys.ARROW_LEFT)
    assert value(page, 0, 0) == 0.96 and bar.get_attribute("aria-valuenow") == "0.96"
    bar.send_keys(Keys.PAGE_DOWN, Keys.PAGE_DOWN)
    assert value(page, 0, 0) == 0.76
    bar.send_keys(Keys.ARROW_DOWN)
    assert page.execute_script("return document.activeElement.dataset.k") == "1"
    page.switch_to.active_element.send_keys(Keys.HOME)
    assert value(page, 0, 1) == 0.0
    assert "survival 0.00, checked by" in track(page, 0, 1).get_attribute("aria-valuetext")
    stops = page.execute_script("return document.querySelectorAll('.track[tabindex=\"0\"]').length")
    assert stops == 3  # one stop per request
    point = page.find_element("css selector", '#sps [data-b="1"]')
    before = page.execute_script("return [...dspark.scene.sps]")
    page.execute_script("arguments[0].focus()", point)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.switch_to.active_element.send_keys(Keys.PAGE_DOWN)
    after = page.execute_script("return [...dspark.scene.sps]")
    assert after[2] == pytest.approx(before[2] - 0.11) and after[1] == before[1] and after[3:] == before[3:]


def test_mouse(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page.find_element("xpath", "//button[text()='Three requests']").click()
    bar = track(page, 1, 2)
    width = bar.size["width"]
    ActionChains(page).move_to_element_with_offset(bar, 0, 0).click_and_hold().move_by_offset(width // 4, 2).perform()
    ActionChains(page).release().perform()
    assert value(page, 1, 2) == pytest.approx(0.75, abs=0.02)
    ActionChains(page).move_by_offset(-width // 4, 0).perform()
    assert value(page, 1, 2) == pytest.approx(0.75, abs=0.02)  # let go
    chart = page.find_element("id", "sps")
    before = page.execute_script("return [...dspark.scene.sps]")
    ActionChains(page).move_to_element_with_offset(chart, 0, 30).click().perform()
    after = page.execute_script("return [...dspark.scene.sps]")
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_more_requests_and_the_next_step(page: Any) -> None:
    page.find_element("xpath", "//button[text()='Stale confidences']").click()
    for _ in range(2):
        page.find_element("id", "more").click()
    assert not page.find_element("id", "more").is_enabled()
    assert len(page.find_elements("css selector", ".track")) == 4 * 4
    today = page.execute_script("return dspark.scene.now")
    for _ in range(2):
        page.find_element("id", "next").click()
    assert page.execute_script("return dspark.scene.then") == today
    page.find_element("id", "edit-then").click()
    track(page, 0, 0).send_keys("\ue011")  # Home
    assert page.execute_script("return dspark.scene.then[0][0]") == 0
    page.find_element("id", "edit-now").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(scheme: str) -> None:
    """Nothing is wider than the screen, fingers move the bars, and text stands out in both colour schemes."""
    with chromium(width=PHONE[0], height=PHONE[1]) as driver:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        driver.get(PAGE.as_uri())
        for button in driver.find_elements("css selector", "#presets button"):
            driver.execute_script("arguments[0].click()", button)
            assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        driver.execute_script("dspark.load({requests: 1, block: 2, shape: 'smooth', now: [[0.9, 0.8]]})")
        bar = track(driver, 0, 1)
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
        box = driver.execute_script(BOX, bar)
        x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
        for kind, points in (("touchStart", [(x, y)]), ("touchMove", [(x - 0.2 * box[2], y)]), ("touchEnd", [])):
            touches = [{"x": at[0], "y": at[1]} for at in points]
            driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})
        assert value(driver, 0, 1) == pytest.approx(0.3, abs=0.03)
        assert min(contrasts(driver)) > 4.5


def contrasts(driver: Any) -> list[float]:
    """Contrast of the page's texts with the cards, by WCAG's formula."""
    names = ("--ink", "--soft", "--greedy", "--lagged", "--retro")
    of_page = "getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    card, *colours = driver.execute_script(f"return arguments[0].map((name) => {of_page})", ["--card", *names])

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ np.array([0.2126, 0.7152, 0.0722]))

    return [
        (max(pair) + 0.05) / (min(pair) + 0.05) for pair in ((luminance(colour), luminance(card)) for colour in colours)
    ]


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_needs_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)""", text)
    assert text.count(MARK) == 1


def measured_profile() -> Profile:
    return Profile(
        model="m</script><b>",
        setting=Setting(model_fingerprint="f", implementation="I", dtype="float32", device="cpu: c", threads=1),
        contexts=(128,),
        tokens_per_request=8,
        sps=((0.0, *(40.0 / (1 + 0.1 * i) for i in range(20))),),
        drafter="d",
        drafter_fingerprint="e",
        draft_requests=(),
        draft_seconds=(),
        repeats=3,
    )


def test_a_measured_curve_travels_inside(tmp_path: Path) -> None:
    profile = measured_profile()
    profile.write(tmp_path / "profile.json")
    out = tmp_path / "page.html"
    desk.show_page(out, profile=tmp_path / "profile.json", browser=False)
    assert out.read_text(encoding="utf-8") == page_with(profile)
    with chromium() as driver:
        driver.get(out.as_uri())
        assert driver.execute_script("return dspark.scene.sps.slice(0, 21)") == [*profile.sps[0]]
        assert "Measured: m</script><b>, cpu: c" in driver.find_element("id", "shape").text
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_page_s_place_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk.show_page(None, profile=None, browser=False)
    assert capsys.readouterr().out.strip() == str(PAGE)
    with pytest.raises(ConfigError, match=r"say where with --out page\.html"):
        desk.show_page(None, profile=tmp_path / "profile.json", browser=False)
