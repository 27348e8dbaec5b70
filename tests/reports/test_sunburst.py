"""The sunburst pages: sums of the rings, names that are inert, nothing from a network."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_recordings import use_of
from profiler_wrapper.reports.memory import layer_order
from profiler_wrapper.reports.sunburst import PAGES, page_text, sectors
from profiler_wrapper.tables.model import CATEGORIES, MemoryCategory
from recordings import Trace
from sample_memory import MIB, llama_memory, memory_at_peak, owner, with_memory
from sample_results import Layer, analysis_of, llama

AWKWARD = [
    "<b>bold</b>",
    "</script><script>alert(1)</script>",
    "</SCRIPT ><!--<script>",
    'quo"te',
    "it's",
    "a&amp;b",
    "&lt;",
    "back\\slash",
    "😀",
    "\ud800lone",
    "%{label}",
    "$x$ ${y}",
    "$title",
    "<br>",
    "line\nbreak\u2028",
    "x" * 300,
]


class Page(HTMLParser):
    """The elements of a page, and the text in each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []  # of the table, without its head
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "tr" and attrs:
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)
        if self._open == "td":
            self.rows[-1][-1] += data


@pytest.mark.parametrize("page", PAGES)
def test_rings_add_up_to_what_the_category_holds(page: str) -> None:
    use = llama_memory(12)
    found = sectors(use, page, layer_order(llama(12)))
    assert found[0].size_bytes == sum(use.peak.categories[category] for category in PAGES[page][1])
    below = [0] * len(found)
    for i, sector in enumerate(found):
        if sector.parent is not None:
            assert sector.parent < i
            below[sector.parent] += sector.size_bytes
    for sector, size_bytes in zip(found, below, strict=True):
        assert size_bytes in (0, sector.size_bytes)


def test_what_a_name_holds_itself_is_a_sector_beside_those_below() -> None:
    use = memory_at_peak((owner("params", 1, name="a"), owner("params", 2, name="a"), owner("params", 5, name="a.b")))
    found = [(sector.name, sector.parent, sector.size_bytes, sector.count) for sector in sectors(use, "params", {})]
    assert found == [
        ("Parameters and buffers", None, 8, 3),
        ("a", 0, 8, 3),
        ("a itself", 1, 3, 2),
        ("a.b", 1, 5, 1),
    ]


def test_the_summary_has_every_category_and_the_optimizers_page_two() -> None:
    use = memory_at_peak(tuple(owner(category, i + 1, op="aten::x") for i, category in enumerate(CATEGORIES)))
    summary = [sector for sector in sectors(use, "summary", {}) if sector.parent == 0]
    assert {sector.label: sector.size_bytes for sector in summary} == {
        category: i + 1 for i, category in enumerate(CATEGORIES)
    }
    optimizer = [sector.label for sector in sectors(use, "os", {}) if sector.parent == 0]
    assert optimizer == ["os_params", "os_state"]


SIZED = st.tuples(st.sampled_from(CATEGORIES), st.sampled_from(["a", "a.b", "c"]), st.integers(-5, 9))


@given(st.lists(SIZED, min_size=1))
def test_children_add_up_to_what_they_are_in(held: list[tuple[MemoryCategory, str, int]]) -> None:
    use = memory_at_peak(tuple(owner(category, size, name=name, op="aten::x") for category, name, size in held))
    for page in PAGES:
        found = sectors(use, page, {})
        below = [0] * len(found)
        for sector in found:
            assert sector.size_bytes > 0 or len(found) == 1
            if sector.parent is not None:
                below[sector.parent] += sector.size_bytes
        assert all(inner in (0, sector.size_bytes) for sector, inner in zip(found, below, strict=True))


def test_memory_outside_of_the_allocator_leaves_the_summary_whole() -> None:
    trace = Trace().mark("a", 10, 100).memory(50, 1024, address=512, device=0)
    use = use_of(trace, (5, [(4096, 4096, "params", "a.weight")]), device="cuda:0")
    root, *others = sectors(use, "summary", {})
    assert root.size_bytes == 1024 == sum(sector.size_bytes for sector in others if sector.parent == 0)


def test_layers_are_in_the_models_order_also_below_a_category() -> None:
    for page in ("params", "summary"):
        names = [sector.name for sector in sectors(llama_memory(12), page, layer_order(llama(12)))]
        before = "params." if page == "summary" else ""
        blocks = [name for name in names if re.fullmatch(rf"{before}model\.layers\.\d+", name)]
        assert blocks == [f"{before}model.layers.{i}" for i in range(12)]
        assert names.index(f"{before}model.embed_tokens") < names.index(f"{before}model.layers")


