"""Lanes spliced into traces: what viewers need, and nothing else touched."""

from __future__ import annotations

import gzip
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.trace.lanes import LaneSpan, splice_lanes
from profiler_wrapper.trace.reader import read

KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20.0, "dur": 5.125, "args": {}}
SPANS = [
    LaneSpan("forward", "model", 1_000, 9_000, 0),
    LaneSpan("forward", 'layers.0 "quoted" \\ \n é \ud800', 2_500, 1_001, 0, {"phase": "forward", "call": 3}),
    LaneSpan("backward", "model", 12_000, 3_000, 0),
    LaneSpan("forward", "model", 500, 100),
]


def write_trace(path: Path, content: Any, indent: int | None = None) -> Path:
    data = json.dumps(content, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def load(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, parse_float=Decimal)


def ours(content: Any) -> list[dict[str, Any]]:
    events = content if isinstance(content, list) else content["traceEvents"]
    return [event for event in events if event.get("cat") == "profiler_wrapper"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("events", [[], [KERNEL], [KERNEL, {"ph": "M", "name": "x", "pid": "Spans", "tid": 1.5}]])
@pytest.mark.parametrize("indent", [None, 2])
def test_everything_else_stays_byte_for_byte(tmp_path: Path, name: str, events: list[Any], indent: int | None) -> None:
    path = write_trace(tmp_path / name, {"a": [{}, {}], "traceEvents": events, "b": [{"c": 1}, {"d": 2}]}, indent)
    before, recording = load(path), read(path)
    splice_lanes(path, SPANS, path)
    after = load(path)
    assert after["traceEvents"][len(after["traceEvents"]) - len(events) :] == before["traceEvents"]
    assert {key: value for key, value in after.items() if key != "traceEvents"} == {"a": before["a"], "b": before["b"]}
    assert len(ours(after)) == len(SPANS)
    assert read(path).spans.start_ns.tolist() == recording.spans.start_ns.tolist()  # the reader ignores our lanes
    assert os.listdir(tmp_path) == [name]


def test_bars_labels_and_numbers(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    splice_lanes(path, SPANS, path)
    content = load(path)
    labels = {
        (event["pid"], event["tid"], event["name"]): next(iter(event["args"].values()))
        for event in content
        if event["ph"] == "M"
    }
    assert labels == {
        (1_000_000_000, 0, "process_name"): "layers on the CPU",
        (1_000_000_000, 0, "process_sort_index"): -1000,
        (1_000_000_000, 1_000_000_001, "thread_name"): "forward",
        (1_000_000_000, 1_000_000_001, "thread_sort_index"): 0,
        (1_000_000_002, 0, "process_name"): "layers on GPU 0",
        (1_000_000_002, 0, "process_sort_index"): -999,
        (1_000_000_002, 1_000_000_003, "thread_name"): "forward",
        (1_000_000_002, 1_000_000_003, "thread_sort_index"): 0,
        (1_000_000_002, 1_000_000_004, "thread_name"): "backward",
        (1_000_000_002, 1_000_000_004, "thread_sort_index"): 1,
    }
    bars = [(bar["tid"], bar["name"], bar["ts"], bar["dur"], bar["args"]) for bar in ours(content)]
    assert bars == [
        (1_000_000_001, "model", Decimal("0.500"), Decimal("0.098"), {}),
        (1_000_000_003, "model", Decimal("1.000"), Decimal("8.998"), {}),
        (
            1_000_000_003,
            'layers.0 "quoted" \\ \n é ?',
            Decimal("2.500"),
            Decimal("0.997"),
            {"phase": "forward", "call": 3},
        ),
        (1_000_000_004, "model", Decimal("12.000"), Decimal("2.998"), {}),
    ]


def test_times_are_written_exactly(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    times = [-1_500, -1, 0, 1, 999, 1_712_195_495_519_695_812]
    splice_lanes(path, [LaneSpan("forward", str(time), time, 0) for time in times], path)
    assert [bar["ts"] * 1000 for bar in ours(load(path))] == times
    assert '"ts": -0.001,' in path.read_text()


def test_crossing_bars_are_cut_and_say_so(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    bars = [(0, 10), (5, 10), (6, 8), (10, 5), (10, 5), (12, 1), (20, 0)]
    splice_lanes(
        path, [LaneSpan("l", f"{start}+{length}", start * 1000, length * 1000, 1) for start, length in bars], path
    )
    written = {
        bar["name"]: (int(bar["ts"]), int(bar["dur"] + Decimal("0.006")), bar["args"]) for bar in ours(load(path))
    }
    assert written == {
        "0+10": (0, 10, {}),
        "5+10": (5, 5, {"cut at its end (ns)": 5000}),
        "6+8": (6, 4, {"cut at its end (ns)": 4000}),
        "10+5": (10, 5, {}),
        "12+1": (12, 1, {}),
        "20+0": (20, 0, {}),
    }


def test_bars_that_touch_stay_apart_where_viewers_round(tmp_path: Path) -> None:
    """A viewer makes integer nanoseconds of start and length, each rounded from floating-point microseconds."""
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    start, length = 4_402_204_334_582_283, 333
    bars = [LaneSpan("l", "outer", start, 100 * length), LaneSpan("l", "inner", start, 100 * length)]
    bars += [LaneSpan("l", str(i), start + i * length, length) for i in range(100)]
    splice_lanes(path, bars, path)
    ends: list[int] = []
    for bar in ours(load(path)):
        begin = round(float(bar["ts"]) * 1000)
        end = begin + round(float(bar["dur"]) * 1000)
        while ends and ends[-1] <= begin:
            ends.pop()
        assert all(end <= outer for outer in ends)
        ends.append(end)


def test_without_spans_it_is_the_same_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    splice_lanes(path, [], tmp_path / "other.json.gz")
    assert gzip.decompress((tmp_path / "other.json.gz").read_bytes()) == path.read_bytes()


@pytest.mark.parametrize("data", [b"", b"no", b'{"traceEvents": ['])
def test_a_file_that_is_no_trace_stays_as_it_was(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(BrokenTrace):
        splice_lanes(path, SPANS, path)
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(tmp_path / "trace.json", [KERNEL])
    before = path.read_bytes()
    with pytest.raises(WrongUse, match="negative duration"):
        splice_lanes(path, [LaneSpan("forward", "m", 0, -1)], path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        splice_lanes(path, SPANS, path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_this_torch_gets_no_new_violation(tmp_path: Path, name: str) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="this torch has no trace validator")
    path = tmp_path / name
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        model(torch.ones(2, 4)).sum().backward()
    profile.export_chrome_trace(str(path))
    before, recording = validator.validate_trace(str(path)), read(path)
    start, end = int(recording.spans.start_ns.min()), int(recording.spans.end_ns.max())
    splice_lanes(
        path, [LaneSpan("forward", "model", start, end - start), LaneSpan("forward", "0", start + 5, 100)], path
    )
    assert list(map(str, validator.validate_trace(str(path))[1])) == list(map(str, before[1]))
    after = read(path)
    assert after.spans.start_ns.tolist() == recording.spans.start_ns.tolist()
    assert after.metadata == recording.metadata
