"""The place Layers in a browser that has no network: what its table, its icicle and its address do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from browser import Browser, Page
from page_tables import LAYER_ROWS, PLACES, Opener, names_of_layers, open_page, show, table_of
from profiler_wrapper.tables.model import Analysis
from sample_views import full_analysis

pytestmark = pytest.mark.full
COPIED = "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { window.copied = text; }}})"


@pytest.fixture
def layers(full: Page) -> Page:
    """The place Layers as it is when first opened."""
    show(full, "step")  # what was searched and chosen in the tools goes with the place
    show(full, "layers")
    fold(full, "Fold all")
    for _ in range(2):  # the root, and what holds the groups
        full.click(f"{LAYER_ROWS} .fold", at=full.count(f"{LAYER_ROWS} .fold") - 1)
    assert full.problems == [] and full.requests == []
    return full


def fold(page: Page, button: str) -> None:
    page.evaluate(
        f"[...document.querySelectorAll('#view-layers button')].find(one => one.innerText === '{button}').click()"
    )
    page.evaluate("new Promise(resolve => setTimeout(resolve))")


def csv_of(page: Page, place: str = "layers") -> list[str]:
    """What the button of the table copies."""
    page.evaluate(COPIED)
    page.evaluate(
        f"[...document.querySelectorAll('#view-{place} button')].find(one => /^Cop/.test(one.innerText)).click()"
    )
    page.wait("window.copied")
    return str(page.evaluate("window.copied")).split("\r\n")


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
    charts = page.count("#view-layers .bars")
    assert charts and page.count("#view-layers .bars rect.outlier") == charts  # one in each
    page.click(f"{LAYER_ROWS}.group a.outlier")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'layers.5'")


def test_sorting(layers: Page) -> None:
    page = layers
    in_order = names_of_layers(page)
    head = "#view-layers th[data-key=time] button"
    page.click(head)
    assert page.evaluate("document.querySelector('#view-layers th[data-key=time]').ariaSort") == "descending"
    assert page.evaluate("location.hash") == "#layers?sort=layers%3A-time"
    # The first level, then what is below the first of it: layers 5.016 ms, lm_head, embedding, norm.
    assert names_of_layers(page)[:3] == ["LlamaForCausalLM", "model", "layers.{0..3}"]
    assert names_of_layers(page)[3:6] == ["embed_tokens", "norm", "lm_head"]
    page.click(head)
    assert names_of_layers(page)[:2] == ["(unattributed) no launch found", "(optimizer)"]
    page.click(head)
    assert names_of_layers(page) == in_order


def test_own_time_is_a_flat_list_that_adds_up(layers: Page) -> None:
    layers.click("#view-layers .segments button[data-id=self]")
    names = names_of_layers(layers)
    assert names[0] == "model.layers.2.mlp"  # 200 us twice over, forward and twice that backward
    assert "layers.{0..3}" not in names
    assert layers.text("#view-layers .sum").startswith("✓ All rows")


def test_searching_and_folding(layers: Page) -> None:
    page = layers
    page.evaluate("document.querySelector('#view-layers input').focus()")
    page.type("layers.2.mlp")
    page.wait("document.querySelector('#view-layers .shown').innerText === '1 of 24 rows match'")
    assert names_of_layers(page) == ["LlamaForCausalLM", "model", "layers.{0..3}", "layers.2", "mlp"]
    page.type(" nothing like it")
    page.wait("document.querySelector('#view-layers td.wide')")
    assert "nothing like it" in page.text("#view-layers td.wide")
    show(page, "step")
    show(page, "layers")
    assert page.count(LAYER_ROWS) == 8
    page.click(f"{LAYER_ROWS}.group .fold")
    assert names_of_layers(page)[3:8] == ["layers.{0..3}", "layers.0", "layers.1", "layers.2", "layers.3"]
    page.click(f"{LAYER_ROWS} .fold")
    assert names_of_layers(page)[0] == "LlamaForCausalLM"
    assert len(names_of_layers(page)) == 3  # the root, what is outside, what has no layer


def test_a_narrow_window_leaves_columns_out(layers: Page) -> None:
    """What matters most stays in sight without scrolling, and the CSV has all of it."""
    heads = "[...document.querySelectorAll('#view-layers th[data-key]')].map(one => one.dataset.key)"
    overflow = "(one => one.scrollWidth - one.clientWidth)(document.querySelector('#view-layers .scroller'))"
    layers.resize(2600, 768)
    layers.wait(
        "![...document.querySelectorAll('#view-layers .shown')].some(one => one.innerText.startsWith('without'))"
    )
    everything = layers.evaluate(heads)
    try:
        for width in (1200, 1000):
            layers.resize(width, 768)
            layers.wait(f"{overflow} === 0 && {heads}.length < {len(everything)}")
            shown = layers.evaluate(heads)
            assert {"label", "time", "share"} <= set(shown)
            left = [key for key in everything if key not in shown]
            said = [text for text in layers.texts("#view-layers .shown") if text.startswith("without ")]
            assert len(said[0].split(", ")) == len(left)
        columns = csv_of(layers)[0].split(",")
        assert len(columns) >= len(everything) and columns[1] == '"Time [ms]"', "in the units of the table"
        layers.resize(2600, 768)
        layers.wait(f"{heads}.length === {len(everything)}")
    finally:
        layers.resize(1366, 768)


def test_a_layer_without_a_forward_keeps_nothing_and_lacks_nothing(opened: Opener) -> None:
    whole = full_analysis()
    rows = tuple(row for row in whole.layers if row.layer != "lm_head" or row.phase != "forward")
    page = opened(replace(whole, layers=rows), "layers")
    page.click("#view-layers .segments [data-id=memory]")
    retained = dict(zip(names_of_layers(page), table_of(page, "Layers").texts("retained"), strict=True))
    assert retained["norm"] and retained["lm_head"] == ""


def test_layers_whose_rows_cannot_be_made(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their place says why, and the others work."""

    def fails(analysis: Analysis) -> None:
        raise KeyError("model.layers.7")

    monkeypatch.setattr("profiler_wrapper.reports.page.layer_view", fails)
    page = open_page(browser, full_analysis(), tmp_path, "layers")
    assert "KeyError: 'model.layers.7'" in page.text("#view-layers .notice")
    for place in PLACES:
        show(page, place)
        assert ("could not be shown" in page.text(f"#view-{place}")) == (place == "layers"), place
    show(page, "step", select="layer:lm_head")
    assert "could not be shown" not in page.text("#panel")
    page.close()


