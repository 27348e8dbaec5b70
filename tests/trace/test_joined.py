"""One trace of several: a recorded one after itself says everything twice, without a pause between."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_traces
import profiler_wrapper as pw
from profiler_wrapper.trace.joined import JoinedTrace
from profiler_wrapper.trace.reader import read
from shared_traces import TRACES, needs_traces


def trace(first_us: int, *names: str) -> bytes:
    """As torch's exporter writes it: ops of 10 us, one after the other, each with a kernel of its own."""
    events = []
    for number, name in enumerate(names):
        place = '"pid": 1, "tid": {}, "ts": {}.005, "dur": 10.000'
        op = place.format(1, first_us + 10 * number)
        kernel = place.format(7, first_us + 10 * number + 2)
        events += [
            f'{{ "ph": "X", "cat": "cuda_runtime", "name": "{name}", {op}, "args": {{ "correlation": {number} }} }}',
            f'{{ "ph": "X", "cat": "kernel", "name": "k{name}", {kernel}, "args": {{ "correlation": {number} }} }}',
        ]
    text = ",\n".join(events)
    return f'{{ "schemaVersion": 1,\n "traceEvents": [\n{text}\n ],"traceName": "/tmp/a]b.json" }}'.encode()


def join(tmp_path: Path, *pieces: bytes) -> JoinedTrace:
    whole = JoinedTrace(tmp_path / "whole.json")
    for number, data in enumerate(pieces):
        piece = tmp_path / f"{number}.json"
        piece.write_bytes(data)
        whole.add(piece)
        assert not piece.exists()
    return whole


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def test_each_piece_begins_where_the_one_before_ended(tmp_path: Path) -> None:
    whole = join(tmp_path, trace(1000, "a", "b"), trace(5_000, "c"), trace(9_000, "d"))
    events = [event for event in events_of(whole.path) if event["cat"] == "cuda_runtime"]
    # The kernel of b ends 2 us after b: the device was not done before.
    assert [(event["name"], event["ts"]) for event in events] == [
        ("a", 1000.005), ("b", 1010.005), ("c", 1022.005), ("d", 1034.005)
    ]  # fmt: skip
    spans = read(whole.path).spans
    numbers, counts = np.unique(spans.correlation, return_counts=True)
    assert len(numbers) == 4 and (counts == 2).all()  # a launch and its kernel


@pytest.mark.parametrize("data", [b"{}", b'{"traceEvents": []}', trace(1000, "a")[:-20], trace(1000)])
def test_what_torch_did_not_write_so_is_refused(data: bytes, tmp_path: Path) -> None:
    whole = join(tmp_path, trace(1000, "a"))
    before = whole.path.read_bytes()
    (tmp_path / "next.json").write_bytes(data)
    with pytest.raises(ValueError, match="exporter"):
        whole.add(tmp_path / "next.json")
    assert whole.path.read_bytes() == before


def test_times_of_fewer_digits_are_refused(tmp_path: Path) -> None:
    whole = join(tmp_path, trace(90, "a"))
    (tmp_path / "next.json").write_bytes(trace(1000, "b"))
    with pytest.raises(ValueError, match="digits"):
        whole.add(tmp_path / "next.json")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    whole = join(tmp_path, trace(1000, "a"), trace(2000, "b"))
    before, limits = whole.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "next.json").write_bytes(trace(3000, "c"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            whole.add(tmp_path / "next.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert whole.path.read_bytes() == before
    whole.add(tmp_path / "next.json")
    assert [event["name"] for event in events_of(whole.path)[::2]] == ["a", "b", "c"]


@needs_traces
@pytest.mark.parametrize(
    "name",
    [
        "mi300_torch_compile",
        pytest.param("mi300_resnet_checkpointing_training", marks=pytest.mark.full),
        pytest.param("mi300_sglang_qwen3_8b_graph_capture", marks=pytest.mark.full),
    ],
)
def test_a_gpus_trace_after_itself(name: str, tmp_path: Path) -> None:
    path = TRACES / f"{name}.json.gz"
    data = gzip.decompress(path.read_bytes())
    whole = join(tmp_path, data, data)
    once, twice = gpu_traces.result(path.name), pw.load(whole.path)

    def totals(result: pw.ProfileResult) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        return {(row.layer, row.class_name, row.phase): (row.time_ns, row.calls) for row in result.layers}

    doubled = {key: tuple(2 * (one or 0) for one in values) for key, values in totals(once).items()}
    assert {key: tuple(one or 0 for one in values) for key, values in totals(twice).items()} == doubled
    device = [
        np.sum(recording.spans.duration_ns[recording.device_mask])
        for recording in (gpu_traces.recording(path.name), read(whole.path))
    ]
    assert device[1] == 2 * device[0]
