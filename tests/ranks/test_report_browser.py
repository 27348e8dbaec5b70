"""The page of a job of many ranks in a browser: every view, what it tells, and names that stay text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from browser import Browser, Page
from profiler_wrapper.ranks.figures import write_ranks_page
from profiler_wrapper.ranks.load import open_ranks
from small_rank_jobs import HOSTILE, write_job

HOSTILE_NAME = "<img src=x>my reader"
pytestmark = pytest.mark.full

VIEWS = ("summary", "timeline", "heat", "ranks", "communication", "layers")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def written(folder: Path, **about: str) -> Path:
    table, page = write_job(folder / "spans.csv", **about), folder / "report.html"
    with open_ranks(table) as (loaded, report):
        write_ranks_page(report, loaded.database, page, trace_href="timeline_trace.json.gz")
    return page


def visit(page: Page, view: str) -> None:
    page.click(f"#tab-{view}")
    page.wait(f"document.querySelector('#view-{view}')")
    if view in ("timeline", "heat"):
        page.wait(f"document.querySelector('#view-{view} .chart[data-drawn] svg')")


def chart(page: Page, view: str, what: str, at: int = 0) -> str:
    """What plotly was given, as JSON."""
    return str(page.evaluate(f"JSON.stringify(document.querySelectorAll('#view-{view} .chart')[{at}].{what})"))


def test_every_view_tells_the_planted_cause(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path))
    page.wait("document.documentElement.dataset.ready")
    sentence = page.text("[data-verdict=rank]")
    assert sentence.startswith("Rank 2 is the straggler: its blocks.1 takes longer")
    assert "50.00 ms" in page.text("#view-summary .figures") and "rank 2, blocks.1" in page.text("#view-summary .table")
    assert page.texts("#tabs [role=tab]") == ["Summary", "Timeline", "Heat maps", "Ranks", "Communication", "Layers"]
    for view in VIEWS[1:]:
        visit(page, view)
    bars = {one["name"]: one for one in json.loads(chart(page, "timeline", "data"))}
    slow = [length for lane, length in zip(bars["forward"]["y"], bars["forward"]["x"], strict=True) if lane == 2]
    assert slow == pytest.approx([60.0] * 3) and set(bars["blocks.1"]["y"]) == {2}
    (heat,) = json.loads(chart(page, "heat", "data"))
    row = page.evaluate("page.data.heat[0].rows.indexOf('forward')")
    assert heat["z"][row] == pytest.approx([0, 0, 50, 0])
    assert set(bars["waiting for others"]["y"]) == {0, 1, 3}, "the slow rank waits for nobody"
    shapes = json.loads(chart(page, "timeline", "layout"))["shapes"]
    assert [one["y0"] for one in shapes if one["type"] == "rect"] == [1.5], "the lane of rank 2 is marked"
    layout = json.loads(chart(page, "heat", "layout"))
    assert "50.0" in heat["text"][row] and heat["text"][row].count("") == 3, "few cells have their numbers in them"
    assert [one["x0"] for one in layout["shapes"]] == [1.5], "the column of rank 2 is framed"
    ranks = page.texts("#view-ranks tbody tr")
    assert len(ranks) == 4 and "▸ 2" in ranks[0] and "60.0" in ranks[0], "who is named comes first"
    small = page.texts("#view-summary .bars figcaption")
    assert len(small) == 2 and small[0].startswith("Self time") and "outlier: rank 2" in small[0]
    assert "Peak memory and MFU are not known: no rank has a result.json" in page.text("#view-summary")
    assert "67.6" in page.text("#view-communication tbody tr") and "blocks.1" in page.text("#view-layers tbody tr")
    assert page.problems == [] and page.requests == []


def test_names_of_no_kind_and_low_scores_are_told(browser: Browser, tmp_path: Path) -> None:
    table = write_job(tmp_path / "spans.csv")
    rows = table.read_text(encoding="utf-8").replace("data,data", f"{HOSTILE_NAME},other").splitlines()
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    page_file = tmp_path / "report.html"
    with open_ranks(table) as (loaded, report):
        write_ranks_page(report, loaded.database, page_file)
    page = browser.open(page_file)
    page.wait("document.documentElement.dataset.ready")
    visit(page, "ranks")
    *ranks, named = page.texts("#view-ranks tbody tr")
    assert "!" in ranks[0] and not any("!" in row for row in ranks[1:]), "the slow rank alone scores low"
    assert named.startswith(HOSTILE_NAME) and "2.000" in named, named
    assert "the mean of the 8 steps that were judged" in page.text("#view-ranks")
    assert "8 steps were judged" in page.text("#view-summary .figures") and "add up" in page.text("#view-summary")
    assert page.problems == [] and page.count("#views img") == 0


def test_hostile_names_are_inert(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path, layer="blocks.1" + HOSTILE, group=HOSTILE), dark=True)
    page.wait("document.documentElement.dataset.ready")
    for view in VIEWS:
        visit(page, view)
    assert page.dialogs == [] and page.problems == [] and page.requests == []
    assert page.count("#views img") == 0 and page.count("#views b img") == 0
    assert "blocks.1</script><img src=x" in page.text("#view-layers tbody")
    assert "\u202e" not in page.evaluate("document.body.innerText")
