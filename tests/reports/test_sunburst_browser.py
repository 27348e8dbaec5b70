"""The sunburst pages in a browser that has no network: rings as large as what they show, clicks, keys, inert names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from browser import Browser, Page
from profiler_wrapper.reports.memory import layer_order
from profiler_wrapper.reports.sunburst import PAGES, sectors, write_page
from profiler_wrapper.tables.model import MemoryUse
from sample_memory import MIB, llama_memory, memory_at_peak, owner
from sample_page import AWKWARD
from sample_results import llama

pytestmark = pytest.mark.full

ALL = "[...document.querySelectorAll('#rings > *')]"
MANY = memory_at_peak(
    (*(owner("params", 100 + i, name=f"many.{i}") for i in range(2000)), owner("params", 700 * MIB, name="one"))
)


@dataclass(frozen=True)
class Drawn:
    """A sector as it is drawn: name and bytes as its title says them; its ring, begin and end in turns."""

    name: str
    size_bytes: int
    ring: int
    begin: float
    end: float


def opened(browser: Browser, use: MemoryUse, page: str, directory: Path, *, dark: bool = False) -> Page:
    write_page(replace(llama(2), memory_use=use), directory / "page.html", page=page)
    shown = browser.open(directory / "page.html", dark=dark)
    shown.wait("document.querySelector('#rings path')")
    return shown


def drawn(page: Page) -> list[Drawn]:
    """All sectors, each before those further out in it."""
    found: list[Drawn] = []
    width = 0.0
    for title, path in page.evaluate(
        f"{ALL}.map(one => [one.querySelector('title').textContent, one.querySelector('path').getAttribute('d')])"
    ):
        told = re.fullmatch(r"(.*): [\d.]+ MiB \(([\d,]+) bytes\), .*", title)
        assert told is not None, title
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", re.split("[LM]", path)[2])]  # the outer side
        end, middle, begin = (math.atan2(x, -y) / math.tau % 1 for x, y in (numbers[:2], numbers[7:9], numbers[14:]))
        span = 2 * ((middle - begin) % 1)
        assert (begin + span - end + 0.5) % 1 == pytest.approx(0.5, abs=2e-5)
        width = width or numbers[2]
        found.append(Drawn(told[1], int(told[2].replace(",", "")), round(numbers[2] / width) - 1, begin, begin + span))
    return found


def check_rings(found: list[Drawn]) -> None:
    """Each sector is as wide as its bytes, and those further out fill the one that they are in, from its begin on."""
    ends: list[float] = []  # in each ring up to this one, where the next begins
    whole = found[0].size_bytes
    for i, one in enumerate(found):
        assert one.end - one.begin == pytest.approx(one.size_bytes / whole, abs=1e-4)
        del ends[one.ring + 1 :]
        if len(ends) == one.ring:
            ends.append(0.0 if not one.ring else next(x.begin for x in found[i::-1] if x.ring == one.ring - 1))
        assert (one.begin - ends[one.ring] + 0.5) % 1 == pytest.approx(0.5, abs=1e-4)
        ends[one.ring] = one.end
        inside = [x.size_bytes for x in found[i + 1 : _end(found, i)] if x.ring == one.ring + 1]
        assert sum(inside) in (0, one.size_bytes)


def _end(found: list[Drawn], i: int) -> int:
    """Behind the last sector that is in the `i`-th."""
    return next((j for j in range(i + 1, len(found)) if found[j].ring <= found[i].ring), len(found))


@pytest.mark.parametrize("page", PAGES)
def test_rings_are_as_wide_as_what_they_show(browser: Browser, page: str, tmp_path: Path) -> None:
    use = llama_memory(2)
    shown = opened(browser, use, page, tmp_path)
    found = drawn(shown)
    check_rings(found)
    tree = {sector.name: sector.size_bytes for sector in sectors(use, page, layer_order(llama(2)))}
    own = [one for one in found if " more in " not in one.name]
    assert len(own) >= 3 and all(tree[one.name] == one.size_bytes for one in own)
    assert (found[0].name, found[0].size_bytes, found[0].ring) == (PAGES[page][0], next(iter(tree.values())), 0)
    assert max(one.ring for one in found) <= 5
    assert (shown.problems, shown.requests) == ([], [])


def test_a_click_opens_a_sector_and_the_middle_goes_back(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, llama_memory(12), "summary", tmp_path)
    whole = drawn(shown)
    target = next(i for i, one in enumerate(whole) if one.name == "params.model.layers")
    click = "{}[{}].dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}}))"
    shown.evaluate(click.format(ALL, target))
    inside = drawn(shown)
    check_rings(inside)
    assert (inside[0].name, inside[0].size_bytes) == (whole[target].name, whole[target].size_bytes)
    shown.click("#rings path")
    assert drawn(shown)[0].name == "params.model"
    shown.click("#rings path")
    shown.click("#rings path")
    assert drawn(shown) == whole
    shown.click("#rings path")  # of all
    assert drawn(shown) == whole


def test_keys_reach_what_opens_and_its_name_is_told(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, llama_memory(2), "params", tmp_path)
    shown.to_front()
    shown.press("Tab")
    shown.press("Tab")  # the table's button is the first
    assert shown.text("#about").startswith("model: ")
    shown.press("Enter")
    assert drawn(shown)[0].name == "model"
    assert shown.evaluate(f"document.activeElement === {ALL}[0]")
    shown.press("Enter")
    assert drawn(shown)[0].name == "Parameters and buffers"


def test_what_is_too_small_is_one_sector_that_opens(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, MANY, "params", tmp_path)
    opens = f"{ALL}.slice(1).find(one => one.textContent.includes(' more in '))"
    there = 2000
    for _ in range(2):
        found = drawn(shown)
        check_rings(found)
        merged = [int(one.name.split(" more")[0]) for one in found[1:] if " more in " in one.name]
        assert sum(merged) + sum(one.name.startswith("many.") for one in found) == there
        assert len(found) < 1000 and min(merged) > 1
        there = int(shown.evaluate(f"{opens}.textContent.split(' ')[0]"))
        shown.evaluate(f"{opens}.dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}}))")
    assert len(drawn(shown)) == 1 + there < 60
    check_rings(drawn(shown))
    assert {one.name.split(".")[0] for one in drawn(shown)[1:]} == {"many"}


def test_names_do_nothing_and_are_shown(browser: Browser, tmp_path: Path) -> None:
    use = memory_at_peak(tuple(owner("params", MIB, name=f"{i}.{name}") for i, name in enumerate(AWKWARD)))
    shown = opened(browser, use, "params", tmp_path)
    assert shown.evaluate("document.title").startswith("Parameters and buffers")
    assert shown.count("img, b") == 0 and shown.count("script") == 1
    names = {one.name for one in drawn(shown)}
    tree = {sector.name for sector in sectors(use, "params", {})}
    assert names <= tree
    assert {f"2.{AWKWARD[2]}", f"9.{AWKWARD[9]}"} <= names
    assert "<b>bold</b>" in shown.evaluate("document.querySelector('#rings').textContent")
    assert (shown.problems, shown.requests, shown.dialogs) == ([], [], [])


@pytest.mark.parametrize("width", [400, 1366])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_in_every_window(browser: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    shown = opened(browser, llama_memory(12), "summary", tmp_path, dark=dark)
    shown.resize(width, 768)
    shown.wait(f"document.querySelector('#rings').viewBox.baseVal.width <= {width}")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.evaluate("document.querySelector('details').open = true")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)"
    )


def test_without_scripts_the_table_is_there(browser: Browser, tmp_path: Path) -> None:
    shown = opened(browser, llama_memory(2), "params", tmp_path)
    shown.call("Emulation.setScriptExecutionDisabled", value=True)
    shown.go(tmp_path / "page.html")
    shown.click("summary")
    assert "the table has all that they show" in shown.text("noscript")
    assert "model.layers.1.mlp.up_proj.weight" in shown.text("table")
