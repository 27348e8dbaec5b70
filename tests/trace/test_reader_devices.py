"""What a trace tells of device events, collectives and Python calls: hand-written files, odd values, plain JSON."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_traces
from profiler_wrapper.trace import events as trace_events
from profiler_wrapper.trace import reader
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.recording import CollectiveDetails, Configurations, DeviceDetails, Recording
from recordings import analyse
from shared_traces import TRACES, needs_traces

REAL_TRACES = [  # one of each device and of each way to spell things
    "alexnet_forward.pt.trace.json.gz",
    "b200_vllm_eager_inference.json.gz",
    "h100_bert_small_inference.json.gz",
    "mi300_resnet_checkpointing_training.json.gz",
    "mi300_torch_compile.json.gz",
    "v100_ddp_resnet.pt.trace.json.gz",
]


def event(cat: str, name: str, ts: float, dur: float, pid: int = 9, tid: int = 10, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(ts: float, name: str = "gemm", **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, 2, 0, 7, device=0, stream=7, **args)


def recorded(tmp_path: Path, *events: dict[str, Any], **metadata: Any) -> Recording:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**metadata, "traceEvents": list(events)}))
    return read(path)


def launches_of(recording: Recording) -> Configurations:
    """A row for each device event that tells something."""
    details = recording.details
    names = Configurations.__dataclass_fields__
    return Configurations(**{name: getattr(details.configurations, name)[details.configuration] for name in names})


LAUNCH = {
    "grid": [18, 32, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 132096,
    "blocks per SM": 4.5, "warps per SM": 54.0, "est. achieved occupancy %": 18,
}  # fmt: skip


def test_launches_and_copies(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        event("cpu_op", "aten::mm", 1, 5),
        kernel(10, **LAUNCH),
        kernel(20, correlation=3),  # tells nothing
        event("gpu_memcpy", "Memcpy HtoD", 30, 1, 0, 7, bytes=4096),
        kernel(40, **LAUNCH),
    )
    details, told = recording.details, launches_of(recording)
    assert details.span.tolist() == [1, 3, 4]
    assert told.grid.tolist() == [[18, 32, 1], [-1, -1, -1], [18, 32, 1]]
    assert told.block.tolist() == [[384, 1, 1], [-1, -1, -1], [384, 1, 1]]
    assert told.registers.tolist() == [168, -1, 168]
    assert told.shared_memory_bytes.tolist() == [132096, -1, 132096]
    assert told.copied_bytes.tolist() == [-1, 4096, -1]
    np.testing.assert_equal(told.blocks_per_sm, [4.5, math.nan, 4.5])
    np.testing.assert_equal(told.occupancy, [0.18, math.nan, 0.18])
    assert details.configuration[0] == details.configuration[2]
    found = details.configuration_of(np.array([4, 2, 0, 1]))
    assert found.tolist() == [details.configuration[2], -1, -1, details.configuration[0]]
    assert DeviceDetails().configuration_of(np.array([4, 2])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grid", "[18, 32, 1]"), ("grid", [18.0, "32", 1]), ("registers per thread", "168"),
        ("shared memory", 132096.0), ("est. achieved occupancy %", "18"), ("blocks per SM", "4.5"),
    ],
)  # fmt: skip
def test_other_spellings_are_read(tmp_path: Path, key: str, value: Any) -> None:
    usual = launches_of(recorded(tmp_path, kernel(10, **LAUNCH)))
    odd = launches_of(recorded(tmp_path, kernel(10, **LAUNCH | {key: value})))
    for name in ("grid", "block", "registers", "shared_memory_bytes", "blocks_per_sm", "occupancy"):
        np.testing.assert_equal(getattr(odd, name), getattr(usual, name))


@pytest.mark.parametrize(
    "value", [None, "", "many", True, -5, 1e300, 10**40, {}, [], [[1]], [1, 2, 3, 4], "NaN", {"a": 1}]
)
@pytest.mark.parametrize("key", [*LAUNCH, "bytes", "Collective name", "In msg nelems", "Process Group Ranks", "dtype"])
def test_odd_values_are_not_told_and_spoil_nothing(tmp_path: Path, key: str, value: Any) -> None:
    odd = kernel(10, correlation=5, **LAUNCH | {key: value})
    recording = recorded(tmp_path, odd, kernel(20, **LAUNCH), distributedInfo={"rank": 0})
    assert recording.spans.start_ns.tolist() == [10000, 20000]
    assert recording.spans.correlation.tolist() == [5, -1]
    assert recording.complete and not recording.warnings
    assert launches_of(recording).registers[-1] == 168
    assert recording.details.span[-1] == 1
    told = launches_of(recording)
    for column in (told.grid, told.block, told.registers, told.shared_memory_bytes, told.copied_bytes):
        assert column.min() >= -1
    assert not (told.blocks_per_sm < 0).any() and not np.isinf(told.occupancy).any()


def test_not_finite_numbers_are_not_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": [kernel(10, **LAUNCH | {"blocks per SM": "@"})]})
    path.write_text(text.replace('"@"', "Infinity"))
    told = launches_of(read(path))
    assert np.isnan(told.blocks_per_sm).all()
    assert told.registers.tolist() == [168]


def test_what_a_kernel_does_not_tell_its_launch_does(tmp_path: Path) -> None:
    launch = {"grid": [1, 40, 1], "block": [256, 1, 1], "shared memory": 64, "bytes": 7}
    recording = recorded(
        tmp_path,
        event("hip_runtime", "hipLaunchKernel", 5, 1, correlation=3, **launch),
        kernel(10, correlation=3),
        kernel(20, correlation=3, grid=[2, 1, 1]),  # its own grid counts
        kernel(30, correlation=4),
    )
    told = launches_of(recording)
    assert recording.details.span.tolist() == [1, 2]
    assert told.grid.tolist() == [[1, 40, 1], [2, 1, 1]]
    assert told.block.tolist() == [[256, 1, 1], [256, 1, 1]]
    assert told.shared_memory_bytes.tolist() == [64, 64]
    assert told.copied_bytes.tolist() == [-1, -1]


def test_events_left_out_shift_the_numbers(tmp_path: Path) -> None:
    broken = kernel(5, **LAUNCH) | {"dur": -1}
    recording = recorded(tmp_path, broken, kernel(10, **LAUNCH), kernel(20, "ncclX", **{"Collective name": "send"}))
    assert recording.details.span.tolist() == [0]
    assert recording.collectives == (CollectiveDetails(1, "send"),)


def test_many_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", 2000)  # many slices
    events = [kernel(10 * i, grid=[i % 50 + 1, 1, 1]) for i in range(200)]
    recording = recorded(tmp_path, *events)
    assert launches_of(recording).grid[:, 0].tolist() == [i % 50 + 1 for i in range(200)]


COLLECTIVE = {
    "Collective name": "_allgather_base", "In msg nelems": 25136, "Out msg nelems": 201088, "Group size": 8,
    "dtype": "BFloat16", "Process Group Name": "3", "Process Group Ranks": [0, 1, 2], "Seq": 17,
}  # fmt: skip


@pytest.mark.parametrize("metadata", [{}, {"distributedInfo": {"rank": 0}}])
@pytest.mark.parametrize("ranks", [[0, 1, 2], "[0, 1, 2]"])
def test_collectives(tmp_path: Path, metadata: dict[str, Any], ranks: Any) -> None:
    told = COLLECTIVE | {"Process Group Ranks": ranks}
    recording = recorded(
        tmp_path,
        event("cpu_op", "record_param_comms", 1, 5, **told),
        event("user_annotation", "nccl:_all_gather_base", 1, 5),
        kernel(10, "ncclDevKernel_AllGather", **told),
        **metadata,
    )
    expected = (25136, 201088, "BFloat16", 8, "3", (0, 1, 2), 17)
    assert recording.collectives == (
        CollectiveDetails(0, "_allgather_base", *expected),
        CollectiveDetails(2, "_allgather_base", *expected),
    )


def test_ranks_that_are_cut_short_are_not_told(tmp_path: Path) -> None:
    told = COLLECTIVE | {"Process Group Ranks": "[0, 1, 2, ..., 1023]", "Process Group ID": 4}
    del told["Process Group Name"]
    (found,) = recorded(tmp_path, event("cpu_op", "record_param_comms", 1, 5, **told)).collectives
    assert (found.ranks, found.group_name, found.group_size) == (None, "4", 8)


def test_python_calls(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        event("python_function", "train.py(12): step", 1, 50),
        event("python_function", "nn.Module: Linear_0", 2, 30),
        event("python_function", "<built-in method add of type object at 0x1>", 3, 1),
        event("python_function", "a b.py(3): <module>", 4, -2),
    )
    calls = recording.python
    assert [recording.names[i] for i in calls.name] == ["train.py(12): step"]
    assert (calls.start_ns.tolist(), calls.duration_ns.tolist()) == ([1000], [50000])
    assert recording.lanes[calls.lane[0]] == (9, 10)
    assert len(recording.spans) == 1


@needs_traces
@pytest.mark.parametrize("name", REAL_TRACES)
def test_real_traces_against_plain_json(name: str) -> None:
    events = [event for event in gpu_traces.events(name) if event["ph"] == "X"]
    kept = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "cuda_sync", "kernel", "gpu_memcpy",
            "gpu_memset", "gpu_user_annotation")  # fmt: skip
    spans = [
        event
        for event in events
        if event.get("cat") in kept or (event.get("cat") == "python_function" and event["name"].startswith("nn.Module"))
    ]
    recording = gpu_traces.recording(name)
    assert len(recording.spans) == len(spans)
    launches = {
        e["args"]["correlation"]: e["args"] for e in spans if e["cat"] == "cuda_runtime" and "grid" in e["args"]
    }
    expected = {}
    for index, event in enumerate(spans):
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = launches.get(event["args"]["correlation"], {})
            args = {key: args[key] for key in args if key != "bytes"} | event["args"]
            told = (
                args.get("grid", [-1] * 3), args.get("block", [-1] * 3), args.get("registers per thread", -1),
                args.get("shared memory", -1), args.get("bytes", -1), args.get("blocks per SM"),
                args.get("warps per SM"), args.get("est. achieved occupancy %"),
            )  # fmt: skip
            if told != ([-1] * 3, [-1] * 3, -1, -1, -1, None, None, None):
                expected[index] = told
    details = recording.details
    assert details.span.tolist() == list(expected)
    told = launches_of(recording)
    for place, column in enumerate(
        (told.grid, told.block, told.registers, told.shared_memory_bytes, told.copied_bytes)
    ):
        assert column.tolist() == [row[place] for row in expected.values()]
    for place, values in ((5, told.blocks_per_sm), (7, told.occupancy * 100)):
        truth = np.array([math.nan if row[place] is None else row[place] for row in expected.values()])
        np.testing.assert_allclose(values, truth, rtol=1e-3, atol=2e-5)
    collectives = [i for i, event in enumerate(spans) if "Collective name" in event.get("args", {})]
    assert [found.span for found in recording.collectives] == collectives
    for found in recording.collectives:
        args = spans[found.span]["args"]
        assert (found.name, found.in_elements) == (args["Collective name"], args["In msg nelems"])
        assert (found.dtype, found.group_size) == (args["dtype"], args["Group size"])
    assert len(recording.python) == sum(
        e.get("cat") == "python_function"
        and not e["name"].startswith(("nn.Module", "<built-in"))
        and "): " in e["name"]
        for e in events
    )
    plain = read(TRACES / name)  # without shapes
    assert plain.collectives == recording.collectives
    assert launches_of(plain).grid.tolist() == told.grid.tolist()


def test_collectives_keep_nothing_else_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", 64 << 10)
    told = COLLECTIVE | {"Input Dims": [[8]], "Input type": ["float"], "not read": "x" * 50_000}
    path = tmp_path / "trace.json"
    calls = [event("cpu_op", "record_param_comms", i, 1, **told) for i in range(200)]
    path.write_text(json.dumps({"traceEvents": calls}))
    tracemalloc.start()
    try:
        recording, shapes = read_with_shapes(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(recording.collectives), len(shapes)) == (200, 200)
    assert peak_bytes < path.stat().st_size / 4


@pytest.mark.parametrize("part", ["_three", "_table", "_collective"])
def test_details_that_cannot_be_read_cost_nothing_else(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damage that the collector does not know: it fails, and times, names and memory stay."""
    events = [
        event("cpu_op", "aten::mm", 1, 5),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=3),
        kernel(10, correlation=3, **LAUNCH),
        kernel(20, "ncclDevKernel_AllReduce", **{"Collective name": "allreduce", "grid": "damaged"}),
        event("cpu_op", "aten::add", 30, 5),
    ]
    whole = recorded(tmp_path, *events)
    assert len(whole.details) and whole.collectives and whole.warnings == ()

    def fails(*_: object) -> None:
        raise TypeError("a grid of nothing")

    monkeypatch.setattr(reader, part, fails)
    found = recorded(tmp_path, *events)
    assert found.warnings == (
        "how kernels were launched, what copies moved and what collectives tell are not available, because that "
        "failed: TypeError: a grid of nothing",
    )
    assert found.names == whole.names and len(found.details) == 0
    for column in ("start_ns", "duration_ns", "category", "name", "correlation", "device"):
        np.testing.assert_array_equal(getattr(found.spans, column), getattr(whole.spans, column))
    analysis = analyse(found)
    assert analysis.time == analyse(whole).time and analysis.kernels
    assert not any("kernels are not available" in warning for warning in analysis.warnings)
    assert found.warnings[0] in analysis.warnings