def test_keys(layers: Page) -> None:
    page = layers
    page.evaluate("document.querySelector('table[aria-label=Layers]').focus()")
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowDown"):
        page.press(key)
    assert (
        page.evaluate(
            "document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).querySelector('.name').innerText"
        )
        == "layers.{0..3}"
    )
    page.press("ArrowRight")
    assert page.evaluate(f"document.querySelector('{LAYER_ROWS}.active').ariaExpanded") == "true"
    page.press("ArrowDown")
    assert page.text(f"{LAYER_ROWS}.selected .name") == "layers.0"
    assert page.text("#panel h2") == "model.layers.0"
    page.press("ArrowLeft")
    assert page.text(f"{LAYER_ROWS}.active .name") == "layers.{0..3}"
    page.press("ArrowLeft")
    assert page.evaluate(f"document.querySelector('{LAYER_ROWS}.active').ariaExpanded") == "false"
    page.press("Escape")
    page.wait("!document.querySelector('#panel')")


def test_an_address_leads_to_a_layer(layers: Page) -> None:
    page = layers
    page.evaluate("location.hash = '#layers?select=layer:model.layers.3.self_attn'")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'self_attn'")
    page.reload()
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'self_attn'")
    assert page.text("#panel h2") == "model.layers.3.self_attn"
    show(page, "step")
    page.click("#view-summary .card a")
    page.wait(f"document.querySelector('{LAYER_ROWS}.selected .name')?.innerText === 'layers.2'")
    page.evaluate("location.hash = '#nowhere?select=layer:%E0%A4%A&step=x&range=9-3'")  # half an escape
    page.wait("!document.querySelector('#view-step').hidden")
    assert page.problems == []


def test_the_icicle_selects_and_looks_inside(layers: Page) -> None:
    page = layers
    canvas = "document.querySelector('.icicle canvas')"
    fields = dict(
        page.evaluate(
            "[...document.querySelectorAll('.icicle .unseen tbody tr')]"
            ".map(row => [...row.cells].map(one => one.textContent).slice(0, 2))"
        )
    )
    assert fields["model.layers.2"] == "1.869 ms" and fields["model.layers.0"] == "939.0 µs"
    x, y, width = page.evaluate(
        f"(() => {{ {canvas}.scrollIntoView({{block: 'center'}});"
        f" const box = {canvas}.getBoundingClientRect(); return [box.x, box.y, box.width]; }})()"
    )
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.call(
                "Input.dispatchMouseEvent", type=kind, x=x + width / 3, y=y + 5 + 24, button="left", clickCount=clicks
            )
    page.wait("location.hash.includes('select=layer')")
    chosen = page.text("#panel h2")
    assert page.text(".icicle .path strong") == chosen.split(".")[-1] == "model"
    page.evaluate(f"{canvas}.focus()")
    page.press("ArrowDown")
    page.wait(f"document.querySelector('#panel h2').innerText !== {chosen!r}")
    page.press("Escape")
    page.click("#view-layers .icicle .segments [data-id=backward]")
    page.wait("document.querySelectorAll('.icicle .unseen tbody tr').length > 5")


def test_copied_csv_holds_numbers_in_the_units_of_the_table_and_no_formula(opened: Opener) -> None:
    analysis = full_analysis()
    page = opened(replace(analysis, kernels=(replace(analysis.kernels[0], name='=1+"1"'),)), "kernels")
    head, line, _ = csv_of(page, "kernels")
    assert head.startswith('"Kernel","Class","Tensor cores","Calls","Total [ms]"')
    assert line.startswith('"\'=1+""1""","gemm","yes",60,1.5,')
