"""What the views of a page show, read by a browser: tables as rows of texts, and numbers in base units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from browser import Browser, Page
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.page import write_page

VIEWS = ("operators", "kernels", "attention", "memory", "communication", "waits", "roofline", "shapes", "timeline")
LAYER_ROWS = "#view-layers tbody tr"
TRACE = "rank0/profile_trace.json.gz"  # where pages say that the trace is
Opener = Callable[..., Page]  # the fixture `opened`
UNITS = {
    "": 1,
    "%": 0.01,
    "s": 1e6,
    "ms": 1000,
    "µs": 1,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TFLOP": 1e12,
    "GFLOP": 1e9,
    "MFLOP": 1e6,
}
UNITS |= {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}


@dataclass(frozen=True)
class Table:
    """What a table on the page shows: cells by the keys of their columns, numbers in base units (µs, bytes, 1)."""

    units: dict[str, str]
    rows: list[dict[str, str]]

    def texts(self, key: str) -> list[str]:
        return [row[key] for row in self.rows]

    def numbers(self, key: str) -> list[float | None]:
        """None where the cell says that it is not known, or is empty."""
        return [None if row[key] in ("–", "") else self._number(key, row[key]) for row in self.rows]

    def _number(self, key: str, text: str) -> float:
        if text.startswith("<"):  # less than the smallest share that is shown
            return 0.0
        return float(text.replace(",", "")) * UNITS[self.units[key]]

    def assert_shows(self, key: str, values: Sequence[float | None]) -> None:
        """As many numbers, each right to the last digit that is shown."""
        shown = self.numbers(key)
        assert len(shown) == len(values)
        for text, found, value in zip(self.texts(key), shown, values, strict=True):
            assert (found is None) == (value is None), (key, text, value)
            if found is None or value is None:
                continue
            decimals = len(text.partition(".")[2])
            within = 0.5001 * 10.0**-decimals * UNITS[self.units[key]]
            assert math.isclose(found, value, rel_tol=1e-9, abs_tol=max(within, 0.00101 if text[0] == "<" else 0)), (
                key,
                text,
                value,
            )


def table_of(page: Page, view: str, *, at: int = 0) -> Table:
    """The `at`-th table of a view, as it is drawn."""
    found = page.evaluate(
        f"""(() => {{
          const table = document.querySelectorAll("#view-{view} .table")[{at}];
          const heads = [...table.querySelectorAll("thead th")];
          const units = heads.map(one => [one.dataset.key, one.querySelector(".unit")?.textContent.trim() ?? ""]);
          const lines = [...table.querySelectorAll("tbody tr")].filter(line => line.row);
          const cells = line => [...line.cells].map((cell, i) => [heads[i].dataset.key, cell.innerText.trim()]);
          return [units, lines.map(cells)];
        }})()"""
    )
    units, rows = found
    return Table(dict(units), [dict(row) for row in rows])


def table_named(page: Page, view: str, heading: str) -> Table:
    """The table below a heading that begins so."""
    at = page.evaluate(
        f"""(() => {{
          const tables = [...document.querySelectorAll("#view-{view} .table")];
          const headings = tables.map(one => one.closest("section")?.querySelector("h2")?.textContent ?? "");
          return headings.findIndex(one => one.startsWith({json.dumps(heading)}));
        }})()"""
    )
    assert at >= 0, f"no table below {heading!r}"
    return table_of(page, view, at=at)


def tooltip_of_cell(page: Page, view: str, key: str, row: int) -> str:
    return str(
        page.evaluate(
            f"""(() => {{
              const table = document.querySelector("#view-{view} .table");
              const at = [...table.querySelectorAll("thead th")].findIndex(one => one.dataset.key === "{key}");
              return table.querySelectorAll("tbody tr")[{row}].cells[at].title;
            }})()"""
        )
    )


def open_page(
    browser: Browser, analysis: Analysis | str, directory: Path, address: str = "", *, title: str = "", **how: Any
) -> Page:
    """The page of an analysis, or of the HTML of one; `how`: what the window is like."""
    path = directory / "report.html"
    if isinstance(analysis, str):
        path.write_text(analysis, encoding="utf-8")
    else:
        write_page(analysis, path, title=title, trace_href=TRACE)
    return browser.open(path, address=address, **how)


def names_of_layers(page: Page) -> list[str]:
    """Names in the first column of the layer table, in order."""
    return [text.split("\n")[0] for text in page.texts(f"{LAYER_ROWS} td:first-child .name")]


def show(page: Page, view: str) -> None:
    """A click on its tab, and its charts are drawn."""
    page.to_front()
    page.click(f"#tab-{view}")
    page.wait(f"document.querySelector('#view-{view}') && !document.querySelector('#view-{view}').hidden")
    page.wait(f"[...document.querySelectorAll('#view-{view} .chart')].every(one => one.dataset.drawn)")


def assert_all_open(page: Page) -> set[str]:
    """Every view is drawn or says why not; gives those that are drawn."""
    drawn = set()
    for view in VIEWS:
        tab = f"document.getElementById('tab-{view}')"
        if page.evaluate(f"{tab}.getAttribute('aria-disabled')") == "true":
            assert len(page.evaluate(f"{tab}.title")) > 10, view
            continue
        show(page, view)
        assert "could not be shown" not in page.text(f"#view-{view}"), view
        assert page.count(f"#view-{view} *") > 5, view
        assert "NaN" not in page.text(f"#view-{view}"), view
        assert "undefined" not in page.text(f"#view-{view}"), view
        drawn.add(view)
    assert page.problems == []
    assert page.requests == []
    return drawn