def test_phases_are_told_with_their_sizes_where_they_are_several() -> None:
    use = memory_at_peak(
        (
            owner("activation", 2 * MIB, layer="a", op="aten::mm", phase="forward"),
            owner("activation", 3 * MIB, layer="a", op="aten::mm", phase="backward"),
            owner("activation", MIB, layer="b", op="aten::mm", phase="forward"),
        )
    )
    phases = {sector.name: sector.phases for sector in sectors(use, "activation", {})}
    assert phases["a.aten::mm"] == "backward 3.00 MiB, forward 2.00 MiB"
    assert phases["b"] == "forward"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing(page: str) -> None:
    text = page_text(with_memory(llama_memory(12)), page)
    assert "http" not in text and "url(" not in text
    elements = Page(text).elements
    assert not [
        tag for tag, attributes in elements if tag in ("link", "img", "iframe", "a") or {"src", "href"} & {*attributes}
    ]


@pytest.mark.parametrize("page", PAGES)
def test_without_scripts_a_table_has_every_sector(page: str) -> None:
    use, analysis = llama_memory(12), llama(12)
    found = sectors(use, page, layer_order(analysis))
    rows = Page(page_text(with_memory(use, analysis), page)).rows
    for sector, (name, size_mib, size_bytes, share, count, phases) in zip(found, rows, strict=True):
        assert (name, size_bytes, int(count), phases) == (
            sector.name,
            f"{sector.size_bytes:,}",
            sector.count,
            sector.phases,
        )
        assert float(size_mib) == pytest.approx(sector.size_bytes / MIB, abs=0.005)
        assert float(share) == pytest.approx(100 * sector.size_bytes / found[0].size_bytes, abs=0.005)


def kinds(page: Page) -> list[str]:
    """Its elements in their order, the rows of the table apart."""
    return [tag for tag, _ in page.elements if tag not in ("tr", "td")]


@cache
def usual_kinds() -> list[str]:
    return kinds(Page(page_text(with_memory(llama_memory(2)), "params")))


def test_awkward_names_are_inert_and_whole() -> None:
    model = analysis_of([Layer("</title><script>x</script>\ud800", "M")])
    use = memory_at_peak(tuple(owner("params", MIB, layer=name, name=f"{name}.weight") for name in AWKWARD))
    page = Page(page_text(with_memory(use, model), "params"))
    assert kinds(page) == usual_kinds()
    assert {tuple(attributes) for tag, attributes in page.elements if tag == "tr"} == {
        (),
        ("data-parent", "data-label", "style"),
    }
    names = [row[0] for row in page.rows]
    shown = {"\ud800lone": "\\ud800lone", "line\nbreak\u2028": "line\\nbreak\\u2028"}
    assert set(names) == {
        "Parameters and buffers",
        *(shown.get(name, name) for name in AWKWARD),
        *(f"{shown.get(name, name)}.weight" for name in AWKWARD),
    }
    assert any("</title><script>x</script>\\ud800" in text for text in page.texts["p"])


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=5, unique=True))
def test_no_name_changes_the_page(names: list[str]) -> None:
    use = memory_at_peak(tuple(owner("params", MIB, name=name) for name in names))
    page = Page(page_text(with_memory(use), "params"))
    assert kinds(page) == usual_kinds()
    assert page.rows[0][2] == f"{MIB * len(names):,}"


@pytest.mark.parametrize(
    ("page", "why"),
    [("grads", "no backward came before"), ("os", "plain SGD"), ("activation", "No pass"), ("params", "No parameter")],
)
def test_an_empty_page_says_why(page: str, why: str) -> None:
    text = page_text(with_memory(memory_at_peak((owner("other", MIB, op="aten::x"),))), page)
    assert why in text
    assert "0.00 MiB of 1.00 MiB at the peak" in text
    assert "<script" not in text


def test_an_empty_page_says_what_was_held_at_other_times() -> None:
    use = llama_memory(12)
    forward = use.moments[3]
    assert forward.categories["grads"] == 0
    owners = tuple(one for one in use.peak_owners if one.category != "grads")
    text = page_text(with_memory(replace(use, peak=forward, peak_owners=owners)), "grads")
    assert "At another moment it was up to 172.05 MiB" in text


def test_nothing_known_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_use"):
        page_text(llama(1), "params")
