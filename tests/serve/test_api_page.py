"""The page in a real browser without a window: conversation, colours, live view, key, narrow screens."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from api_run import Running, running, tiny_engine

from dspark.serve.api.app import WEB
from dspark.serve.api.config import ApiConfig

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
browsing = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_whole_by_itself() -> None:
    """Nothing from elsewhere, nothing inline, every element that scripts ask for is there."""
    tags = Tags()
    tags.feed((WEB / "index.html").read_text())
    for tag, attributes in tags.found:
        for name in ("src", "href"):
            path = attributes.get(name)
            assert path is None or (path.startswith("/static/") and (WEB / path.removeprefix("/static/")).is_file())
        assert tag != "script" or attributes.get("src")
        assert tag != "style" and "style" not in attributes and not any(name.startswith("on") for name in attributes)
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for script in WEB.glob("*.js"):
        text = script.read_text()
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text
        assert set(re.findall(r'\$\("([a-z-]+)"\)', text)) <= set(ids), script.name
        for imported in re.findall(r'from "\./([a-z.]+)"', text):
            assert (WEB / imported).is_file()
    for label in [attributes["for"] for tag, attributes in tags.found if tag == "label" and "for" in attributes]:
        assert label in ids


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def until(what: Callable[[], Any], *, seconds: float = 15.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
    return found


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return list(browser.execute_script(script, selector))


def say(browser: Any, text: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)


def complaints(browser: Any) -> list[str]:
    """What the console has against the page."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def open_page(browser: Any, server: Running) -> None:
    browser.get(server.url)
    browser.get_log("browser")  # the last test's page may have missed its server
    browser.execute_script("sessionStorage.clear(); localStorage.clear()")
    browser.refresh()


@browsing
def test_a_conversation(browser: Any) -> None:
    from selenium.webdriver.common.by import By

    with running(tiny_engine(step_seconds=0.01), ApiConfig(max_completion_tokens=90)) as server:
        open_page(browser, server)
        until(lambda: "tiny" in texts(browser, "#about")[0])
        browser.execute_script(
            "const m = document.getElementById('most'); m.value = 30; m.dispatchEvent(new Event('input'))"
        )
        say(browser, "first")
        until(lambda: "30 tokens" in texts(browser, ".foot")[-1])
        own = "".join(texts(browser, ".assistant .draft, .assistant .own"))
        assert own and set(texts(browser, ".assistant .draft")) and "a round" in texts(browser, ".foot")[0]
        say(browser, "second")
        until(lambda: len(texts(browser, ".foot")) == 2 and "30 tokens" in texts(browser, ".foot")[1])
        sent = server.service.model.chat.decode(server.engine.seen[-1].prompt_ids, skip_special_tokens=False)
        visible = "".join(texts(browser, ".assistant:nth-of-type(3) .draft, .assistant:nth-of-type(3) .own"))
        assert visible == own and f"assistant\n{visible}" in sent and sent.count("<|im_start|>user") == 2
        # too many tokens for what the context leaves: the page takes what there is, and stop stops
        server.engine.step_seconds = 0.1
        browser.execute_script("document.getElementById('most').value = ''")
        say(browser, "third")
        until(lambda: server.engine.running)
        until(lambda: len(texts(browser, ".assistant .text")[2]) > 3)
        browser.find_element(By.ID, "stop").click()
        until(lambda: "stopped" in texts(browser, ".foot")[2])
        until(lambda: not server.engine.running)
        assert texts(browser, ".run"), "the live view has seen nothing"
        until(lambda: "#1" in "".join(texts(browser, ".run .facts")))
        until(lambda: texts(browser, "#length")[0][:1].isdigit())
        assert browser.execute_script("return document.querySelectorAll('.run canvas').length") >= 3
        browser.find_element(By.ID, "new").click()
        assert texts(browser, ".message") == []
        say(browser, "x" * 400)
        until(lambda: "context" in texts(browser, ".foot")[0])
        refused = [line for line in complaints(browser) if "400" not in line]
        assert refused == []


@browsing
def test_the_key_is_asked_for_and_text_is_shown_if_allowed(browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with running(config=ApiConfig(api_keys=("secret",), live_text=True, max_completion_tokens=40)) as server:
        open_page(browser, server)
        until(lambda: browser.execute_script("return document.getElementById('key-dialog').open"))
        browser.find_element(By.ID, "key").send_keys("secret", Keys.ENTER)
        until(lambda: "tiny" in texts(browser, "#about")[0])
        browser.execute_script("document.getElementById('most').value = 40")
        say(browser, "<img src=x onerror=alert(1)>")
        until(lambda: "40 tokens" in texts(browser, ".foot")[-1])
        assert browser.execute_script("return document.querySelectorAll('.message img').length") == 0
        spoken = "".join(texts(browser, ".assistant .draft, .assistant .own"))
        until(lambda: spoken == "".join(texts(browser, ".run .words .draft, .run .words .own")))
        assert all("401" in line for line in complaints(browser))


@browsing
def test_a_narrow_screen_in_both_themes(browser: Any) -> None:
    from selenium.webdriver.common.by import By

    metrics = {"width": 360, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    with running(tiny_engine(step_seconds=0.01)) as server:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        try:
            open_page(browser, server)
            until(lambda: "tiny" in texts(browser, "#about")[0])
            grounds = set()
            for theme in ("light", "dark"):
                browser.get(f"{server.url}/?theme={theme}")
                grounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
                for tab in ("chat", "live"):
                    browser.find_element(By.ID, f"tab-{tab}").click()
                    assert browser.find_element(By.ID, tab).is_displayed()
                    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert len(grounds) == 2
            heights = browser.execute_script(
                "return [...document.querySelectorAll('button')].map((b) => b.offsetParent ? b.offsetHeight : 99)"
            )
            assert min(heights) >= 38 and complaints(browser) == []
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_settings_of_browsers_are_told(tmp_path: Any) -> None:
    """The policy allows the page's own files and nothing else."""
    from dspark.serve.api.front import POLICY

    rules = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert rules["default-src"] == "'none'" and rules["script-src"] == rules["style-src"] == "'self'"
    assert "unsafe" not in json.dumps(rules)
