"""The sunburst pages in a browser that has no network: their rings are there, and names do nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from profiler_wrapper.analysis.memory_model import MemoryUse
from profiler_wrapper.reports.sunburst import PAGES, write_page, write_script
from sample_memory import MIB, llama_memory, memory_at_peak, owner
from sample_results import llama

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

AWKWARD = ("<b>bold</b>", "</script><script>document.title='ran'</script>", 'quo"te', "<img src=x onerror=alert(1)>")


def opened(use: MemoryUse, page: str, directory: Path) -> str:
    """The page's elements after its scripts have run."""
    analysis = replace(llama(2), memory_use=use)
    write_script(analysis, directory / "plotly.min.js")
    write_page(analysis, directory / "page.html", page=page)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={directory / 'user'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    command += ["--virtual-time-budget=20000", (directory / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_rings(page: str, tmp_path: Path) -> None:
    elements = opened(llama_memory(2), page, tmp_path)
    assert len(re.findall(r'<g class="slice', elements)) >= 3
    assert PAGES[page][0] in elements


def test_names_do_nothing_and_are_shown(tmp_path: Path) -> None:
    use = memory_at_peak(tuple(owner("params", MIB, name=name) for name in AWKWARD))
    elements = opened(use, "params", tmp_path)
    assert "<title>Parameters and buffers" in elements
    assert "<img" not in elements
    drawn = elements.split('class="main-svg"', 1)[1]
    for name in AWKWARD[:1] + AWKWARD[2:3]:  # short enough to be on their sectors
        assert name in unescape(drawn)
