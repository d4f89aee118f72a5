"""Headless Chromium for the pages, through selenium.

Where there is none, tests that ask for it are skipped, unless ``DSPARK_BROWSER=1`` says that there must be one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium(*, width: int = 1200, height: int = 900) -> Iterator[Any]:  # Any: selenium has no types here
    """A driver of a browser window of this size, closed at the end; its ``get_log("browser")`` holds the console."""
    reason = _missing()
    if reason is not None:
        if os.environ.get("DSPARK_BROWSER") == "1":
            pytest.fail(f"DSPARK_BROWSER is 1 and {reason}")
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(_binary())
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # the sandbox does not work for root, and containers have a small /dev/shm
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield driver
    finally:
        driver.quit()


def _binary() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def _missing() -> str | None:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if _binary() is None or shutil.which("chromedriver") is None:
        return "there is no chromium with its chromedriver (Debian: chromium chromium-driver)"
    return None
