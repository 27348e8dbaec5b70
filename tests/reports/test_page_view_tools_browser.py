"""The tools of the page's places in a browser: sorting, search, ranges, and the ways from one place to another."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import LAYER_ROWS, open_page, read_number, show, table_of
from profiler_wrapper.reports.page import write_page
from sample_results import llama
from sample_views import full_analysis

pytestmark = pytest.mark.full


def descending(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return known == sorted(known, reverse=True)


@pytest.mark.parametrize(
    ("by", "label", "key"),
    [
        ("op", "Operators", "calls"),
        ("kernel", "Kernels", "mean_us"),
        ("communication", "Collectives", "count"),
        ("waits", "Waits", "count"),
    ],
)
def test_sorting(full: Page, by: str, label: str, key: str) -> None:
    show(full, "kernels", by)
    full.click(f"#view-kernels th[data-key={key}] button")
    assert descending(table_of(full, label).numbers(key))
    assert f"-{key}" in full.evaluate("location.hash")
    full.click(f"#view-kernels th[data-key={key}] button")
    assert descending(table_of(full, label).numbers(key)[::-1])
    full.reload()
    full.wait(f"document.querySelector('th[data-key={key}]')?.ariaSort === 'ascending'")
    assert descending(table_of(full, label).numbers(key)[::-1])


def test_search_and_the_way_to_a_layer(full: Page) -> None:
    show(full, "run")
    show(full, "kernels", "op")
    full.click("#view-kernels input[type=search]")
    full.type("flash")
    full.wait("document.querySelectorAll('#view-kernels tbody tr').length === 1")
    assert table_of(full, "Operators").texts("op") == ["aten::_scaled_dot_product_flash_attention"]
    full.click("#view-kernels tbody td")
    full.wait("document.querySelector('#panel')")
    full.click("#panel a[href^='#layers']")
    full.wait(f"document.querySelector('{LAYER_ROWS}.selected')")
    assert full.text("#panel h2") == "model.layers.0.self_attn"


def test_search_over_all(full: Page) -> None:
    """By keys alone: a slash, a word, an arrow, Enter; Escape lets it go."""
    show(full, "run")
    full.evaluate("document.activeElement.blur()")
    full.call("Input.dispatchKeyEvent", type="keyDown", key="/", text="/")
    full.call("Input.dispatchKeyEvent", type="keyUp", key="/")
    full.wait("document.activeElement.matches('#search input')")
    full.type("layers.2.mlp")
    full.wait("document.querySelectorAll('#found li').length === 1")
    full.press("ArrowDown")
    full.press("Enter")
    full.wait(f"document.querySelector('{LAYER_ROWS}.selected')")
    assert full.text("#panel h2") == "model.layers.2.mlp"
    full.press("Escape")
    full.wait("!document.querySelector('#panel')")


def test_one_selection_everywhere(full: Page) -> None:
    """A layer stays chosen from place to place, and narrows what they show."""
    show(full, "layers", select="layer:model.layers.0.mlp")
    for place in ("kernels", "memory", "run", "step"):
        full.click(f"#tab-{place}")
        full.wait(f"location.hash === '#{place}?select=layer%3Amodel.layers.0.mlp'")
        assert full.text("#panel h2") == "model.layers.0.mlp"
    full.click("#tab-kernels")
    full.wait("document.querySelector('#view-kernels table')")
    assert set(table_of(full, "Kernels by Kernel").texts("name")) == {"sm90_xmma_gemm_bf16"}
    full.click("#panel [aria-label=Close]")
    full.wait("document.querySelectorAll('#view-kernels tbody tr').length > 4 && location.hash === '#kernels'")


def test_the_tabs_by_keys(full: Page) -> None:
    show(full, "step")
    full.evaluate("document.querySelector('#tab-step').focus()")
    full.press("Tab")
    assert full.evaluate("document.activeElement.id") == "tab-layers"
    full.press("Enter")
    full.wait("location.hash === '#layers'")
    unreached = full.evaluate(
        "[...document.querySelectorAll('#root [onclick], #root canvas[role], #root [role=slider]')]"
        ".filter(one => one.tabIndex < 0).length"
    )
    assert unreached == 0


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    for kind, (x, y) in [("mouseMoved", start), ("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end)]:
        button = "none" if kind == "mouseMoved" and (x, y) == start else "left"
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=1)
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], button="left", clickCount=1)


def curve_box(page: Page) -> list[float]:
    curve = "document.querySelector('.memory-curve .u-over')"
    page.evaluate(f"{curve}.scrollIntoView({{block: 'center'}})")
    found: list[float] = page.evaluate(f"(b => [b.x, b.y, b.width, b.height])({curve}.getBoundingClientRect())")
    return found


def test_a_range_of_the_curve_and_back(full: Page) -> None:
    show(full, "memory")
    end = full_analysis().memory["curve"]["end_us"]
    x, y, width, height = curve_box(full)
    drag(full, (x + 0.25 * width, y + 0.5 * height), (x + 0.5 * width, y + 0.5 * height))
    full.wait("[...document.querySelectorAll('h2')].some(one => one.innerText.startsWith('From '))")
    words = next(text for text in full.texts("#view-memory h2") if text.startswith("From "))
    left, right = (read_number(text)[0] for text in words[5:].split(":")[0].split(" to "))
    assert left == pytest.approx(0.25 * end, rel=0.05) and right == pytest.approx(0.5 * end, rel=0.05)
    assert "range=" in full.evaluate("location.hash")
    full.evaluate("[...document.querySelectorAll('button')].find(one => one.innerText === 'Zoom to the range').click()")
    full.wait("[...document.querySelectorAll('button')].some(one => one.innerText === 'Show all')")
    full.evaluate("[...document.querySelectorAll('button')].find(one => one.innerText === 'Leave the range').click()")
    full.wait("location.hash === '#memory'")


def test_a_moment_by_keys(full: Page) -> None:
    show(full, "memory")
    full.evaluate("document.querySelector('.memory-curve [role=slider]').focus()")
    full.press("End")
    full.wait(
        "[...document.querySelectorAll('h2')]"
        ".some(one => one.innerText.startsWith('At ') && !one.innerText.startsWith('At the peak'))"
    )
    alive = table_of(full, "Allocations alive")
    alive.assert_shows("size_bytes", [64 << 20])
    full.press("Escape")
    full.wait("[...document.querySelectorAll('h2')].some(one => one.innerText.startsWith('At the peak'))")


def test_the_trace_is_one_click_away(full: Page) -> None:
    show(full, "run")
    assert full.evaluate("document.getElementById('trace').getAttribute('href')") == "rank0/profile_trace.json.gz"
    assert "ui.perfetto.dev" in full.text("#view-run")


def test_without_a_trace_it_is_said_how_to_keep_it(browser: Browser, tmp_path: Path) -> None:
    write_page(llama(2), tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html")
    page.wait("document.querySelector('.timeline-none')")
    assert page.text(".timeline-none").startswith("There is no timeline here: ")
    show(page, "run")
    assert "trace=False" in page.text("#view-run") and page.count("#trace") == 0
    page.close()


@pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="no pdftoppm to look at a sheet with")
@pytest.mark.parametrize("dark", [False, True])
def test_a_sheet_is_mostly_white(browser: Browser, tmp_path: Path, dark: bool) -> None:
    page = open_page(browser, full_analysis(), tmp_path, "layers", dark=dark)
    printed = page.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
    page.close()
    pdf = tmp_path / "sheet.pdf"
    pdf.write_bytes(base64.b64decode(printed["data"]))
    subprocess.run(["pdftoppm", "-r", "40", "-f", "1", "-l", "1", "-singlefile", pdf, tmp_path / "sheet"], check=True)
    pixels = (tmp_path / "sheet.ppm").read_bytes().split(b"\n255\n", 1)[1]
    white = sum(min(pixels[at : at + 3]) > 250 for at in range(0, len(pixels) - 2, 3)) / (len(pixels) // 3)
    assert 0.7 <= white < 0.99
