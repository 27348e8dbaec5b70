"""What the tests of pages in a browser share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import CHROMIUM, NO_CHROMIUM, Browser, Page
from page_tables import opened
from sample_views import full_analysis


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without network; skips the test where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def full(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a result in which every view has something to show."""
    return opened(browser, full_analysis(), tmp_path_factory.mktemp("full"))
