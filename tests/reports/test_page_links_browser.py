"""Links of the page: from the verdict to what causes it in three clicks, and none that finds nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from browser import Page
from page_tables import GROUPS, LOOKS, PLACES, Opener, show
from page_traces import B200, DDP, QWEN, RESNET, TIMESFORMER, V100, events_of, with_events, within
from profiler_wrapper.tables.timeline_columns import Timeline
from sample_views import full_analysis
from shared_traces import needs_traces
from timeline_rows import rows

pytestmark = pytest.mark.full

Row = dict[str, Any]
MOST_CLICKS = 3
MOST_PANELS = 3  # of a kind


def selected(page: Page) -> tuple[str, str]:
    """The kind and the name or number of what is selected; of nothing two empty texts."""
    kind, _, name = page.evaluate(
        "new URLSearchParams(location.hash.split('?')[1] ?? '').get('select') ?? ''"
    ).partition(":")
    return kind, name


def most_time(made: Timeline, counts: Callable[[Row], bool]) -> str:
    """The kernel with most time in such rows of the sums."""
    times: Counter[str] = Counter()
    for row in rows(made, "sums"):
        if counts(row):
            times[row["name"]] += row["time_ns"]
    return times.most_common(1)[0][0]


def longest_gap(made: Timeline) -> str:
    return str(int(made.gaps["duration_ns"].argmax()))


@needs_traces
@pytest.mark.parametrize(
    ("name", "headline", "clicks", "cause"),
    [
        (QWEN, "Qwen2Attention", 2, lambda made: ("kernel", most_time(made, lambda row: "Attention" in row["layer"]))),
        (
            RESNET,
            "Communication",
            1,
            lambda made: ("kernel", most_time(made, lambda row: row["class"] == "communication")),
        ),
        (V100, "## forward ##", 2, lambda made: ("kernel", most_time(made, within("## forward ##")))),
        (B200, "idle", 1, lambda made: ("gap", longest_gap(made))),
        (TIMESFORMER, "idle", 1, lambda made: ("gap", longest_gap(made))),
        (DDP, "No layer", 2, lambda made: ("kernel", most_time(made, lambda row: True))),
    ],
)
def test_from_the_verdict_to_its_cause(
    opened: Opener, name: str, headline: str, clicks: int, cause: Callable[[Timeline], tuple[str, str]]
) -> None:
    """The first click is on the headline's share, each other one on the first kernel that is told of what it led to."""
    page = opened(with_events(name))
    assert headline in page.text(".big")
    page.click(".big a")
    done = 1
    while selected(page)[0] not in ("kernel", "gap"):
        assert done < MOST_CLICKS
        page.click(f"{'#panel' if selected(page)[0] else '#where'} a[href*='select=kernel']")
        done += 1
    assert (selected(page), done) == (cause(events_of(name)), clicks)
    assert len(page.text("#panel")) > 100


def assert_found(page: Page, href: str) -> None:
    """What a link leads to is there: its place is open, what it selects is told, and stands in the place's table."""
    place = href.lstrip("#").partition("?")[0]
    page.wait(f"document.querySelector('#view-{place}:not([hidden])')")
    if "select=" not in href:  # what is selected stays
        return
    assert page.evaluate("location.hash") == href
    page.wait("document.querySelector('#panel h2')")
    assert "is not in this run" not in page.text("#panel"), href
    own = {"layers": ("layer",), "kernels": ("kernel", "op")}.get(place, ())
    if selected(page)[0] in own:
        page.wait(f"document.querySelector('#view-{place} tr[aria-selected=true], #view-{place} .notice')")


def links(page: Page) -> list[str]:
    """Addresses within the page of all that can be clicked now."""
    found: list[str] = page.evaluate(
        '[...new Set([...document.querySelectorAll(\'main a[href^="#"], #panel a[href^="#"]\')]'
        ".filter(one => one.offsetParent).map(one => one.getAttribute('href')))]"
    )
    return found


def assert_links_find(page: Page) -> int:
    """Clicks every link of every place, and of the first panels of each kind; gives how many."""
    tried: set[str] = set()
    panels: Counter[str] = Counter()

    def click_all(again: Callable[[], None], *, deeper: bool) -> None:
        again()
        for href in links(page):
            if href in tried:
                continue
            tried.add(href)
            again()
            page.evaluate(
                f"[...document.querySelectorAll('a')].find(one => one.getAttribute('href') === {href!r}).click()"
            )
            assert_found(page, href)
            kind, _ = selected(page)
            panels[kind] += deeper
            if deeper and kind and panels[kind] <= MOST_PANELS:
                click_all(partial(go, page, href), deeper=False)

    for place in PLACES:
        click_all(partial(show, page, place), deeper=True)
    for by in (*GROUPS, *LOOKS):
        click_all(partial(show, page, "kernels", by), deeper=True)
    return len(tried)


def go(page: Page, href: str) -> None:
    page.evaluate(f"location.hash = {href!r}")
    page.wait("document.querySelector('#panel h2')")


@needs_traces
@pytest.mark.parametrize("name", [QWEN, DDP])
def test_no_link_of_a_trace_finds_nothing(opened: Opener, name: str) -> None:
    assert assert_links_find(opened(with_events(name))) > 50


def test_no_link_of_a_result_with_everything_finds_nothing(opened: Opener) -> None:
    assert assert_links_find(opened(full_analysis())) > 20
