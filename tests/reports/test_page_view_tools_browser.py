"""The tools of the page's views in a browser: sorting, search, filters, zoom, and the ways from one view to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import show, table_of
from profiler_wrapper.reports.page import write_page
from sample_results import llama

pytestmark = pytest.mark.full


def descending(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return known == sorted(known, reverse=True)


@pytest.mark.parametrize(
    ("view", "key"), [("operators", "calls"), ("kernels", "mean_us"), ("communication", "count"), ("waits", "count")]
)
def test_sorting(full: Page, view: str, key: str) -> None:
    show(full, view)
    full.click(f"#view-{view} th[data-key={key}] button")
    assert descending(table_of(full, view).numbers(key))
    full.click(f"#view-{view} th[data-key={key}] button")
    assert descending(table_of(full, view).numbers(key)[::-1])


def test_search_and_the_way_to_a_layer(full: Page) -> None:
    show(full, "operators")
    full.click("#view-operators input[type=search]")
    full.type("flash")
    full.wait("document.querySelectorAll('#view-operators tbody tr').length === 1")
    assert table_of(full, "operators").texts("op") == ["aten::_scaled_dot_product_flash_attention"]
    assert full.evaluate("location.hash") == "#operators/flash"
    full.click("#view-operators tbody td a")
    full.wait("location.hash.startsWith('#layers/')")
    assert full.evaluate("decodeURIComponent(location.hash)") == "#layers/model.layers.0.self_attn"
    full.evaluate("page.goto('operators', '')")
    full.wait("document.querySelectorAll('#view-operators tbody tr').length === 4")


def test_kernels_of_one_class(full: Page) -> None:
    show(full, "kernels")
    full.click("#view-kernels button[data-part=gemm]")
    assert table_of(full, "kernels").texts("name") == ["sm90_xmma_gemm_bf16"] * 2
    full.click("#view-kernels button[data-part=gemm]")
    assert len(table_of(full, "kernels").rows) == 6
    full.click("#view-kernels button[data-part=unknown]")
    assert table_of(full, "kernels").texts("name") == ["mystery"]
    full.click("#view-kernels button[data-part=unknown]")


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    for kind, (x, y) in [("mouseMoved", start), ("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end)]:
        button = "none" if kind == "mouseMoved" and (x, y) == start else "left"
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=1)
    page.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], button="left", clickCount=1)


def test_zoom_into_the_curve_and_back(full: Page) -> None:
    show(full, "memory")
    chart = "document.querySelector('#view-memory .chart')"
    whole = full.evaluate(f"{chart}.layout.xaxis.range")
    box = f"{chart}.querySelector('.nsewdrag').getBoundingClientRect()"
    full.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    x, y, width, height = full.evaluate(f"(() => {{ const b = {box}; return [b.x, b.y, b.width, b.height]; }})()")
    drag(full, (x + 0.25 * width, y + 0.5 * height), (x + 0.5 * width, y + 0.5 * height))
    full.wait(f"{chart}.layout.xaxis.range[1] < {0.6 * whole[1]}")
    left, right = full.evaluate(f"{chart}.layout.xaxis.range")
    assert left == pytest.approx(0.25 * whole[1], rel=0.05)
    assert right == pytest.approx(0.5 * whole[1], rel=0.05)
    full.click("#view-memory .chart .modebar-btn[data-title='Reset axes']")  # as a double click does
    full.wait(f"{chart}.layout.xaxis.range[1] === {whole[1]}")


def test_an_allocation_is_shown_in_the_curve(full: Page) -> None:
    show(full, "memory")
    rectangles = "document.querySelector('#view-memory .chart').layout.shapes.filter(one => one.type === 'rect')"
    full.evaluate(
        "[...document.querySelectorAll('#view-memory tbody tr')].find(one => one.row?.size_bytes === 16 * 1048576)"
        ".cells[0].click()"
    )
    full.wait(f"{rectangles}.length === 1")
    assert full.evaluate(f"[{rectangles}[0].x0, {rectangles}[0].x1]") == [2.5, 3.75]


def test_the_trace_is_one_click_away(full: Page) -> None:
    show(full, "timeline")
    assert full.evaluate("document.getElementById('trace').getAttribute('href')") == "rank0/profile_trace.json.gz"
    assert "ui.perfetto.dev" in full.text("#view-timeline")


def test_without_a_trace_the_view_says_how_to_keep_it(browser: Browser, tmp_path: Path) -> None:
    write_page(llama(2), tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html", address="timeline")
    page.wait("document.documentElement.dataset.ready")
    assert "trace=False" in page.text("#view-timeline")
    page.close()
