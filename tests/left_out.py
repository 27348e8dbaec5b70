"""What is not run: tests that lack something on this machine, as one that is skipped; files of the other size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from browser import CHROMIUM, NO_CHROMIUM
from shared_traces import NO_TRACES, TRACES


def opens_browser(item: pytest.Item) -> bool:
    """Whether it asks for the fixture `browser`, itself or by another."""
    return "browser" in getattr(item, "fixturenames", ())


def reads_traces(item: pytest.Item) -> bool:
    """Whether it is marked so, or is parametrised over the traces, of which there are none."""
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skip")]
    is_empty = any(reason.startswith("got empty parameter set") for reason in reasons)
    return is_empty or item.get_closest_marker("needs_traces") is not None


def what_lacks() -> dict[str, Callable[[pytest.Item], bool]]:
    """What this machine has not, and which tests need it."""
    found = {} if CHROMIUM else {NO_CHROMIUM: opens_browser}
    return found | ({} if TRACES.is_dir() else {NO_TRACES: reads_traces})


def leave_out(items: list[pytest.Item], lacks: dict[str, Callable[[pytest.Item], bool]]) -> list[pytest.Item]:
    """Take out of `items` all that need what is not there, but for the first, which is skipped; give what was taken."""
    left_out: list[pytest.Item] = []
    for what, needs in lacks.items():
        first, *others = [item for item in items if needs(item)] or [None]
        if first is not None:
            first.add_marker(pytest.mark.skip(reason=f"{what}; so it is with {len(others)} other tests"), append=False)
        left_out += others
        items[:] = [item for item in items if item not in others]
    return left_out


def has_none(path: Path, *, size: str) -> bool:
    """Whether no test of the file has this size, `full` or `not full`, as its text says."""
    text = path.read_text(encoding="utf-8")
    if size == "full":
        return "mark.full" not in text
    return size == "not full" and re.search(r"^pytestmark = \[?pytest\.mark\.full\b", text, re.MULTILINE) is not None
