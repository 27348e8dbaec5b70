"""What npm brings to the page: it is built from its sources, and axe has no complaint of what it shows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from browser import Page
from checkout import ROOT
from page_tables import GROUPS, LOOKS, PLACES, Opener, show
from page_traces import QWEN, events_of, with_events
from sample_views import full_analysis
from shared_traces import needs_traces

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the page's sources with what they need, so that nothing is installed in the checkout."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    directory = tmp_path_factory.mktemp("checkout")
    copy = shutil.copytree(ROOT / "page", directory / "page", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "profiler_wrapper/reports/page", directory / "profiler_wrapper/reports/page")
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    installed = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"npm cannot install what the page is built with: {installed.stderr[-200:]}")
    return copy


@pytest.mark.parametrize("command", [["check"], ["build", "--", "--check"]], ids=["types", "built files"])
def test_the_page_is_what_its_sources_make(sources: Path, command: list[str]) -> None:
    made = subprocess.run(["npm", "run", *command], cwd=sources, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr


def complaints(page: Page, axe: str) -> list[str]:
    """Of the rules of axe-core about what is shown now."""
    page.evaluate(f"{axe};0")
    found = json.loads(
        page.evaluate(
            "axe.run().then(one => JSON.stringify({passes: one.passes.length,"
            " violations: one.violations.map(each => `${each.id}: ${each.nodes[0].html}`)}))"
        )
    )
    assert found["passes"] > 10
    violations: list[str] = found["violations"]
    return violations


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_has_no_complaint(sources: Path, opened: Opener, dark: bool) -> None:
    """Every place, beside the panel of a layer, and every group of Kernels."""
    axe = (sources / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
    page = opened(full_analysis(), dark=dark)
    for place in PLACES:
        show(page, place, select="layer:model.layers.2")
        assert complaints(page, axe) == [], place
    for by in (*GROUPS, *LOOKS):
        show(page, "kernels", by)
        assert complaints(page, axe) == [], by


@needs_traces
def test_axe_has_no_complaint_of_a_timeline(sources: Path, opened: Opener) -> None:
    axe = (sources / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
    page = opened(with_events(QWEN), f"step?range=0-{events_of(QWEN).length_ns}")
    assert page.count(".timeline-range") == 1
    assert complaints(page, axe) == []
