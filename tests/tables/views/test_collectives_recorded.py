"""Collectives and waits in recorded traces of GPUs: against plain json, and against what one sees in the file."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter, defaultdict
from decimal import Decimal
from typing import Any

import pytest

from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.reader import read
from recordings import analyse
from shared_traces import TRACE_NAMES, TRACES, needs_traces

pytestmark = needs_traces
MI300 = "mi300_resnet_checkpointing_training.json.gz"
DDP = "ddp_training_with_memory.pt.trace.json.gz"
_BYTES = {"BFloat16": 2, "Long": 8, "Float": 4}


@functools.cache
def result(name: str) -> Analysis:
    return analyse(read(TRACES / name))


def events_of(name: str) -> list[dict[str, Any]]:
    with gzip.open(TRACES / name, "rt") as file:
        events = json.load(file, parse_float=Decimal)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_collectives_are_the_class_communication(name: str) -> None:
    found = result(name)
    communication = sum(row.time_ns for row in found.classes if row.class_name == "communication")
    assert sum(row.time_ns for row in found.collectives) == communication
    assert all((row.exposed_ns or 0) + (row.overlapped_ns or 0) == row.time_ns for row in found.collectives)
    assert sum(row.exposed_ns or 0 for row in found.collectives) == (found.time.exposed_communication_ns or 0)


def test_collectives_on_rocm_are_told_apart_though_their_kernels_are_named_alike() -> None:
    events = events_of(MI300)
    told = [event for event in events if event["name"] == "record_param_comms"]
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") == "cuda_runtime"}
    count, payload, time_ns = Counter[Any](), Counter[Any](), Counter[Any]()
    for event in events:
        if event.get("cat") != "kernel" or not event["name"].startswith("ncclDevKernel"):
            continue
        launch = launches.get(event["args"]["correlation"])
        key: Any = ("other", "")
        if launch is not None:
            (call,) = (each for each in told if each["ts"] <= launch["ts"] <= each["ts"] + each["dur"])
            key = (call["args"]["Collective name"], call["args"]["dtype"])
            payload[key] += call["args"]["In msg nelems"] * _BYTES[call["args"]["dtype"]]
        count[key] += 1
        time_ns[key] += int(event["dur"] * 1000)
    names = {"allreduce": "all_reduce"}
    expected = {(names.get(key[0], key[0]), key[1]): (count[key], payload[key] or None, time_ns[key]) for key in count}
    rows = result(MI300).collectives
    assert {(row.collective, row.dtype): (row.count, row.payload_bytes, row.time_ns) for row in rows} == expected
    (reduced,) = (row for row in rows if row.collective == "all_reduce")
    assert (reduced.group_size, reduced.layer, reduced.phase) == (8, "", "backward")
    assert reduced.bandwidth_bytes_per_s == pytest.approx(70_137_072 / (reduced.time_ns / 1e9))
    assert reduced.bus_bandwidth_bytes_per_s == pytest.approx(1.75 * 70_137_072 / (reduced.time_ns / 1e9))


def test_an_old_trace_tells_its_collectives_by_their_kernels() -> None:
    (row,) = result(DDP).collectives
    assert (row.collective, row.dtype, row.count, row.payload_bytes) == ("all_reduce", "Float", 2020, None)


# What one sees in the files: waits within the steps (all of a trace without steps), but for the profiler's own.
WAITS = {
    "alexnet_forward.pt.trace.json.gz": {("blocking copy", "aten::to"): 16, ("device", "cudaDeviceSynchronize"): 4},
    "h100_bert_small_inference.json.gz": {("item", "aten::is_nonzero"): 1, ("device", "cudaDeviceSynchronize"): 1},
    "h100_qwen1.5_0.5b_inference.json.gz": {("item", "aten::is_nonzero"): 1, ("device", "cudaDeviceSynchronize"): 1},
    "h100_timesformer_inference.json.gz": {("blocking copy", "aten::to"): 2, ("device", "cudaDeviceSynchronize"): 1},
    "h100_vit_inference.json.gz": {("device", "cudaDeviceSynchronize"): 1},
    "mi300_sglang_qwen3_8b_decode_graph_replay.json.gz": {("blocking copy", "aten::copy_"): 1},
    "mi300_sglang_qwen3_8b_graph_capture.json.gz": {("device", "hipDeviceSynchronize"): 1},
}


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_waits_are_those_that_one_sees(name: str) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for row in result(name).synchronisations:
        counts[row.kind, row.op] += row.count
    assert counts == WAITS.get(name, {})


def test_the_wait_for_a_result_is_in_the_copy_not_in_the_synchronisation_after_it() -> None:
    """`.cpu()` of pageable memory: cudaMemcpyAsync waits 126 ms, cudaStreamSynchronize then 12 us."""
    calls: dict[str, list[int]] = defaultdict(list)
    for event in events_of("h100_timesformer_inference.json.gz"):
        if event.get("cat") == "cuda_runtime" and event["name"] in ("cudaMemcpyAsync", "cudaStreamSynchronize"):
            calls[event["name"]].append(int(event["dur"] * 1000))
    assert sorted(map(len, calls.values())) == [2, 2]
    (row,) = (row for row in result("h100_timesformer_inference.json.gz").synchronisations if row.op == "aten::to")
    assert row.wait_ns == sum(map(sum, calls.values())) > 125_000_000
