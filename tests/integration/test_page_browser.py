"""The page in a browser that has no network: every tab of every kind of run, and what its tables and charts do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, NO_CHROMIUM, Browser, Page
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.page import page_html, write_page
from profiler_wrapper.reports.page_data import page_data
from profiler_wrapper.reports.result_json import from_dict, to_dict
from sample_page import AWKWARD, awkward_page, full_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
ROWS = "#view-layers tbody tr"
ROW_HEIGHT = 24


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Opens the page of an analysis; at the end says that it asked for nothing and complained of nothing."""
    pages: list[Page] = []

    def open_page(analysis: Analysis | str, address: str = "", **how: Any) -> Page:
        path = tmp_path / f"report{len(pages)}.html"
        if isinstance(analysis, str):
            path.write_text(analysis, encoding="utf-8")
        else:
            write_page(analysis, path, trace_href="profile_trace.json")
        pages.append(browser.open(path, address=address, **how))
        return pages[-1]

    yield open_page
    for page in pages:
        assert page.requests == []
        assert page.problems == []
        assert page.dialogs == []
        page.close()


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


@pytest.fixture(scope="module")
def shared_layers(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of one result; those that use it come by `layers`."""
    path = tmp_path_factory.mktemp("full") / "report.html"
    write_page(full_page(), path, trace_href="profile_trace.json")
    return browser.open(path, address="layers")


@pytest.fixture
def layers(shared_layers: Page) -> Page:
    """The view Layers as it is when first opened."""
    shared_layers.to_front()
    shared_layers.evaluate("location.hash = '#layers'")
    shared_layers.wait("!document.querySelector('#view-layers').hidden && location.hash === '#layers'")
    shared_layers.click("#view-layers .segments button[data-id=total]")
    shared_layers.evaluate(
        "(() => { const { table } = document.querySelector('#view-layers .table');"
        " table.selected = null; table.sort = null; table.search(''); })()"
    )
    assert shared_layers.problems == [] and shared_layers.requests == []
    return shared_layers


def names_shown(page: Page) -> list[str]:
    """Names in the first column of the layer table, in order."""
    return [text.split("\n")[0] for text in page.texts(f"{ROWS} td:first-child .name")]


def test_every_tab_of_a_full_result(opened: Opener) -> None:
    page = opened(full_page())
    assert_every_tab_opens(page)
    page.evaluate("page.goto('overview')")
    widths = page.evaluate(
        "[...document.querySelectorAll('#view-overview .parts')]"
        ".map(bar => [...bar.children].reduce((sum, piece) => sum + parseFloat(piece.style.width), 0))"
    )
    assert widths == pytest.approx([100.0] * 4, abs=0.01)  # three steps, and the classes of one phase


def test_a_result_of_json_alone_draws_the_same() -> None:
    analysis = full_page()
    again = from_dict(json.loads(json.dumps(to_dict(analysis))))
    assert page_data(again) == page_data(analysis)


def test_layers_are_told_with_the_odd_one(opened: Opener) -> None:
    page = opened(full_page(8, odd=5), "layers")
    assert names_shown(page) == [
        "LlamaForCausalLM", "model", "embed_tokens", "layers.{0..7}", "norm", "lm_head",
        "(optimizer)", "(unattributed) no launch found",
    ]  # fmt: skip
    group = page.text(f"{ROWS}.group td:first-child")
    # By hand: 10 + 100 + 200 + 3 us forward, twice that backward: 939 us; the odd one has twice 310 us, and 3 us.
    assert "8×, median 0.939 ms (0.939–1.869)" in group
    assert "odd: layers.5 +99 %" in group
    assert page.count("#view-layers .bars rect.odd") == 3  # forward, backward, attention
    page.click(f"{ROWS}.group a.odd")
    page.wait(f"document.querySelector('{ROWS}.selected .name')?.innerText === 'layers.5'")


def test_sorting(layers: Page) -> None:
    page = layers
    in_order = names_shown(page)
    page.click("#view-layers th[data-key=time] button")
    assert page.evaluate("document.querySelector('#view-layers th[data-key=time]').ariaSort") == "descending"
    # The first level, then what is below the first of it: layers 5.016 ms, lm_head, embedding, norm.
    assert names_shown(page)[:3] == ["LlamaForCausalLM", "model", "layers.{0..3}"]
    assert names_shown(page)[3:6] == ["embed_tokens", "norm", "lm_head"]
    page.click("#view-layers th[data-key=time] button")
    assert names_shown(page)[:2] == [
        "(unattributed) no launch found",
        "(optimizer)",
    ]
    page.click("#view-layers th[data-key=time] button")
    assert names_shown(page) == in_order


def test_own_time_is_a_flat_list_that_adds_up(layers: Page) -> None:
    page = layers
    page.click("#view-layers .segments button[data-id=self]")
    names = names_shown(page)
    assert names[0] == "model.layers.2.mlp"  # 200 us twice over, forward and twice that backward
    assert "layers.{0..3}" not in names
    assert page.text("#view-layers .sum").startswith("✓ All rows")


def test_searching_and_collapsing(layers: Page) -> None:
    page = layers
    page.evaluate("document.querySelector('#view-layers input').focus()")
    page.type("layers.2.mlp")
    page.wait("location.hash === '#layers/layers.2.mlp'")
    assert names_shown(page) == ["LlamaForCausalLM", "model", "layers.{0..3}", "layers.2", "mlp"]
    assert page.text("#view-layers .shown") == "1 of 24 rows match"
    page.evaluate("page.goto('layers', 'nothing like it')")
    page.wait("document.querySelector('#view-layers td.wide')")
    assert "nothing like it" in page.text("#view-layers td.wide")
    page.evaluate("page.goto('layers')")
    page.wait(f"document.querySelectorAll('{ROWS}').length === 8")
    page.click(f"{ROWS}.group .fold")
    assert names_shown(page)[3:8] == ["layers.{0..3}", "layers.0", "layers.1", "layers.2", "layers.3"]
    page.click(f"{ROWS} .fold")
    assert names_shown(page)[0] == "LlamaForCausalLM"
    assert len(names_shown(page)) == 3  # the root, what is outside, what has no layer


def test_a_narrow_window_leaves_columns_out(layers: Page) -> None:
    """What matters most stays in sight without scrolling, and a wide window has all of it again."""
    heads = "[...document.querySelectorAll('#view-layers th')].map(one => one.dataset.key)"
    overflow = "(one => one.scrollWidth - one.clientWidth)(document.querySelector('#view-layers .scroller'))"
    layers.resize(2600, 768)
    layers.wait(f"{heads}.includes('calls')")
    everything = layers.evaluate(heads)
    try:
        for width in (1200, 1000):
            layers.resize(width, 768)
            layers.wait(f"{overflow} === 0 && {heads}.length < {len(everything)}")
            shown = layers.evaluate(heads)
            assert {"label", "time", "share", "forward", "backward", "retained", "peak"} <= set(shown)
            left = [key for key in everything if key not in shown]
            assert left and len(layers.texts("#view-layers .shown")[1].split(", ")) == len(left)
        csv = layers.evaluate("document.querySelector('#view-layers .table').table.csv()").split("\r\n")[0]
        assert csv == ",".join(f'"{key}"' for key in everything)
        layers.resize(2600, 768)
        layers.wait(f"{heads}.length === {len(everything)}")
    finally:
        layers.resize(1366, 768)


@pytest.mark.parametrize("part", ["parents_of_layers", "layer_groups"])
def test_layers_whose_order_cannot_be_made(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Without groups the layers are shown one by one; without parents their view says why, and the others work."""

    def fails(analysis: Analysis) -> None:
        raise KeyError("model.layers.7")

    monkeypatch.setattr(f"profiler_wrapper.reports.page_data.{part}", fails)
    write_page(full_page(), tmp_path / "report.html")
    page = browser.open(tmp_path / "report.html", address="layers")
    assert "KeyError: 'model.layers.7'" in page.text("#view-layers .notice")
    if part == "layer_groups":
        page.evaluate("document.querySelector('#view-layers .table').table.openAll(true)")
        assert "layers.0" in names_shown(page)
        assert "✓" in page.text("#view-layers .sum")
    page.click("#tab-overview")
    page.wait("document.querySelector('#view-overview .parts')")
    page.close()


def test_times_of_many_seconds_are_in_seconds(layers: Page) -> None:
    formatted = "(f => [f.unit, f.text(43_300_000), f.text(1500)])(page.columnFormat('us', [43_300_000, 1500]))"
    assert layers.evaluate(formatted) == ["s", "43.300", "0.002"]
    assert layers.evaluate("page.columnFormat('us', [9_900_000]).unit") == "ms"
    assert layers.evaluate("[16, 8.214, 0.001].map(page.columnFormat('number', [16, 8.214]).text)") == [
        "16.00",
        "8.21",
        "<0.01",
    ]


def test_printed_on_white(layers: Page) -> None:
    layers.set_dark(True)
    layers.wait("document.documentElement.dataset.theme === 'dark'")
    layers.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert layers.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    layers.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert layers.evaluate("document.documentElement.dataset.theme") == "dark"
    layers.set_dark(False)


def test_keys(layers: Page) -> None:
    page = layers
    page.evaluate(f"document.querySelector('{ROWS}').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        page.press(key)
    assert page.text(f"{ROWS}.selected .name") == "layers.{0..3}"
    page.press("ArrowRight")
    assert page.evaluate(f"document.querySelector('{ROWS}.selected').ariaExpanded") == "true"
    page.press("ArrowDown")
    assert page.text(f"{ROWS}.selected .name") == "layers.0"
    page.press("ArrowLeft")
    assert page.text(f"{ROWS}.selected .name") == "layers.{0..3}"
    page.press("ArrowLeft")
    assert page.evaluate("document.activeElement.ariaExpanded") == "false"
    page.evaluate("document.getElementById('tab-layers').focus()")
    page.press("ArrowRight")
    page.wait("location.hash === '#overview'")


def test_an_address_leads_to_a_layer(layers: Page) -> None:
    page = layers
    page.evaluate("location.hash = '#layers/model.layers.3.self_attn'")
    page.wait(f"document.querySelector('{ROWS}.selected .name')?.innerText === 'self_attn'")
    page.evaluate("location.hash = '#layers/model.layers.%7B0..3%7D'")
    page.wait(f"document.querySelector('{ROWS}.selected.group')")
    page.evaluate("location.hash = '#layers/model.layers.%7B0..3%7D.mlp'")
    page.wait("document.querySelector('#view-layers .shown').innerText.startsWith('4 of')")
    page.evaluate("location.hash = '#summary'")
    page.click("#view-summary .card .where a")
    page.wait(f"document.querySelector('{ROWS}.selected .name')?.innerText === 'layers.2'")
    page.evaluate("location.hash = '#nowhere/%E0%A4%A'")  # half an escape
    page.wait("!document.querySelector('#view-summary').hidden")


def test_the_icicle_zooms_and_leads_to_the_row(layers: Page) -> None:
    page = layers
    page.evaluate("document.querySelector('.icicle').scrollIntoView()")
    page.wait("document.querySelectorAll('.icicle g.slice').length > 10")
    assert page.evaluate("document.querySelector('.icicle .js-plotly-plot')._fullData[0].ids[0]") == "LlamaForCausalLM"
    tall = "document.querySelector('.icicle g.slice').getBoundingClientRect().height"
    assert page.evaluate(tall) < 60
    before = page.evaluate("document.querySelector('.icicle .js-plotly-plot').calcdata.length")
    assert before == 1
    at = page.evaluate(
        "[...document.querySelectorAll('.icicle g.slice')]"
        ".findIndex(one => one.__data__.data.data.id === 'model.layers.2')"
    )
    page.click(".icicle g.slice", at=int(at))
    page.wait("document.querySelector('.icicle .js-plotly-plot')._fullData[0]._entryDepth > 0")
    page.wait(f"document.querySelector('{ROWS}.selected .name')?.innerText === 'layers.2'")
    page.click("#view-layers .tools button[data-id=backward]")
    page.click("#view-layers .tools button[data-id=retained]")
    page.wait("document.querySelectorAll('.icicle g.slice').length > 5")


def test_light_and_dark(opened: Opener) -> None:
    page = opened(full_page(), "layers", dark=True)
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(21, 24, 28)"
    page.set_dark(False)
    page.wait(f"{paper} === 'rgb(255, 255, 255)'")
    page.click("#theme")
    page.click("#theme")
    assert page.text("#theme") == "Theme: dark"
    assert page.evaluate(paper) == "rgb(21, 24, 28)"


def test_copied_csv_holds_whole_numbers_and_no_formula(opened: Opener) -> None:
    page = opened(awkward_page(), "layers")
    lines = page.evaluate("document.querySelector('#view-layers .table').table.csv()").split("\r\n")
    assert lines[0].startswith('"label","time","share"')
    assert any(line.startswith('"Model.=cmd()') for line in lines)
    rows = "[{a: '=1+1'}, {a: 'b\"c'}]"
    csv = page.evaluate(f"page.csvOf([{{key: 'a', title: 'a', kind: 'text'}}], {rows})")
    assert csv == '"a"\r\n"\'=1+1"\r\n"b""c"\r\n'


def test_a_view_that_fails_says_so_and_the_others_work(opened: Opener, browser: Browser, tmp_path: Path) -> None:
    html = page_html(full_page())
    broken = re.sub(r'"layers":\{"count"', '"layers":{"columns":{"layer":{"text":7}},"count"', html, count=1)
    assert broken != html
    broken = re.sub(
        r'("layers":\{"columns":\{"layer":\{"text":7\}\},"count":\d+),"columns":', r'\1,"was":', broken, count=1
    )
    path = tmp_path / "broken.html"
    path.write_text(broken, encoding="utf-8")
    page = browser.open(path, address="layers")
    assert "Layers could not be shown" in page.text("#view-layers")
    assert page.problems != []  # whoever looks for the reason finds it in the console
    page.click("#tab-overview")
    page.wait("document.querySelector('#view-overview .parts')")
    path.write_text(re.sub(r'(id="data">\{)', r"\1]", html), encoding="utf-8")
    page.go(path)
    assert "cannot be read" in page.text("#views")
    page.close()


def test_a_run_of_which_a_part_failed(opened: Opener) -> None:
    analysis = replace(full_page(), memory={}, steps=(), classes=(), overview=None, summary={}, complete=False, run={})
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
    heights = page.evaluate(f"[...document.querySelectorAll('{ROWS}')].map(row => row.getBoundingClientRect().height)")
    assert len(heights) > len(AWKWARD)
    assert max(heights) <= ROW_HEIGHT
    shown = names_shown(page)
    assert AWKWARD[0] in shown and AWKWARD[2] in shown and "emoji 🧠👩‍🔬" in shown
    assert "line\\nbreak\\ttab" in shown and "nul\\u0000bell\\u0007" in shown
    longest = max(page.evaluate("[...document.querySelectorAll('[title]')].map(one => one.title.length)"))
    assert longest <= 2000
    assert page.evaluate("document.body.innerText.length") < 100_000
    assert page.evaluate(
        "[...document.querySelectorAll('a[href]')].every(a => /^(#|profile_trace.json$)/.test(a.getAttribute('href')))"
    )


def test_awkward_titles_stay_text() -> None:
    for name in AWKWARD:
        html = page_html(full_page(), title=name)
        assert "<script>document.title='ran'" not in html
        assert "<img src=x" not in html
        title = html.split("<title>", 1)[1].split("</title>", 1)[0]
        assert len(title) < 200 and "<" not in title and "\n" not in title


@pytest.mark.parametrize("href", ["javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "vbscript:x"])
def test_a_link_to_the_trace_runs_nothing(href: str) -> None:
    assert href not in page_html(full_page(), trace_href=href)
