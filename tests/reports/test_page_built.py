"""What the package ships of the page is what its sources make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from checkout import ROOT

pytestmark = pytest.mark.full


def test_the_page_is_built_from_its_sources(tmp_path: Path) -> None:
    """In a copy, so that nothing is installed in the checkout."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    sources = shutil.copytree(ROOT / "page", tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))
    shipped = tmp_path / "profiler_wrapper" / "reports" / "page"
    shutil.copytree(ROOT / "profiler_wrapper" / "reports" / "page", shipped)
    installed = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=sources, capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install what the page is built with: {installed.stderr[-200:]}")
    for command in ("check", "build"):
        made = subprocess.run(
            [npm, "run", command, *(["--", "--check"] if command == "build" else [])],
            cwd=sources,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
