"""The interactive page of the scheduler (``web/scheduler.html``), as it is or with a measured curve inside."""

from __future__ import annotations

import json
from pathlib import Path

import dspark
from dspark.artifacts import atomic_write_text
from dspark.errors import DataError
from dspark.schedule_files import Profile

PAGE = Path(dspark.__file__).parent / "web" / "scheduler.html"
MARK = '<script type="application/json" id="measured">null</script>'
MOST_TOKENS = 64  # of a curve on the page


def page_with(profile: Profile | None) -> str:
    """The page's text. With a profile, its first curve is offered beside the built-in ones."""
    text = PAGE.read_text(encoding="utf-8")
    if profile is None:
        return text
    if text.count(MARK) != 1:
        raise DataError(f"{PAGE} has no place for a measured curve; install dspark anew")
    curve = [0.0, *profile.sps[0][1 : MOST_TOKENS + 1]]
    content = {"name": f"{profile.model}, {profile.setting.device}", "sps": curve, "context": profile.contexts[0]}
    held = json.dumps(content).replace("<", "\\u003c")  # a name must not end the element
    return text.replace(MARK, MARK.replace("null", held))


def write_page(path: Path, text: str) -> None:
    """Write a page in one step."""
    atomic_write_text(path, text)
