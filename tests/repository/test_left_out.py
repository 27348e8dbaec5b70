"""Where a browser or the recorded traces are missing, one test is skipped with the reason; the others are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

import left_out
from programs import run_program

TESTS = """
    import pytest

    @pytest.fixture
    def browser(): pass

    @pytest.fixture
    def page(browser): pass

    def test_browser(browser): pass
    def test_page(page): pass
    @pytest.mark.needs_traces
    def test_marked(): pass
    @pytest.mark.parametrize("trace", [])
    def test_each(trace): pass
    @pytest.mark.skip(reason="of its own")
    def test_skipped(): pass
    def test_plain(): pass
"""

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("lacks", "left", "taken"),
    [
        ({}, ["browser", "page", "marked", "each[NOTSET]", "skipped", "plain"], []),
        ({"none": left_out.opens_browser}, ["browser", "marked", "each[NOTSET]", "skipped", "plain"], ["page"]),
        ({"none": left_out.reads_traces}, ["browser", "page", "marked", "skipped", "plain"], ["each[NOTSET]"]),
    ],
)
def test_all_but_the_first_that_need_it_are_left_out(
    pytester: pytest.Pytester, lacks: dict[str, object], left: list[str], taken: list[str]
) -> None:
    items = pytester.getitems(TESTS)
    out = left_out.leave_out(items, lacks)  # type: ignore[arg-type]
    assert [item.name for item in out] == [f"test_{name}" for name in taken]
    assert [item.name for item in items] == [f"test_{name}" for name in left]
    reasons = [mark.kwargs["reason"] for item in items for mark in item.iter_markers("skip")]
    assert [reason for reason in reasons if "none" in reason] == ["none; so it is with 1 other tests"] * len(lacks)


@pytest.mark.full
def test_a_run_without_a_browser_skips_one_test(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "reports" / "test_sunburst_browser.py"
    options = ("-n", "0", "-rs", "-m", "full", "-p", "no:cacheprovider")
    done = run_program("-m", "pytest", *options, file, cwd=file.parents[2], environment={"PATH": str(tmp_path)})
    assert "no Chromium on this machine; so it is with" in done.stdout, done.stdout + done.stderr
    assert " 1 skipped, " in done.stdout and " passed" not in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("pytestmark = pytest.mark.full\n", {"full", ""}),
        ("pytestmark = [pytest.mark.full, pytest.mark.timeout(60)]\n", {"full", ""}),
        ("@pytest.mark.full\ndef test_long(): pass\n\ndef test_short(): pass\n", {"full", "not full", ""}),
        ("def test_short(): pass\n", {"not full", ""}),
    ],
)
def test_a_file_is_read_for_the_sizes_that_it_has(tmp_path: Path, text: str, sizes: set[str]) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert {size for size in ("full", "not full", "") if not left_out.has_none(path, size=size)} == sizes
