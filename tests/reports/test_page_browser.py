"""The frame of the page in a browser that has no network: tabs, themes, names, and what happens where a part fails."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import LAYER_ROWS, TRACE, Opener, names_of_layers, open_page
from profiler_wrapper.reports.page import page_html
from sample_page import AWKWARD, awkward_page
from sample_views import full_analysis

pytestmark = pytest.mark.full
ROW_HEIGHT = 24


def tabs(page: Page) -> dict[str, bool]:
    """Which views there are, and whether they can be opened."""
    found = page.evaluate(
        "[...document.querySelectorAll('[role=tab]')].map(t => [t.id.slice(4), t.ariaDisabled !== 'true'])"
    )
    return dict(found)


def assert_every_tab_opens(page: Page) -> None:
    """Each says something, or is disabled and says why."""
    views = tabs(page)
    assert views["summary"] and views["layers"]
    for name, enabled in views.items():
        if not enabled:
            assert page.evaluate(f"document.getElementById('tab-{name}').title.length") > 10
            continue
        page.click(f"#tab-{name}")
        page.wait(f"location.hash.startsWith('#{name}') && document.querySelector('#view-{name}:not([hidden])')")
        assert len(page.text(f"#view-{name}")) > 20
        assert not page.evaluate(f"'failed' in document.getElementById('view-{name}').dataset"), name
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"


def test_every_tab_of_a_full_result(full: Page) -> None:
    assert_every_tab_opens(full)
    full.evaluate("page.goto('overview')")
    widths = full.evaluate(
        "[...document.querySelectorAll('#view-overview .parts')]"
        ".map(bar => [...bar.children].reduce((sum, piece) => sum + parseFloat(piece.style.width), 0))"
    )
    assert widths == pytest.approx([100.0] * 4, abs=0.01)  # three steps, and the classes of one phase


def test_light_and_dark(opened: Opener) -> None:
    page = opened(full_analysis(), "layers", dark=True)
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(21, 24, 28)"
    page.set_dark(False)
    page.wait(f"{paper} === 'rgb(255, 255, 255)'")
    page.click("#theme")
    page.click("#theme")
    assert page.text("#theme") == "Theme: dark"
    assert page.evaluate(paper) == "rgb(21, 24, 28)"
    page.click("#theme")  # what is chosen holds for all pages of this browser
    assert page.text("#theme") == "Theme: system"


def test_a_view_that_fails_says_so_and_the_others_work(browser: Browser, tmp_path: Path) -> None:
    html = page_html(full_analysis())
    broken = re.sub(r'"layers":\{"count"', '"layers":{"columns":{"layer":{"text":7}},"count"', html, count=1)
    assert broken != html
    broken = re.sub(
        r'("layers":\{"columns":\{"layer":\{"text":7\}\},"count":\d+),"columns":', r'\1,"was":', broken, count=1
    )
    page = open_page(browser, broken, tmp_path, "layers")
    assert "Layers could not be shown" in page.text("#view-layers")
    assert page.problems != []  # whoever looks for the reason finds it in the console
    page.click("#tab-overview")
    page.wait("document.querySelector('#view-overview .parts')")
    page.close()
    page = open_page(browser, re.sub(r'(id="data">\{)', r"\1]", html), tmp_path)
    assert "cannot be read" in page.text("#views")
    page.close()


def test_a_run_of_which_a_part_failed(opened: Opener) -> None:
    analysis = replace(
        full_analysis(), memory={}, steps=(), classes=(), overview=None, summary={}, complete=False, run={}
    )
    page = opened(analysis)
    assert_every_tab_opens(page)
    assert "INCOMPLETE" in page.text("#head")


def test_names_do_nothing_and_can_be_read(opened: Opener) -> None:
    page = opened(awkward_page())
    assert_every_tab_opens(page)
    assert page.evaluate("document.title") != "ran"
    assert page.count("img, iframe, object, embed, b") == 0
    page.click("#tab-layers")
    page.evaluate("document.querySelector('#view-layers .table').table.openAll(true)")
    heights = page.evaluate(
        f"[...document.querySelectorAll('{LAYER_ROWS}')].map(row => row.getBoundingClientRect().height)"
    )
    assert len(heights) > len(AWKWARD)
    assert max(heights) <= ROW_HEIGHT
    shown = names_of_layers(page)
    assert AWKWARD[0] in shown and AWKWARD[2] in shown and "emoji 🧠👩‍🔬" in shown
    assert "line\\nbreak\\ttab" in shown and "nul\\u0000bell\\u0007" in shown
    longest = max(page.evaluate("[...document.querySelectorAll('[title]')].map(one => one.title.length)"))
    assert longest <= 2000
    assert page.evaluate("document.body.innerText.length") < 100_000
    assert page.evaluate(
        "[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))"
        f".every(href => href.startsWith('#') || href === '{TRACE}')"
    )
