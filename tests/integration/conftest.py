"""What the tests of whole runs share: a browser, pages in it, a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page
from page_tables import Opener, open_page
from profiler_wrapper.analysis.model import Analysis
from sample_views import full_analysis


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser without network. Tests that ask for it are left out where there is no Chromium."""
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def full(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of a result in which every view has something to show."""
    page = open_page(browser, full_analysis(), tmp_path_factory.mktemp("full"))
    yield page
    page.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page of an analysis; at the end says that it asked for nothing and complained of nothing."""
    pages: list[Page] = []

    def opens(analysis: Analysis | str, address: str = "", **how: Any) -> Page:
        pages.append(open_page(browser, analysis, tmp_path, address, **how))
        return pages[-1]

    yield opens
    for page in pages:
        assert page.requests == []
        assert page.problems == []
        assert page.dialogs == []
        page.close()


@pytest.fixture
def case() -> Any:
    """A Llama of two blocks, as `models.build` gives it."""
    import models

    return models.build("llama")
