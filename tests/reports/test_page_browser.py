"""The frame of the page in a browser without a network: places, themes, names, and what happens where a part fails."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import (
    LAYER_ROWS,
    TRACE,
    Opener,
    assert_all_open,
    names_of_layers,
    open_page,
    read_number,
    show,
)
from profiler_wrapper.reports.page import page_html
from sample_page import AWKWARD, awkward_page, large_page
from sample_results import llama
from sample_views import full_analysis, summary

pytestmark = pytest.mark.full
ROW_HEIGHT = 24


def test_the_bar_of_the_step_adds_up(full: Page) -> None:
    show(full, "step")
    parts = full.evaluate("[...document.querySelectorAll('.step-bar > div')].map(one => Number(one.style.flexGrow))")
    assert sum(parts) == pytest.approx(1)
    full.click("#where summary")
    *lines, total = full.texts("#where tbody tr td:nth-child(2)")
    assert total == "10.00 ms"
    assert sum(read_number(line)[0] for line in lines) == pytest.approx(10_000)


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
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(paper) == "rgb(255, 255, 255)", "paper is white"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")  # what is chosen holds for all pages of this browser
    assert page.text("#theme") == "Theme: system"


def test_what_fails_says_so_and_the_others_work(browser: Browser, tmp_path: Path) -> None:
    html = page_html(full_analysis())
    broken = re.sub(r'("collectives":\{"count":\d+,"columns":)', r'\1{"time_us":7},"was":', html, count=1)
    assert broken != html
    page = open_page(browser, broken, tmp_path, "kernels?by=communication")
    assert "Kernels could not be shown" in page.text("#view-kernels")
    assert page.problems != []  # whoever looks for the reason finds it in the console
    page.click("#tab-layers")
    page.wait(f"document.querySelector('{LAYER_ROWS}')")
    page.close()
    page = open_page(browser, re.sub(r'(id="data">\{)', r"\1]", html), tmp_path)
    assert "cannot be read" in page.text("#root")
    page.close()


def test_a_run_of_which_a_part_failed(opened: Opener) -> None:
    analysis = replace(
        full_analysis(), memory={}, steps=(), classes=(), overview=None, summary={}, complete=False, run={}
    )
    page = opened(analysis)
    assert_all_open(page)
    assert "INCOMPLETE" in page.text("#head")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone(opened: Opener, dark: bool) -> None:
    """Nothing is wider than 400 pixels, and the headline and its fix are whole."""
    said = {"verdict": f"One block takes twice the time of its likes. First fix: {'look there ' * 30}."}
    page = opened(full_analysis(summary={**summary(), **said}), width=400, height=800, dark=dark)
    assert_all_open(page)
    show(page, "step", select="layer:model.layers.2")
    for one in (".big", ".fix", "#panel"):
        assert page.evaluate(
            "(one => one.scrollWidth <= one.clientWidth && one.getBoundingClientRect().right <= 400)"
            f"(document.querySelector('{one}'))"
        ), one
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_five_hundred_blocks(opened: Opener) -> None:
    """Only the rows in sight are drawn."""
    page = opened(large_page(500), "layers")
    page.evaluate(
        "[...document.querySelectorAll('#view-layers button')].find(one => one.innerText === 'Unfold all').click()"
    )
    page.wait("document.querySelector('table[aria-label=Layers]').ariaRowCount > 5000")
    assert page.count(LAYER_ROWS) < 60
    assert_all_open(page)


def test_deep_layers_and_many_steps(opened: Opener) -> None:
    deep = ".".join(["inner"] * 150)
    rows = llama(1, steps=100).layers
    names = [".".join(["inner"] * level) for level in range(1, 151)]
    nested = [
        replace(
            rows[-1],
            layer=name,
            depth=level,
            parent=names[level - 1] if level else None,
            order=1000 + level,
            self_time_ns=0,
        )
        for level, name in enumerate(names)
    ]
    page = opened(replace(llama(1, steps=100), layers=(*rows, *nested)))
    assert page.count(".step-bars button") == 100
    assert_all_open(page)
    show(page, "layers", select=f"layer:{deep}")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_do_nothing_and_can_be_read(opened: Opener) -> None:
    page = opened(awkward_page())
    assert_all_open(page)
    assert page.evaluate("document.title") != "ran"
    assert page.count("#root :is(img, iframe, object, embed, script)") == 0
    for name in AWKWARD[:4]:  # those that are out to do harm
        page.evaluate(f"location.hash = '#layers?select=' + encodeURIComponent({('layer:Model.' + name)!r})")
        page.wait("document.querySelector('#panel h2')")
        page.press("Escape")
        page.click("#tab-layers")
        page.evaluate("document.querySelector('button.search').click()")
        page.wait("document.activeElement.matches('#search input')")
        page.type(name)
        page.wait("document.querySelectorAll('#found li').length > 0")
        page.press("Enter")
        page.wait("!document.querySelector('#search') && document.querySelector('#panel')")
    assert page.evaluate("document.title") != "ran" and page.dialogs == []
    show(page, "layers")
    page.evaluate(
        "[...document.querySelectorAll('#view-layers button')].find(one => one.innerText === 'Unfold all').click()"
    )
    page.wait(f"document.querySelectorAll('{LAYER_ROWS}').length > {len(AWKWARD)}")
    heights = page.evaluate(
        f"[...document.querySelectorAll('{LAYER_ROWS}')].map(row => row.getBoundingClientRect().height)"
    )
    assert max(heights) <= ROW_HEIGHT
    shown = names_of_layers(page)
    assert AWKWARD[0] in shown and AWKWARD[2] in shown and "emoji 🧠👩‍🔬" in shown
    assert "line\\nbreak\\ttab" in shown and "nul\\u0000bell\\u0007" in shown
    longest = max(page.evaluate("[...document.querySelectorAll('[title]')].map(one => one.title.length)"))
    assert longest <= 2000
    assert page.evaluate("document.body.innerText.length") < 100_000
    hrefs = page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert all(href.startswith("#") or href == TRACE for href in hrefs)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.count("#root :is(img, iframe, object, embed, script)") == 0
