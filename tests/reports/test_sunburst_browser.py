"""The sunburst pages in a browser that has no network: their rings are there, and names do nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from browser import Browser
from profiler_wrapper.analysis.model import MemoryUse
from profiler_wrapper.reports.sunburst import PAGES, write_page, write_script
from sample_memory import MIB, llama_memory, memory_at_peak, owner
from sample_results import llama

pytestmark = pytest.mark.full

AWKWARD = ("<b>bold</b>", "</script><script>document.title='ran'</script>", 'quo"te', "<img src=x onerror=alert(1)>")


def opened(browser: Browser, use: MemoryUse, page: str, directory: Path) -> str:
    """The page's elements after its scripts have run."""
    analysis = replace(llama(2), memory_use=use)
    write_script(analysis, directory / "plotly.min.js")
    write_page(analysis, directory / "page.html", page=page)
    shown = browser.open(directory / "page.html")
    shown.wait("document.querySelectorAll('g.slice').length >= 3")
    assert shown.problems == []
    elements = shown.evaluate("document.documentElement.outerHTML")
    shown.close()
    return str(elements)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_rings(browser: Browser, page: str, tmp_path: Path) -> None:
    elements = opened(browser, llama_memory(2), page, tmp_path)
    assert len(re.findall(r'<g class="slice', elements)) >= 3
    assert PAGES[page][0] in elements


def test_names_do_nothing_and_are_shown(browser: Browser, tmp_path: Path) -> None:
    use = memory_at_peak(tuple(owner("params", MIB, name=name) for name in AWKWARD))
    elements = opened(browser, use, "params", tmp_path)
    assert "<title>Parameters and buffers" in elements
    assert "<img" not in elements
    drawn = elements.split('class="main-svg"', 1)[1]
    for name in AWKWARD[:1] + AWKWARD[2:3]:  # short enough to be on their sectors
        assert name in unescape(drawn)
