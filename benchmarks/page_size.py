"""How large pages are, how long they take to write, and how they run in a headless Chromium, beside their budgets.

python benchmarks/page_size.py                   a model of 500 blocks, 10 modules each, 4 phases, 10 steps
python benchmarks/page_size.py TRACE ...         the pages of traces

Times of the browser are multiples of a fixed loop, 30 million square roots, in the same browser: machines differ.
"""

from __future__ import annotations

import math
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import measuring  # noqa: F401
from browser import CHROMIUM, NO_CHROMIUM, Browser, Page
from page_tables import PLACES, open_page
from profiler_wrapper.reports.page import page_html
from profiler_wrapper.result import load_for_page
from profiler_wrapper.tables.model import Analysis
from sample_page import large_page

REPEATS = 5
ZOOMS = 60
MOST_PAGE_MB, MOST_PAGE_OF_LARGE_TRACE_MB, LARGE_TRACE_BYTES = 2.0, 6.0, 400e6
MOST_LOOPS_PAINT, MOST_LOOPS_TASK, MOST_ZOOM_MS = 1.0, 1.0, 8.0
LOOP = """(() => {
  const begin = performance.now();
  let sum = 0;
  for (let i = 0; i < 3e7; i++) sum += Math.sqrt(i);
  return sum ? performance.now() - begin : 0;
})()"""
PAINT = "performance.getEntriesByName('first-contentful-paint')"
# Tasks of 50 ms and more, of which browsers keep a list.
LONGEST_TASK_MS = """new Promise(resolve => {
  const tasks = [];
  new PerformanceObserver(list => tasks.push(...list.getEntries())).observe({ type: "longtask", buffered: true });
  setTimeout(() => resolve(Math.max(0, ...tasks.map(one => one.duration))), 300);
})"""
# A turn of the wheel a frame; its JavaScript is its handler and what the next frame runs.
ZOOM_MS = f"""new Promise(resolve => {{
  const canvas = document.querySelector(".timeline-over");
  const box = canvas.getBoundingClientRect();
  const scripts = [], frames = [];
  let inFrame = 0;
  const later = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = callback => later(time => {{
    const begin = performance.now();
    callback(time);
    inFrame += performance.now() - begin;
  }});
  let count = 0, before = performance.now();
  const turn = () => later(() => {{
    const now = performance.now();
    if (count > 1) {{ frames.push(now - before); scripts.push(inFrame); }}
    before = now;
    inFrame = 0;
    if (count++ > {ZOOMS}) {{ window.requestAnimationFrame = later; return resolve({{ scripts, frames }}); }}
    const begin = performance.now();
    const deltaY = count % 20 < 10 ? -60 : 60;
    const at = {{ clientX: box.x + box.width / 2, clientY: box.y + 60 }};
    canvas.dispatchEvent(new WheelEvent("wheel", {{ deltaY, ...at, ctrlKey: true, bubbles: true, cancelable: true }}));
    inFrame += performance.now() - begin;
    setTimeout(turn);
  }});
  turn();
}})"""


def measure(name: str, analysis: Analysis, seconds: float, most_mb: float) -> None:
    """Prints how large the page is, and how it runs."""
    begin = time.perf_counter()
    html = page_html(analysis)
    writing = time.perf_counter() - begin
    print(f"{name}: {len(analysis.layers)} rows of layers, read in {seconds:.1f} s, written in {writing:.2f} s")
    told("page", len(html.encode()) / 1e6, most_mb, "MB")
    if CHROMIUM is None:
        print(f"  {NO_CHROMIUM}")
        return
    with tempfile.TemporaryDirectory() as directory, Browser() as browser:
        in_browser(browser, html, Path(directory))


def told(what: str, value: float, most: float, unit: str) -> None:
    print(f"  {what:36} {value:8.2f} {unit:5} of at most {most:g}{'' if value <= most else '  TOO MUCH'}", flush=True)


def in_browser(browser: Browser, html: str, directory: Path) -> None:
    """First paint, the longest task of each place, and a zoom."""
    painted, loops = [], []
    for _ in range(REPEATS):
        page = open_page(browser, html, directory)
        loops.append(float(page.evaluate(LOOP)))
        page.to_front()
        page.wait(f"{PAINT}.length")
        painted.append(float(page.evaluate(f"{PAINT}[0].startTime")))
        page.close()
    loop_ms = median(loops)
    print(f"  a loop takes {loop_ms:.0f} ms")
    told("first paint", median(painted) / loop_ms, MOST_LOOPS_PAINT, "loops")
    for place in PLACES:
        longest = []
        for _ in range(REPEATS):
            page = open_page(browser, html, directory, place)
            longest.append(float(page.evaluate(LONGEST_TASK_MS)))
            page.close()
        told(f"longest task, opened at {place}", median(longest) / loop_ms, MOST_LOOPS_TASK, "loops")
    page = open_page(browser, html, directory, "step")
    if page.count(".timeline-over"):
        zoom(page)
    page.close()


def zoom(page: Page) -> None:
    page.to_front()
    page.evaluate("document.querySelector('.timeline-over').scrollIntoView({ block: 'center' })")
    found = page.evaluate(ZOOM_MS)
    events = page.evaluate("page.data.views.timeline.tables.find(one => one.name === 'events').count")
    told(f"JavaScript of a zoom, {events:,} events", median(found["scripts"]), MOST_ZOOM_MS, "ms")
    frames = sorted(found["frames"])
    print(f"  frames: median {median(frames):.0f} ms, 95 of 100 within {frames[int(0.95 * len(frames))]:.0f} ms")


def main() -> None:
    """Measures what is asked for."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    if len(sys.argv) == 1:
        measure("500 blocks, 10 modules, 4 phases, 10 steps", large_page(500), 0.0, math.inf)
    for trace in map(Path, sys.argv[1:]):
        begin = time.perf_counter()
        result = load_for_page(trace)
        seconds = time.perf_counter() - begin
        is_large = trace.suffix == ".json" and trace.stat().st_size > LARGE_TRACE_BYTES
        measure(trace.name, result, seconds, MOST_PAGE_OF_LARGE_TRACE_MB if is_large else MOST_PAGE_MB)


if __name__ == "__main__":
    main()
