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
    with pytest.raises(BrokenTrace, match="pids do not tell whose an event is"):
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


def test_what_one_process_does_is_not_refused(tmp_path: Path) -> None:
    """A launch of two kernels; the runtime calls the driver; a mark that stays open crosses what is around it."""
    trace = Trace().launch(0, 10, correlation=1, name="hipLaunchKernel").launch(30, 50, correlation=4)
    trace.launch(35, 45, correlation=4, name="cuLaunchKernel").mark("open", 55, 900).annotation("block", 57, 950)
    trace.op("aten::mm", 60, 80, sequence=1).mark("around", 52, 90)
    for number in (1, 1, 2, 3, 4):
        launched = 100 * number if number in (2, 3) else None
        trace.kernel("gemm", 1000 * number, 1000 * number + 500, correlation=number, launched=launched)
    assert load(trace.write(tmp_path / "one.json")).time.total_ns == 2500


def test_times_that_were_rounded_are_of_one_process(tmp_path: Path) -> None:
    trace = Trace()
    for begin in range(300, 300_000, 7_300):  # an op within another to its end, and a launch in it
        trace.op("aten::linear", begin, begin + 5_900).op("aten::addmm", begin + 2_300, begin + 5_900)
        trace.kernel("gemm", begin + 900_000, begin + 901_000, launched=begin + 3_100)
    path = trace.write(tmp_path / "one.json")
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        event |= {"ts": int(event["ts"]), "dur": int(event["dur"])}
    path.write_text(json.dumps(content))
    assert load(path).time.total_ns == 42 * US


def of_one_pid(tmp_path: Path, later_us: float, *, numbers: int = 1000, kept: int = 0, device: bool = True) -> Path:
    """Two ranks of one pid and thread, the second that much later, its correlations greater but for `kept` ones."""
    path = merged(tmp_path, lambda rank, pid: 100 if pid > 9 else pid)
    events = json.loads(path.read_text())["traceEvents"]
    seen: set[int] = set()
    for event in events[len(events) // 2 :]:
        event["ts"] += later_us
        if number := event.get("args", {}).get("correlation"):
            seen.add(number)
            event["args"]["correlation"] = number if len(seen) <= kept else number + numbers
    on_device = ("kernel", "cuda_runtime")
    path.write_text(json.dumps({"traceEvents": [one for one in events if device or one["cat"] not in on_device]}))
    return path


@pytest.mark.parametrize("later_us", [0, 0.0004, 4, 25, 2015.5])
def test_ranks_of_one_pid_are_seen_by_their_launches_where_no_correlation_is_shared(
    tmp_path: Path, later_us: float
) -> None:
    with pytest.raises(BrokenTrace, match="CPU pids: 100"):
        load(of_one_pid(tmp_path, later_us))


def test_ranks_of_one_pid_are_seen_by_their_ops_where_there_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(BrokenTrace, match="CPU pids: 100"):
        load(of_one_pid(tmp_path, 25, device=False))


def test_one_correlation_of_two_launches_is_enough(tmp_path: Path) -> None:
    with pytest.raises(BrokenTrace, match="CPU pids: 100"):
        load(of_one_pid(tmp_path, 1e6, kept=1))


def test_recordings_one_after_the_other_are_read_and_said_to_be_several(tmp_path: Path) -> None:
    result = load(of_one_pid(tmp_path, 1e6))
    times = {(row.layer, row.phase): row.self_time_ns for row in result.layers if row.layer}
    assert (times["first", "forward"], times["second", "forward"]) == (200 * US, 600 * US)
    assert [row.step for row in result.steps] == [0, 1, 0, 1]
    assert sum("steps are numbered anew" in one for one in result.warnings) == 1
