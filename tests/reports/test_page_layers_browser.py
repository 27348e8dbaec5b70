"""The view Layers in a browser that has no network: what its table, its icicle and its address do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import LAYER_ROWS, Opener, names_of_layers, open_page, table_of
from profiler_wrapper.analysis.model import Analysis
from sample_page import awkward_page
from sample_views import full_analysis

pytestmark = pytest.mark.full


@pytest.fixture
def layers(full: Page) -> Page:
    """The view Layers as it is when first opened."""
    full.to_front()
    full.evaluate("location.hash = '#layers'")
    full.wait("!document.querySelector('#view-layers').hidden && location.hash === '#layers'")
    full.click("#view-layers .segments button[data-id=total]")
    full.evaluate(
        "(() => { const { table } = document.querySelector('#view-layers .table');"
        " table.selected = null; table.sort = null; table.search(''); })()"
    )
    assert full.problems == [] and full.requests == []
    return full


def test_layers_are_told_with_the_odd_one(opened: Opener) -> None:
    page = opened(full_analysis(8, odd=5), "layers")
    assert names_of_layers(page) == [
        "LlamaForCausalLM", "model", "embed_tokens", "layers.{0..7}", "norm", "lm_head",
        "(optimizer)", "(unattributed) no launch found",
    ]  # fmt: skip
    group = page.text(f"{LAYER_ROWS}.group td:first-child")
    # By hand: 10 + 100 + 200 + 3 us forward, twice that backward: 939 us; the odd one has twice 310 us, and 3 us.
    assert "8×, median 0.939 ms (0.939–1.869)" in group
    assert "outlier: layers.5 +99 %" in group
    assert page.count("#view-layers .bars rect.outlier") == 5  # in each chart
    page.click(f"{LAYER_ROWS}.group a.outlier")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'layers.5'")


def test_sorting(layers: Page) -> None:
    page = layers
    in_order = names_of_layers(page)
    page.click("#view-layers th[data-key=time] button")
    assert page.evaluate("document.querySelector('#view-layers th[data-key=time]').ariaSort") == "descending"
    # The first level, then what is below the first of it: layers 5.016 ms, lm_head, embedding, norm.
    assert names_of_layers(page)[:3] == ["LlamaForCausalLM", "model", "layers.{0..3}"]
    assert names_of_layers(page)[3:6] == ["embed_tokens", "norm", "lm_head"]
    page.click("#view-layers th[data-key=time] button")
    assert names_of_layers(page)[:2] == [
        "(unattributed) no launch found",
        "(optimizer)",
    ]
    page.click("#view-layers th[data-key=time] button")
    assert names_of_layers(page) == in_order


def test_own_time_is_a_flat_list_that_adds_up(layers: Page) -> None:
    page = layers
    page.click("#view-layers .segments button[data-id=self]")
    names = names_of_layers(page)
    assert names[0] == "model.layers.2.mlp"  # 200 us twice over, forward and twice that backward
    assert "layers.{0..3}" not in names
    assert page.text("#view-layers .sum").startswith("✓ All rows")


def test_searching_and_collapsing(layers: Page) -> None:
    page = layers
    page.evaluate("document.querySelector('#view-layers input').focus()")
    page.type("layers.2.mlp")
    page.wait("location.hash === '#layers/layers.2.mlp'")
    assert names_of_layers(page) == ["LlamaForCausalLM", "model", "layers.{0..3}", "layers.2", "mlp"]
    assert page.text("#view-layers .shown") == "1 of 24 rows match"
    page.evaluate("page.goto('layers', 'nothing like it')")
    page.wait("document.querySelector('#view-layers td.wide')")
    assert "nothing like it" in page.text("#view-layers td.wide")
    page.evaluate("page.goto('layers')")
    page.wait(f"document.querySelectorAll('{LAYER_ROWS}').length === 8")
    page.click(f"{LAYER_ROWS}.group .fold")
    assert names_of_layers(page)[3:8] == ["layers.{0..3}", "layers.0", "layers.1", "layers.2", "layers.3"]
    page.click(f"{LAYER_ROWS} .fold")
    assert names_of_layers(page)[0] == "LlamaForCausalLM"
    assert len(names_of_layers(page)) == 3  # the root, what is outside, what has no layer


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


def test_a_layer_without_a_forward_keeps_nothing_and_lacks_nothing(opened: Opener) -> None:
    whole = full_analysis()
    rows = tuple(row for row in whole.layers if row.layer != "lm_head" or row.phase != "forward")
    page = opened(replace(whole, layers=rows), "layers")
    retained = dict(zip(names_of_layers(page), table_of(page, "layers").texts("retained"), strict=True))
    assert retained["norm"] and retained["lm_head"] == ""


def test_layers_whose_rows_cannot_be_made(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their view says why, and the others work."""

    def fails(analysis: Analysis) -> None:
        raise KeyError("model.layers.7")

    monkeypatch.setattr("profiler_wrapper.reports.page.layer_view", fails)
    page = open_page(browser, full_analysis(), tmp_path, "layers")
    assert "KeyError: 'model.layers.7'" in page.text("#view-layers .notice")
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
    page.evaluate(f"document.querySelector('{LAYER_ROWS}').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        page.press(key)
    assert page.text(f"{LAYER_ROWS}.selected .name") == "layers.{0..3}"
    page.press("ArrowRight")
    assert page.evaluate(f"document.querySelector('{LAYER_ROWS}.selected').ariaExpanded") == "true"
    page.press("ArrowDown")
    assert page.text(f"{LAYER_ROWS}.selected .name") == "layers.0"
    page.press("ArrowLeft")
    assert page.text(f"{LAYER_ROWS}.selected .name") == "layers.{0..3}"
    page.press("ArrowLeft")
    assert page.evaluate("document.activeElement.ariaExpanded") == "false"
    page.evaluate("document.getElementById('tab-layers').focus()")
    page.press("ArrowRight")
    page.wait("location.hash === '#overview'")


def test_an_address_leads_to_a_layer(layers: Page) -> None:
    page = layers
    page.evaluate("location.hash = '#layers/model.layers.3.self_attn'")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'self_attn'")
    page.evaluate("location.hash = '#layers/model.layers.%7B0..3%7D'")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected.group')")
    page.evaluate("location.hash = '#layers/model.layers.%7B0..3%7D.mlp'")
    page.wait("document.querySelector('#view-layers .shown').innerText.startsWith('4 of')")
    page.evaluate("location.hash = '#summary'")
    page.click("#view-summary .card .where a")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'layers.2'")
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
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'layers.2'")
    page.click("#view-layers .tools button[data-id=backward]")
    page.click("#view-layers .tools button[data-id=retained]")
    page.wait("document.querySelectorAll('.icicle g.slice').length > 5")


def test_copied_csv_holds_whole_numbers_and_no_formula(opened: Opener) -> None:
    page = opened(awkward_page(), "layers")
    lines = page.evaluate("document.querySelector('#view-layers .table').table.csv()").split("\r\n")
    assert lines[0].startswith('"label","time","share"')
    assert any(line.startswith('"Model.=cmd()') for line in lines)
    rows = "[{a: '=1+1'}, {a: 'b\"c'}]"
    csv = page.evaluate(f"page.csvOf([{{key: 'a', title: 'a', kind: 'text'}}], {rows})")
    assert csv == '"a"\r\n"\'=1+1"\r\n"b""c"\r\n'
