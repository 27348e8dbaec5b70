"""The reader against independent truths: hand-written files, json + Decimal on real traces, tears and damage."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.errors import BrokenTrace, EmptyRecording, SeveralProcesses
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.trace import events as trace_events
from profiler_wrapper.trace import reader as trace_reader
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.recording import Category, FailedAllocation, Lane, Recording
from shared_traces import TRACE_NAMES, TRACES, needs_traces

KERNEL = {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20.0, "dur": 5.125,
    "args": {"device": 0, "stream": 7, "correlation": 11, "External id": 3, "graph node id": 4},
}  # fmt: skip
LAUNCH = {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 10, "ts": 12.001, "dur": 1,
    "args": {"correlation": 11, "External id": 3},
}  # fmt: skip
OP = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 10, "ts": 10.5, "dur": 4.999,
    "args": {"External id": 3, "Sequence number": 8, "Fwd thread id": 0, "Input Dims": [[2, 3], [3, 4]],
             "Input type": ["float", "float"], "Concrete Inputs": ["", ""]},
}  # fmt: skip
ALLOCATION = {
    "ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 10, "ts": 11, "s": "t",
    "args": {"Addr": 2**63 + 5, "Bytes": 512, "Total Allocated": 1024, "Total Reserved": 4096,
             "Device Type": 1, "Device Id": 0},
}  # fmt: skip


def trace(*events: Any, **metadata: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, **metadata, "traceEvents": list(events)}


@pytest.fixture
def read_json(tmp_path: Path) -> Callable[..., Recording]:
    def write_and_read(content: Any, *, indent: int | None = None) -> Recording:
        path = tmp_path / "trace.json"
        data = content if isinstance(content, bytes) else json.dumps(content, indent=indent).encode()
        path.write_bytes(data)
        return read(path)

    return write_and_read


# --- hand-written files ---


@pytest.mark.parametrize("last", [1 << 14, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40])
def test_identifiers_of_any_width_are_those_of_the_file(read_json: Callable[..., Recording], last: int) -> None:
    """However few bytes they are kept in."""
    numbers = [1, last - 1, last]
    events = [LAUNCH | {"tid": one % (1 << 31), "args": {"correlation": one}} for one in numbers]
    spans = read_json(trace(*events, *(OP | {"args": {"Sequence number": one}} for one in numbers))).spans
    assert spans.correlation.tolist() == [*numbers, -1, -1, -1]
    assert spans.sequence.tolist() == [-1, -1, -1, *numbers]


@pytest.mark.parametrize(
    ("name", "args", "category"),
    [
        ("ProfilerStep#5", {}, Category.ANNOTATION),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", {}, Category.ANNOTATION),
        ("Optimizer.zero_grad#SGD.zero_grad", {}, Category.ANNOTATION),
        ("DistributedDataParallel.forward", {}, Category.ANNOTATION),
        ("my model", {"External id": 3}, Category.ANNOTATION),
        ("aten::empty", {}, Category.CPU_OP),
        ("torchvision::nms", {}, Category.CPU_OP),
        ("torch::autograd::AccumulateGrad", {}, Category.CPU_OP),
        ("AddmmBackward", {"Sequence number": 8, "Fwd thread id": 1}, Category.CPU_OP),
        ("MyFunction", {"Sequence number": 0}, Category.CPU_OP),
        ("detach_", {}, Category.CPU_OP),  # an op without a namespace
    ],
)
def test_ranges_of_torch_1_8_have_the_category_of_ops(
    read_json: Callable[..., Recording], name: str, args: dict[str, int], category: Category
) -> None:
    event = OP | {"name": name, "args": args}
    recording = read_json(trace(OP, event | {"cat": "Operator"}, event))
    assert recording.spans.category.tolist() == [Category.CPU_OP, category, Category.CPU_OP]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_columns_of_a_small_trace(read_json: Callable[..., Recording], indent: int | None) -> None:
    recording = read_json(trace(OP, LAUNCH, KERNEL, ALLOCATION, distributedInfo={"rank": 3}), indent=indent)
    spans = recording.spans
    assert [recording.name_of(span) for span in range(3)] == ["aten::mm", "cudaLaunchKernel", "gemm"]
    assert spans.category.tolist() == [Category.CPU_OP, Category.RUNTIME, Category.KERNEL]
    assert [recording.lanes[lane] for lane in spans.lane] == [Lane(9, 10), Lane(9, 10), Lane(0, 7)]
    assert spans.start_ns.tolist() == [10_500, 12_001, 20_000]
    assert spans.duration_ns.tolist() == [4_999, 1_000, 5_125]
    assert spans.correlation.tolist() == [-1, 11, 11]
    assert spans.external_id.tolist() == [3, 3, 3]
    assert spans.sequence.tolist() == [8, -1, -1]
    assert spans.forward_thread.tolist() == [0, -1, -1]
    assert spans.device.tolist() == [-1, -1, 0]
    assert spans.stream.tolist() == [-1, -1, 7]
    assert spans.graph.tolist() == [False, False, True]
    assert recording.memory.address.tolist() == [5 - 2**63]
    assert recording.memory.size_bytes.tolist() == [512]
    assert recording.memory.total_allocated_bytes.tolist() == [1024]
    assert recording.memory.total_reserved_bytes.tolist() == [4096]
    assert recording.memory.device_type.tolist() == [1]
    assert recording.memory.time_ns.tolist() == [11_000]
    assert recording.rank == 3
    assert recording.complete
    assert recording.warnings == ()


def test_a_read_may_end_anywhere_between_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "trace.json.gz", json.dumps(trace(OP, KERNEL)).encode()
    members = gzip.compress(text[:99]), gzip.compress(text[99:])
    for gap in (b"", b"\0" * 3):
        path.write_bytes(gap.join(members))
        for size in range(1, len(members[0]) + 8):
            monkeypatch.setattr(trace_events, "_PACKED_BYTES", size)
            assert read(path).names == ("aten::mm", "gemm")


def test_gzip_is_known_by_content_and_keys_come_in_any_order(tmp_path: Path) -> None:
    text = (
        '\n{ "z" : {"a": "},{"}, "traceEvents" : [ ' + json.dumps(OP) + ' ] , "w": [{"b": 1}, {"c": "]}"}], "v": 3.5 } '
    )
    plain, packed = tmp_path / "a.json.gz", tmp_path / "b.json"
    plain.write_text(text)
    first, second = gzip.compress(text[:40].encode()), gzip.compress(text[40:].encode())
    packed.write_bytes(first + b"\0\0" + second + b"behind")
    for path in (plain, packed):
        recording = read(path)
        assert len(recording.spans) == 1
        assert recording.metadata == {"z": {"a": "},{"}, "w": [{"b": 1}, {"c": "]}"}], "v": 3.5}
        assert recording.complete


@pytest.mark.parametrize(
    "content", [[OP, KERNEL], trace(OP, KERNEL), b"\xef\xbb\xbf" + json.dumps([OP, KERNEL]).encode()]
)
def test_object_bare_list_and_byte_order_mark(read_json: Callable[..., Recording], content: Any) -> None:
    assert len(read_json(content).spans) == 2


@pytest.mark.parametrize("content", [[], trace(), b'{"traceEvents":[]}', b" [ ] "])
def test_no_events_is_a_recording_without_events(read_json: Callable[..., Recording], content: Any) -> None:
    recording = read_json(content)
    assert (len(recording.spans), len(recording.memory), len(recording.flows)) == (0, 0, 0)
    assert recording.complete


def test_metadata_before_and_after(read_json: Callable[..., Recording]) -> None:
    text = b'{"first":1,"traceEvents":[' + json.dumps(KERNEL).encode() + b'],"last":{"deep":[{},{}]}}'
    assert read_json(text).metadata == {"first": 1, "last": {"deep": [{}, {}]}}


@pytest.mark.parametrize(
    ("cat", "expected"),
    [
        ("Kernel", Category.KERNEL), ("Memcpy", Category.MEMCPY), ("gpu_memset", Category.MEMSET),
        ("Operator", Category.CPU_OP), ("Runtime", Category.RUNTIME), ("hip_runtime", Category.RUNTIME),
        ("privateuse1_runtime", Category.RUNTIME), ("cuda_driver", Category.RUNTIME),
        ("a_launcher_of_tomorrow", Category.RUNTIME), ("user_annotation", Category.ANNOTATION),
        ("mtia_ccp_events", Category.KERNEL), ("hpu_op", Category.KERNEL),
        ("gpu_user_annotation", Category.DEVICE_ANNOTATION), ("cuda_sync", Category.SYNC),
    ],
)  # fmt: skip
def test_categories_of_all_versions(read_json: Callable[..., Recording], cat: str, expected: Category) -> None:
    recording = read_json(trace(LAUNCH | {"cat": cat, "name": "aten::mm"}))
    assert recording.spans.category.tolist() == [expected]


def test_each_category_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "trace.json", Counter[str]()
    path.write_text(json.dumps(trace(*[OP | {"cat": f"c{i}"} for i in range(500)])))
    monkeypatch.setattr(trace_events, "_HEAD_BYTES", 1)
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(trace_reader, "category_code", lambda cat: asked.update([cat]) or -1)
    read(path)
    assert max(asked[f"c{i}"] for i in range(500)) == 1


def test_unknown_categories_launch_only_from_a_cpu_lane(read_json: Callable[..., Recording]) -> None:
    recording = read_json(
        trace(
            KERNEL,
            LAUNCH | {"cat": "novel", "pid": 0, "tid": 7},  # on the kernel's lane
            LAUNCH | {"cat": "novel", "args": {"correlation": 5, "stream": 7, "device": 0}},
            LAUNCH | {"cat": "novel", "args": {}},
        )
    )
    assert recording.spans.category.tolist() == [Category.KERNEL]
    assert recording.warnings == (
        "events of categories that are not known are in no figure: novel 0.002 ms, on lanes of devices 0.001 ms",
    )


def test_events_without_a_category_are_not_dropped_in_silence(read_json: Callable[..., Recording]) -> None:
    bare = {key: value for key, value in KERNEL.items() if key != "cat"}
    name = {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}}
    warnings = read_json(trace(KERNEL, bare, bare | {"dur": -5}, name)).warnings
    assert warnings == (
        f"events of categories that are not known are in no figure: (none) {KERNEL['dur'] / 1e3:.3f} ms",
    )
    assert read_json(trace(KERNEL, bare | {"dur": 0}, name)).warnings == ()


def test_what_has_no_place_in_a_recording_is_left_out(read_json: Callable[..., Recording]) -> None:
    python = {"ph": "X", "cat": "python_function", "pid": 9, "tid": 10, "ts": 1, "dur": 2}
    recording = read_json(
        trace(
            python | {"name": "nn.Module: Linear_0"},
            python | {"name": "<built-in method add of type object at 0x7f>"},
            OP | {"cat": "profiler_wrapper"},
            {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
            {"ph": "s", "cat": "ac2g", "id": 1, "pid": 9, "tid": 10, "ts": 1, "name": "ac2g"},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
        )
    )
    assert recording.spans.category.tolist() == [Category.MODULE]


def test_flows_pair_by_id_and_reused_ids_pair_in_order(read_json: Callable[..., Recording]) -> None:
    def end(ph: str, identity: int | str, ts: float, tid: int) -> dict[str, Any]:
        return {"ph": ph, "id": identity, "pid": 1, "tid": tid, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"}

    recording = read_json(
        trace(
            end("s", 1, 1, 1), end("f", 1, 10, 2), end("s", 1, 3, 1), end("f", 2, 11, 2), end("f", 1, 12, 2),
            end("s", "x", 4, 1), end("f", "x", 13.5, 3), end("s", 5, 9, 1),
        )
    )  # fmt: skip
    flows = recording.flows
    pairs = zip(flows.forward_ns.tolist(), flows.backward_ns.tolist(), strict=True)
    assert list(pairs) == [(1000, 10_000), (3000, 12_000), (4000, 13_500)]
    assert [recording.lanes[lane].tid for lane in flows.backward_lane] == [2, 2, 3]


def test_memory_events_are_sorted_and_ties_keep_their_order(read_json: Callable[..., Recording]) -> None:
    def event(ts: float, size: int) -> dict[str, Any]:
        return ALLOCATION | {"ts": ts, "args": {"Bytes": size, "Addr": 1, "Device Type": 0, "Device Id": -1}}

    recording = read_json(trace(event(3, 1), event(1, 2), event(3, -1), event(2, 4)))
    assert recording.memory.size_bytes.tolist() == [2, 4, 1, -1]
    assert recording.memory.device.tolist() == [-1] * 4
    assert recording.memory.total_reserved_bytes.tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("ts", "expected_ns"),
    [
        ("0", 0), ("7", 7000), ("0.001", 1), ("1234.567", 1_234_567), ("-5.25", -5250), ("1e3", 1_000_000),
        ("3743411230052.985", 3743411230052985),  # below 2^43
        ("1712195495519695.812", 1712195495519695812),  # above: as a float it would end in 750
        ("1669783687389324", 1669783687389324000),
    ],
)  # fmt: skip
def test_times_are_exact(read_json: Callable[..., Recording], ts: str, expected_ns: int) -> None:
    text = json.dumps(trace(OP | {"ts": "@"})).replace('"@"', ts)
    assert read_json(text.encode()).spans.start_ns.tolist() == [expected_ns]


@pytest.mark.parametrize("duration", [-1, -0.001, 18446744073709551.615, 2**70, 1e300])
def test_impossible_durations_are_dropped_and_counted(read_json: Callable[..., Recording], duration: float) -> None:
    recording = read_json(trace(OP, KERNEL | {"dur": duration}, KERNEL))
    assert recording.spans.duration_ns.tolist() == [4999, 5125]
    assert recording.warnings == ("1 events with a negative or impossible duration were left out",)


def test_foreign_types_are_read_as_far_as_they_make_sense(read_json: Callable[..., Recording]) -> None:
    recording = read_json(
        trace(
            KERNEL | {"ts": "20.5", "args": {"correlation": "11", "device": "N/A", "stream": None}},
            LAUNCH | {"args": {"correlation": 11.0, "External id": 16.0}},
            OP | {"args": None, "id": None},
            OP | {"args": [1, 2], "cat": None},
            OP | {"ts": "yesterday"},
            17,
            None,
        )
    )
    assert recording.spans.category.tolist() == [Category.KERNEL, Category.RUNTIME, Category.CPU_OP]
    assert recording.spans.start_ns.tolist() == [20_500, 12_001, 10_500]
    assert recording.spans.correlation.tolist() == [11, 11, -1]
    assert recording.spans.external_id.tolist() == [-1, 16, -1]
    assert recording.spans.device.tolist() == [0, -1, -1]  # from the lane
    assert recording.warnings == (
        "3 entries of traceEvents could not be understood and were left out",
        "events of categories that are not known are in no figure: (none) 0.005 ms",
    )


def test_names_are_interned(read_json: Callable[..., Recording]) -> None:
    recording = read_json(trace(*[OP] * 5, KERNEL, OP))
    assert recording.names == ("aten::mm", "gemm")
    assert recording.spans.name.tolist() == [0, 0, 0, 0, 0, 1, 0]


# --- slices ---


NASTY = [
    OP | {"name": '},{"ph": "X"', "args": {"nested": [{"ph": 1}, {"ph": [{"ph": 2}, {"ph": "},\n  {"}]}]}},
    OP | {"name": 'back\\slash"quote ]}', "args": {"a": {"ph": {}}, "b": [[{}, {}], [{"ph": 1}]]}},
    KERNEL | {"name": "größe 層 \U0001f600"},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("chunk", [1, 7, 64, 333, 4096])
def test_slices_cut_at_event_boundaries_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    path = tmp_path / "trace.json"
    events = [event | {"ts": index} for index, event in enumerate(NASTY * 12)]
    path.write_text(
        json.dumps(trace(*events, after=[{"ph": 1}, {"ph": 2}]), indent=indent, ensure_ascii=False), "utf-8"
    )
    whole = read(path)
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(trace_events, "_HEAD_BYTES", chunk)
    sliced = read(path)
    assert sliced.names == whole.names == tuple(event["name"] for event in NASTY)
    assert sliced.spans.start_ns.tolist() == whole.spans.start_ns.tolist() == [i * 1000 for i in range(36)]
    assert sliced.metadata == whole.metadata


def test_a_cut_may_lie_in_a_name_that_needs_a_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps(trace(OP, OP | {"name": "@"}, KERNEL)).replace("@", "a\nb},\n {c")
    path.write_text(text)
    monkeypatch.setattr(trace_events, "_HEAD_BYTES", 1)
    for chunk in range(400, len(text), 5):
        monkeypatch.setattr(trace_events, "CHUNK_BYTES", chunk)
        assert len(read(path).spans) == 3


@pytest.mark.parametrize("inside", [1, 3, 7, 15, 40])
def test_no_whole_event_is_lost_at_a_tear_among_events_of_many_objects(tmp_path: Path, inside: int) -> None:
    path = tmp_path / "trace.json"
    events = [OP | {"args": {"nested": [{}] * inside + ["},{"]}}] * 30
    path.write_text(json.dumps(trace(*events))[:-9])
    assert len(read(path).spans) == 29


# --- damage ---


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "byte 0: the file is empty"),
        (b"  \n", "byte 3: the file is empty"),
        (b"hello", "byte 0: not JSON: starts with b'hello'"),
        (b"3", "not JSON"),
        (b"{}", "has no traceEvents; keys found: none"),
        (b'{"a": 1, "b": {}}', "has no traceEvents; keys found: 'a', 'b'"),
        (b'{"traceEvents": 3}', "byte 1: traceEvents is not a list"),
        (b'{"traceEvents": [{}}', "byte 19: malformed JSON"),
        (b'{"traceEvents": [] "a": 3}', "byte 19: malformed JSON: expected ','"),
        (b'{"traceEvents": [],}', "malformed JSON: trailing comma"),
        (b'{"traceEvents": []} {}', "byte 21: malformed JSON: trailing characters"),
        (b'{"a": [1, 2}, "traceEvents": []}', "malformed JSON"),
        (b"{a: 3}", "byte 1: malformed JSON: object keys must be strings"),
        (b'[1, 2, "x"]', "none of its 3 entries is an event"),
        (b'[{"name": "a"b"}]' + b" " * 99, "byte 13: malformed JSON: expected ',' or '}'"),
        (b'[{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "nested too deeply"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(BrokenTrace) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: byte ")
    assert cause in str(caught.value)


def test_a_quote_in_a_name_is_found_at_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    text = json.dumps(trace(*[OP] * 2000, OP | {"name": "@"}, *[OP] * 2000)).replace('"@"', '"my "block""')
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(BrokenTrace, match=f"byte {text.index('block')} of the decompressed data: malformed JSON"):
        read(path)


def test_bytes_that_are_not_utf8_are_replaced(read_json: Callable[..., Recording]) -> None:
    text = json.dumps(trace(OP, OP | {"name": "caf@"}, KERNEL), ensure_ascii=False).encode()
    recording = read_json(text.replace(b"@", b"\xe9"))
    assert recording.names == ("aten::mm", "caf?", "gemm")
    assert recording.warnings == (f"1 bytes that are not UTF-8 were read as '?', the first at byte {text.index(b'@')}",)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [(b"a\tb\nc", "a b c"), (rb"x\ud800y", "x\ufffdy"), (rb"\ud83d\ude00\udc00", "\U0001f600\ufffd")],
)
def test_names_that_json_forbids_are_repaired(
    read_json: Callable[..., Recording], written: bytes, read_as: str
) -> None:
    recording = read_json(json.dumps(trace(OP, OP | {"name": "@"}, KERNEL)).encode().replace(b"@", written))
    assert recording.names == ("aten::mm", read_as, "gemm")
    assert len(recording.warnings) == 1
    assert recording.complete


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "nan"])
def test_numbers_that_are_not_finite_are_left_out(read_json: Callable[..., Recording], number: str) -> None:
    strange = KERNEL | {"args": {"correlation": 11, "est. achieved occupancy %": "@"}, "name": "says nan, inf"}
    recording = read_json(json.dumps(trace(strange)).replace('"@"', number).encode())
    assert recording.names == ("says nan, inf",)
    assert "1 numbers that are not finite were left out" in recording.warnings[0]
    assert recording.spans.correlation.tolist() == [11]


@pytest.mark.parametrize("number", ["NaN", "sNaN", "Infinity"])
def test_text_that_is_no_number_among_large_times_is_left_out(read_json: Callable[..., Recording], number: str) -> None:
    large = {"ph": "X", "cat": "cpu_op", "name": "kept", "pid": 1, "tid": 1, "ts": 8796093022209.5, "dur": 1.25}
    recording = read_json({"traceEvents": [large, {**large, "name": "untimed", "ts": number}]})
    assert [recording.name_of(i) for i in range(len(recording.spans))] == ["kept"]


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")
    with pytest.raises(IsADirectoryError, match="is a directory, not a trace file"):
        read(tmp_path)


# --- tears ---


def read_or_broken(path: Path) -> Recording | None:
    try:
        return read(path)
    except (BrokenTrace, SeveralProcesses) as error:
        assert str(path) in str(error)
        return None


@pytest.mark.parametrize("indent", [None, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("content", [NASTY, trace(*NASTY, ALLOCATION, OP) | {"after": {"a": [1, -2.5e-7, "é"]}}])
def test_every_truncation_is_read_up_to_the_tear(tmp_path: Path, content: Any, indent: int | None) -> None:
    path = tmp_path / "trace.json"
    data = json.dumps(content, indent=indent, ensure_ascii=False).encode()
    path.write_bytes(data)
    names_of_all = [read(path).name_of(span) for span in range(len(read(path).spans))]
    kept: list[int] = []
    for size in range(len(data)):
        path.write_bytes(data[:size])
        recording = read_or_broken(path)
        if recording is None:
            assert size <= data.index(b"[") and not kept
            continue
        assert not recording.complete
        assert f"torn at byte {size}" in recording.warnings[-1]
        names = [recording.name_of(span) for span in range(len(recording.spans))]
        assert names == names_of_all[: len(names)]
        kept.append(len(names))
    assert kept == sorted(kept)
    assert kept[-1] == len(names_of_all)


def test_every_truncation_of_gzip_is_read_up_to_the_tear(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    rng = np.random.default_rng(0)
    events = [OP | {"ts": int(ts), "name": f"op{ts}"} for ts in rng.integers(0, 10**9, 400)]
    data = gzip.compress(json.dumps(trace(*events)).encode())
    kept = []
    for size in [0, 1, 2, 5, 10, *range(20, len(data), 97), *range(len(data) - 12, len(data))]:
        path.write_bytes(data[:size])
        recording = read_or_broken(path)
        if recording is not None:
            assert not recording.complete
            kept.append(len(recording.spans))
    assert kept == sorted(kept)
    assert kept[-1] == 400
    assert max(np.diff(kept)) < 50


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    data = bytearray(gzip.compress(json.dumps(trace(*[OP] * 100)).encode()))
    data[-5] ^= 0xFF  # the checksum
    path.write_bytes(data)
    with pytest.raises(BrokenTrace, match="damaged gzip data"):
        read(path)


def test_a_file_filled_up_with_nul_bytes_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps(trace(OP, KERNEL)).encode()[:-40] + b"\0" * 5000)
    recording = read(path)
    assert not recording.complete
    assert recording.names == ("aten::mm",)
    assert "NUL" in recording.warnings[0]


def test_a_gzip_bomb_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "_LONGEST_VALUE_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    for start in (b'[{"name": "', b'{"a": "', b'[{"args": [', b'{"a": ['):
        path.write_bytes(gzip.compress(start + b"1," * (3 << 20)))
        with pytest.raises(BrokenTrace, match="one value of more than 1 MiB"):
            read(path)
    path.write_bytes(gzip.compress(b" " * (6 << 20)))
    with pytest.raises(BrokenTrace, match="the file is empty"):
        read(path)


@pytest.mark.full
def test_random_damage_is_read_or_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "trace.json"
    whole = json.dumps(trace(*NASTY, ALLOCATION, LAUNCH), ensure_ascii=False).encode()
    outcomes = set()
    for _ in range(1500):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), rng.integers(1, 4)):
            data[position] = rng.choice(list(b'"{}[],:\\\0\xff9-.e x'))
        path.write_bytes(data)
        recording = read_or_broken(path)
        outcomes.add(recording is None or recording.complete)
    assert outcomes == {True, False}


# --- shapes ---


def test_shapes_of_ops_by_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    listed = OP | {"args": {"Input Dims": [[[2], [3, 4]], []], "Input type": ["TensorList", "Scalar"]}}
    path.write_text(json.dumps(trace(KERNEL | {"dur": -3}, OP, LAUNCH, listed, OP)))
    shapes = read_with_shapes(path)[1]
    assert list(shapes) == [0, 2, 3]
    assert shapes[0] == shapes[3]
    assert shapes[0].dims == ([2, 3], [3, 4])
    assert shapes[0].types == ("float", "float")
    assert shapes[2].dims == ([[2], [3, 4]], [])
    assert shapes[2].concrete == ()


# --- real traces ---


@needs_traces
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name.startswith("ddp") else ()) for name in TRACE_NAMES]
)
def test_real_traces_against_json_and_decimal(name: str) -> None:
    with gzip.open(TRACES / name) as file:
        content = json.load(file, parse_float=Decimal)
    recording = read(TRACES / name)
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in content["traceEvents"] if event["ph"] == "X" and event.get("cat") in device]
    mask = recording.device_mask
    assert recording.complete
    assert recording.warnings == ()
    assert recording.spans.duration_ns[mask].tolist() == [int(event["dur"] * 1000) for event in events]
    assert recording.spans.start_ns[mask].tolist() == [int(event["ts"] * 1000) for event in events]
    assert recording.spans.device[mask].tolist() == [event["args"]["device"] for event in events]
    assert recording.spans.correlation[mask].tolist() == [event["args"]["correlation"] for event in events]
    assert [recording.names[i] for i in recording.spans.name[mask]] == [event["name"] for event in events]
    instants = [event for event in content["traceEvents"] if event.get("name") == "[memory]"]
    assert sorted(recording.memory.size_bytes.tolist()) == sorted(event["args"]["Bytes"] for event in instants)
    arrows = Counter(event["ph"] for event in content["traceEvents"] if event.get("cat") == "fwdbwd")
    assert arrows["s"] == arrows["f"] == len(recording.flows)
    assert recording.metadata == {
        key: value if not isinstance(value, Decimal) else float(value)
        for key, value in json.loads(json.dumps(content, default=float)).items()
        if key != "traceEvents"
    }


@needs_traces
def test_shapes_of_a_real_trace() -> None:
    path = TRACES / "h100_vit_inference.json.gz"
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]
    recording, shapes = read(path), read_with_shapes(path)[1]
    ops = np.flatnonzero(recording.spans.category == Category.CPU_OP)
    assert list(shapes) == ops.tolist()
    assert [list(shapes[op].dims) for op in shapes] == [event["args"]["Input Dims"] for event in events]
    assert [list(shapes[op].types) for op in shapes] == [event["args"]["Input type"] for event in events]


def test_allocations_that_could_not_be_met(read_json: Callable[..., Recording]) -> None:
    failed = {
        **ALLOCATION,
        "name": "[OutOfMemory]",
        "ts": 12.25,
        "args": {"Total Reserved": 0, "Total Allocated": 7, "Bytes": 4096, "Device Id": -1, "Device Type": 0},
    }
    recording = read_json(trace(OP, ALLOCATION, failed))
    assert recording.failed_allocations == (FailedAllocation(12_250, 0, 4096, 0, -1),)
    assert len(recording.memory) == 1


def test_loading_imports_neither_torch_nor_what_only_writes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(KERNEL, LAUNCH, OP)))
    code = (
        "import sys, profiler_wrapper as pw; result = pw.load(sys.argv[1]); assert result.time.total_ns == 5125;"
        "assert not {'torch', 'matplotlib', 'tabulate', 'wcwidth'} & sys.modules.keys();"
        "assert 'TOTAL' in str(result)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parents[2])


# --- files that are no profile of torch.profiler ---


def listed(number: int, pid: int | str, name: str) -> dict[str, Any]:
    """An event as torch's list of events is written."""
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": 10.0 * number, "dur": 5.0, "args": {}}


