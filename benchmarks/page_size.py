"""How large the page of a run is, how long it takes to write, and to open in a headless Chromium.

python benchmarks/page_size.py                   a model of 100 blocks, 10 modules each, 4 phases, 10 steps
python benchmarks/page_size.py TRACE ...         the pages of traces
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import measuring  # noqa: F401
import profiler_wrapper as pw
from browser import CHROMIUM, NO_CHROMIUM, Browser
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.page import page_data, page_html, script_json
from sample_page import large_page

REPEATS = 5
MIB = 1 << 20
# The page marks the end of the first frame that it has drawn; times count from the start of the navigation.
DRAWN_MS = "performance.getEntriesByName('drawn')[0].startTime"


def measure(name: str, analysis: Analysis, seconds: float) -> None:
    """Prints one line."""
    begin = time.perf_counter()
    html = page_html(analysis)
    writing = time.perf_counter() - begin
    data_bytes = len(script_json(page_data(analysis)).encode())
    opened = opening_ms(html)
    print(
        f"{name:44} rows {len(analysis.layers):6}  load {seconds:6.2f} s  write {writing:5.2f} s  "
        f"page {len(html.encode()) / MIB:6.2f} MiB  data {data_bytes / MIB:6.2f} MiB  {opened}",
        flush=True,
    )


def opening_ms(html: str) -> str:
    """The median time until the summary, and then the layers, are drawn."""
    if CHROMIUM is None:
        return NO_CHROMIUM
    first: list[float] = []
    layers: list[float] = []
    with tempfile.TemporaryDirectory() as directory, Browser() as browser:
        path = Path(directory) / "report.html"
        path.write_text(html, encoding="utf-8")
        for address, times in (("summary", first), ("layers", layers)):
            for _ in range(REPEATS):
                page = browser.open(path, address=address)
                page.wait("performance.getEntriesByName('drawn').length")
                times.append(float(page.evaluate(DRAWN_MS)))
                page.close()
    return f"opens in {median(first):.0f} ms, at the layers in {median(layers):.0f} ms (median of {REPEATS})"


def main() -> None:
    """Measures what is asked for."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    if len(sys.argv) == 1:
        measure("100 blocks, 10 modules, 4 phases, 10 steps", large_page(), 0.0)
    for trace in sys.argv[1:]:
        begin = time.perf_counter()
        result = pw.load(trace)
        measure(Path(trace).name, result, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
