"""The timeline in a browser that has no network: its numbers are Python's; what a click, a drag and keys do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, Page
from gpu_traces import attributed_trace
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.timeline_bytes import packed_timeline
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.timeline import timeline
from profiler_wrapper.tables.timeline_columns import CAUSES, Timeline
from recordings import AUTOGRAD, Trace, analyse
from sample_results import Layer, analysis_of
from shared_traces import needs_traces
from timeline_rows import rows

pytestmark = pytest.mark.full

CANVAS = ".timeline-over"
LABELS, AXIS, AROUND = (
    166,
    40,
    0.01,
)  # pixels left and above of the lanes; of the length, what is seen before and behind
US = 1000


def two_steps() -> Trace:
    """Layers in forward and backward, a collective beside them, and a device that waits."""
    trace = Trace()
    for number in (3, 4):
        at = (number - 3) * 1_000 * US

        def since(time_us: int, at: int = at) -> int:
            return at + time_us * US

        trace.annotation(f"ProfilerStep#{number}", since(0), since(1_000))
        trace.mark("model", since(10), since(400)).mark("model.mlp", since(20), since(380))
        trace.op("aten::mm", since(30), since(90), sequence=number).kernel(
            "gemm_kernel", since(100), since(300), launched=since(40)
        )
        trace.op("aten::add", since(100), since(150)).kernel("add_kernel", since(300), since(350), launched=since(120))
        trace.op("aten::item", since(390), since(600)).launch(since(400), since(590), name="cudaStreamSynchronize")
        trace.op("aten::sum", since(600), since(609)).kernel("sum_kernel", since(620), since(640), launched=since(605))
        trace.node("MmBackward0", since(610), since(700), number=number)
        trace.op("MmBackward0", since(611), since(699), thread=AUTOGRAD, sequence=number, forward_thread=1)
        trace.kernel("gemm_backward", since(650), since(900), launched=since(640), thread=AUTOGRAD)
        trace.op("nccl:all_reduce", since(701), since(720), thread=AUTOGRAD)
        trace.kernel("ncclDevKernel_AllReduce", since(850), since(980), launched=since(710), thread=AUTOGRAD, stream=9)
    return trace


def on_the_cpu() -> Trace:
    """Ops that enclose others, within a block."""
    trace = Trace().annotation("ProfilerStep#0", 0, 100 * US).annotation("a block", 5 * US, 90 * US)
    trace.op("aten::linear", 10 * US, 50 * US).op("aten::t", 12 * US, 15 * US).op("aten::addmm", 20 * US, 45 * US)
    return trace.op("aten::relu", 60 * US, 70 * US)


def written(path: Path, made: Timeline | str) -> Path:
    """A page with that timeline."""
    write_page(replace(analysis_of([Layer("model", "Model")]), timeline=made), path, title="timeline")
    return path


def opened(browser: Browser, path: Path, address: str = "", *, width: int = 1200) -> Page:
    page = browser.open(path, address=address, width=width, height=900)
    page.wait("document.querySelector('.timeline, .timeline-none')")
    page.evaluate(f"document.querySelector('{CANVAS}')?.scrollIntoView({{ block: 'center' }})")
    settled(page)
    return page


def settled(page: Page) -> None:
    page.to_front()
    page.evaluate(
        "new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 100))"
    )


@pytest.fixture
def made() -> Timeline:
    found = analyse(two_steps().recording(), timeline=True).timeline
    assert isinstance(found, Timeline)
    return found


@pytest.fixture
def page(browser: Browser, made: Timeline, tmp_path: Path) -> Page:
    return opened(browser, written(tmp_path / "page.html", made))


# ---- where things are ----


def mouse(page: Page, kind: str, x: float, y: float, **more: Any) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, **more)


def box(page: Page) -> dict[str, float]:
    found: dict[str, float] = page.evaluate(
        f"(() => {{ const {{ left, top, width, height }} = document.querySelector('{CANVAS}').getBoundingClientRect();"
        " return { left, top, width, height }; })()"
    )
    return found


def x_of(page: Page, made: Timeline, time_ns: float) -> float:
    """Where an instant is while all is shown."""
    at = box(page)
    part = (time_ns / made.length_ns + AROUND) / (1 + 2 * AROUND)
    return at["left"] + LABELS + part * (at["width"] - LABELS)


def found_at(page: Page, x: float, name: str) -> float:
    """How far down what is called so lies at `x`: as the tooltip says."""
    at = box(page)
    for y in np.arange(at["top"] + AXIS + 4, at["top"] + at["height"], 6):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=float(y))
        settled(page)
        if page.evaluate("document.querySelector('.timeline-tip b')?.innerText") == name:
            return float(y) + 4  # well within it
    raise AssertionError(f"no {name} at {x}")


def click(page: Page, x: float, y: float) -> None:
    mouse(page, "mousePressed", x, y)
    mouse(page, "mouseReleased", x, y)
    settled(page)


def drag(page: Page, x: float, to: float, y: float) -> None:
    mouse(page, "mousePressed", x, y)
    for part in (0.3, 0.7, 1.0):
        mouse(page, "mouseMoved", x + (to - x) * part, y, buttons=1)
    mouse(page, "mouseReleased", to, y)
    settled(page)


def press(page: Page, key: str) -> None:
    page.evaluate(f"document.querySelector('{CANVAS}').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key)
    settled(page)


def cells(page: Page, table: str) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(
        f"[...document.querySelectorAll('{table} tbody tr')].map(row => [...row.cells].map(one => one.innerText))"
    )
    return found


def address(page: Page) -> dict[str, str]:
    found: dict[str, str] = page.evaluate(
        "Object.fromEntries(new URLSearchParams(location.hash.replace(/^#step\\??/, '')))"
    )
    return found


def seen(page: Page) -> str:
    """All that the canvas shows, as a number."""
    return str(page.evaluate("document.querySelector('.timeline-canvases canvas').toDataURL()"))


# ---- the same numbers by Python ----


def cut(made: Timeline, start: int, end: int) -> Iterable[tuple[dict[str, Any], int]]:
    """What runs on a device in a stretch of time, and how much of it lies within."""
    streams = {lane.name for lane in made.lanes if lane.kind == "stream"}
    for row in rows(made, "events"):
        time = min(row["start_ns"] + row["duration_ns"], end) - max(row["start_ns"], start)
        if row["lane"] in streams and time > 0:
            yield row, time


def sums(made: Timeline, key: str, start: int, end: int, none: str = "") -> dict[str, int]:
    found: Counter[str] = Counter()
    for row, time in cut(made, start, end):
        found[row[key] or none] += time
    return dict(found)


def covered(stretches: Iterable[tuple[int, int]]) -> int:
    time, until = 0, 0
    for start, end in sorted(stretches):
        time += max(0, end - max(start, until))
        until = max(until, end)
    return time


def shown_sums(page: Page, what: str) -> dict[str, int]:
    """A table of the range by name, in nanoseconds."""
    found: dict[str, int] = page.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('.timeline-sum[data-of={what}] tbody tr')]"
        ".map(row => [row.dataset.name, Number(row.dataset.ns)]))"
    )
    return found


def test_the_hidden_tables_have_the_numbers(page: Page, made: Timeline) -> None:
    lanes = page.evaluate(
        "[...document.querySelectorAll('.timeline-lanes tbody tr')]"
        ".map(row => [row.cells[0].innerText, Number(row.dataset.ns), row.cells[2].innerText])"
    )
    by_lane: dict[str, list[tuple[int, int]]] = {lane.name: [] for lane in made.lanes}
    for row in rows(made, "events"):
        by_lane[row["lane"]].append((row["start_ns"], row["start_ns"] + row["duration_ns"]))
    assert lanes == [[name, covered(found), str(len(found))] for name, found in by_lane.items()]
    assert ["stream 9", 2 * 130 * US, "2"] in lanes
    longest = cells(page, ".timeline-longest")
    assert longest[0] == ["gemm_backward", "250.0 µs", "650.0 µs", "model.mlp", "backward"]
    assert [row[0] for row in longest] == [
        "gemm_backward", "gemm_backward", "gemm_kernel", "gemm_kernel",
        "ncclDevKernel_AllReduce", "ncclDevKernel_AllReduce", "add_kernel", "add_kernel", "sum_kernel", "sum_kernel",
    ]  # fmt: skip
    idle = cells(page, ".timeline-idles")
    assert idle[0] == ["270.0 µs", "350.0 µs", CAUSES[1], "cudaStreamSynchronize"]
    assert len(idle) == len(made.gaps["start_ns"])


def test_a_drag_selects_a_range_with_its_sums(page: Page, made: Timeline) -> None:
    y = box(page)["top"] + box(page)["height"] - 4
    drag(page, x_of(page, made, 200 * US), x_of(page, made, 900 * US), y)
    start, end = map(int, address(page)["range"].split("-"))
    assert abs(start - 200 * US) < 3 * US and abs(end - 900 * US) < 3 * US  # to the pixel
    assert shown_sums(page, "kernel") == sums(made, "name", start, end)
    assert shown_sums(page, "layer") == sums(made, "layer", start, end, "(no layer)")
    assert shown_sums(page, "phase") == sums(made, "phase", start, end)
    assert shown_sums(page, "class") == sums(made, "class", start, end)
    busy = covered(
        (max(row["start_ns"], start), max(row["start_ns"], start) + time) for row, time in cut(made, start, end)
    )
    assert page.text(".timeline-idle") == f"{(end - start - busy) / US:.1f} µs"
    # The first end is taken hold of, and pulled.
    drag(page, x_of(page, made, start), x_of(page, made, 500 * US), y)
    first, last = map(int, address(page)["range"].split("-"))
    assert abs(first - 500 * US) < 3 * US and last == end
    page.reload()
    page.wait("document.querySelector('.timeline-range')")
    settled(page)
    assert shown_sums(page, "kernel") == sums(made, "name", first, end)
    press(page, "Escape")
    assert "range" not in address(page) and page.count(".timeline-range") == 0
    assert page.problems == [] and page.requests == []


def test_the_whole_adds_up(browser: Browser, made: Timeline, tmp_path: Path) -> None:
    page = opened(browser, written(tmp_path / "page.html", made), f"step?range=0-{made.length_ns}")
    assert (
        sum(shown_sums(page, "kernel").values()) == made.sums["time_ns"].sum() == 2 * (200 + 50 + 20 + 250 + 130) * US
    )
    for what, key in (("kernel", "name"), ("phase", "phase"), ("class", "class")):
        found: Counter[str] = Counter()
        for row in rows(made, "sums"):
            found[row[key]] += row["time_ns"]
        assert shown_sums(page, what) == dict(found)
    idle_ns = sum(step.idle_ns or 0 for step in made.steps)
    assert page.text(".timeline-idle") == f"{idle_ns / US:.1f} µs"


def test_without_a_device_ops_have_their_own_time(browser: Browser, tmp_path: Path) -> None:
    made = analyse(on_the_cpu().recording(), timeline=True).timeline
    assert isinstance(made, Timeline) and not made.device
    page = opened(browser, written(tmp_path / "page.html", made), f"step?range=0-{made.length_ns}")
    by_hand = {"aten::linear": 12 * US, "aten::t": 3 * US, "aten::addmm": 25 * US, "aten::relu": 10 * US}
    assert shown_sums(page, "op") == by_hand
    assert sum(by_hand.values()) == made.sums["time_ns"].sum()
    assert page.problems == []


@needs_traces
@pytest.mark.parametrize("name", ["mi300_resnet_checkpointing_training.json.gz", "h100_bert_small_inference.json.gz"])
def test_the_whole_of_a_real_trace_adds_up(browser: Browser, name: str, tmp_path: Path) -> None:
    found = attributed_trace(name)
    made = timeline(found, layer_calls(found, {}))
    page = opened(browser, written(tmp_path / "page.html", made), f"step?range=0-{made.length_ns}")
    for what in ("kernel", "layer", "phase", "class"):
        assert sum(shown_sums(page, what).values()) == made.sums["time_ns"].sum()
    assert page.problems == [] and page.requests == []


def test_a_click_on_a_kernel_selects_it(page: Page, made: Timeline) -> None:
    x = x_of(page, made, 775 * US)
    click(page, x, found_at(page, x, "gemm_backward"))
    events = rows(made, "events")
    row = int(address(page)["select"].removeprefix("event:"))
    assert (events[row]["name"], events[row]["start_ns"]) == ("gemm_backward", 650 * US)
    said = page.text(".timeline-chosen")
    assert said.startswith("Highlighted: event gemm_backward, duration 250.0 µs, launched 10.00 µs before it began")
    tip = page.text(".timeline-tip")
    for part in ("model.mlp", "backward", "gemm", "650.0 µs into step 3"):
        assert part in tip
    dimmed = seen(page)
    page.reload()
    page.wait("document.querySelector('.timeline-chosen')")
    settled(page)
    assert address(page) == {"select": f"event:{row}"} and page.text(".timeline-chosen") == said
    assert seen(page) == dimmed
    assert page.problems == [] and page.requests == []


def test_an_idle_stretch_has_its_cause(page: Page, made: Timeline) -> None:
    x = x_of(page, made, 500 * US)
    click(page, x, found_at(page, x, "Device idle"))
    gap = rows(made, "gaps")[int(address(page)["select"].removeprefix("gap:"))]
    assert (gap["start_ns"], gap["duration_ns"]) == (350 * US, 270 * US)
    said = page.text(".timeline-chosen")
    assert said.startswith(f"Highlighted: gap device idle, duration 270.0 µs, cause {CAUSES[1]}")
    assert "CPU is in\ncudaStreamSynchronize" in page.text(".timeline-tip")
    x = x_of(page, made, 500 * US)  # the panel is beside it now
    click(page, x, found_at(page, x, "Device idle"))  # again: it is let go
    assert address(page) == {}


def test_keys(page: Page, made: Timeline) -> None:
    whole = seen(page)
    press(page, "w")
    nearer = seen(page)
    press(page, "d")
    assert len({whole, nearer, seen(page)}) == 3
    press(page, "0")
    assert seen(page) == whole
    press(page, ".")  # the first event of the first stream
    first = int(address(page)["select"].removeprefix("event:"))
    press(page, ".")
    names = [rows(made, "events")[one]["name"] for one in (first, first + 1)]
    assert names == ["gemm_kernel", "add_kernel"] and address(page)["select"] == f"event:{first + 1}"
    press(page, ",")
    assert address(page)["select"] == f"event:{first}"
    press(page, "f")
    assert seen(page) != whole
    press(page, "Escape")
    press(page, "0")
    assert address(page) == {} and seen(page) == whole


def test_the_wheel_and_the_pointer_move_it(page: Page, made: Timeline) -> None:
    x, y = x_of(page, made, 775 * US), box(page)["top"] + box(page)["height"] - 4
    whole = seen(page)

    def wheel(modifiers: int) -> str:
        page.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-120, modifiers=modifiers)
        settled(page)
        return seen(page)

    assert wheel(0) == whole  # scrolls
    zoomed = wheel(2)  # Ctrl
    moved = wheel(8)  # Shift
    assert len({whole, zoomed, moved}) == 3
    mouse(page, "mousePressed", x, y, modifiers=8)
    mouse(page, "mouseMoved", x + 100, y, buttons=1, modifiers=8)
    mouse(page, "mouseReleased", x + 100, y, modifiers=8)
    settled(page)
    assert seen(page) not in (whole, zoomed, moved) and address(page) == {}
    press(page, "0")
    y = found_at(page, x, "gemm_backward")
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)
    settled(page)
    assert address(page)["select"].startswith("event:")  # a second click does not let it go
    at, lanes = box(page), box(page)["width"] - LABELS
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=at["left"] + LABELS + 0.2 * lanes, y=y)
    settled(page)
    assert page.text(".timeline-tip b") == "gemm_backward"  # three quarters of the view


def test_an_arrow_leads_from_a_kernel_to_its_launch(page: Page, made: Timeline) -> None:
    """By what lies over the lanes between them."""
    inked = (
        f"(() => {{ const canvas = document.querySelector('{CANVAS}');"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        " let count = 0; for (let i = 3; i < data.length; i += 4) if (data[i]) count++; return count; })()"
    )
    assert page.evaluate(inked) == 0
    events = rows(made, "events")
    counts = {}
    for name in ("ProfilerStep#3", "gemm_kernel", "aten::mm"):
        row = next(i for i, one in enumerate(events) if one["name"] == name and one["start_ns"] < 1_000 * US)
        page.evaluate(f"location.hash = '#step?select=event:{row}'")
        settled(page)
        counts[name] = page.evaluate(inked)
    assert counts["gemm_kernel"] > 400 and counts["aten::mm"] > 400  # frames alone have less


def test_steps_and_folded_lanes(page: Page) -> None:
    options = page.texts(".timeline-steps option")
    assert options == ["all 2", "3: 1.000 ms, the slowest", "4: 1.000 ms"]
    whole = seen(page)
    page.evaluate(
        "(() => { const steps = document.querySelector('.timeline-steps'); steps.value = '4';"
        " steps.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )
    settled(page)
    assert address(page) == {"step": "4"} and seen(page) != whole
    height = box(page)["height"]
    page.click(".timeline-labels button[aria-expanded=true]")
    settled(page)
    assert page.count(".timeline-labels button[aria-expanded=false]") == 1 and box(page)["height"] < height


def test_what_is_selected_elsewhere_stays_and_all_else_is_pale(
    browser: Browser, made: Timeline, tmp_path: Path
) -> None:
    page = opened(browser, written(tmp_path / "page.html", made), width=880)  # the panel is below, not beside
    whole = seen(page)
    for chosen, said in (("layer:model.mlp", "mlp"), ("kernel:add_kernel", "add_kernel"), ("op:aten::mm", "aten::mm")):
        page.evaluate(f"location.hash = '#step?select={chosen}'")
        settled(page)
        assert page.text(".timeline-chosen").startswith(f"Highlighted: {chosen.partition(':')[0]} {said}")
        assert seen(page) != whole
    page.evaluate("location.hash = '#step?select=kernel:elsewhere'")
    settled(page)
    assert "Nothing is drawn here of: kernel elsewhere" in page.text(".timeline-chosen") and seen(page) == whole


def test_names_do_nothing_and_a_narrow_page_fits(browser: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=\"document.title='ran'\">" + "x" * 400
    trace = Trace().annotation("ProfilerStep#7", 0, 90 * US).mark(name[:60], US, 60 * US)
    trace.op(name, 2 * US, 8 * US).kernel(name, 20 * US, 50 * US, launched=7 * US)
    made = analyse(trace.recording(), timeline=True).timeline
    assert isinstance(made, Timeline)
    kernel = next(i for i, row in enumerate(rows(made, "events")) if row["lane"] == "stream 7")
    page = opened(
        browser, written(tmp_path / "page.html", made), f"step?select=event:{kernel}&range=0-90000", width=400
    )
    assert "<img src=x onerror" in page.text(".timeline-chosen") and page.evaluate("document.title") == "timeline"
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.count("img") == 0 and page.problems == [] and page.requests == []


def test_without_events_the_page_says_why(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, written(tmp_path / "page.html", "The trace was not kept."))
    assert page.text(".timeline-none") == "There is no timeline here: The trace was not kept."
    whole = analyse(on_the_cpu().recording(), timeline=True).timeline
    assert isinstance(whole, Timeline)
    text = written(tmp_path / "page.html", whole).read_text(encoding="utf-8")
    _, packed = packed_timeline(whole)
    (tmp_path / "page.html").write_text(text.replace(packed, packed[: len(packed) // 2]), encoding="utf-8")
    page = browser.open(tmp_path / "page.html")
    page.wait("document.querySelector('.timeline-none')")
    assert "The events cannot be read (" in page.text(".timeline-none")
