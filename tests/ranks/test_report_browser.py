"""The page of a job of many ranks in a browser: what each part of it tells, and names that stay text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from browser import Browser, Page
from page_tables import assert_reads, table_of
from profiler_wrapper.ranks.figures import write_ranks_page
from profiler_wrapper.ranks.load import open_ranks
from small_rank_jobs import HOSTILE, write_job

HOSTILE_NAME = "<img src=x>my reader"
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def written(folder: Path, **about: str) -> Path:
    table, page = write_job(folder / "spans.csv", **about), folder / "report.html"
    with open_ranks(table) as (loaded, report):
        write_ranks_page(report, loaded.database, page, trace_href="timeline_trace.json.gz")
    return page


def opened(browser: Browser, page_file: Path, **how: bool) -> Page:
    page = browser.open(page_file, **how)
    page.wait("document.documentElement.dataset.ready")
    return page


def test_the_page_tells_the_planted_cause(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, written(tmp_path))
    assert page.text("[data-verdict=rank]").startswith("Rank 2 is the straggler: its blocks.1 takes longer")
    assert "50.00 ms" in page.text("#view-summary .figures")
    assert table_of(page, "Suspects").rows[0]["who"] == "rank 2, blocks.1"
    page.evaluate("document.querySelector('.ranks-timeline').parentElement.querySelector('summary').click()")
    page.wait("[...document.querySelectorAll('table')].some(one => one.ariaLabel?.startsWith('What each rank did'))")
    lanes, steps = table_of(page, "What each rank did"), 8
    lanes.assert_shows("forward", [steps * 10_000, steps * 10_000, steps * 60_000, steps * 10_000])
    lanes.assert_shows("waiting", [steps * 50_000, steps * 50_000, 0, steps * 50_000])
    heat = page.evaluate(
        "(map => Object.fromEntries(map.rows.map((row, i) => [row, map.values_ms[i]])))"
        "(JSON.parse(document.getElementById('data').textContent).heat[0])"
    )
    assert heat["forward"] == pytest.approx([0, 0, 50, 0])
    assert page.text(".heat .legend [aria-live]") == "Highest: rank 2, forward: +50.00 ms"
    ranks = table_of(page, "Ranks")
    assert [ranks.rows[0]["rank"], ranks.count] == ["2", 4], "who is named comes first"
    assert page.texts("table[aria-label=Ranks] [title='named by the verdict']") == ["▸ 2"]
    assert_reads(ranks.rows[0]["forward"], 60_000, ranks.units["forward"])
    assert [float(text) for text in ranks.texts("waiting_ms_per_step")] == [0, 50, 50, 50], (
        "the slow rank waits for nobody"
    )
    small = page.texts(".bars figcaption")
    assert small[0].startswith("Self time") and "outlier: rank 2" in small[0]
    assert "Peak memory and MFU are not known: no rank has a result.json" in page.text("#places")
    assert table_of(page, "Communication").rows[0]["waited"] == "67.6"
    assert table_of(page, "Layers over the ranks").rows[0]["layer"] == "blocks.1"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == [] and page.requests == []
    page.close()


def test_names_of_no_kind_and_low_scores_are_told(browser: Browser, tmp_path: Path) -> None:
    table = write_job(tmp_path / "spans.csv")
    rows = table.read_text(encoding="utf-8").replace("data,data", f"{HOSTILE_NAME},other").splitlines()
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    page_file = tmp_path / "report.html"
    with open_ranks(table) as (loaded, report):
        write_ranks_page(report, loaded.database, page_file)
    page = opened(browser, page_file)
    scores = table_of(page, "Ranks").texts("relative_score")
    assert "!" in scores[0] and not any("!" in score for score in scores[1:]), "the slow rank alone scores low"
    (named,) = table_of(page, "Named spans").rows
    assert named["name"] == HOSTILE_NAME and named["others_ms_per_step"] == "2.000", named
    assert "the mean of the 8 steps that were judged" in page.text("#places")
    assert "8 steps were judged" in page.text("#view-summary .figures") and "add up" in page.text("#places")
    assert page.problems == [] and page.count("#root img") == 0
    page.close()


def test_hostile_names_are_inert(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, written(tmp_path, layer="blocks.1" + HOSTILE, group=HOSTILE), dark=True)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.dialogs == [] and page.problems == [] and page.requests == []
    assert page.count("#root :is(img, b img, script)") == 0
    assert "blocks.1</script><img src=x" in table_of(page, "Layers over the ranks").rows[0]["layer"]
    assert "\u202e" not in page.evaluate("document.body.innerText")
    page.close()
