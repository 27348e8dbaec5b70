"""What the places of a page show, read by a browser: tables as rows of texts, and numbers in base units."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browser import Browser, Page
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.tables.model import Analysis

PLACES = ("step", "layers", "kernels", "memory", "run")
GROUPS = ("kernel", "op", "layer", "phase", "class", "shape", "stream", "cores")  # of Kernels
LOOKS = ("attention", "communication", "waits", "experts", "roofline")  # in the same place
LAYER_ROWS = "table[aria-label=Layers] tbody tr:not(.space)"
TRACE = "rank0/profile_trace.json.gz"  # where pages say that the trace is
DRAWN = "document.documentElement.dataset.ready && !document.querySelector('[aria-busy]')"
Opener = Callable[..., Page]  # the fixture `opened`
UNITS = {
    "": 1, "%": 0.01, "s": 1e6, "ms": 1000, "µs": 1, "ns": 0.001, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10,
    "B": 1, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "FLOP": 1,
    "TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6,
}  # fmt: skip


def read_number(text: str, unit: str | None = None) -> tuple[float, float]:
    """A number in base units (µs, bytes, 1), and how far it may be off: `12.34 ms`, or without its unit."""
    found = re.search(r"(<?)(-?[\d,]+(?:\.(\d+))?)(?: (\S+))?", text)
    assert found is not None, text
    size = UNITS[(found[4] or "").rstrip(",;)") if unit is None else unit]
    if found[1]:  # less than the smallest that is shown
        return 0.0, float(found[2].replace(",", "")) * size
    return float(found[2].replace(",", "")) * size, 0.5001 * 10.0 ** -len(found[3] or "") * size


def assert_reads(text: str, value: float, unit: str | None = None) -> None:
    """What is shown is right to its last digit."""
    found, within = read_number(text, unit)
    assert math.isclose(found, value, rel_tol=1e-9, abs_tol=within), (text, value)


@dataclass(frozen=True)
class Table:
    """What a table on the page shows: cells by the keys of their columns, numbers in base units (µs, bytes, 1)."""

    units: dict[str, str]
    rows: list[dict[str, str]]  # those that are drawn
    count: int  # of all that scrolling shows
    total: dict[str, str]  # the last row, if there is one

    def texts(self, key: str) -> list[str]:
        return [row[key] for row in self.rows]

    def numbers(self, key: str) -> list[float | None]:
        """None where the cell says that it is not known, or is empty."""
        return [None if row[key] in ("–", "") else read_number(row[key], self.units[key])[0] for row in self.rows]

    def assert_shows(self, key: str, values: Sequence[float | None]) -> None:
        """Of the rows that are drawn; each right to the last digit that is shown."""
        assert bool(self.rows) == bool(values) and self.count == len(values)
        for row, value in zip(self.rows, values, strict=False):
            assert (row[key] in ("–", "")) == (value is None), (key, row[key], value)
            if value is not None:
                assert_reads(row[key], value, self.units[key])


def table_of(page: Page, label: str, *, level: int | None = None) -> Table:
    """The table whose label begins so; `level`: of its rows only those, all of which must be drawn."""
    found = page.evaluate(
        f"""((label, level) => {{
          const table = [...document.querySelectorAll("table")].find(one => one.ariaLabel?.startsWith(label));
          if (!table) return null;
          const heads = [...table.querySelectorAll("thead th")];
          const units = heads.map(one => [one.dataset.key, one.querySelector(".unit")?.textContent.trim() ?? ""]);
          const said = cell => cell.textContent.replace(/^[▸▾]/, "").trim();
          const cells = line => [...line.cells].map((cell, i) => [heads[i].dataset.key, said(cell)]);
          const rows = [...table.querySelectorAll("tbody tr[aria-selected]")];
          const isOf = row => level === null || row.ariaLevel == level;
          const total = table.tFoot ? cells(table.tFoot.rows[0]) : [];
          return [units, rows.filter(isOf).map(cells), table.ariaRowCount - 1 - (table.tFoot ? 1 : 0), total];
        }})({json.dumps(label)}, {json.dumps(level)})"""
    )
    assert found is not None, (
        label,
        page.evaluate("[...document.querySelectorAll('table')].map(one => one.ariaLabel)"),
    )
    units, rows, count, total = found
    return Table(dict(units), [dict(row) for row in rows], len(rows) if level else count, dict(total))


def figures_of(page: Page, place: str) -> dict[str, str]:
    """The figures of a place by their names."""
    values = page.texts(f"#view-{place} .figure .value")
    return dict(zip(page.texts(f"#view-{place} .figure:has(.value) .label"), values, strict=True))


def open_page(
    browser: Browser, analysis: Analysis | str, directory: Path, address: str = "", *, title: str = "", **how: Any
) -> Page:
    """The page of an analysis, or of the HTML of one, when its events are read; `how`: what the window is like."""
    path = directory / "report.html"
    if isinstance(analysis, str):
        path.write_text(analysis, encoding="utf-8")
    else:
        write_page(analysis, path, title=title, trace_href=TRACE)
    page = browser.open(path, address=address, **how)
    page.wait(DRAWN)
    return page


def names_of_layers(page: Page) -> list[str]:
    """Names in the first column of the layer table, in order."""
    return page.texts(f"{LAYER_ROWS} td:first-child .name")


def show(page: Page, place: str, by: str = "", **more: str) -> None:
    """Nothing but this is in the address: no selection, no range, the sorts that tables begin with."""
    page.to_front()
    parts = "&".join(f"{key}={value}" for key, value in {"by": by, **more}.items() if value)
    page.evaluate(f"location.hash = {json.dumps(f'#{place}' + (f'?{parts}' if parts else ''))}")
    page.wait(f"document.querySelector('#view-{place}:not([hidden])') && !document.querySelector('[aria-busy]')")
    if by:
        page.wait(f"document.querySelector('#view-kernels [data-id={by}][aria-pressed=true], #view-kernels > .notice')")
    page.evaluate("new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))")


def assert_said(page: Page, place: str) -> None:
    """A place has something to say, fits its window and lacks no number."""
    text = page.text(f"#view-{place}")
    assert len(text) > 20, place
    for wrong in ("could not be shown", "NaN", "undefined", "[object", "Infinity"):
        assert wrong not in text, (place, wrong)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{place} scrolls sideways"


def assert_all_open(page: Page) -> set[str]:
    """Every place, and every group of Kernels, is drawn or says why not; gives the groups that are drawn."""
    drawn = set()
    for place in PLACES:
        page.to_front()
        page.click(f"#tab-{place}")
        page.wait(f"location.hash.startsWith('#{place}') && document.querySelector('#view-{place}:not([hidden])')")
        assert_said(page, place)
    for by in (*GROUPS, *LOOKS):
        choice = f"#view-kernels .choices [data-id={by}]"
        show(page, "kernels")
        if page.evaluate(f"document.querySelector('{choice}').ariaDisabled") == "true":
            assert len(page.evaluate(f"document.querySelector('{choice}').title")) > 10, by
            continue
        page.click(choice)
        page.wait(f"document.querySelector('{choice}').ariaPressed === 'true'")
        assert_said(page, "kernels")
        assert page.count("#view-kernels :is(tbody tr, .figure, .notice)"), by
        drawn.add(by)
    assert page.problems == []
    assert page.requests == []
    return drawn
