"""A timeline in a page: what is packed comes out again, by a decoder that knows only how the bytes are meant."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_traces import attributed_trace
from page_files import page_data
from profiler_wrapper.reports import timeline_bytes
from profiler_wrapper.reports.page import write_page
from profiler_wrapper.reports.timeline_bytes import packed_timeline, varints
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.timeline import timeline
from profiler_wrapper.tables.timeline_columns import NO_TRACE, Timeline
from recordings import Trace, analyse
from shared_traces import TRACE_NAMES, needs_traces

PLAIN = {
    ("events", "duration_ns"), ("events", "depth"), ("events", "name"), ("gaps", "duration_ns"), ("gaps", "device"),
    ("sums", "time_ns"), ("sums", "count"),
}  # fmt: skip


def unpacked(head: dict[str, Any], text: str) -> dict[str, dict[str, list[int]]]:
    """The tables of a page, number by number."""
    stream = iter(zlib.decompress(base64.b64decode(text), -15))

    def number() -> int:
        value = shift = 0
        while True:
            byte = next(stream)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def column(table: str, name: str, count: int) -> list[int]:
        values, before = [], 0
        for _ in range(count):
            value = number()
            if (table, name) not in PLAIN:
                before += -(value + 1) // 2 if value % 2 else value // 2
                value = before
            values.append(value)
        return values

    tables = {
        table["name"]: {name: column(table["name"], name, table["count"]) for name in table["columns"]}
        for table in head["tables"]
    }
    assert next(stream, None) is None
    return tables


def stepping() -> Trace:
    trace = Trace().annotation("ProfilerStep#7", 0, 90_000).mark("layers.0", 1_000, 60_000)
    trace.op("aten::mm", 2_000, 8_000).kernel("gemm", 20_000, 50_000, launched=7_000)
    return trace.op("aten::add", 10_000, 12_000).kernel("add", 80_000, 85_000, launched=11_000, stream=9)


def tables_of(made: Timeline) -> dict[str, dict[str, list[int]]]:
    every = {"events": made.events, "gaps": made.gaps, "sums": made.sums}
    return {name: {key: column.tolist() for key, column in table.items()} for name, table in every.items()}


def test_numbers_are_leb128() -> None:
    assert varints(np.array([0, 1, 127, 128, 300, 1 << 52], np.int64)) == bytes(
        [0, 1, 127, 0x80, 1, 0xAC, 2, *[0x80] * 7, 8]
    )
    assert varints(np.empty(0, np.int64)) == b""


@needs_traces
@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if not name.startswith("ddp")])
def test_what_is_packed_comes_out_again(name: str) -> None:
    found = attributed_trace(name)
    made = timeline(found, layer_calls(found, {}))
    head, text = packed_timeline(made)
    assert unpacked(json.loads(json.dumps(head)), text) == tables_of(made)


def test_a_page_holds_its_timeline(tmp_path: Path) -> None:
    made = analyse(stepping().recording(), timeline=True)
    assert isinstance(made.timeline, Timeline)
    write_page(made, tmp_path / "page.html")
    html, head = (tmp_path / "page.html").read_text(encoding="utf-8"), page_data(tmp_path / "page.html")["views"]
    (text,) = (
        part.partition("</script>")[0]
        for part in html.split('<script type="application/octet-stream" id="timeline">')[1:]
    )
    head = head["timeline"]
    assert unpacked(head, text) == tables_of(made.timeline)
    assert head["why"] is None
    assert (head["note"], head["device"], head["length_ns"]) == ("", True, 90_000)
    assert head["steps"] == [
        {"number": 7, "start_ns": 0, "end_ns": 90_000, "drawn": True, "slowest": False, "idle_ns": 55_000}
    ]
    assert [(lane["kind"], lane["name"], lane["device"], lane["main"], lane["levels"]) for lane in head["lanes"]] == [
        ("layers", "layers", 0, False, 1),
        ("phases", "phases", 0, False, 1),
        ("thread", "main thread", None, True, 4),
        ("stream", "stream 7", 0, False, 1),
        ("stream", "stream 9", 0, False, 1),
    ]


def test_a_page_without_events_says_why(tmp_path: Path) -> None:
    write_page(analyse(stepping().recording()), tmp_path / "page.html")
    assert page_data(tmp_path / "page.html")["views"]["timeline"] == {"why": NO_TRACE}
    assert 'id="timeline"' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_failure_loses_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("no")

    made = analyse(stepping().recording(), timeline=True)
    monkeypatch.setattr(timeline_bytes, "varints", fail)
    write_page(made, tmp_path / "page.html")
    why = {"why": "The timeline could not be made: RuntimeError: no"}
    assert page_data(tmp_path / "page.html")["views"]["timeline"] == why
    monkeypatch.setattr("profiler_wrapper.tables.timeline.step_windows", fail)
    assert analyse(stepping().recording(), timeline=True).timeline == why["why"]


def test_names_out_to_do_harm_stay_text(tmp_path: Path) -> None:
    name = "</script><script>document.title='ran'</script>\ud800"
    made = analyse(stepping().op(name, 61_000, 62_000).recording(), timeline=True)
    write_page(made, tmp_path / "page.html")
    assert page_data(tmp_path / "page.html")["views"]["timeline"]["names"].count(name) == 1
    write_page(replace(made, timeline=name), tmp_path / "page.html")
    assert page_data(tmp_path / "page.html")["views"]["timeline"]["why"] == name
