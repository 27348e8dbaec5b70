"""Traces of several ranks in one file, as mergers put them together: split by process, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.errors import BrokenTrace, SeveralProcesses, WrongUse
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.result import load
from profiler_wrapper.trace.reader import read
from recordings import AUTOGRAD, Trace

US = 1000
Event = dict[str, Any]
Rename = Callable[[int, Any], Any]  # of a rank and a pid of its own trace


def rank_events(tmp_path: Path, rank: int, layer: str, kernel_us: int, *, device: int = 0) -> list[Event]:
    """Two steps of one layer, with a backward node, a kernel each, an allocation; all numbers as on any rank."""
    trace = Trace()
    for step in range(2):
        begin = 2000 * US * step
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 1900 * US)
        trace.mark(layer, begin + 10 * US, begin + 100 * US).op(
            "aten::mm", begin + 20 * US, begin + 60 * US, sequence=step, forward_thread=0, external_id=step + 1
        )
        start = begin + 200 * US
        trace.kernel("gemm", start, start + kernel_us * US, launched=begin + 30 * US, device=device)
        trace.node("MmBackward0", begin + 900 * US, begin + 950 * US, number=step)
        trace.arrow(begin + 20 * US, begin + 900 * US)
        trace.kernel(
            "gemm", start + 800 * US, start + 840 * US, launched=begin + 910 * US, thread=AUTOGRAD, device=device
        )
        trace.memory(begin + 25 * US, 512 * (rank + 1), address=4096, device=device)
    events: list[Event] = json.loads(trace.write(tmp_path / "one.json").read_text())["traceEvents"]
    return [event | {"pid": event["pid"] + 10 * rank if event["pid"] == 100 else event["pid"]} for event in events]


def merged(tmp_path: Path, rename: Rename, *, local: bool = False, **metadata: Any) -> Path:
    """Ranks 0 (layer `first`, kernels of 100 us) and 1 (`second`, 300 us) in one file."""
    events = []
    for rank, (layer, kernel_us) in enumerate((("first", 100), ("second", 300))):
        for event in rank_events(tmp_path, rank, layer, kernel_us, device=rank if local else 0):
            events.append(event | {"pid": rename(rank, event["pid"])})
    path = tmp_path / "merged.json"
    path.write_text(json.dumps({"schemaVersion": 1, **metadata, "traceEvents": events}))
    return path


LABELLED: dict[str, Rename] = {
    "SGLang": lambda rank, pid: f"[TP{rank:02d}-PP00] {pid}",
    "rank before": lambda rank, pid: f"rank{rank} {pid}",
    "number behind": lambda rank, pid: f"{pid}_{rank}",
    "offset": lambda rank, pid: pid + 1_000_000 * rank,
    "one pid a rank": lambda rank, pid: rank + 1,
}


@pytest.mark.parametrize("local", [False, True], ids=["device 0 each", "device of the rank"])
@pytest.mark.parametrize("how", LABELLED)
def test_each_rank_has_what_it_has_alone(tmp_path: Path, how: str, local: bool) -> None:
    path = merged(tmp_path, LABELLED[how], local=local, distributedInfo={"rank": 7, "world_size": 2})
    with pytest.raises(SeveralProcesses, match="holds 2 processes") as raised:
        load(path)
    for rank, (layer, kernel_us) in enumerate((("first", 100), ("second", 300))):
        result = load(path, process=raised.value.names[rank])
        assert result.run["rank"] == rank
        times = {(row.layer, row.phase): row.self_time_ns for row in result.layers if row.layer}
        assert times == {(layer, "forward"): 2 * kernel_us * US, (layer, "backward"): 80 * US}
        assert [row.time_ns for row in result.steps] == [(kernel_us + 40) * US] * 2
        assert result.complete
        recording = read(path, process=raised.value.names[rank])
        assert set(recording.memory.size_bytes.tolist()) == {512 * (rank + 1)}
        assert len(recording.flows) == 2


def test_a_process_is_named_by_a_part_of_its_pid_that_no_other_has(tmp_path: Path) -> None:
    path = merged(tmp_path, LABELLED["SGLang"])
    assert load(path, process="TP01").time.total_ns == 680 * US
    for wrong in ("TP0", "TP02", 5):
        with pytest.raises(WrongUse, match=r"give one of '\[TP00-PP00\] 100', '\[TP01-PP00\] 110'"):
            load(path, process=wrong)


@pytest.mark.parametrize(
    "rename", [lambda rank, pid: pid, lambda rank, pid: 100 if pid > 9 else pid], ids=["as they are", "equal"]
)
def test_where_pids_do_not_tell_no_number_is_given(tmp_path: Path, rename: Rename) -> None:
    with pytest.raises(BrokenTrace, match="pids do not tell whose the events of the devices are"):
        load(merged(tmp_path, rename))


def test_steps_of_two_processes_are_not_added_up_where_their_numbers_differ(tmp_path: Path) -> None:
    path = merged(tmp_path, lambda rank, pid: pid)
    content = json.loads(path.read_text())
    for event in content["traceEvents"][len(content["traceEvents"]) // 2 :]:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] += 1000
    path.write_text(json.dumps(content))
    with pytest.raises(BrokenTrace, match="CPU pids: 100, 110"):
        load(path)


def test_helpers_of_one_rank_are_no_ranks(tmp_path: Path) -> None:
    events = rank_events(tmp_path, 0, "first", 100)
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps({"traceEvents": events}))
    worker = Trace().op("aten::stack", 0, 50 * US, sequence=1, forward_thread=0, external_id=1)
    worker.op("aten::stack", 60 * US, 90 * US)
    loads = [
        event | {"pid": pid}
        for pid in (200, 201)
        for event in json.loads(worker.write(alone).read_text())["traceEvents"]
    ]
    for on_device in (True, False):
        kept = [event for event in events if on_device or event.get("cat") not in ("kernel", "cuda_runtime")]
        alone.write_text(json.dumps({"traceEvents": [*kept, *loads]}))
        result = load(alone)
        assert [row.step for row in result.steps][:2] == [0, 1]
        if on_device:
            assert result.time.total_ns == 280 * US
            assert result.complete


def test_ranks_on_cpus_are_each_a_process(tmp_path: Path) -> None:
    path = merged(tmp_path, lambda rank, pid: pid)
    content = json.loads(path.read_text())
    kept = [one for one in content["traceEvents"] if one.get("cat") not in ("kernel", "cuda_runtime")]
    path.write_text(json.dumps({"traceEvents": kept}))
    with pytest.raises(SeveralProcesses, match="2 processes"):
        load(path)
    assert {row.layer for row in load(path, process=110).layers if row.layer} == {"second"}


def test_ranks_of_one_file_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    report = load_ranks(merged(tmp_path, LABELLED["rank before"]))
    assert report.own.ranks.tolist() == [0, 1]
    again = load_ranks(tmp_path / "merged.json")  # from the tables that were made
    assert again.to_dict() == report.to_dict()


def test_a_device_s_pid_may_be_any_where_there_is_one_process(tmp_path: Path) -> None:
    events = rank_events(tmp_path, 0, "first", 100, device=3)
    for pid in ("GPU", 0, 900):
        path = tmp_path / "one.json"
        content = [event | {"pid": pid} if event["pid"] == 3 else event for event in events]
        for event in content:
            if pid == "GPU":
                event.get("args", {}).pop("device", None)
        path.write_text(json.dumps({"traceEvents": content}))
        assert load(path).time.total_ns == 280 * US
        assert load(path, process=100).time.total_ns == 280 * US


def test_a_few_launches_with_one_number_are_no_two_processes(tmp_path: Path) -> None:
    trace = Trace().launch(0, 10, correlation=1, name="hipLaunchKernel")
    for number in (1, 1, 2, 3):
        trace.kernel("gemm", 1000 * number, 1000 * number + 500, correlation=number, launched=20)
    assert load(trace.write(tmp_path / "one.json")).time.total_ns == 2000