NPU = {"ph": "M", "name": "process_name", "pid": 4, "tid": 0, "args": {"name": "Ascend Hardware"}}
TASK = {"ph": "X", "name": "MatMul", "pid": 4, "tid": 3, "ts": "12.5", "dur": 4, "args": {"Task Type": "AI_CORE"}}
TO_NPU = {"ph": "s", "cat": "async_npu", "name": "torch_to_npu", "id": "5_3_0", "pid": 9, "tid": 10, "ts": "10.5"}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (
            [*(listed(i, "CPU functions", "aten::mm") for i in range(10)), listed(9, "CUDA functions", "sgemm")],
            r"holds events of no category, process CPU functions \(10\), .* CUDA functions \(1\)\. Give .*prof.export",
        ),
        ([{**OP, "ph": "B"}, {**OP, "ph": "E"}] * 2, r"events of phase B \(2\), events of phase E \(2\)"),
        ([{"ph": "b", "cat": "net", "name": "x", "ts": 1, "id": 1}], r"events of phase b \(1\)"),
        ([{**OP, "cat": "toplevel" * 50, "args": {}}], r"events of toplevel\w{1,60} \(1\)\. Give"),
        ([NPU, OP, TASK], "a trace of Ascend's profiler, whose events of the NPU are not read"),
        ([OP, TO_NPU, TASK], "a trace of Ascend's profiler"),
        ([], "0 events, but no kernel, copy or CPU op among them. Was the profiler stopped before the first step"),
        ([ALLOCATION], "0 events, but no kernel, copy or CPU op among them"),
    ],
)
def test_a_file_that_is_no_profile_is_said_to_be_what_it_is(
    read_json: Callable[..., Recording], events: list[Any], said: str
) -> None:
    for content in (events, trace(*events)):
        with pytest.raises(EmptyRecording, match=said):
            place_events(read_json(content))


def test_a_profile_may_hold_other_events_too(read_json: Callable[..., Recording]) -> None:
    label = {**NPU, "args": {"name": "python"}}
    recording = read_json([label, OP, {**OP, "ph": "B"}, listed(1, "CPU functions", "aten::mm")])
    assert place_events(recording).charges.basis == "cpu"


def test_the_timeline_of_torchs_memory_is_no_trace(read_json: Callable[..., Recording]) -> None:
    with pytest.raises(BrokenTrace, match=r"none of its 2 entries is an event of a Chrome trace\. Give what"):
        read_json([[1, 2, 3], [[0, 512], [0, 1024]]])
